"""Starts the ranks of a job on this machine, and ends all of them when one fails.

Horovod's rendezvous server introduces the ranks to each other, and its environment tells each who it is, as
under ``horovodrun``; several machines are ``horovodrun -H``'s own business. Two things differ from it. No
shell and no helper process stands between the launcher and a rank, so a signal that ended a rank is seen as
that. And when a rank has failed, the others get a moment to say what they saw before they are ended, so that
the report can tell the cause from its consequences.

TensorFlow is not imported.
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
"""Seconds that the other ranks have to end by themselves, and then again before they are killed."""

_TAIL = 20  # lines of stderr that are kept for the report

Write = Callable[[int, str, str], None]
"""Takes a rank, ``"stdout"`` or ``"stderr"``, and a line of its output without its end."""


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
      rank: Which one.
      code: Its exit code; minus the signal that ended it.
      seconds: From the start of the job until then.
      ended_here: Whether the launcher ended it.
      tail: The last lines of its stderr.
      told: What it has told the launcher (`gmeta.core.collectives.driver.notes`).
    """

    rank: int
    code: int
    seconds: float
    ended_here: bool
    tail: tuple[str, ...]
    told: frozenset[str] = frozenset()

    @property
    def leaves(self) -> bool:
        """Whether it ended, or was about to, to start again with another number of ranks."""
        return telling.LEAVES in self.told

    @property
    def blames_others(self) -> bool:
        """Whether it has said that others are gone or didn't come: it isn't what they wait for.

        Of a lost connection Gloo's thread speaks in a rank that hangs, too.
        """
        said = _SAID if self.ended_here else _LOST
        return telling.LOST_PEERS in self.told or any(said.search(line) for line in self.tail)

    @property
    def how(self) -> str:
        """Such as ``was killed by SIGKILL`` or ``ended with exit code 1``."""
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
    """Run a command as every rank of a job, and return when all have ended well.

    A rank that fails ends the job: the others have 5 s to fail of it by themselves, then they get SIGTERM,
    and SIGKILL 5 s later. An interrupt of the launcher ends it too, and is passed on as SIGINT first; ranks
    leave by themselves when the launcher was killed.

    Args:
      command: The program and its arguments.
      size: How many ranks.
      environment: What is set besides this process's environment.
      write: Gets each line of output; by default lines go to stdout and stderr behind ``[rank] ``.
      timeout: Seconds after which the job is ended.

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
      reason: The rank and what happened to it.
      culprit: That rank.
      lost: All ranks that failed by themselves, or hung; the others could have gone on without them.
      hopeless: Whether it would come again: all ranks failed alike, or the program ended too soon.
    """

    reason: str
    culprit: RankEnd
    lost: tuple[RankEnd, ...] = ()
    hopeless: bool = False


def verdict(ends: Sequence[RankEnd], timeout: float | None = None) -> Verdict:
    """Tell the cause of a job's failure from its consequences; `ends` in the order in which they ended."""
    size = len(ends)
    failed = [end for end in ends if end.code and not end.ended_here and not end.leaves]
    causes = [end for end in failed if not end.blames_others]
    silent = [end for end in ends if end.ended_here]
    # Who has said that others are gone, or leaves for others to join, may need long to leave, but isn't hung.
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
    """Which rank ended a job and why, and its last lines; `ends` in the order in which they ended."""
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
    """Its last words, if it could say any."""
    return f": {end.tail[-1].strip()}" if end.code > 0 and end.tail else ""


@contextmanager
def _rendezvous(size: int) -> Iterator[list[dict[str, str]]]:
    """Horovod's server, for as long as the block runs; yields what each rank must have in its environment."""
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
    """The processes of all ranks, the threads that read their output, and how they ended."""

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
                        start_new_session=True,  # a group of its own, to be ended with what it has started
                    )
                )
                self._watch(rank)
        except BaseException:
            self.end(signal.SIGKILL)
            raise

    def wait(self, timeout: float | None) -> list[RankEnd]:
        """Wait for all, or for the first failure; then end the others. In the order of ending."""
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
            thread.join(GRACE)  # a grandchild may hold a pipe open; it isn't waited for
        return [self._end_of(rank) for rank in order]

    def end(self, first: signal.Signals) -> None:
        """Send `first` to those that run; after a grace SIGTERM, then SIGKILL. Returns when none runs."""
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
            self._signal(rank, signal.SIGKILL)  # what a rank has started and left behind

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[rank].pid, number)

    def _next(self, deadline: float | None) -> int | None:
        """The next rank to end; None if none did by the deadline."""
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
    """Lines as they come; a progress bar's carriage return ends one too."""
    rest = b""
    while chunk := os.read(pipe.fileno(), 1 << 16):
        *lines, rest = re.split(rb"\r\n|\n|\r(?!\n|$)", rest + chunk)
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _print(rank: int, stream: str, line: str) -> None:
    print(f"[{rank}] {line}", file=getattr(sys, stream), flush=True)
