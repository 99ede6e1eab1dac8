"""The places that there are for the ranks of an elastic job, while machines come and go.

A host discovery script tells machines and how many ranks each has room for, or the list is fixed. A place
whose rank was lost counts as free again at once if its start had saved a checkpoint; otherwise only when the
script tells another number for its machine. So a rank that the system has killed comes back at the next save,
and a broken GPU doesn't end every other start. A machine whose connection was lost counts again when the
script has left it out once, or tells another number for it.
"""

from __future__ import annotations

import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from gmeta.core.collectives.driver.elastic import CHANGE, SAVED, SCOPE
from gmeta.core.collectives.driver.wire import pack
from gmeta.core.collectives.launcher.hosts import HERE, Host, is_here
from gmeta.core.collectives.launcher.meeting import Values
from gmeta.core.errors import ConfigError

EVERY = 1.0
"""Seconds between two looks at the places, the same as Horovod's."""

_SCRIPT_TIME = 60.0  # seconds that the script may take


class Room:
    """The places for ranks now, and the messages that tell ranks about changes.

    Args:
      most: The most ranks that the job ever has.
      least: The least.
      hosts: The machines; None: this one alone.
      script: As in `ask_script`; None: the machines stay.
      values: Of the store of messages (`gmeta.core.collectives.driver.elastic`).

    Raises:
      ConfigError: As in `ask_script`.
    """

    def __init__(
        self, most: int, least: int, hosts: Sequence[Host] | None, script: str | None, values: Values
    ) -> None:
        self._most, self._least, self._script, self._values = most, least, script, values
        self._elsewhere = hosts is not None
        self._hosts = [Host(HERE, most)] if hosts is None else list(hosts)
        if script is not None:
            self._hosts = ask_script(script, elsewhere=self._elsewhere)
        self._bad: Counter[Host] = Counter()  # how many places of such a host are bad
        self._gone: set[Host] = set()
        self._lock = threading.Lock()

    @property
    def saved(self) -> bool:
        """Whether a checkpoint was saved since the start of the ranks."""
        return SAVED in self._values.of(SCOPE)

    def wanted(self) -> list[str]:
        """Return by rank the machine that it should run on."""
        with self._lock:
            names = [name for name, slots in self._slots().items() for _ in range(slots)]
        return names[: self._most]

    def without(self, running: Sequence[str], lost: Sequence[str]) -> list[str]:
        """Return where ranks go on: where they run, without lost ones and places that are no more."""
        left, places = Counter(running) - Counter(lost), Counter(self.wanted())
        kept = [name for name in left for _ in range(min(left[name], places[name]))]
        return kept if len(kept) >= self._least else list(left.elements())[: self._least]

    def lose(self, lost: Sequence[str], gone: Sequence[str], saved: bool) -> None:
        """Note the machines of lost ranks, those that were lost themselves, and whether ranks had saved."""
        with self._lock:
            if saved:
                self._bad.clear()
            for host in self._hosts:
                if host.name in gone:
                    self._gone.add(host)
                elif not saved:
                    self._bad[host] += lost.count(host.name)

    @contextmanager
    def watch(self, running: Sequence[str]) -> Iterator[None]:
        """Forget the previous start, and tell the running ranks when other places are wanted."""
        for message in (SAVED, CHANGE):
            self._values.drop(SCOPE, message)
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(running, over), name="gmeta-places", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._lock:
                over.set()

    def _watch(self, running: Sequence[str], over: threading.Event) -> None:
        there = Counter(running)
        while True:
            hosts = self._hosts
            if self._script is not None:
                with suppress(ConfigError):  # it may work again
                    hosts = ask_script(self._script, elsewhere=self._elsewhere)
            with self._lock:
                if over.is_set():  # the script may have taken long: another start owns places and messages
                    return
                self._hosts = hosts
                self._gone &= set(hosts)
                slots = self._slots()
                number = min(self._most, sum(slots.values()))
                if number >= self._least and (number != len(running) or there - Counter(slots)):
                    self._values.put(SCOPE, CHANGE, pack(True))
                else:
                    self._values.drop(SCOPE, CHANGE)
            over.wait(EVERY)

    def _slots(self) -> dict[str, int]:
        there = [host for host in self._hosts if host not in self._gone]
        return {host.name: max(0, host.slots - self._bad[host]) for host in there}


def ask_script(script: str, *, elsewhere: bool) -> list[Host]:
    """Run a host discovery script and return the machines that there is room on.

    Args:
      script: A shell command that prints lines ``host:slots``, as for ``horovodrun --host-discovery-script``.
      elsewhere: Whether it may name other machines.

    Raises:
      ConfigError: The script fails, prints something else, or names another machine if it may not.
    """
    try:
        done = subprocess.run(
            script, shell=True, capture_output=True, text=True, timeout=_SCRIPT_TIME, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{script}: no answer in {_SCRIPT_TIME:.0f} s; it must print lines host:slots"
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise ConfigError(f"{script}: exit code {done.returncode}, it said: {said[0]}")
    slots: Counter[str] = Counter()
    for line in filter(None, map(str.strip, done.stdout.splitlines())):
        host, _, number = line.rpartition(":")
        if not host or host.startswith("-") or not number.isdecimal():
            raise ConfigError(
                f"{script}: it printed {line!r}; each line must be host:slots, such as localhost:8"
            )
        if not is_here(host) and not elsewhere:
            raise ConfigError(
                f"{script}: {host} is another machine, and this job's ranks are on this one: name the "
                "machines that it begins with by `gmeta launch --hosts`"
            )
        slots[HERE if is_here(host) else host] += int(number)
    return [Host(name, number) for name, number in slots.items()]


def hosts_for(names: Sequence[str]) -> list[Host]:
    """Return machines with just the room for ranks on these.

    Example:
      >>> hosts_for(["a", "b", "a"])
      [Host(name='a', slots=2), Host(name='b', slots=1)]
    """
    return [Host(name, number) for name, number in Counter(names).items()]
