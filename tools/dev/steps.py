"""Steps that are done once: each leaves a stamp that says what it was done for.

A stamp holds a digest of everything that the step depends on, and is written when the step has succeeded.
So a step runs again exactly when that has changed, or when it was interrupted. The stamps lie in the
environment, and go when it goes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# What tells from a command's output why it failed: pattern -> what to say.
_REASONS = (
    (r"No space left on device", "the disk is full: free some space, or point TMPDIR to another disk"),
    (r"Permission denied", "something can't be written: see who owns the checkout and the temporary folder"),
    (
        r"Name or service not known|Temporary failure in name|NewConnectionError|ConnectTimeout|ReadTimeout|"
        r"Network is unreachable|Could not find a version that satisfies",
        "pip can't reach a package index that has this pin: check the network and `pip config list`",
    ),
    (
        r"\bKilled\b|virtual memory exhausted",
        "the compiler ran out of memory: close something",
    ),
)
# What an outer make says to inner makes, and where another Python looks for its modules.
_FOREIGN = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH", "PYTHONHOME")


class SetupError(Exception):
    """One line: what is missing, and how to get it."""


def digest(parts: Iterable[str | Path]) -> str:
    """A digest of strings and of files' contents (a folder stands for all files below it)."""
    value = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            value.update(part.encode() + b"\0")
            continue
        files = sorted(part.rglob("*")) if part.is_dir() else [part]
        for file in files:
            if file.is_file():
                value.update(str(file).encode() + b"\0" + file.read_bytes() + b"\0")
    return value.hexdigest()


class Steps:
    """Runs steps, says how long each took, and keeps the output of their commands in a log."""

    def __init__(self, stamps: Path, log: Path) -> None:
        self.stamps, self.log = stamps, log
        self.ran = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")

    def due(self, name: str, fingerprint: str) -> bool:
        """Whether the step must run: it never did to its end, or did for something else."""
        stamp = self.stamps / name
        return not stamp.is_file() or stamp.read_text() != fingerprint

    def forget(self, name: str) -> None:
        """Make the step due."""
        (self.stamps / name).unlink(missing_ok=True)

    def step(self, name: str, title: str, fingerprint: str, action: Callable[[], None]) -> None:
        """Run `action` if it is due, and stamp it."""
        if not self.due(name, fingerprint):
            return
        self.forget(name)
        print(f"setup: {title} ...", end="", flush=True)
        start = time.monotonic()
        try:
            action()
        except BaseException:
            print(flush=True)
            raise
        print(f" {time.monotonic() - start:.1f} s", flush=True)
        self.stamps.mkdir(parents=True, exist_ok=True)
        (self.stamps / name).write_text(fingerprint)
        self.ran += 1

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None) -> None:
        """Run a command without stdin, with its output in the log.

        Raises:
          SetupError: It failed; the line says why, as far as its output tells.
        """
        words = [str(word) for word in command]
        inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        with self.log.open("r+") as log:
            log.seek(0, os.SEEK_END)
            log.write(f"\n$ {' '.join(words)}\n")
            log.flush()
            start = log.tell()
            code = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited, **(env or {})},
                check=False,
            ).returncode
            log.seek(start)
            output = log.read()
        if code:
            raise SetupError(f"{_reason(output)}; the whole output is in {self.log}")


def _reason(output: str) -> str:
    for pattern, reason in _REASONS:
        if re.search(pattern, output):
            return reason
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|missing", line, re.IGNORECASE)]
    return (errors or lines or ["it failed without a word"])[0 if errors else -1]


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Let one set-up work on a checkout at a time; a second one waits, and says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another set-up of this checkout", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def set_up(lock: Path, begin: Callable[[], Steps], make: Callable[[Steps], None], ready: str) -> int:
    """Do what is due, and say at the end that it is there.

    Args:
      lock: A file that set-ups which mustn't meet have in common.
      begin: Makes the steps, once nobody else has the lock.
      make: Does them.
      ready: What is there then.

    Returns:
      The exit status: 0 when all is there, 1 with one line on stderr, 130 when interrupted.
    """
    start = time.monotonic()
    try:
        with only_one(lock):
            steps = begin()
            make(steps)
    except SetupError as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next call goes on from here", file=sys.stderr)
        return 130
    done = f"ready after {time.monotonic() - start:.0f} s" if steps.ran else "nothing to do"
    print(f"setup: {done}; {ready}", flush=True)
    return 0
