"""The workers that one process reads from: which there are, which are lost, and who reads the next piece."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gmeta.core.errors import ConfigError
from gmeta.core.version import __version__
from gmeta.io.readers.read_options import Waiting
from gmeta.io.service.channel import Channel, announced, key_of, split_address

_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = (0.5, 30.0)
"""How long a worker that didn't answer isn't asked again: at first, and at most."""
_ANSWER_SECONDS = 10.0


@dataclass
class _Worker:
    """One worker, as this process knows it."""

    order: float
    identities: frozenset[bytes] = frozenset()  # of those announced at its address; none: it was given
    streams: int = 0
    answers: bool = False
    asking: bool = False
    reason: str = "it hasn't answered yet"
    pause: float = _PAUSE_SECONDS[0]
    until: float = 0.0  # when it may be asked again
    leaves: bool = False


class WorkerPool:
    """Workers by their addresses, or as they announce themselves in a folder.

    Args:
      workers: Addresses, ``["host:port", ...]``; or a folder in which `gmeta workers FOLDER` announces
        workers. Those that join later are used, and so are addresses at which a worker starts later.
      timeout: Seconds that reading waits for a worker where none can be reached, before it raises.

    Raises:
      ConfigError: An address is none, no folder is named, or there is no key.
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
        self._draw = random.Random()  # processes that share workers begin with different ones
        self._lock = threading.RLock()
        self._looked = 0.0
        self._look()

    def take(self, ended: threading.Event) -> str:
        """Return the worker that reads the fewest pieces, for one more; wait until there is one.

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
        """Say that a piece is no longer read by a worker, and whether that is because it was lost."""
        with self._lock:
            worker = self._workers[address]
            worker.streams -= 1
            if lost is not None and worker.answers:
                self._lose(worker, lost)

    def move(self, address: str) -> str | None:
        """Return a worker that continues in place of this one, which leaves or has more to do, or None."""
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
        """Take note of how training waited, and of the seconds that workers made elements for it."""

    def ready(self) -> list[str]:
        """Return the addresses of workers that aren't lost and don't leave; the least busy last."""
        with self._lock:
            self._look(now=True)
            found = self._usable()
            return sorted(found, key=lambda one: -found[one].streams)

    def send_away(self, address: str) -> None:
        """Let a worker end once its pieces are read by others."""
        with self._lock:
            self._workers[address].leaves = True
        with contextlib.suppress(OSError, EOFError):  # it is gone already
            channel = self.call(address)
            channel.send((__version__, "leave"))
            channel.close()

    def call(self, address: str) -> Channel:
        """Connect to a worker.

        Raises:
          OSError: It can't be reached, or it isn't the worker that was announced there.
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
        """Look which workers there are, and ask those that don't answer."""
        if not now and time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        there: dict[str, frozenset[bytes]] = dict.fromkeys(self._given, frozenset())
        self._unusable = {}
        for address, identity, why in () if self.folder is None else announced(self.folder):
            if why:
                self._unusable[address] = why
            else:  # one that was killed may have left its announcement at the address of another
                there[address] = there.get(address, frozenset()) | {identity}
        for address, identities in there.items():
            if address not in self._workers:
                split_address(address)
                self._workers[address] = _Worker(self._draw.random())
            self._workers[address].identities = identities
        for address in set(self._workers) - set(there):  # it was taken back
            self._workers[address].leaves = True
            if not self._workers[address].streams and not self._workers[address].asking:
                del self._workers[address]
        for address, worker in self._workers.items():
            if not (worker.answers or worker.asking or worker.leaves) and worker.until <= self._looked:
                worker.asking = True
                threading.Thread(target=self._ask, args=(address, worker), daemon=True).start()

    def _ask(self, address: str, worker: _Worker) -> None:
        """Find out whether a worker answers."""
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
