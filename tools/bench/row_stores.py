"""Rows of a table in Redis, Redis Cluster or RocksDB, beside the same table in the server's memory.

    python tools/bench/row_stores.py
    python tools/bench/row_stores.py --rows 10000000 --json FILE

A table of rows 64 wide is trained by SGD, published with external rows, and delivered to each store; then a
hundredth of its rows change, and are delivered as a delta. The server is the exported model in a session of
TensorFlow's own ops, in this process. The client is tools/dev/row_client.py without REST. A request asks for
1,000 random rows of those in the table; requests to all contenders are interleaved.

load           rows a second of a whole load
delta          rows a second of a delta
get            the multi-get of a request's rows, 50th and 99th percentile
request        the whole request: ids, multi-get, answer; the peer is the table in the server's memory
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gmeta  # noqa: F401  before TensorFlow: it selects Keras 2
from gmeta.export import Publisher, export_model
from gmeta.export.delivery import deliver

import numpy as np
import tensorflow as tf
from harness import Result, parser, report
from publish import CHANGED, DIM, Scores, step

ASKED, REQUESTS = 1000, 200
CLIENT = Path(__file__).parents[1] / "dev" / "row_client.py"


@contextmanager
def redis_servers(count: int) -> Iterator[list[int]]:
    """Run Redis, or a cluster of it; yield the ports."""
    settings = ["--save", "", "--loglevel", "warning"]
    if count > 1:
        settings += ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"]
    with ExitStack() as stack:
        ports = [free_port(22000 + 1000 * place) for place in range(count)]
        for port in ports:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            words = ["redis-server", "--port", str(port), "--dir", folder, *settings]
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        time.sleep(1)
        if count > 1:
            places = [f"127.0.0.1:{port}" for port in ports]
            words = ["redis-cli", "--cluster", "create", *places, "--cluster-yes"]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            time.sleep(3)
        yield ports


def free_port(first: int) -> int:
    """A port that is free, and so is the one 10,000 above, of a cluster's bus."""
    for port in range(first, first + 1000):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10000))
                return port
            except OSError:
                continue
    raise SystemExit("no free port")


def signatures(folder: Path) -> Callable[..., dict[str, Any]]:
    """Return the function that answers a request by a SavedModel."""
    session = tf.compat.v1.Session(graph=tf.Graph())
    with session.graph.as_default():
        definitions = tf.compat.v1.saved_model.load(session, ["serve"], str(folder)).signature_def

    def ask(name: str, **inputs: Any) -> dict[str, Any]:
        definition = definitions[name]
        feed = {definition.inputs[key].name: value for key, value in inputs.items()}
        fetch = {key: tensor.name for key, tensor in definition.outputs.items()}
        return session.run(fetch, feed)

    return ask


def measure(
    whole: Path, external: Path, stores: dict[str, Any], rows: int
) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds of requests by contender and part."""
    inside, outside = signatures(whole), signatures(external)
    random = np.random.default_rng(1)
    took: dict[str, dict[str, list[float]]] = {
        name: {"get": [], "request": []} for name in [*stores, "memory"]
    }
    for number in range(REQUESTS + 20):
        ids = random.integers(0, rows, ASKED)
        start = time.perf_counter()
        right = inside("serving_default", id=ids)["output"]
        spent = {"memory": {"get": 0.0, "request": time.perf_counter() - start}}
        for name, store in stores.items():
            start = time.perf_counter()
            wanted = outside("serving_default_ids", id=ids)["id_ids"]
            before = time.perf_counter()
            found = store.get({"id": wanted})["id"]
            after = time.perf_counter()
            answer = outside("serving_default", id=ids, id_ids=wanted, id_rows=np.array(found, object))[
                "output"
            ]
            spent[name] = {"get": after - before, "request": time.perf_counter() - start}
            np.testing.assert_array_equal(answer, right)
        for name, parts in spent.items() if number >= 20 else ():
            for part, seconds in parts.items():
                took[name][part].append(1e3 * seconds)
    return took


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000, help="rows in the table (%(default)s)")
    options = options.parse_args()
    rows = 20_000 if options.smoke else options.rows
    spec = importlib.util.spec_from_file_location("row_client", CLIENT)
    client = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(client)
    model, random = Scores(), np.random.default_rng(0)
    model({"id": tf.constant([0])})
    for first in range(0, rows, 1_000_000):
        step(model, np.arange(first, min(first + 1_000_000, rows)))
    step(model, np.arange(1))
    path = f"row_stores/rows{rows}"
    results = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {"rocksdb": f"rocksdb://{scratch}/rocksdb"}
        if shutil.which("redis-server"):
            urls["redis"] = f"redis://127.0.0.1:{stack.enter_context(redis_servers(1))[0]}/bench"
            urls["cluster3"] = f"redis://127.0.0.1:{stack.enter_context(redis_servers(3))[0]}/bench"
        publisher = Publisher(model, scratch / "online", export={"external": "all"})
        base = publisher.publish_base()
        speeds: dict[str, dict[str, float]] = {name: {} for name in urls}

        def send(what: str, count: int) -> None:
            for name, url in urls.items():
                start = time.perf_counter()
                deliver(scratch / "online", [url], say=str)
                speeds[name][what] = count / (time.perf_counter() - start)

        send("load", rows)
        deltas = []
        for _ in range(options.rounds):
            step(model, random.choice(rows, max(int(rows * CHANGED), 1), replace=False))
            delta = publisher.publish(dense=False)
            send("delta", delta.rows)
            deltas.append({name: each["delta"] for name, each in speeds.items()})
        whole = export_model(model, scratch / "whole").folder
        took = measure(whole, base.path, {name: client.Rows(url) for name, url in urls.items()}, rows)
    for name in urls:
        results += [
            Result(f"{path}/{name}/load", speeds[name]["load"], "rows/s"),
            Result(f"{path}/{name}/delta", float(np.median([each[name] for each in deltas])), "rows/s"),
        ]
        for part in ("get", "request"):
            for which in (50, 99):
                value = float(np.percentile(took[name][part], which))
                peer = float(np.percentile(took["memory"][part], which)) if part == "request" else None
                of = "in memory" if part == "request" else None
                results.append(Result(f"{path}/{name}/{part}/p{which}", value, "ms", of, peer))
    report(f"{rows:,} rows of {DIM}, requests of {ASKED:,}", results, options.json)


if __name__ == "__main__":
    main()
