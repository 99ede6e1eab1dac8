"""`gmeta serve` under load: latencies of requests that arrive by themselves, at shares of its capacity.

    python tools/bench/serving_load.py
    python tools/bench/serving_load.py --seconds 60 --requests 1000000
    python tools/bench/serving_load.py --cores 2

The server is a process of its own, and so is the sender. Both share all cores, unless ``--cores`` gives the
server some of its own, and the sender the others. Capacity is what the server answers when several requests
are always on their way. Arrivals are then open, a Poisson process at 10 to 90% of it, and a latency begins
when a request is due, not when it is sent: what waits behind a slow answer counts. Models are MeLU as in
`serving.py` (10 rated samples, 5 inner steps, 20 samples to rate), a `GRM` with kept states (a history of 200
events, 64 candidates), and a `NextItemModel` (10,000 items, histories of 50), one after another. Memory is
the server's, after the loads and after many more requests.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gmeta  # before TensorFlow: it selects Keras 2
from gmeta.export import export_model
from gmeta.export.meta_models import meta_signatures
from gmeta.export.sequence_models import exposure_signatures, state_signatures
from gmeta.export.servers import array_of, messages, put_array
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig
from gmeta.meta import InnerLoop
from gmeta.models import melu
from support.serving import padded

import grpc
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from harness import Result, parser, report, write
from serving import ASKED, RATED, STEPS, samples
from user_states import columns

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
PREDICT = "/tensorflow.serving.PredictionService/Predict"
USERS, EVENTS, CANDIDATES, ITEMS, HISTORY = 16, 200, 64, 10_000, 50
AT_ONCE = 8
"""Requests on their way while capacity is measured."""

Arrays = Mapping[str, npt.NDArray[Any]]


def encode(signature: str, inputs: Arrays) -> bytes:
    """A request's bytes."""
    request = messages()["PredictRequest"]()
    request.model_spec.signature_name = signature
    for name, array in inputs.items():
        kind = tf.string if array.dtype == object else tf.as_dtype(array.dtype)
        put_array(request.inputs.add(key=name).value, array, kind.as_datatype_enum)
    return bytes(request.SerializeToString())


def answer(port: int, data: bytes) -> dict[str, npt.NDArray[Any]]:
    """One request's answer."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        found = messages()["PredictResponse"].FromString(channel.unary_unary(PREDICT)(data))
    return {each.key: array_of(each.value, 1 << 30) for each in found.outputs}


def meta_learned(folder: Path) -> None:
    """Export MeLU."""
    model = melu(inner=InnerLoop(steps=STEPS))
    model.compile()
    model.adapt(samples(RATED, 0), np.ones(RATED))
    label = np.ones(RATED, np.float32)
    warm = {"predict": padded(samples(ASKED, 1)), "adapt": {**padded(samples(RATED, 0)), "label": label}}
    warm["predict_with"] = padded(samples(ASKED, 2))
    export_model(model, folder, signatures=meta_signatures(model), warm_up=warm)


def meta_requests(port: int) -> dict[str, list[bytes]]:
    """The requests of users, of three signatures."""
    found: dict[str, list[bytes]] = {"predict": [], "adapt": [], "predict_with": []}
    for user in range(USERS):
        label = np.random.default_rng(user).integers(1, 6, RATED).astype(np.float32)
        asked = padded(samples(ASKED, USERS + user))
        found["predict"].append(encode("predict", asked))
        found["adapt"].append(encode("adapt", {**padded(samples(RATED, user)), "label": label}))
        found["predict_with"].append(encode("predict_with", {**asked, **answer(port, found["adapt"][-1])}))
    return found


def ranker(folder: Path) -> None:
    """Export a `GRM` with states."""
    model = gmeta.models.GRM.of(
        [FeatureConfig("city", dim=16), FeatureConfig("item", dim=64), FeatureConfig("action", dim=16)],
        contexts=["city"],
        history=["item", "action"],
        targets=["item"],
        time="time",
        dim=64,
        blocks=2,
        heads=2,
        max_length=EVENTS,
    )
    export_model(model, folder, signatures={**exposure_signatures(model), **state_signatures(model)})


def ranker_requests(port: int) -> dict[str, list[bytes]]:
    """Candidates of users whose histories the server has read."""
    found = []
    for user in range(USERS):
        city = {"contexts_city": np.full(1, user)}
        history = _arrays(columns("history", EVENTS, 1, 0, ["item", "action"], user))
        state = answer(port, encode("read", {**city, **history}))["state_bytes"]
        targets = _arrays(columns("targets", CANDIDATES, 1, 10**8, ["item"], user))
        found.append(encode("score", {"state_bytes": state, **targets}))
    return {"score": found}


def _arrays(tensors: Mapping[str, tf.Tensor]) -> dict[str, npt.NDArray[Any]]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def next_item(folder: Path) -> None:
    """Export a `NextItemModel`."""
    hstu = HSTU(blocks=2, heads=2, attention_dim=32, value_dim=32, max_length=HISTORY, bias_by_time=False)
    items = EmbeddingCollection([FeatureConfig("item", dim=64)])
    model = gmeta.models.NextItemModel(items, hstu, items=np.arange(ITEMS), max_length=HISTORY)
    model.compile("adam")
    model.predict(tf.data.Dataset.from_tensors({"item": tf.ragged.constant([[1, 2]], tf.int64)}))
    export_model(model, folder)


def next_requests(_: int) -> dict[str, list[bytes]]:
    """Histories of users."""
    draw = np.random.default_rng(0).integers
    return {"recommend": [encode("recommend", {"item": draw(0, ITEMS, (1, HISTORY))}) for _ in range(USERS)]}


MODELS = {
    "melu": ({"predict", "adapt", "predict_with"}, meta_learned, meta_requests),
    "ranker": ({"score"}, ranker, ranker_requests),
    "next": ({"recommend"}, next_item, next_requests),
}
"""Model -> its signatures that are measured, and the functions that export it and make requests."""


@contextmanager
def served(folder: Path, workers: int, cores: set[int]) -> Iterator[tuple[int, int]]:
    """Serve a folder in a process on some of this machine's cores; yield its port and its id."""
    words = [sys.executable, "-m", "gmeta", "serve", str(folder), "--port", "0", "--workers", str(workers)]
    words += ["--max-queue", "100000"]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        os.sched_setaffinity(process.pid, cores)  # its threads, which come later, inherit this
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.match(r"grpc://[^:]+:(\d+)/", line):
                break
        else:
            raise RuntimeError("".join(said))
        try:
            yield int(found[1]), process.pid
        finally:
            process.terminate()
            process.communicate(timeout=60)


def memory(process: int) -> float:
    """The memory that a process has in use, in MB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Sender:
    """Sends requests to a server in this process's event loop."""

    def __init__(self, port: int) -> None:
        self._port = port

    def closed(self, requests: Sequence[bytes], seconds: float, count: int | None = None) -> float:
        """Requests a second when `AT_ONCE` are always on their way, for a time or ``count`` requests."""
        return asyncio.run(self._closed(requests, seconds, count))

    async def _closed(self, requests: Sequence[bytes], seconds: float, count: int | None) -> float:
        done, start = 0, time.perf_counter()

        async def client() -> None:
            nonlocal done
            while done < count if count is not None else time.perf_counter() < start + seconds:
                number, done = done, done + 1
                await call(requests[number % len(requests)])

        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            call = channel.unary_unary(PREDICT)
            await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        return done / (time.perf_counter() - start)

    def open(self, requests: Sequence[bytes], rate: float, seconds: float, seed: int) -> npt.NDArray[Any]:
        """Seconds from when a request was due to its answer, of Poisson arrivals at a rate."""
        random = np.random.default_rng(seed)
        due = np.cumsum(random.exponential(1 / rate, max(20, round(rate * seconds))))
        return asyncio.run(self._open(requests, due))

    async def _open(self, requests: Sequence[bytes], due: npt.NDArray[Any]) -> npt.NDArray[Any]:
        latency = np.zeros(len(due))

        async def one(number: int) -> None:
            await call(requests[number % len(requests)])
            latency[number] = time.perf_counter() - start - due[number]

        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            call = channel.unary_unary(PREDICT)
            await call(requests[0])  # connects
            start, tasks = time.perf_counter() + 0.05, []
            for number, at in enumerate(due):
                if (wait := start + at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(one(number)))
            await asyncio.gather(*tasks)
        return latency


def measure(given: Any, folder: Path) -> list[Result]:
    """The figures of all signatures; what is measured is written at once."""
    results: list[Result] = []
    every = sorted(os.sched_getaffinity(0))
    if given.cores is not None and not 0 < given.cores < len(every):
        sys.exit(f"--cores must be 1 to {len(every) - 1}: {len(every)} cores are shared by server and sender")
    cores = set(every[: given.cores])
    os.sched_setaffinity(0, set(every) - cores or every)
    for name, (signatures, export, made) in MODELS.items():
        if given.only and not signatures & {*given.only}:
            continue
        export(folder / name / "1")
        with served(folder / name, given.workers, cores) as (port, process):
            sender, before = Sender(port), 0.0
            sent: list[bytes] = []  # of the signatures that are measured, in turn
            for signature, requests in made(port).items():
                if given.only and signature not in given.only:
                    continue
                path = f"serving/load/{signature}"
                sent += requests
                sender.closed(requests, given.seconds / 4)
                before = before or memory(process)
                capacity = sender.closed(requests, given.seconds / 2)
                results.append(Result(f"{path}/capacity", capacity, "requests/s"))
                for share in SHARES:
                    found = sender.open(requests, share * capacity, given.seconds, round(100 * share))
                    at = f"{path}/{share:.0%}"
                    for quantile in (50, 99, 99.9):
                        value = 1e3 * float(np.percentile(found, quantile))
                        results.append(Result(f"{at}/p{quantile:g}", value, "ms"))
            if before:
                sender.closed(sent, 0, given.requests)
                results.append(Result(f"serving/load/{name}/memory/start", before, "MB"))
                results.append(Result(f"serving/load/{name}/memory/end", memory(process), "MB"))
            if given.json:
                write(given.json, results)
    return results


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=20.0, help="of each load (default: %(default)s)")
    options.add_argument("--workers", type=int, default=2, help="of the server (default: %(default)s)")
    options.add_argument("--cores", type=int, help="of the server alone (default: all, with the sender)")
    options.add_argument(
        "--requests", type=int, default=20_000, help="before memory is read again (default: %(default)s)"
    )
    options.add_argument("--only", nargs="*", metavar="SIGNATURE", help="of these signatures alone")
    given = options.parse_args()
    if given.smoke:
        given.seconds, given.requests = 0.5, 50
    with tempfile.TemporaryDirectory() as folder:
        results = measure(given, Path(folder))
    report("latencies of open arrivals at shares of the capacity", results, given.json)


if __name__ == "__main__":
    main()
