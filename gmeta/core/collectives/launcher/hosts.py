"""The machines of a job, and the places of its ranks on them."""

from __future__ import annotations

import platform
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gmeta.core.collectives.place import Place
from gmeta.core.errors import ConfigError

HERE = "localhost"


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
      name: Its name or address.
      slots: How many ranks it has room for.
    """

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """Read a list of hosts, as ``horovodrun -H`` takes it.

    Raises:
      ConfigError: It is no such list, or names a host twice.

    Example:
      >>> parse_hosts("a:2,b:4")
      [Host(name='a', slots=2), Host(name='b', slots=4)]
    """
    hosts = []
    for each in text.split(","):
        name, _, slots = each.strip().rpartition(":")
        if not name or name.startswith("-") or not slots.isdecimal() or int(slots) < 1:
            raise ConfigError(f"{each.strip()!r} is no host:slots; give such as a:2,b:2")
        hosts.append(Host(name, int(slots)))
    twice = [name for name, times in Counter(host.name for host in hosts).items() if times > 1]
    if twice:
        raise ConfigError(f"{text}: {twice[0]} is there twice; add up its slots")
    return hosts


def host_of_each(hosts: Sequence[Host] | None, size: int) -> list[str]:
    """Return by rank the machine that it runs on; without hosts all are here.

    Raises:
      ConfigError: There is not enough room.

    Example:
      >>> host_of_each([Host("a", 2), Host("b", 4)], 3)
      ['a', 'a', 'b']
    """
    if hosts is None:
        return [HERE] * size
    names = [host.name for host in hosts for _ in range(host.slots)]
    if len(names) < size:
        raise ConfigError(f"{size} ranks, but the hosts have room for {len(names)}: give them more slots")
    return names[:size]


def places_of(names: Sequence[str]) -> list[Place]:
    """Return by rank its place, given the names of the ranks' machines.

    Example:
      >>> places_of(["a", "a", "b"])[1]
      Place(rank=1, size=3, local_rank=1, local_size=2)
    """
    sizes, before = Counter(names), Counter[str]()
    places = []
    for rank, name in enumerate(names):
        places.append(Place(rank, len(names), before[name], sizes[name]))
        before[name] += 1
    return places


def is_here(name: str) -> bool:
    """Return whether a host is this machine."""
    return name in {HERE, "127.0.0.1", platform.node(), platform.node().split(".")[0], socket.getfqdn()}
