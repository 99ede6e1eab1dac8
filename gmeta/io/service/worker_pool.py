"""The workers from which one process reads, and a pool that starts and stops them.

A `WorkerPool` tracks which workers exist, which are lost, and which reads the next piece. A `ScaledPool`
starts and stops its workers depending on how long training waits for data.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.launcher.rank_processes import module_command
from gmeta.core.version import __version__
from gmeta.io.readers.read_options import Waiting
from gmeta.io.service.worker import Channel, announced, key_of, split_address

_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = (0.5, 30.0)
"""How long a worker that didn't answer isn't asked again: at first, and at most."""
_ANSWER_SECONDS = 10.0


@dataclass
class _Worker:
    """One worker, as this process knows it."""

    order: float
    identities: frozenset[bytes] = frozenset()  # of workers announced at its address; empty: the user gave it
    streams: int = 0
    answers: bool = False
    asking: bool = False
    reason: str = "it hasn't answered yet"
    pause: float = _PAUSE_SECONDS[0]
    until: float = 0.0  # when it may be tried again
    leaves: bool = False


class WorkerPool:
    """Workers given by their addresses, or announced in a folder.

    Args:
      workers: Addresses, ``["host:port", ...]``; or a folder in which `gmeta workers FOLDER` announces
        workers. Workers that join later, or start later at one of the addresses, are used too.
      timeout: Seconds to wait for a worker if none can be reached, before reading raises an error.

    Raises:
      ConfigError: An address is invalid, no folder is named, or there is no key.
    """

    def __init__(self, workers: Sequence[str] | str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        self.folder = Path(workers) if isinstance(workers, str | os.PathLike) else None
        if self.folder is not None and ("://" in str(workers) or not self.folder.is_dir()):
            hint = f"; for a worker's address give a list, [{workers!r}]" if ":" in str(workers) else ""
            raise ConfigError(
                f"workers={workers!r} is no folder: make it, or start `gmeta workers` there{hint}"
            )
        self._given = () if isinstance(workers, str | os.PathLike) else tuple(workers)
        if self.folder is None and not self._given:
            raise ConfigError("workers=[] names no worker: start `gmeta workers`, and give its address")
        for address in self._given:
            split_address(address)
        self.timeout = timeout
        self.key = key_of(self.folder)
        self._workers: dict[str, _Worker] = {}
        self._unusable: dict[str, str] = {}
        self._draw = random.Random()  # processes that share workers start with different ones
        self._lock = threading.RLock()
        self._looked = 0.0
        self._look()

    def take(self, ended: threading.Event) -> str:
        """Return the worker that reads the fewest pieces, for another piece; wait until there is one.

        Raises:
          RuntimeError: There was none for ``timeout`` seconds, or reading ended.
        """
        began = time.monotonic()
        while not ended.is_set():
            with self._lock:
                self._look()
                if found := self._usable():
                    address = min(found, key=lambda one: (found[one].streams, found[one].order))
                    found[address].streams += 1
                    return address
            if time.monotonic() - began > self.timeout:
                raise RuntimeError(f"gmeta: distribute: {self._nobody()}")
            ended.wait(0.1)
        raise RuntimeError("gmeta: distribute: reading has ended")

    def give_back(self, address: str, lost: BaseException | None = None) -> None:
        """Record that a worker no longer reads a piece, and whether that is because it was lost."""
        with self._lock:
            worker = self._workers[address]
            worker.streams -= 1
            if lost is not None and worker.answers:
                self._lose(worker, lost)

    def move(self, address: str) -> str | None:
        """Return a worker that replaces this one, which is leaving or has more work; None without one."""
        with self._lock:
            self._look()
            found, here = self._usable(), self._workers[address]
            fewest = min(found, key=lambda one: found[one].streams, default=None)
            if fewest is None or not (here.leaves or found[fewest].streams + 1 < here.streams):
                return None
            here.streams -= 1
            found[fewest].streams += 1
            return fewest

    def note(self, waiting: Waiting, made: float, streams: int) -> None:
        """Record how long training waited, and how many seconds workers spent on its elements."""

    def ready(self) -> list[str]:
        """Return the addresses of workers that are neither lost nor leaving, the least busy last."""
        with self._lock:
            self._look(now=True)
            found = self._usable()
            return sorted(found, key=lambda one: -found[one].streams)

    def send_away(self, address: str) -> None:
        """Dismiss a worker once others read its pieces."""
        with self._lock:
            self._workers[address].leaves = True
        with contextlib.suppress(OSError, EOFError):  # it is already gone
            channel = self.call(address)
            channel.send((__version__, "leave"))
            channel.close()

    def call(self, address: str) -> Channel:
        """Connect to a worker.

        Raises:
          OSError: It can't be reached, or it isn't the worker announced there.
        """
        with self._lock:
            worker = self._workers.get(address)
        return Channel.to(address, self.key, worker.identities if worker else ())

    def _usable(self) -> dict[str, _Worker]:
        return {name: one for name, one in self._workers.items() if one.answers and not one.leaves}

    def _lose(self, worker: _Worker, error: BaseException) -> None:
        worker.answers, worker.reason = False, str(error) or type(error).__name__
        worker.until = time.monotonic() + worker.pause
        worker.pause = min(2 * worker.pause, _PAUSE_SECONDS[1])

    def _look(self, now: bool = False) -> None:
        """Update the list of workers, and retry those that didn't answer."""
        if not now and time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        there: dict[str, frozenset[bytes]] = dict.fromkeys(self._given, frozenset())
        self._unusable = {}
        for address, identity, why in () if self.folder is None else announced(self.folder):
            if why:
                self._unusable[address] = why
            else:  # a killed worker may have left an announcement at the address of another
                there[address] = there.get(address, frozenset()) | {identity}
        for address, identities in there.items():
            if address not in self._workers:
                split_address(address)
                self._workers[address] = _Worker(self._draw.random())
            self._workers[address].identities = identities
        for address in set(self._workers) - set(there):  # it was withdrawn
            self._workers[address].leaves = True
            if not self._workers[address].streams and not self._workers[address].asking:
                del self._workers[address]
        for address, worker in self._workers.items():
            if not (worker.answers or worker.asking or worker.leaves) and worker.until <= self._looked:
                worker.asking = True
                threading.Thread(target=self._ask, args=(address, worker), daemon=True).start()

    def _ask(self, address: str, worker: _Worker) -> None:
        """Check whether a worker answers."""
        failure: BaseException | None = None
        try:
            channel = Channel.to(address, self.key, worker.identities)
            try:
                channel.send((__version__, "hello"))
                kind, *text = channel.receive(_ANSWER_SECONDS)
                if kind != "hello":
                    raise ConnectionError(*text)
            finally:
                channel.close()
        except (OSError, EOFError) as error:
            failure = error
        with self._lock:
            worker.asking = False
            if failure is None:
                worker.answers, worker.pause = True, _PAUSE_SECONDS[0]
            else:
                self._lose(worker, failure)

    def _nobody(self) -> str:
        with self._lock:
            reasons = {address: worker.reason for address, worker in self._workers.items()} | self._unusable
            known = [f"{address} ({reason})" for address, reason in reasons.items()]
        start = f"`gmeta workers {self.folder}`" if self.folder else "`gmeta workers --port PORT`"
        which = f"no worker is announced in {self.folder}, and none came"
        if known:
            which = f"none of the workers {', '.join(known)} could be reached"
        return (
            f"{which} for {self.timeout:.0f} s; start one with {start}, or correct the addresses, and resume "
            "from the saved position"
        )


# The desired number of workers: more while training waits for data, fewer while they idle.

WAITS = 0.05
"""The share of its time that training may wait for data before a worker is added."""

_BUSY = 0.75
"""How busy workers may be once there is one less of them; more would make training wait again."""


@dataclass(frozen=True)
class Load:
    """Measurements since the number of workers was last checked.

    Attributes:
      waited: The fraction of time that training waited for data, 0 to 1.
      busy: The fraction of time that workers made elements, rather than waiting for training to receive them,
        0 to 1; the mean over workers.
      ready: Number of reading workers.
      starting: Number of workers that were started but can't be reached yet.
    """

    waited: float
    busy: float
    ready: int
    starting: int = 0


def workers_to_add(load: Load, *, least: int, most: int) -> int:
    """Return how many workers to start or, if negative, to dismiss.

    Their number is always from ``least`` to ``most``. Within these limits, one is added if training waits
    more than 5% of the time, unless one is starting. One is dismissed if training waits less, and without it
    the others would be busy at most three quarters of the time.

    Example:
      >>> workers_to_add(Load(waited=0.2, busy=0.9, ready=2), least=1, most=4)
      1
      >>> workers_to_add(Load(waited=0.0, busy=0.3, ready=2), least=1, most=4)
      -1
    """
    there = load.ready + load.starting
    if there < least:
        return least - there
    if there > most:
        return most - there
    if load.waited > WAITS:
        return int(there < most and not load.starting)
    spare = load.ready > least and load.busy * load.ready <= _BUSY * (load.ready - 1)
    return -int(spare and not load.starting)


_START_SECONDS = 120.0
"""After this time, a worker that was started and doesn't answer no longer counts as starting."""
_END_SECONDS = 10.0
_IDLE_SECONDS = 300


@dataclass(eq=False)
class _Start:
    """One run of the command, and whether its worker has answered."""

    process: subprocess.Popen[bytes]
    since: float
    answered: bool = False


class ScaledPool(WorkerPool):
    """Workers that are added while training waits for data, and dismissed while they idle.

    At least ``least`` workers read, and lost ones are replaced. Every ``interval`` seconds of reading,
    a worker is added if training waited for data more than 5% of the time, up to ``most``; one is dismissed
    if the others suffice (`workers_to_add`). Other workers continue the pieces that it reads.

    Without ``command``, workers are processes on this machine that end with this process, or after five
    minutes without a reader. With ``command``, each start runs it to start one worker that announces itself
    in ``folder``, such as ``"srun -N1 gmeta workers {folder} --host 0.0.0.0"``.

    Args:
      least: The minimum number of workers.
      most: The maximum number of workers.
      folder: Where workers announce themselves, on a disk shared with this process. None: a temporary folder.
      command: The command that starts one worker; ``{folder}`` is replaced by the folder.
      interval: Seconds between decisions.
      timeout: As for `WorkerPool`.

    Attributes:
      folder: The folder.

    Raises:
      ConfigError: A number is out of its range, a command has no folder, or it can't be run.

    Example:
      >>> pool = ScaledPool(least=1, most=4)  # doctest: +SKIP
      >>> model.fit(distribute(train, pool), epochs=3)  # doctest: +SKIP
      >>> pool.close()  # doctest: +SKIP
    """

    def __init__(
        self,
        least: int = 1,
        most: int = 4,
        *,
        folder: str | os.PathLike[str] | None = None,
        command: str | None = None,
        interval: float = 10.0,
        timeout: float = 120.0,
    ) -> None:
        self.least = whole_number("ScaledPool: least", least, least=1)
        self.most = whole_number("ScaledPool: most", most, least=self.least)
        if not interval > 0:
            raise ConfigError(f"ScaledPool: interval={interval} must be above 0 seconds")
        if command is not None and folder is None:
            raise ConfigError(
                f"ScaledPool: command={command!r} needs the folder where its workers announce themselves"
            )
        self.interval = interval
        self._temporary = tempfile.TemporaryDirectory(prefix="gmeta-workers-") if folder is None else None
        place = Path(folder or self._temporary.name)  # type: ignore[union-attr]
        place.mkdir(parents=True, exist_ok=True)
        super().__init__(place, timeout=timeout)
        local = ["gmeta", "workers", "{folder}", "--path", str(Path.cwd()), "--idle", str(_IDLE_SECONDS)]
        words = shlex.split(command) if command else module_command(*local)
        self._command = [word.replace("{folder}", str(place)) for word in words]
        self._submits = command is not None
        self._started: list[_Start] = []
        self._seen = {worker.address for worker in announced(place)}
        self._waiting, self._made, self._streams = Waiting(), 0.0, 1
        self._decided = time.monotonic()
        self._closed = False
        self._keep(Load(0.0, 1.0, len(announced(place))))
        atexit.register(self.close)

    def note(self, waiting: Waiting, made: float, streams: int) -> None:
        """Measure how long training waited and how busy workers were; periodically start or dismiss one."""
        with self._lock:
            self._waiting += waiting
            self._made += made
            self._streams = max(self._streams, streams)
            passed = time.monotonic() - self._decided
            if passed < self.interval or self._closed:
                return
            ready = self.ready()
            busy = min(1.0, self._made / (passed * self._streams))
            load = Load(self._waiting.share, busy, len(ready), self._count_starting(ready))
            self._waiting, self._made, self._streams = Waiting(), 0.0, 1
            self._decided = time.monotonic()
        self._keep(load)

    def close(self) -> None:
        """Dismiss all workers that answer, and end the processes that were started here."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for address in self.ready():
            self.send_away(address)
        for start in self._started:
            start.process.terminate()
        for start in self._started:
            try:
                start.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                start.process.kill()
                start.process.wait()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _keep(self, load: Load) -> None:
        add = workers_to_add(load, least=self.least, most=self.most)
        for _ in range(add):
            self._started.append(_Start(self._run(), time.monotonic()))
        for address in self.ready()[add:] if add < 0 else ():
            self.send_away(address)

    def _run(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(self._command)
        except OSError as error:
            raise ConfigError(
                f"ScaledPool: can't run {self._command[0]!r}, which command= begins with: {error.strerror}; "
                "give a command that runs in a shell on this machine"
            ) from None

    def _count_starting(self, ready: Iterable[str]) -> int:
        """Count the started workers that haven't answered yet; each new worker is matched to a start."""
        # A command may succeed immediately, such as one that submits to a cluster.
        ends, oldest = (None, 0) if self._submits else (None,), time.monotonic() - _START_SECONDS
        new = len(set(ready) - self._seen)
        self._seen.update(ready)
        for start in self._started:
            if new and not start.answered:
                start.answered, new = True, new - 1
        starting = [
            start
            for start in self._started
            if not start.answered and start.since > oldest and start.process.poll() in ends
        ]
        self._started = [one for one in self._started if one in starting or one.process.poll() is None]
        return len(starting)
