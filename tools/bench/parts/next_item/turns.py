"""Trainers in separate processes, which train on request and so take turns.

A peer's interpreter, which has no gmeta, runs it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_BENCH = Path(__file__).resolve().parents[2]
_ROOT = _BENCH.parents[1]


class Trainer(Protocol):
    """The trainer in a process."""

    def train(self, share: float) -> list[float]:
        """Train for a share of an epoch, at most 1, and return the seconds of an epoch at that pace.

        First wall-clock seconds, then processor seconds of the process, which depend less on other work on
        the machine.
        """

    def measure(self, cut: str) -> float:
        """Return NDCG@10 of ``validation`` or ``test`` items among all items; ties count against it."""


class Turns:
    """A trainer in a process.

    Args:
      python: The interpreter.
      module: A module of this folder whose main calls `answer`.
      settings: Settings from which `answer` makes the trainer; values that JSON can hold.
    """

    def __init__(self, python: str | Path, module: str, settings: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until the process ends
        paths = os.pathsep.join(map(str, (_BENCH, _ROOT)))
        self._process = subprocess.Popen(
            [python, "-m", f"parts.next_item.{module}", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # On shared cores, OpenMP threads that spin for each other slow down everything.
            env={"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": paths},
        )

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # ends its input, and so its loop

    def train(self, share: float) -> list[float]:
        """See `Trainer`."""
        return list(self._ask("train", share))

    def measure(self, cut: str) -> float:
        """See `Trainer`."""
        return float(self._ask("measure", cut))

    def _ask(self, what: str, argument: float | str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # the process has ended: see below
            print(json.dumps([what, argument]), file=self._process.stdin, flush=True)
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._errors.seek(0)
        raise RuntimeError(f"a trainer ended with {self._process.wait()}:\n{self._errors.read()[-3000:]}")


def now() -> np.ndarray:
    """Return wall-clock and processor seconds of this process, for subtraction."""
    return np.array([time.perf_counter(), time.process_time()])


def answer(make: Callable[[dict[str, Any]], Trainer]) -> None:
    """In the process: make the trainer, and serve requests, a line each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that libraries' output isn't an answer
    trainer = make(json.loads(sys.argv[1]))
    for line in sys.stdin:
        what, argument = json.loads(line)
        print(json.dumps(getattr(trainer, what)(argument)), file=answers, flush=True)
