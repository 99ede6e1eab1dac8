"""Starts the ranks of a job on this machine, and ends all of them when one fails.

Horovod's rendezvous server introduces the ranks to each other, and environment variables tell each rank who
it is, as under ``horovodrun``; jobs over several machines need ``horovodrun -H`` itself. Two things differ
from ``horovodrun``. No shell or helper process stands between the launcher and a rank, so the launcher sees
the signal that ended a rank. And when a rank has failed, the others get a moment to report what they saw
before the launcher ends them, so the report can tell the cause from its consequences.

This module doesn't import TensorFlow.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gmeta.core.collectives.backend import HOW_TO_BUILD, horovod_version
from gmeta.core.collectives.driver import notes as telling
from gmeta.core.collectives.driver.rendezvous import guard, new_secret
from gmeta.core.collectives.place import LAUNCHER
from gmeta.core.errors import ConfigError, RanksError

GRACE = 5.0
"""Seconds that the other ranks have to end by themselves, and again between SIGTERM and SIGKILL."""

_TAIL = 20  # lines of stderr that are kept for the report

Write = Callable[[int, str, str], None]
"""Function of a rank, ``"stdout"`` or ``"stderr"``, and a line of its output without the line end."""


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
      rank: The number of the rank.
      code: Its exit code, or minus the number of the signal that ended it.
      seconds: The time from the start of the job until the rank ended.
      ended_here: Whether the launcher ended it.
      tail: The last lines of its stderr.
      told: The notes that it left for the launcher (`gmeta.core.collectives.driver.notes`).
    """

    rank: int
    code: int
    seconds: float
    ended_here: bool
    tail: tuple[str, ...]
    told: frozenset[str] = frozenset()

    @property
    def leaves(self) -> bool:
        """Whether it ended, or was about to end, to start again with another number of ranks."""
        return telling.LEAVES in self.told

    @property
    def blames_others(self) -> bool:
        """Whether it has said that others are gone or didn't come, so the others don't wait for it.

        Gloo's thread reports a lost connection even in a rank that hangs.
        """
        said = _SAID if self.ended_here else _LOST
        return telling.LOST_PEERS in self.told or any(said.search(line) for line in self.tail)

    @property
    def how(self) -> str:
        """Phrase such as ``was killed by SIGKILL`` or ``ended with exit code 1``."""
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


def launch(
    command: Sequence[str],
    size: int,
    *,
    environment: Mapping[str, str] | None = None,
    write: Write | None = None,
    timeout: float | None = None,
) -> None:
    """Run a command as every rank of a job, and return when all have succeeded.

    A rank that fails ends the job: the others have 5 s to end by themselves, then they get SIGTERM, and
    SIGKILL 5 s later. An interrupt of the launcher ends the job too; the ranks get SIGINT first. If the
    launcher is killed, the ranks exit by themselves.

    Args:
      command: The program and its arguments.
      size: The number of ranks.
      environment: Variables to set besides this process's environment.
      write: Receives each line of output; by default lines go to stdout and stderr behind ``[rank] ``.
      timeout: Seconds after which the launcher ends the job.

    Raises:
      RanksError: A rank failed, or time ran out. The message starts with the rank and the reason.
      ConfigError: Horovod is not installed, or `size` is no number of ranks.
    """
    if size < 1:
        raise ConfigError(f"{size} is no number of ranks; start at least 1")
    if horovod_version() is None:
        raise ConfigError(f"{size} ranks need Horovod, which is not installed: {HOW_TO_BUILD}")
    with _rendezvous(size) as environments, tempfile.TemporaryDirectory(prefix="gmeta-told-") as folder:
        given = [{**(environment or {}), **own, telling.TOLD: folder} for own in environments]
        job = _Job(command, given, write or _print, Path(folder))
        try:
            ends = job.wait(timeout)
        except BaseException as error:
            job.end(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
    if any(end.code for end in ends):
        raise RanksError(report(ends, timeout), ends=ends)


@dataclass(frozen=True)
class Verdict:
    """Why a job ended.

    Attributes:
      reason: The rank that caused it, and what happened to that rank.
      culprit: How that rank ended.
      lost: All ranks that failed by themselves, or hung; the others could have gone on without them.
      hopeless: Whether the failure would happen again: all ranks failed alike, or the program ended too soon.
    """

    reason: str
    culprit: RankEnd
    lost: tuple[RankEnd, ...] = ()
    hopeless: bool = False


def verdict(ends: Sequence[RankEnd], timeout: float | None = None) -> Verdict:
    """Tell the cause of a job's failure from its consequences; `ends` is in the order of ending."""
    size = len(ends)
    failed = [end for end in ends if end.code and not end.ended_here and not end.leaves]
    causes = [end for end in failed if not end.blames_others]
    silent = [end for end in ends if end.ended_here]
    # A rank that has reported lost peers, or leaves so that others can join, may exit slowly but isn't hung.
    hung = [end for end in silent if not end.blames_others and not end.leaves]
    left = [end for end in ends if not end.code]
    if len(causes) == size > 1 and len({_reason(end) for end in causes}) == 1:  # such as a wrong setting
        end = causes[0]
        reason = f"all {size} ranks alike: rank {end.rank} {end.how}{_reason(end)}"
        return Verdict(reason, end, hopeless=True)
    if causes:
        end = causes[0]
        reason = f"rank {end.rank} of {size} {end.how} after {end.seconds:.0f} s{_reason(end)}"
        return Verdict(reason, end, tuple(causes))
    if hung and any((end.code and not end.ended_here) or end.blames_others for end in ends):
        them = "it" if len(hung) == 1 else "them"
        reason = f"{_ranks(hung)} of {size} hung: the others waited for {them} in a collective"
        return Verdict(reason, hung[0], tuple(hung))
    if failed and left:
        end = left[0]
        reason = f"rank {end.rank} of {size} was done while the others still had collectives to do"
        return Verdict(reason, end, hopeless=True)
    if failed or not silent:
        end = [*failed, *ends][0]
        return Verdict(f"rank {end.rank} of {size} {end.how} after {end.seconds:.0f} s", end)
    end = silent[0]
    return Verdict(f"{_ranks(silent)} of {size} had not ended after {timeout:.0f} s", end, hopeless=True)


def _ranks(ends: Sequence[RankEnd]) -> str:
    numbers = ", ".join(str(end.rank) for end in sorted(ends, key=lambda end: end.rank))
    return f"rank{'s' * (len(ends) > 1)} {numbers}"


def report(ends: Sequence[RankEnd], timeout: float | None = None) -> str:
    """Report which rank ended a job and why, with its last lines; `ends` is in the order of ending."""
    found = verdict(ends, timeout)
    culprit = found.culprit
    lines = [f"the job was ended: {found.reason}"]
    if culprit.tail:
        lines += [f"the last lines of rank {culprit.rank}'s stderr:", *(f"  {line}" for line in culprit.tail)]
    others = [end for end in sorted(ends, key=lambda end: end.rank) if end is not culprit]
    lines += [f"rank {end.rank} {end.how}{' by the launcher' * end.ended_here}" for end in others]
    return "\n".join(lines)


_SAID = re.compile(r"has waited \d+ s in|CollectiveError|lost its peers")
_LOST = re.compile(rf"{_SAID.pattern}|Horovod has been shut down|[Cc]onnection (closed|reset) by peer")


def _reason(end: RankEnd) -> str:
    """Return the last line of a rank's stderr, if it could write any."""
    return f": {end.tail[-1].strip()}" if end.code > 0 and end.tail else ""


@contextmanager
def _rendezvous(size: int) -> Iterator[list[dict[str, str]]]:
    """Run Horovod's server while the block runs; yield the environment variables of each rank."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    slots = get_host_assignments(parse_hosts(f"localhost:{size}"), size)
    secret = new_secret()
    handler = guard(RendezvousHandler, secret, signed=False)
    server = RendezvousHTTPServer(("127.0.0.1", 0), handler, 0)
    server.init(slots)
    threading.Thread(target=server.serve_forever, name="gmeta-rendezvous", daemon=True).start()
    port = server.server_port
    shared = {
        **create_run_env_vars(f"127.0.0.1:{port}/{secret}", ["lo"], port),
        LAUNCHER: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }
    try:
        yield [
            {key: str(value) for key, value in {**shared, **create_slot_env_vars(s)}.items()} for s in slots
        ]
    finally:
        server.shutdown()
        server.server_close()


class _Job:
    """The processes of all ranks, the threads that read their output, and how the ranks ended."""

    def __init__(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]], write: Write, told: Path
    ) -> None:
        self._write, self._lock, self._told = write, threading.Lock(), told
        self._start = time.monotonic()
        self._tails: list[deque[str]] = [deque(maxlen=_TAIL) for _ in environments]
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._when: dict[int, float] = {}
        self._ending: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, own in enumerate(environments):
                self._processes.append(
                    subprocess.Popen(
                        list(command),
                        env={**os.environ, **own},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        start_new_session=True,  # its own group, to end it with its child processes
                    )
                )
                self._watch(rank)
        except BaseException:
            self.end(signal.SIGKILL)
            raise

    def wait(self, timeout: float | None) -> list[RankEnd]:
        """Wait for all, or for the first failure and then end the others; return them in order of ending."""
        deadline = None if timeout is None else self._start + timeout
        order: list[int] = []
        while len(order) < len(self._processes):
            rank = self._next(deadline)
            if rank is not None:
                order.append(rank)
                if self._processes[rank].returncode == 0:
                    continue
                grace = time.monotonic() + GRACE
                while len(order) < len(self._processes) and (rank := self._next(grace)) is not None:
                    order.append(rank)
            self.end(signal.SIGTERM)
            order += sorted(set(range(len(self._processes))) - set(order))
        for thread in self._threads:
            thread.join(GRACE)  # a grandchild may hold a pipe open; don't wait for it
        return [self._end_of(rank) for rank in order]

    def end(self, first: signal.Signals) -> None:
        """Send `first` to running ranks; after `GRACE` SIGTERM, then SIGKILL. Return when none runs."""
        running = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
        self._ending |= set(running)
        for number in dict.fromkeys((first, signal.SIGTERM, signal.SIGKILL)):
            for rank in running:
                self._signal(rank, number)
            deadline = time.monotonic() + GRACE
            for rank in running:
                try:
                    self._processes[rank].wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue
            running = [rank for rank in running if self._processes[rank].poll() is None]
        for rank in running:
            self._processes[rank].wait()  # nothing outlives SIGKILL; a busy machine may take its time
        for rank in range(len(self._processes)):
            self._signal(rank, signal.SIGKILL)  # processes that a rank has started and left behind

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[rank].pid, number)

    def _next(self, deadline: float | None) -> int | None:
        """Wait for the next rank to end; return None if none ends by the deadline."""
        try:
            if deadline is None:
                return self._ended.get()
            return self._ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _end_of(self, rank: int) -> RankEnd:
        code, when = self._processes[rank].returncode, self._when.get(rank, time.monotonic())
        tail, told = tuple(self._tails[rank]), telling.things_told(self._told, rank)
        return RankEnd(rank, code, when - self._start, rank in self._ending, tail, told)

    def _watch(self, rank: int) -> None:
        process = self._processes[rank]

        def wait() -> None:
            process.wait()
            self._when[rank] = time.monotonic()
            self._ended.put(rank)

        assert process.stdout is not None
        assert process.stderr is not None
        for target, args in (
            (wait, ()),
            (self._read, (rank, "stdout", process.stdout)),
            (self._read, (rank, "stderr", process.stderr)),
        ):
            thread = threading.Thread(target=target, args=args, name=f"rank-{rank}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _read(self, rank: int, stream: str, pipe: BinaryIO) -> None:
        with pipe:
            for line in _lines(pipe):
                if stream == "stderr":
                    self._tails[rank].append(line)
                with self._lock:
                    self._write(rank, stream, line)


def _lines(pipe: BinaryIO) -> Iterator[str]:
    """Yield lines as they arrive; a progress bar's carriage return ends a line too."""
    rest = b""
    while chunk := os.read(pipe.fileno(), 1 << 16):
        *lines, rest = re.split(rb"\r\n|\n|\r(?!\n|$)", rest + chunk)
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _print(rank: int, stream: str, line: str) -> None:
    print(f"[{rank}] {line}", file=getattr(sys, stream), flush=True)
