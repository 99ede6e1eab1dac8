"""Steps that run once: each leaves a stamp of its inputs.

A stamp holds a digest of everything that the step depends on, and is written when the step has succeeded.
So a step runs again exactly if these have changed, or if it was interrupted. The stamps are in the
environment, and are deleted with it. Independent steps run side by side, each with its own log.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

# Patterns of a command's output -> the reason of its failure.
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
_TAIL = 15  # lines of a failed command that are shown
_PATIENCE = 10.0  # seconds for a stopped command to remove unfinished files
# An outer make's variables for inner makes, and another Python's module path.
_FOREIGN = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH", "PYTHONHOME")


class SetupError(Exception):
    """One line: what is missing, and how to get it.

    Attributes:
      tail: The last lines of the command that failed, if one did.
    """

    def __init__(self, line: str, tail: Iterable[str] = ()) -> None:
        super().__init__(line)
        self.tail = list(tail)


class StoppedError(Exception):
    """A step was stopped, because another one has failed or set-up was interrupted."""


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


class Log:
    """Runs a step's commands one after another, and keeps their output in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None
        self._stopped = False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None) -> None:
        """Run a command without stdin, with its output in the log.

        Raises:
          SetupError: It failed; the line has the reason, as far as the output shows it.
          StoppedError: `stop` was called.
        """
        words = [str(word) for word in command]
        inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        with self.path.open("r+") as log:
            log.seek(0, os.SEEK_END)
            log.write(f"\n$ {' '.join(words)}\n")
            log.flush()
            start = log.tell()
            with self._lock:
                if self._stopped:
                    raise StoppedError
                # In a session of its own, so that it can be stopped with all that it has started.
                self._running = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**inherited, **(env or {})},
                    text=True,
                    start_new_session=True,
                )
            code = self._running.wait()
            with self._lock:
                self._running = None
            log.seek(start)
            output = log.read()
        if self._stopped:
            raise StoppedError
        if code:
            tail = [line for line in output.splitlines() if line.strip()][-_TAIL:]
            raise SetupError(f"{_reason(output)}; the whole output is in {self.path}", tail)

    def stop(self) -> None:
        """End the running command, with its children, and start no other."""
        with self._lock:
            self._stopped = True
            running = self._running
        if running is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + _PATIENCE
            with suppress(ProcessLookupError):  # once no process of the group is left
                os.killpg(running.pid, number)
                while time.monotonic() < end:
                    time.sleep(0.05)
                    os.killpg(running.pid, 0)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of set-up.

    Attributes:
      name: The name of its stamp and its log.
      title: The name of its result.
      fingerprint: A digest of all its inputs.
      action: Runs the step; its commands run in the log.
    """

    name: str
    title: str
    fingerprint: str
    action: Callable[[Log], None]


class Steps:
    """Runs steps that are due, and reports the time of each.

    Attributes:
      stamps: The folder of the stamps.
      logs: The folder of the logs, each of its step's last run.
      ran: The number of steps that have run.
    """

    def __init__(self, stamps: Path, logs: Path) -> None:
        self.stamps, self.logs = stamps, logs
        self.ran = 0

    def due(self, step: Step) -> bool:
        """Whether the step must run: it never completed, or had other inputs."""
        stamp = self.stamps / step.name
        return not stamp.is_file() or stamp.read_text() != step.fingerprint

    def forget(self, name: str) -> None:
        """Make the step due."""
        (self.stamps / name).unlink(missing_ok=True)

    def do(self, *steps: Step) -> None:
        """Run the steps that are due side by side, and stamp each when it is done.

        The first one that fails ends the others, as an interrupt does, with all their processes.
        """
        due = [step for step in steps if self.due(step)]
        if not due:
            return
        for step in due:
            self.forget(step.name)
        print(f"setup: {', and '.join(step.title for step in due)} ...", end="", flush=True)
        logs = [Log(self.logs / f"{step.name}.log") for step in due]
        start = time.monotonic()
        with ThreadPoolExecutor(len(due)) as threads:
            try:
                running = {
                    threads.submit(step.action, log): step for step, log in zip(due, logs, strict=True)
                }
                for done in as_completed(running):
                    self._finish(running[done], done)
                    shown = f" {running[done].name}" if len(due) > 1 else ""
                    print(f"{shown} {time.monotonic() - start:.1f} s", end="", flush=True)
            except BaseException:
                for log in logs:
                    log.stop()
                raise
            finally:
                print(flush=True)

    def _finish(self, step: Step, done: Future[None]) -> None:
        """Stamp a step, unless it has failed."""
        done.result()
        self.stamps.mkdir(parents=True, exist_ok=True)
        (self.stamps / step.name).write_text(step.fingerprint)
        self.ran += 1


def _reason(output: str) -> str:
    for pattern, reason in _REASONS:
        if re.search(pattern, output):
            return reason
    cmake = re.search(r"CMake Error.*:\n((?:(?:  .*)?\n)+)", output)
    if cmake:
        return " ".join(cmake.group(1).split())
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|missing", line, re.IGNORECASE)]
    return (errors or lines or ["it failed without a word"])[0 if errors else -1]


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Allow one set-up of a checkout at a time; a second one waits, and prints that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another set-up of this checkout", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def set_up(lock: Path, begin: Callable[[], Steps], make: Callable[[Steps], None], ready: str) -> int:
    """Run the steps that are due, and report at the end.

    Args:
      lock: A file shared by set-ups that must not run at the same time.
      begin: Makes the steps, once the lock is free.
      make: Runs them.
      ready: The description of the result.

    Returns:
      The exit status: 0 on success; 1 with one line on stderr, below the last output of a failed command; 130
      if interrupted, also by SIGTERM or when the terminal closes.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)
    start = time.monotonic()
    try:
        with only_one(lock):
            steps = begin()
            make(steps)
    except SetupError as error:
        for line in error.tail:
            print(f"  {line}", file=sys.stderr)
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next call goes on from here", file=sys.stderr)
        return 130
    done = f"ready after {time.monotonic() - start:.0f} s" if steps.ran else "nothing to do"
    print(f"setup: {done}; {ready}", flush=True)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
