"""Training on a stream, with all its processes killed at random moments, must end as if nothing had happened.

    make online-kills [KILLS=20] [SEED=0]
    python tools/dev/online_kills.py --kills 100 --json FILE

Four processes work: a source, which writes the files of a log that the seed draws; `gmeta train --follow`,
which publishes; `gmeta deliver --follow`; and a server with TensorFlow Serving's REST interface. One of them,
drawn at random, is killed (SIGKILL) at a random moment and started again, many times. Then training catches
up, ends by SIGTERM, and by `--until-end`. Another folder has a run of the same log that was never killed. At
the end:

rows        each id's frequency is the number of batches that have it, and the steps are all of the log: none
            lost, none repeated
bits        rows, slots, dense weights, optimizer and progressive metrics equal those of the other run
server      its answers equal those of an export of the final model
folders     every checkpoint that is kept loads, and no half-written file is left

Processes are forked from one that has imported everything, so a start takes a second and not ten.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH, ROWS, IDS = 64, 256, 1000
"""Rows of a step and of a file; ids of a column."""
COLUMNS = ("user", "item")
KINDS = ("source", "trainer", "trainer", "deliverer", "server")
"""What is killed next is drawn from these; the trainer publishes, too."""
ENOUGH = "enough"  # a file beside the log's folder, which ends the source
CALM = 240.0  # seconds without progress after the kills, beyond which something is broken

_context = multiprocessing.get_context("forkserver")


def events(seed: int, number: int) -> list[dict[str, int]]:
    """Return the rows of a file of the log."""
    draw = np.random.default_rng([seed, number])
    rows = {name: draw.integers(0, IDS, ROWS).tolist() for name in COLUMNS}
    click = ((np.array(rows["user"]) + np.array(rows["item"])) % 3 == 0).astype(int).tolist()
    times = [1_700_000_000 + number * 60 + row * 60 // ROWS for row in range(ROWS)]
    return [
        {"user": user, "item": item, "click": label, "ts": ts}
        for user, item, label, ts in zip(rows["user"], rows["item"], click, times, strict=True)
    ]


def write_log(folder: str, seed: int, pause: float, files: int | None = None) -> None:
    """Write the files that a log lacks, to a number or until it has enough; each under another name first."""
    for number in itertools.count() if files is None else range(files):
        if Path(folder).with_name(ENOUGH).exists():
            return
        path = Path(folder, f"{number:06d}.jsonl")
        if path.exists():
            continue
        data = "".join(json.dumps(row) + "\n" for row in events(seed, number)).encode()
        unfinished = path.with_name(f"{path.name}.tmp")
        with unfinished.open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            time.sleep(pause / 2)
            file.write(data[len(data) // 2 :])
        unfinished.rename(path)
        time.sleep(pause / 2)


def run_gmeta(words: list[str]) -> None:
    """Run the command line."""
    from gmeta.cli import main

    main(words)


def serve_model(base: str, port: int) -> None:
    """Run the server."""
    from support.model_server import serve

    serve(base, port)


def _begin(said: str, target: Callable[..., None], *arguments: Any) -> None:
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    target(*arguments)


class Job:
    """A process that is started again whenever it is killed.

    Args:
      said: The file of its output.
      target: What it runs.
      *arguments: The arguments.
    """

    def __init__(self, said: Path, target: Callable[..., None], *arguments: Any) -> None:
        self.said, self._target, self._arguments = said, target, arguments
        self.start()

    def start(self) -> None:
        """Start it."""
        self._before = self.said.stat().st_size if self.said.exists() else 0
        words = (str(self.said), self._target, *self._arguments)
        self._process = _context.Process(target=_begin, args=words, daemon=True)
        self._process.start()

    def kill(self) -> bool:
        """Kill it and start it again; return whether it was still running."""
        alive = self._process.is_alive()
        self._process.kill()
        self._process.join()
        self.check(-signal.SIGKILL)
        self.start()
        return alive

    def check(self, *known: int) -> bool:
        """Return whether it runs.

        Raises:
          SystemExit: It ended by itself with an error.
        """
        code = self._process.exitcode
        if code in (None, 0, *known):
            return code is None
        raise SystemExit(f"online kills: {self.said.stem} ended with {code}:\n{tail(self.said)}")

    def says(self, text: str) -> bool:
        """Return whether its output since its start has a text."""
        return self.said.exists() and text in self.said.read_text(errors="replace")[self._before :]

    def end(self, number: signal.Signals | None = None) -> int:
        """End it by a signal, or wait for its end; return its exit code."""
        if number is not None and self._process.is_alive():
            os.kill(self._process.pid or 0, number)
        self._process.join()
        return int(self._process.exitcode or 0)


def tail(said: Path) -> str:
    """Return the last lines of a process' output."""
    return "\n".join(said.read_text(errors="replace").splitlines()[-25:]) if said.exists() else ""


class Online:
    """The processes, and their folders.

    Args:
      folder: Where all of them work.
      seed: The seed of the log.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.log, self.run, self.online = (folder / name for name in ("log", "run", "online"))
        self.log.mkdir(parents=True)
        write_log(str(self.log), seed, 0.0, 1)  # from which columns are inferred
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1/models/model"
        self._seed = seed

    def words(self, run: Path, *more: str) -> list[str]:
        """Return the command that trains in a folder."""
        settings = {
            "label": '"click"', "time": '"ts"', "batch_size": BATCH, "dim": 8, "hidden": "[16]",
            "window": 8 * BATCH, "checkpoint_every": '"1s"', "publish_every": '"0.3s"',
            "dense_every": '"1s"', "base_every": '"20s"',
        }  # fmt: skip
        given = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return ["train", "--follow", str(self.log), "--run", str(run), *given, *more]

    def start(self, pause: float) -> dict[str, Job]:
        """Start the four processes."""
        self.train = self.words(self.run, "--publish", str(self.online))
        follow = ["deliver", "--from", str(self.online), "--to", self.url, "--follow", "--every", "0.2s"]
        work: dict[str, tuple[Any, ...]] = {
            "source": (write_log, str(self.log), self._seed, pause),
            "trainer": (run_gmeta, self.train),
            "deliverer": (run_gmeta, follow),
            "server": (serve_model, str(self.online / "model"), self.port),
        }
        self.jobs = {name: Job(self.folder / f"{name}.log", *each) for name, each in work.items()}
        return self.jobs

    @property
    def files(self) -> int:
        """The number of the log's files."""
        return len(list(self.log.glob("*.jsonl")))

    def ask(self, signature: str, inputs: dict[str, Any]) -> Any:
        """Return the server's answer; None if there is none."""
        body = json.dumps({"signature_name": signature, "inputs": inputs}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}:predict", body, timeout=30) as answer:
                return json.load(answer)["outputs"]
        except (OSError, ValueError, KeyError):
            return None


def until(what: str, done: Callable[[], bool], jobs: dict[str, Job]) -> None:
    """Wait.

    Raises:
      SystemExit: It takes too long, or a process has ended with an error.
    """
    began = time.monotonic()
    while not done():
        for job in jobs.values():
            job.check()
        if time.monotonic() - began > CALM:
            said = "\n\n".join(f"{name}:\n{tail(job.said)}" for name, job in jobs.items())
            raise SystemExit(f"online kills: {what} takes more than {CALM:.0f} s\n{said}")
        time.sleep(0.2)


def killed(online: Online, kills: int, seed: int, mean: float) -> dict[str, Any]:
    """Run the processes, kill them, let them finish; return what was done."""
    from gmeta.export.published_folder import PublishedFolder

    chance, count = random.Random(seed), Counter[str]()
    jobs = online.start(pause=2 * mean)
    for _ in range(kills):
        name = chance.choice(KINDS)
        if name == "trainer" and chance.random() < 0.8:  # otherwise it might never train a batch
            until("training", lambda: jobs["trainer"].says("trains click"), jobs)
        time.sleep(chance.uniform(0.05, 2 * mean))
        for job in jobs.values():
            job.check()
        if jobs[name].kill():
            count[name] += 1
    (online.folder / ENOUGH).touch()
    until("the source", lambda: not jobs["source"].check(), jobs)
    until("a checkpoint", lambda: any(online.run.glob("checkpoints/step-*")), jobs)
    until("training", lambda: jobs["trainer"].says("trains click"), jobs)
    time.sleep(chance.uniform(0.1, mean))
    ended = {"SIGTERM": jobs["trainer"].end(signal.SIGTERM)}
    last = Job(online.folder / "last.log", run_gmeta, [*online.train, "--until-end"])
    ended["--until-end"] = last.end()
    if any(ended.values()):
        raise SystemExit(
            f"online kills: exit codes {ended}:\n{tail(last.said)}\n{tail(jobs['trainer'].said)}"
        )
    version = PublishedFolder(online.online).contents().version
    serving = {name: jobs[name] for name in ("deliverer", "server")}
    until(f"version {version}", lambda: online.ask("delta_version", {}) == version, serving)
    return {"kills": dict(sorted(count.items())), "version": version}


def contents(run: Path) -> dict[str, Any]:
    """Return all that the last checkpoint of a run holds, as arrays."""
    from gmeta.experiment.online.follow import Following, load_config
    from gmeta.export.delta_signatures import tables_of
    from support.tables import sorted_records

    config = load_config(run)
    following = Following(run, config, config.open(False), show=lambda _: None)
    model = following.model
    # Slots are created, and the stored values given to them, by the first gradients.
    model.optimizer.build(model.trainable_variables)
    found: dict[str, Any] = {"step": np.array(int(model.reading.step))}
    for table in tables_of(model):
        found |= {f"{table.name}/{name}": value for name, value in sorted_records(table).items()}
    found |= {f"weight/{i}": each.numpy() for i, each in enumerate(model.trainable_variables)}
    found |= {f"optimizer/{i}": each.numpy() for i, each in enumerate(model.optimizer.variables)}
    found["progress"] = np.frombuffer(following.progress.state(), np.uint8)
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return what differs between two runs, to the bit."""
    wrong = [f"{name} is missing" for name in sorted(set(found) ^ set(expected))]
    for name in sorted(set(found) & set(expected)):
        if found[name].dtype != expected[name].dtype or found[name].tobytes() != expected[name].tobytes():
            wrong.append(f"{name} differs")
    return wrong


def frequencies(run: Path) -> dict[str, dict[int, int]]:
    """Return how many steps with each id a run's tables have counted, by column."""
    from gmeta.checkpoint import ShardedCheckpoint
    from gmeta.experiment.online.follow import build, load_config
    from gmeta.export.delta_signatures import named_tables, tables_of
    from support.tables import sorted_records

    model = build(load_config(run))
    ShardedCheckpoint(run / "checkpoints").restore(model)
    records = {table.name: sorted_records(table) for table in tables_of(model)}
    found = {}
    for name, named in named_tables(model).items():
        held = records[named.physical]
        own = named.own({"keys": held["keys"], "frequency": held["frequency"]})
        found[name.rpartition("/")[2]] = dict(
            zip(own["keys"].tolist(), own["frequency"].tolist(), strict=True)
        )
    return found


def counted(seed: int, files: int) -> dict[str, dict[int, int]]:
    """Return in how many batches of the log each id is, by column."""
    rows = [row for number in range(files) for row in events(seed, number)]
    batches = [rows[begin : begin + BATCH] for begin in range(0, len(rows), BATCH)]
    return {
        name: dict(Counter(each for batch in batches for each in {row[name] for row in batch}))
        for name in COLUMNS
    }


def compare_server(online: Online) -> list[str]:
    """Return what differs between the server and an export of the last checkpoint."""
    from gmeta.checkpoint import ShardedCheckpoint
    from gmeta.experiment.online.follow import build, load_config
    from gmeta.export import export_model
    from support.model_server import Loaded

    model = build(load_config(online.run))
    ShardedCheckpoint(online.run / "checkpoints").restore(model)
    export_model(model, online.folder / "whole", signatures={"predict": model.signature()})
    ids = list(range(IDS + 50))  # some of which no event has
    asked = {"user": ids, "item": ids[::-1]}
    expected = Loaded(online.folder / "whole", 0).answer(asked, "predict")
    found = online.ask("predict", asked)
    return [] if found == expected else [f"the server's answers: {_first(found, expected)}"]


def _first(found: Any, expected: Any) -> str:
    if not isinstance(found, dict) or found.keys() != expected.keys():
        return f"{found!r:.200}"
    pairs = [(name, *each) for name in found for each in zip(found[name], expected[name], strict=True)]
    wrong = [pair for pair in pairs if pair[1] != pair[2]]
    return f"{len(wrong)} of {len(pairs)}, such as {wrong[0]}"


def check_folders(online: Online) -> list[str]:
    """Return what is wrong in the folders of a run and of its publisher."""
    from gmeta.checkpoint import ShardedCheckpoint
    from gmeta.checkpoint.store import CheckpointStore
    from gmeta.experiment.online.follow import build, load_config
    from gmeta.export.published_folder import PublishedFolder

    wrong = []
    for path in CheckpointStore(online.run / "checkpoints").checkpoints():
        ShardedCheckpoint(online.run / "checkpoints").restore(build(load_config(online.run)), path)
    folder = PublishedFolder(online.online)
    for delta in folder.contents().deltas:
        folder.read(delta.name, folder.layout())
    left = [path for root in (online.run, online.online) for path in root.rglob(".*")]
    wrong += [f"left: {path}" for path in left if path.name != ".lock"]
    return wrong


def judge(online: Online, calm: Path, seed: int) -> list[str]:
    """Return all that is wrong after the run."""
    wrong = differences(contents(online.run), contents(calm))
    expected = counted(seed, online.files)
    for name, found in frequencies(online.run).items():
        own = expected[name]
        lost = sum(max(0, number - found.get(each, 0)) for each, number in own.items())
        repeated = sum(max(0, number - own.get(each, 0)) for each, number in found.items())
        if lost or repeated:
            wrong.append(f"{name}: {lost} steps lost, {repeated} repeated")
    return [*wrong, *compare_server(online), *check_folders(online)]


def main() -> int:
    """Run it; return 1 if something differs."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--kills", type=int, default=20, help="how many (default: %(default)s)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--mean", type=float, default=3.0, help="seconds between kills (%(default)s)")
    options.add_argument("--folder", type=Path, help="where to work; must not exist (default: temporary)")
    options.add_argument("--json", type=Path, help="also write the result to this file")
    options = options.parse_args()
    _context.set_forkserver_preload(
        ["gmeta.cli.train", "gmeta.cli.publish", "gmeta.experiment.online.follow", "support.model_server"]
    )
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        online = Online(folder, options.seed)
        done = killed(online, options.kills, options.seed, options.mean)
        seconds = time.monotonic() - began
        calm = Job(folder / "calm.log", run_gmeta, online.words(folder / "calm", "--until-end"))
        if calm.end():
            raise SystemExit(f"online kills: the run without kills ended with an error:\n{tail(calm.said)}")
        wrong, rows = judge(online, folder / "calm", options.seed), online.files * ROWS
        for job in online.jobs.values():
            job.end(signal.SIGKILL)
    for line in wrong:
        print(f"online kills: {line}")
    counts = ", ".join(f"{number} of the {name}" for name, number in done["kills"].items())
    print(
        f"online kills: {'FAILED' if wrong else 'passed'}: {sum(done['kills'].values())} kills ({counts}), "
        f"{rows:,} events, version {done['version']}, {seconds:.0f} s, seed {options.seed}"
    )
    if options.json is not None:
        _write(options.json, {**done, "events": rows, "seconds": round(seconds), "wrong": wrong})
    return 1 if wrong else 0


def _write(path: Path, result: dict[str, Any]) -> None:
    command = " ".join([Path(sys.argv[0]).name, *(word for word in sys.argv[1:] if "/" not in word)])
    about = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "command": command,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    path.write_text(json.dumps([about, result], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
