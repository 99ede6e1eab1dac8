"""Starts a job whose number of ranks changes: it survives lost ranks and accepts new ones.

A job is a sequence of starts (`launch`), each with as many ranks as there are slots. A lost rank's embedding
rows are lost too, so the remaining ranks can't just continue: all restart from the last checkpoint. Every
start divides the data of a step into the same number of shares (`shares`), so the steps equal those of an
uninterrupted job.

* If ranks fail or hang, the next start has that many fewer ranks. A failure that would recur ends the job:
  all ranks failed in the same way, or `FRUITLESS` consecutive starts saved nothing.
* If the number of slots changes, or a machine with ranks has no more slots, the launcher notifies the ranks
  (`gmeta.core.collectives.elastic`), and they leave together after their next save.

The messages go through a store that outlives the starts.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from gmeta.core.collectives.elastic import AGAIN, CHANGE, ELASTIC, FRUITLESS, SAVED, SCOPE
from gmeta.core.collectives.rendezvous import LEAVES
from gmeta.core.collectives.wire import choose_addresses, pack
from gmeta.core.errors import ConfigError, RanksError
from gmeta.core.launcher.local_ranks import Verdict, Write, launch, verdict
from gmeta.core.launcher.meeting import HERE, Host, Values, host_of_each, is_here, run_store
from gmeta.core.launcher.rank_processes import SSH
from gmeta.core.shares import SHARES

# The places for the ranks of an elastic job while machines join and leave.
#
# A host discovery script lists machines and their numbers of slots, or the list is fixed. The place of a lost
# rank is free again immediately if its start saved a checkpoint; otherwise, only when the script prints
# another number for its machine. A rank that the system killed therefore returns at the next save, and a
# broken GPU doesn't end every other start. A machine whose connection was lost is used again once the script
# omits it, or prints another number for it.

EVERY = 1.0
"""Seconds between two looks at the places, the same as Horovod's."""

_SCRIPT_TIME = 60.0  # seconds that the script may take


class Room:
    """The current places for ranks, and the messages that notify ranks of changes.

    Args:
      most: The maximum number of ranks of the job.
      least: The minimum number of ranks.
      hosts: The machines; None: only this one.
      script: As in `ask_script`; None: the machines don't change.
      values: The values of the message store (`gmeta.core.collectives.elastic`).

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
        self._bad: Counter[Host] = Counter()  # number of bad places of such a host
        self._gone: set[Host] = set()
        self._lock = threading.Lock()

    @property
    def saved(self) -> bool:
        """Whether a checkpoint was saved since the start of the ranks."""
        return SAVED in self._values.of(SCOPE)

    def wanted(self) -> list[str]:
        """Return the machine on which each rank should run, by rank."""
        with self._lock:
            names = [name for name, slots in self._slots().items() for _ in range(slots)]
        return names[: self._most]

    def without(self, running: Sequence[str], lost: Sequence[str]) -> list[str]:
        """Return the places where ranks continue: the current ones, without lost ranks and removed places."""
        left, places = Counter(running) - Counter(lost), Counter(self.wanted())
        kept = [name for name in left for _ in range(min(left[name], places[name]))]
        return kept if len(kept) >= self._least else list(left.elements())[: self._least]

    def lose(self, lost: Sequence[str], gone: Sequence[str], saved: bool) -> None:
        """Record the machines of lost ranks, lost machines, and whether ranks saved a checkpoint."""
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
        """Reset the state of the previous start, and notify the running ranks when places change."""
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
                with suppress(ConfigError):  # it may succeed later
                    hosts = ask_script(self._script, elsewhere=self._elsewhere)
            with self._lock:
                if over.is_set():  # the script may have been slow: another start owns places and messages
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
    """Run a host discovery script, and return the machines with slots.

    Args:
      script: A shell command that prints lines ``host:slots``, as for ``horovodrun --host-discovery-script``.
      elsewhere: Whether the script may name other machines.

    Raises:
      ConfigError: The script fails, prints something else, or names a disallowed machine.
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
    """Return the machines, each with as many slots as it has ranks.

    Example:
      >>> hosts_for(["a", "b", "a"])
      [Host(name='a', slots=2), Host(name='b', slots=1)]
    """
    return [Host(name, number) for name, number in Counter(names).items()]


def launch_elastic(
    command: Sequence[str],
    size: int,
    *,
    min_size: int = 1,
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
    write: Write | None = None,
    say: Callable[[str], None] | None = None,
    hosts: Sequence[Host] | None = None,
    ssh: Sequence[str] = SSH,
) -> None:
    """Run a command as the ranks of an elastic job, and return when the last start's ranks succeed.

    The command must save checkpoints with `gmeta.checkpoint.store.CheckpointStore` or code that uses it,
    and restore the last one when it starts.

    Args:
      command: The program and its arguments.
      size: The initial and maximum number of ranks, and the number of shares of the data.
      min_size: The minimum number of ranks; with fewer, the job ends.
      script: A shell command that prints the numbers of slots in lines ``host:slots``; it runs every second.
        None: there are always `size` slots.
      environment: Variables to set in addition to this process's environment.
      write: As in `launch`.
      say: Receives a line when the number of ranks changes; by default, the line is written to stderr.
      hosts: The initial machines without a script; a script may then name others too. None: this machine, the
        only one that a script may name.
      ssh: As in `launch`.

    Raises:
      RanksError: As in `launch`, when the job can't continue.
      ConfigError: The numbers or the script are invalid; or as in `launch`.
    """
    if not 1 <= min_size <= size:
        raise ConfigError(
            f"{min_size} to {size} ranks: give at least 1, and a least number that isn't above the other"
        )
    say = say or _print
    with run_store(*choose_addresses(local=hosts is None)) as (server, secret, values):
        room = Room(size, min_size, hosts, script, values)
        own = {**(environment or {}), SHARES: str(size), ELASTIC: f"{server} {secret}"}
        running, fruitless = room.wanted(), 0
        if len(running) < min_size:
            raise ConfigError(
                f"{script or 'the hosts'}: room for {len(running)} ranks, "
                f"fewer than the least number, {min_size}"
            )
        while True:
            over = None if hosts is None else hosts_for(running)
            running = host_of_each(over, len(running))  # by rank
            try:
                with room.watch(running):
                    launch(command, len(running), environment=own, write=write, hosts=over, ssh=ssh)
                return
            except RanksError as error:
                if all(end.code == AGAIN or end.ended_here for end in error.ends):
                    before, wanted = len(running), room.wanted()
                    running = wanted if len(wanted) >= min_size else running
                    say(f"{_why(before, len(running))}; {_goes_on(len(running), size)}")
                    continue
                found, saved = _judge(error), room.saved
                fruitless = 0 if saved else fruitless + 1
                gone = [end.lost_host for end in error.ends if end.lost_host]
                failed = {end.rank for end in found.lost}
                lost = [name for rank, name in enumerate(running) if rank in failed or name in gone]
                left = len(running) - len(lost)
                if found.hopeless or left < min_size or fruitless == FRUITLESS:
                    raise RanksError(
                        f"{_last_word(found, left, min_size, fruitless)}{error}", ends=error.ends
                    ) from None
                room.lose(lost, gone, saved)
                running = room.without(running, lost)
                say(f"{found.reason}; {_goes_on(len(running), size)}")


def _why(before: int, after: int) -> str:
    if before == after:
        return "ranks have other places"
    return f"there is room for {after} ranks in place of {before}"


def _goes_on(ranks: int, size: int) -> str:
    return f"the job goes on with {ranks} of {size} from the last checkpoint"


def _judge(error: RanksError) -> Verdict:
    """Find the cause of a failed start; ranks that left so that others can join neither failed nor hung."""
    leaving = frozenset([LEAVES])
    return verdict(
        [replace(end, told=end.told | leaving) if end.code == AGAIN else end for end in error.ends]
    )


def _last_word(found: Verdict, left: int, least: int, fruitless: int) -> str:
    if found.hopeless:
        return ""
    if left < least:
        return f"too few ranks are left, {left} where {least} is the least number: "
    return f"{fruitless} starts in a row failed before they had saved a checkpoint: "


def _print(text: str) -> None:
    print(f"gmeta: {text}", file=sys.stderr, flush=True)  # noqa: T201
