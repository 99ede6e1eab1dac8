"""How long it takes from an event to its effect in a server, while training follows a stream.

    python tools/bench/event_to_served.py
    python tools/bench/event_to_served.py --rate 5000 --seconds 90 --json FILE
    python tools/bench/event_to_served.py --source kafka

Four processes on this machine: a producer, which every fifth of a second writes a file of Parquet, or, with
`--source kafka`, messages to four partitions of a topic, whose broker it is (confluent-kafka's mock cluster);
`gmeta train --follow`, which publishes every second; `gmeta deliver --follow`; and a server with TensorFlow
Serving's REST interface. Twice a second, the producer makes an event of a new user and a new item. This
process asks the server for their score every 50 ms, until it differs from that of the untrained rows. The
time runs from when the event was made, before it was written. Scores also change with dense weights; a user
and an item that are never trained show when, and events that wait at such a moment are left out and counted.

effect     50th and 99th percentile, and the maximum
trained    events per second, while measured
lag        of training: the age of the newest event that was read, by the median and the maximum
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from harness import Result, parser, report

FILE, MARK, ASK = 0.2, 0.5, 0.05
"""Seconds between files, marks and requests."""
USERS, ITEMS, NEW = 100_000, 20_000, 1 << 40
PARTITIONS = 4
ROUNDING = 1e-5
"""Logits that differ by less differ by the number of samples in a request; training changes them by more."""
HERE = Path(__file__).parent


def write_file(folder: str, number: int, columns: dict[str, Any]) -> None:
    """Write events as a file, which appears whole."""
    micros = pa.array(columns["ts"]).cast(pa.timestamp("us"))
    path = Path(folder, f"{number:09d}.parquet")
    pa.parquet.write_table(pa.table({**columns, "ts": micros}), f"{path}.tmp")
    Path(f"{path}.tmp").rename(path)


def begin_topic() -> tuple[str, Any]:
    """Start a broker in this process; return the topic's URL, and a function that writes events to it."""
    import confluent_kafka

    producer = confluent_kafka.Producer(
        {"bootstrap.servers": "unused", "test.mock.num.brokers": 1, "linger.ms": 5}
    )
    broker = next(iter(producer.list_topics(timeout=20).brokers.values()))

    def write(number: int, columns: dict[str, Any]) -> None:
        names = list(columns)
        for place, row in enumerate(zip(*(each.tolist() for each in columns.values()), strict=True)):
            message = json.dumps(dict(zip(names, row, strict=True)))
            producer.produce("events", message, partition=place % PARTITIONS)
        producer.flush()

    return f"kafka://{broker.host}:{broker.port}/events", write


def produce(folder: str | None, rate: int, made: Any) -> None:
    """Write events until the process is killed; put (number, time) of each mark into a queue.

    Args:
      folder: The folder of files. None: a topic, whose URL is put into the queue first.
      rate: Events per second.
      made: The queue.
    """
    if folder is None:
        url, write = begin_topic()
        made.put(url)
    else:
        write = functools.partial(write_file, folder)
    draw = np.random.default_rng(0)
    rows, number, marks, last = max(1, round(rate * FILE)), 0, 0, time.time()
    while True:
        begin, end = last, last + FILE
        users = np.minimum(draw.zipf(1.2, rows), USERS) % USERS
        items = np.minimum(draw.zipf(1.2, rows), ITEMS) % ITEMS
        times = np.linspace(begin, end, rows, endpoint=False)
        clicks = (draw.random(rows) < 0.2).astype(np.float32)
        if number * FILE // MARK != (number + 1) * FILE // MARK:
            place = int(draw.integers(rows))
            users[place] = items[place] = NEW + marks
            clicks[place] = 1.0
            made.put((marks, times[place]))
            marks += 1
        time.sleep(max(0.0, end - time.time()))
        micros = (times * 1e6).astype(np.int64)
        write(number, {"user": users, "item": items, "click": clicks, "ts": micros})
        number, last = number + 1, end


@dataclass
class Probe:
    """The requests to the server, and what they showed.

    Attributes:
      url: The model's address.
      waits: Seconds of each mark whose effect was seen.
      waiting: Mark -> when it was made, and its untrained score.
      dropped: Marks that waited while dense weights changed.
    """

    url: str
    waits: list[float] = field(default_factory=list)
    waiting: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    dropped: int = 0
    _control: float | None = None

    def score(self, ids: list[int]) -> list[float]:
        """Return the logits of new users and items."""
        inputs = {"user": ids, "item": ids}
        body = json.dumps({"signature_name": "predict", "inputs": inputs}).encode()
        with urllib.request.urlopen(f"{self.url}:predict", body, timeout=30) as answer:
            found: list[float] = json.load(answer)["outputs"]["click_logit"]
        return found

    def ask(self) -> None:
        """Ask for all marks that wait."""
        marks = list(self.waiting)
        control, *scores = self.score([NEW - 1, *(NEW + mark for mark in marks)])
        now = time.time()
        others = self._control is None or abs(control - self._control) > ROUNDING
        self._control = control
        for mark, score in zip(marks, scores, strict=True):
            made, before = self.waiting[mark]
            if before is None:
                self.waiting[mark] = made, score
            elif others:
                self.dropped += 1
                del self.waiting[mark]
            elif abs(score - before) > ROUNDING:
                self.waits.append(now - made)
                del self.waiting[mark]


def read_metrics(port: int) -> dict[str, float]:
    """Return the counters of training."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(gmeta_\w+) (\S+)$", text, re.MULTILINE)}


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def started(name: str, words: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, whose output goes to a file; end it afterwards."""
    with (folder / f"{name}.log").open("wb") as said:
        process = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT, cwd=HERE)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def measure(
    folder: Path, source: str, rate: int, seconds: float, every: str, dense_every: str
) -> dict[str, Any]:
    """Run all processes; return waits, and the rate and the lag of training."""
    log, online = folder / "log", folder / "online"
    log.mkdir()
    files = source == "folder"
    context = multiprocessing.get_context("spawn")
    made: Any = context.Queue()
    producer = context.Process(target=produce, args=(str(log) if files else None, rate, made), daemon=True)
    gmeta = str(Path(sys.executable).with_name("gmeta"))
    metrics, port = free_port(), free_port()
    settings = {"label": '"click"', "time": '"ts"', "publish_every": f'"{every}"'}
    settings |= {"dense_every": f'"{dense_every}"', "window": '"30s"'}
    probe = Probe(f"http://127.0.0.1:{port}/v1/models/model")
    deliver = [gmeta, "deliver", "--from", str(online), "--to", probe.url, "--follow", "--every", "0.1s"]
    serve = f"from support.model_server import serve; serve({str(online / 'model')!r}, {port}, 1)"
    with contextlib.ExitStack() as stack:
        producer.start()
        stack.callback(producer.kill)
        followed = str(log) if files else str(made.get(timeout=60))
        if files:
            _wait(lambda: bool(list(log.glob("*.parquet"))))
        else:
            types = {"user": "int64", "item": "int64", "click": "float32", "ts": "int64"}
            settings |= {"unit": '"us"', "columns": _toml(types)}
        train = [gmeta, "train", "--follow", followed, "--run", str(folder / "run")]
        train += ["--publish", str(online), "--metrics-port", str(metrics)]
        train += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        stack.enter_context(started("server", [sys.executable, "-c", serve], folder))
        stack.enter_context(started("train", train, folder))
        _wait(lambda: probe.score([0]) != [])
        stack.enter_context(started("deliver", deliver, folder))
        _wait(lambda: _lag(read_metrics(metrics)) < 3.0)  # it has caught up with what came meanwhile
        time.sleep(5)
        while not made.empty():
            made.get()
        began, first = time.time(), read_metrics(metrics)
        lags = []
        while time.time() - began < seconds:
            with contextlib.suppress(queue.Empty):
                while True:
                    mark, when = made.get_nowait()
                    probe.waiting[mark] = when, None
            probe.ask()
            if not lags or time.time() - began > len(lags):
                lags.append(_lag(read_metrics(metrics)))
            time.sleep(ASK)
        last, took = read_metrics(metrics), time.time() - began
        name = "gmeta_events_total"
        return {
            "waits": probe.waits,
            "open": max([0.0, *(time.time() - made for made, _ in probe.waiting.values())]),
            "dropped": probe.dropped,
            "rate": (last[name] - first[name]) / took,
            "lags": lags,
            "published": last.get("gmeta_publish_seconds_sum", 0.0),
        }


def _toml(values: dict[str, str]) -> str:
    return "{" + ", ".join(f'{name} = "{value}"' for name, value in values.items()) + "}"


def _lag(metrics: dict[str, float]) -> float:
    return metrics["gmeta_lag_seconds"]


def _wait(done: Any, most: float = 400.0) -> None:
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if done():
                return
        if time.monotonic() - began > most:
            raise SystemExit("event to served: the processes don't start, or don't keep up with the events")
        time.sleep(0.2)


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument(
        "--source", choices=["folder", "kafka"], default="folder", help="the log (%(default)s)"
    )
    options.add_argument("--rate", type=int, default=5000, help="events per second (%(default)s)")
    options.add_argument("--seconds", type=float, default=60.0, help="how long to measure (%(default)s)")
    options.add_argument("--every", default="1s", help="between two deltas (%(default)s)")
    options.add_argument("--dense-every", default="1m", help="between two with dense weights (%(default)s)")
    options = options.parse_args()
    rate, seconds = (500, 10.0) if options.smoke else (options.rate, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.source, rate, seconds, options.every, options.dense_every)
    waits, path = found["waits"], f"event_to_served/rate{rate}/every{options.every}"
    path += "" if options.source == "folder" else f"/{options.source}"
    report(
        f"{len(waits)} events of new ids among {rate:,} events/s; a delta each {options.every}",
        [
            Result(f"{path}/effect/p50", float(np.percentile(waits, 50)), "s"),
            Result(f"{path}/effect/p99", float(np.percentile(waits, 99)), "s"),
            Result(f"{path}/effect/max", float(max(waits)), "s"),
            Result(f"{path}/marks", len(waits), "events"),
            Result(f"{path}/marks/left_out", found["dropped"], "events"),
            Result(f"{path}/marks/longest_open", found["open"], "s"),
            Result(f"{path}/trained", found["rate"], "events/s"),
            Result(f"{path}/lag/p50", float(np.median(found["lags"])), "s"),
            Result(f"{path}/lag/max", float(max(found["lags"])), "s"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
