"""Starts the ranks of a job, and ends all of them when one fails.

Ranks find each other by Horovod's rendezvous server or gmeta's own store (`meeting`), and environment
variables assign each rank its place. There are two differences from ``horovodrun``. The launcher sees the
signal that ended a rank: no shell or helper process is between them on this machine, and on another one the
helper reports it (`rank_processes`). After a rank fails, the others have a moment to report what they saw
before the launcher ends them, so the report can separate the cause from its consequences.

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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from gmeta.core.collectives import rendezvous
from gmeta.core.collectives.place import RANKS, uses_horovod
from gmeta.core.collectives.wire import choose_addresses
from gmeta.core.errors import ConfigError, RanksError
from gmeta.core.launcher.meeting import (
    Host,
    Values,
    host_of_each,
    is_here,
    meet_by_horovod,
    meet_by_store,
    places_of,
)
from gmeta.core.launcher.rank_processes import SSH, LocalProcess, RemoteProcess

# Finds why a job ended: which rank was the cause, and which ranks ended as a consequence.


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
      rank: The number of the rank.
      code: Its exit code, or minus the number of the signal that ended it.
      seconds: The time from the start of the job until the rank ended.
      ended_here: Whether the launcher ended it.
      tail: The last lines of its stderr.
      told: The notes that it left for the launcher (`gmeta.core.collectives.monitoring`).
      lost_host: The machine that was lost with it; "" if the rank's end is known.
    """

    rank: int
    code: int
    seconds: float
    ended_here: bool
    tail: tuple[str, ...]
    told: frozenset[str] = frozenset()
    lost_host: str = ""

    @property
    def leaves(self) -> bool:
        """Whether it ended, or was about to end, to restart with another number of ranks."""
        return rendezvous.LEAVES in self.told

    @property
    def blames_others(self) -> bool:
        """Whether it reported that others are gone or didn't join, so the others don't wait for it.

        Gloo's thread reports a lost connection even in a rank that hangs.
        """
        said = _SAID if self.ended_here else _LOST
        return rendezvous.LOST_PEERS in self.told or any(said.search(line) for line in self.tail)

    @property
    def how(self) -> str:
        """Phrase such as ``was killed by SIGKILL``, ``ended with exit code 1`` or ``was lost with host1``."""
        if self.lost_host:
            return f"was lost with {self.lost_host}, whose connection ended with exit code {self.code}"
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


@dataclass(frozen=True)
class Verdict:
    """Why a job ended.

    Attributes:
      reason: The rank that caused it, and what happened to that rank.
      culprit: How that rank ended.
      lost: All ranks that failed on their own, or hung; the others could have continued without them.
      hopeless: Whether the failure would recur: all ranks failed in the same way, or the program ended too
        soon.
    """

    reason: str
    culprit: RankEnd
    lost: tuple[RankEnd, ...] = ()
    hopeless: bool = False


def verdict(ends: Sequence[RankEnd], timeout: float | None = None) -> Verdict:
    """Separate the cause of a job's failure from its consequences; `ends` is in the order of ending."""
    size = len(ends)
    failed = [end for end in ends if end.code and not end.ended_here and not end.leaves]
    causes = [end for end in failed if not end.blames_others]
    silent = [end for end in ends if end.ended_here]
    # A rank that reported lost peers, or leaves so that others can join, may exit slowly but isn't hung.
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
    unlike = [said.group() for end in ends for said in map(_UNLIKE.search, end.tail) if said is not None]
    if failed and unlike:
        return Verdict(unlike[0], failed[0])
    if failed and left:
        end = left[0]
        reason = f"rank {end.rank} of {size} was done while the others still had collectives to do"
        return Verdict(reason, end, hopeless=True)
    waits = [said.group() for end in ends for said in map(_WAITS.search, end.tail) if said is not None]
    if failed and len(waits) == size > 1:
        return Verdict(f"the ranks waited for each other: {'; '.join(waits)}", failed[0])
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


_UNLIKE = re.compile(r"rank \d+ of \d+ during .*: the ranks make different collectives: [^;]+")
_WAITS = re.compile(
    r"rank \d+ of \d+ has waited \d+ s in \w+"
    r"|rank \d+ of \d+ lost its peers .*timed out: .* did not come within \d+ s to [^;]+"
)
_SAID = re.compile(r"has waited \d+ s in|CollectiveError|lost its peers|ranks make different collectives")
_LOST = re.compile(rf"{_SAID.pattern}|Horovod has been shut down|[Cc]onnection (closed|reset) by peer")


def _reason(end: RankEnd) -> str:
    """Return the last line of a rank's stderr, if it wrote any."""
    return f": {end.tail[-1].strip()}" if end.code > 0 and end.tail else ""


GRACE = 5.0
"""Seconds that the other ranks have to end by themselves, and again between SIGTERM and SIGKILL."""

_TAIL = 20  # lines of stderr that are kept for the report

Write = Callable[[int, str, str], None]
"""Function of a rank, ``"stdout"`` or ``"stderr"``, and a line of its output without the line end."""


def launch(
    command: Sequence[str],
    size: int,
    *,
    environment: Mapping[str, str] | None = None,
    write: Write | None = None,
    timeout: float | None = None,
    hosts: Sequence[Host] | None = None,
    ssh: Sequence[str] = SSH,
) -> None:
    """Run a command as every rank of a job, and return when all have succeeded.

    A failing rank ends the job: the others have 5 s to end on their own, then they receive SIGTERM, and
    SIGKILL 5 s later. An interrupt of the launcher also ends the job; the ranks receive SIGINT first. If the
    launcher is killed, the ranks exit on their own.

    Args:
      command: The program and its arguments.
      size: The number of ranks.
      environment: Variables to set besides this process's environment.
      write: Receives each line of output; by default, lines are written to stdout and stderr, prefixed with
        ``[rank] ``.
      timeout: Seconds after which the launcher ends the job.
      hosts: Machines, whose slots are filled with ranks one machine after another. The ranks then don't use
        Horovod, whose launcher is ``horovodrun``. None: this machine.
      ssh: The program that starts a command on another machine, and its options.

    Raises:
      RanksError: A rank failed, or time ran out. The message starts with the rank and the reason.
      ConfigError: ``GMETA_RANKS`` selects Horovod, which isn't installed or can't use ``hosts``; Horovod
        lacks a package; `size` is not a valid number of ranks, or exceeds the slots.
    """
    if size < 1:
        raise ConfigError(f"{size} is no number of ranks; start at least 1")
    own = {**os.environ, **(environment or {})}
    with (
        _meet(size, own, hosts) as (environments, values),
        tempfile.TemporaryDirectory(prefix="gmeta-notes-") as folder,
    ):
        processes: list[LocalProcess] = []
        for rank, host in enumerate(host_of_each(hosts, size)):
            variables = {**own, **environments[rank], rendezvous.NOTES: f"{folder}/{rank}"}
            if is_here(host):
                processes.append(LocalProcess(command, variables))
            else:
                processes.append(RemoteProcess(command, variables, host, ssh, values))
        job = _Job(processes, write or _print)
        try:
            ends = job.wait(timeout)
        except BaseException as error:
            job.end(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
    if any(end.code for end in ends):
        raise RanksError(report(ends, timeout), ends=ends)


@contextmanager
def _meet(
    size: int, environment: Mapping[str, str], hosts: Sequence[Host] | None
) -> Iterator[tuple[list[dict[str, str]], Values]]:
    """Run a meeting for ranks while the block runs; yield each rank's variables, and the store's values."""
    by_horovod = uses_horovod(environment)
    if hosts is None and by_horovod:
        with meet_by_horovod(size) as environments:
            yield environments, Values()
        return
    if environment.get(RANKS) == "horovod":
        raise ConfigError(
            f"{RANKS}=horovod, but several hosts are given: start them by `horovodrun -H`, or unset {RANKS}"
        )
    names = host_of_each(hosts, size)
    addresses = choose_addresses(local=all(map(is_here, names)))
    with meet_by_store(places_of(names), *addresses) as met:
        yield met


class _Job:
    """The processes of all ranks, the threads that read their output, and how the ranks ended."""

    def __init__(self, processes: Sequence[LocalProcess], write: Write) -> None:
        self._write, self._lock = write, threading.Lock()
        self._start = time.monotonic()
        self._tails: list[deque[str]] = [deque(maxlen=_TAIL) for _ in processes]
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._when: dict[int, float] = {}
        self._ending: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._ranks: list[LocalProcess] = []
        try:
            for rank, process in enumerate(processes):
                process.start()
                self._ranks.append(process)
                self._watch(rank)
        except BaseException:
            self.end(signal.SIGKILL)
            raise

    def wait(self, timeout: float | None) -> list[RankEnd]:
        """Wait for all ranks, or until one fails, then end the others; return them in order of ending."""
        deadline = None if timeout is None else self._start + timeout
        order: list[int] = []
        while len(order) < len(self._ranks):
            rank = self._next(deadline)
            if rank is not None:
                order.append(rank)
                if self._ranks[rank].process.returncode == 0:
                    continue
                grace = time.monotonic() + GRACE
                while len(order) < len(self._ranks) and (rank := self._next(grace)) is not None:
                    order.append(rank)
            self.end(signal.SIGTERM)
            order += sorted(set(range(len(self._ranks))) - set(order))
        for thread in self._threads:
            thread.join(GRACE)  # a grandchild may hold a pipe open; don't wait for it
        return [self._end_of(rank) for rank in order]

    def end(self, first: signal.Signals) -> None:
        """Send `first` to running ranks; after `GRACE`, SIGTERM, then SIGKILL. Return when none runs."""
        running = [rank for rank, one in enumerate(self._ranks) if one.process.poll() is None]
        self._ending |= set(running)
        for number in dict.fromkeys((first, signal.SIGTERM, signal.SIGKILL)):
            for rank in running:
                self._ranks[rank].signal(number)
            deadline = time.monotonic() + GRACE
            for rank in running:
                try:
                    self._ranks[rank].process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue
            running = [rank for rank in running if self._ranks[rank].process.poll() is None]
        for rank in running:
            self._ranks[rank].process.wait()  # nothing outlives SIGKILL, but a busy machine may be slow
        for rank in range(len(self._ranks)):
            self._ranks[rank].signal(signal.SIGKILL)  # processes that a rank started and left running

    def _next(self, deadline: float | None) -> int | None:
        """Wait for the next rank to end; return None if none ends by the deadline."""
        try:
            if deadline is None:
                return self._ended.get()
            return self._ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _end_of(self, rank: int) -> RankEnd:
        when, how = self._when.get(rank, time.monotonic()), self._ranks[rank].how_ended(rank)
        tail, here = tuple(self._tails[rank]), rank in self._ending
        return RankEnd(rank, how.code, when - self._start, here, tail, how.told, how.lost_host)

    def _watch(self, rank: int) -> None:
        process = self._ranks[rank].process

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
    """Yield lines as they arrive; a progress bar's carriage return also ends a line."""
    rest = b""
    while chunk := os.read(pipe.fileno(), 1 << 16):
        *lines, rest = re.split(rb"\r\n|\n|\r(?!\n|$)", rest + chunk)
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _print(rank: int, stream: str, line: str) -> None:
    print(f"[{rank}] {line}", file=getattr(sys, stream), flush=True)
