"""The meeting point of a job's ranks: Horovod's rendezvous server, or gmeta's own store of values.

Both run in the launcher while the job runs, and answer only processes that know the job's secret
(`gmeta.core.collectives.rendezvous`). A meeting yields the environment variables that contain each rank's
place and the addresses of the others.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gmeta.core.collectives.place import LAUNCHER, RANKS, RankPlace, horovod_version
from gmeta.core.collectives.rendezvous import ALL, SECRET, STORE, guard, new_secret
from gmeta.core.collectives.wire import Callers, pack
from gmeta.core.errors import ConfigError

_SHARED = {"PYTHONUNBUFFERED": "1"}
_REQUEST_TIME = 30.0  # seconds within which a request must arrive
_MOST_VALUES = 1 << 16
_MOST_CALLERS = 1024  # at a time; a rank's request arrives quickly, a stranger's may never arrive


@contextmanager
def meet_by_horovod(size: int) -> Iterator[list[dict[str, str]]]:
    """Run Horovod's server for ranks on this machine while the block runs.

    Yields:
      By rank, the environment variables.

    Raises:
      ConfigError: Horovod was installed without a package that its launcher requires.
    """
    try:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError as error:
        version = horovod_version()
        raise ConfigError(
            f"Horovod {version}'s launcher doesn't load: {error}; `pip install horovod=={version}` adds what "
            f"it needs, and {RANKS}=gmeta starts ranks without Horovod"
        ) from error

    slots = get_host_assignments(parse_hosts(f"localhost:{size}"), size)
    secret = new_secret()
    handler = guard(RendezvousHandler, secret, signed=False)
    server = RendezvousHTTPServer(("127.0.0.1", 0), handler, 0)
    server.init(slots)
    threading.Thread(target=server.serve_forever, name="gmeta-rendezvous", daemon=True).start()
    port = server.server_port
    shared = {
        **create_run_env_vars(f"127.0.0.1:{port}/{secret}", ["lo"], port),
        **_SHARED,
        LAUNCHER: str(os.getpid()),
        SECRET: new_secret(),  # for lanes
    }
    try:
        yield [
            {key: str(value) for key, value in {**shared, **create_slot_env_vars(s)}.items()} for s in slots
        ]
    finally:
        server.shutdown()
        server.server_close()


class Values:
    """The values of a store; ``values[scope][key]`` is a message of `wire`."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, bytes]] = {}
        self._lock = threading.Lock()

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Store a value, unless there are too many."""
        with self._lock:
            if sum(map(len, self._values.values())) < _MOST_VALUES:
                self._values.setdefault(scope, {})[key] = value

    def of(self, scope: str) -> dict[str, bytes]:
        """Return a scope's values by key."""
        with self._lock:
            return dict(self._values.get(scope, {}))

    def drop(self, scope: str, key: str) -> None:
        """Delete a value if it exists."""
        with self._lock:
            self._values.get(scope, {}).pop(key, None)


@contextmanager
def meet_by_store(
    places: Sequence[RankPlace], bound: str = "127.0.0.1", told: str = "127.0.0.1"
) -> Iterator[tuple[list[dict[str, str]], Values]]:
    """Run a store by which ranks find each other while the block runs.

    Args:
      places: The places of the ranks.
      bound: As in `run_store`.
      told: As in `run_store`.

    Yields:
      The environment variables of each rank, and the values of the store.
    """
    with run_store(bound, told) as (server, secret, values):
        shared = {**_SHARED, LAUNCHER: str(os.getpid()), STORE: server, SECRET: secret}
        yield [{**shared, **place.variables()} for place in places], values


@contextmanager
def run_store(bound: str = "127.0.0.1", told: str = "127.0.0.1") -> Iterator[tuple[str, str, Values]]:
    """Run a store while the block runs.

    Args:
      bound: The address to listen on.
      told: The name or address at which ranks reach it.

    Yields:
      Its address and port, its secret, and its values.
    """
    values, secret, callers = Values(), new_secret(), Callers(_MOST_CALLERS)

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIME

        def _get_value(self, scope: str, key: str) -> bytes | None:
            found = values.of(scope)
            return pack(found) if key == ALL else found.get(key)

        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            values.put(scope, key, value)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in bound else socket.AF_INET
        daemon_threads = True
        request_queue_size = 1024  # all ranks start at once

        def process_request(self, request: Any, client_address: Any) -> None:
            callers.admit(request)
            super().process_request(request, client_address)

        def shutdown_request(self, request: Any) -> None:
            callers.leave(request)
            super().shutdown_request(request)

        def handle_error(self, *_: Any) -> None:
            pass  # the client is gone

    server = Server((bound, 0), guard(Handler, secret, signed=True))
    threading.Thread(target=server.serve_forever, name="gmeta-store", daemon=True).start()
    try:
        yield f"{told}:{server.server_port}", secret, values
    finally:
        server.shutdown()
        server.server_close()


# The machines of a job, and the places of its ranks on them.

HERE = "localhost"


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
      name: Its name or address.
      slots: How many ranks it can run.
    """

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """Parse a list of hosts in the format of ``horovodrun -H``.

    Raises:
      ConfigError: The list is invalid, or names a host twice.

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
        raise ConfigError(f"{text}: {twice[0]} is named twice; add up its slots")
    return hosts


def host_of_each(hosts: Sequence[Host] | None, size: int) -> list[str]:
    """Return the machine of each rank, by rank; without hosts, all run on this machine.

    Raises:
      ConfigError: There are not enough slots.

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


def places_of(names: Sequence[str]) -> list[RankPlace]:
    """Return the place of each rank, given the names of the ranks' machines.

    Example:
      >>> places_of(["a", "a", "b"])[1]
      RankPlace(rank=1, size=3, local_rank=1, local_size=2)
    """
    sizes, before = Counter(names), Counter[str]()
    places = []
    for rank, name in enumerate(names):
        places.append(RankPlace(rank, len(names), before[name], sizes[name]))
        before[name] += 1
    return places


def is_here(name: str) -> bool:
    """Return whether a host is this machine."""
    return name in {HERE, "127.0.0.1", platform.node(), platform.node().split(".")[0], socket.getfqdn()}
