"""A random soak of the hash table: insert, update, evict, grow, save, kill, load.

    make soak [MINUTES=10] [SEED=0]

A process works on tables of several policies, optimizers and precisions, some of which the seed draws. It
saves them at random, by `tf.train.Checkpoint` and in shards, and is killed (SIGKILL) at a random moment; the
next one restores and continues. Meanwhile this process runs the same operations once on the reference in
NumPy. At the end both must have the same content: keys, frequencies, steps and the number of half rows
exactly, weights and slots to the last bit where the arithmetic is exact, and within rounding elsewhere.
Operations are a function of the seed (`soak_trace`); the moments of kills aren't, and needn't be: the end
must be the same.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.reference.table import ReferenceHashTable

import numpy as np
from soak_draw import rigs
from soak_trace import Profile, Trace

LIFE = Path(__file__).with_name("soak_life.py")
LIFE_SECONDS = 8.0
"""Seconds that a life works once it has begun; its start takes a time that depends on the machine."""


class Reference:
    """The same tables in NumPy, which are never killed."""

    def __init__(self, seed: int) -> None:
        self.done = 0
        self.tables: dict[str, tuple[Profile, ReferenceHashTable, Trace]] = {
            f"{rig}/{profile.name}": (
                profile,
                ReferenceHashTable(**profile.settings(), seed=seed),
                Trace(seed, profile),
            )
            for rig, profiles in rigs(seed).items()
            for profile in profiles
        }

    def step(self) -> None:
        """Run the next operation on every table."""
        for _, table, trace in self.tables.values():
            trace.apply(self.done, table)
        self.done += 1


@dataclass
class Tally:
    """The events so far."""

    lives: int = 0
    kills: int = 0
    kills_in_saves: int = 0
    saves: int = 0
    loads: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, output: str) -> None:
        """Count a life's events."""
        lines = [line.split() for line in output.splitlines()]
        counts = {event: sum(event in line for line in lines) for event in ("saving", "saved", "loaded")}
        self.saves += counts["saved"]
        self.loads += counts["loaded"]
        self.kills_in_saves += counts["saving"] - counts["saved"]


@dataclass
class Life:
    """A running process, and its output so far."""

    process: subprocess.Popen[bytes]
    said: Path

    def begun(self) -> bool:
        """Whether it has loaded the tables and works."""
        return "sharded: loaded" in self.output()

    def output(self) -> str:
        """Its events, a line each."""
        return self.said.read_text()


@contextmanager
def a_life(folder: Path, *words: object) -> Iterator[Life]:
    """A process that resumes from the folder; it doesn't outlive the block."""
    with tempfile.NamedTemporaryFile() as said, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, LIFE, folder, *map(str, words)]
        process = subprocess.Popen(command, stdout=said, stderr=errors)
        try:
            yield Life(process, Path(said.name))
        finally:
            process.kill()
            process.wait()
        if process.returncode not in (0, -9):
            errors.seek(0)
            raise SystemExit(f"soak: a life ended by itself with {process.returncode}:\n{errors.read()}")


def soak(folder: Path, seconds: float, seed: int) -> Tally:
    """Run lives until time is up, then one to the end, and compare."""
    reference, tally, chance = Reference(seed), Tally(), random.Random(seed)
    start, speed = time.monotonic(), 10.0
    usual = min(LIFE_SECONDS, seconds)
    while time.monotonic() - start < seconds:
        until = reference.done + max(20, round(speed * usual))
        span = chance.uniform(0.0, 1.3) * usual
        with a_life(folder, seed, tally.lives, until) as life:
            while life.process.poll() is None and not life.begun():
                time.sleep(0.05)
            begun, first = time.monotonic(), reference.done
            # It works for a while, and runs at least one operation.
            while life.process.poll() is None and (
                reference.done == first or time.monotonic() < begun + span
            ):
                if reference.done < until:
                    reference.step()
                else:
                    time.sleep(0.01)
            if life.process.poll() is None:
                life.process.kill()
                life.process.wait()
                tally.kills += 1
            tally.add(life.output())
            if reference.done > first:
                speed = max(5.0, (reference.done - first) / (time.monotonic() - begun))
        tally.lives += 1
        catch_up(reference, folder)
        print(
            f"soak: {time.monotonic() - start:5.0f} s, life {tally.lives}: {tally.kills} kills "
            f"({tally.kills_in_saves} while saving), {tally.saves} saves, {tally.loads} loads, "
            f"reference at operation {reference.done:,}",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "tables.npz")
        with a_life(folder, seed, tally.lives, reference.done, path) as life:
            life.process.wait()
            tally.add(life.output())
        tally.lives += 1
        with np.load(path) as arrays:
            tally.differences = compare(reference, dict(arrays))
    report(reference, tally, time.monotonic() - start)
    return tally


def catch_up(reference: Reference, folder: Path) -> None:
    """Run the reference to the last operation that a life has saved, which may be ahead of it."""
    names = [path.name for path in [*folder.glob("whole/ckpt-*.index"), *folder.glob("sharded/step-*")]]
    for _ in range(reference.done, max((int(re.sub(r"\D", "", name)) for name in names), default=0)):
        reference.step()


def compare(reference: Reference, found: dict[str, np.ndarray]) -> list[str]:
    """Describe where the tables and the reference differ."""
    differences = []
    for name, (profile, model, _) in reference.tables.items():
        keys = sorted(model.records)
        records = [model.records[key] for key in keys]
        expected = {
            "keys": keys,
            "frequency": [record.frequency for record in records],
            "last_step": [record.last_step for record in records],
            "step": model.step,
            "half_rows": model.half_rows(),
            "rows": [record.row for record in records],
            "slots": [record.slots for record in records],
        }
        for part, value in expected.items():
            ours, theirs = found[f"{name}/{part}"], np.asarray(value)
            if ours.shape != theirs.shape and ours.size + theirs.size:
                differences.append(f"{name}: {part} has shape {ours.shape}, the reference {theirs.shape}")
                continue
            rounding = part in ("rows", "slots") and not profile.exact
            same = np.isclose(ours, theirs, rtol=1e-3, atol=1e-4) if rounding else ours == theirs
            if not np.all(same):
                differences.append(f"{name}: {part} differs in {np.sum(~same)} of {same.size} places")
    return differences


def report(reference: Reference, tally: Tally, seconds: float) -> None:
    """Print the differences, and the summary line."""
    for name, (profile, model, _) in reference.tables.items():
        counts = ", ".join(f"{count:,} {what}" for what, count in model.counts.items() if count)
        half = f", {model.half_rows():,} half" if profile.precision is not None else ""
        print(f"soak: {name}: {model.size():,} rows{half}; {counts}")
        if profile.name.startswith("drawn"):
            print(f"soak: {name} is {profile}")
    for difference in tally.differences:
        print(f"soak: DIFFERS {difference}")
    print(
        f"soak: {'FAILED' if tally.differences else 'passed'}: {reference.done:,} operations on "
        f"{len(reference.tables)} tables in {seconds:.0f} s, {tally.lives} lives, {tally.kills} kills "
        f"({tally.kills_in_saves} while saving), {tally.saves} saves, {tally.loads} loads"
    )


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--folder", type=Path, help="for the checkpoints, which are kept  [default: a temporary one]"
    )
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tally = soak(given.folder or Path(scratch), 60 * given.minutes, given.seed)
    return 1 if tally.differences else 0


if __name__ == "__main__":
    sys.exit(main())
