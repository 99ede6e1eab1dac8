"""Collectives between steps: they exchange Python objects, or wait for all ranks.

All ranks call these functions eagerly and in the same order. Objects travel as bytes, so the functions work
between ranks with different versions, and such a difference can be found.

What carries them is what has brought the ranks together: Horovod (`horovod_peers`), or without it gmeta's own
lanes (`lane_peers`). `gmeta.init` says which, by `use_peers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from gmeta.core.collectives.driver.wire import pack, unpack
from gmeta.core.collectives.failures import name_failures
from gmeta.core.collectives.place import Place, World, world
from gmeta.core.errors import ConfigError

T = TypeVar("T")


class Peers(Protocol):
    """The ranks of a job, as what brings them together; its errors are for `name_failures`.

    Attributes:
      packages: Packages besides gmeta's own requirements whose versions the ranks must share.
    """

    packages: tuple[str, ...]

    def start(self) -> Place:
        """Find this rank's place."""

    def connect(self, here: World) -> None:
        """Reach the other ranks; called once, when this rank has taken its GPU."""

    def come(self, name: str) -> None:
        """Wait for all ranks to be about to exchange objects, if it isn't known that they do the same."""

    def allgather(self, data: bytes) -> list[bytes]:
        """Give every rank the bytes of all."""

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Give every rank the bytes of one; the others' are of any length."""

    def barrier(self) -> None:
        """Wait for all ranks."""


_peers: Peers | None = None


def use_peers(peers: Peers) -> None:
    """Let objects go this way from now on."""
    global _peers
    _peers = peers


def _through() -> Peers:
    if _peers is None:
        raise ConfigError("gmeta.init() hasn't brought the ranks together: call it first")
    return _peers


def allgather_objects(obj: T) -> list[T]:
    """Give every rank the objects of all ranks.

    Args:
      obj: Numbers, texts, bytes, arrays, and lists, tuples and dicts of them
        (`gmeta.core.collectives.driver.wire`).

    Returns:
      The objects by rank; ``[obj]`` with one rank.

    Raises:
      ConfigError: `obj` holds something else.
      CollectiveError: A rank has ended, or called something else.
    """
    if world().size == 1:
        return [obj]
    sent = pack(obj)
    with _in_order("allgather_objects"):
        return [unpack(received) for received in _through().allgather(sent)]


def broadcast_object(obj: T, root: int = 0) -> T:
    """Give every rank the object of rank `root`.

    Args:
      obj: The object, as for `allgather_objects`; it is ignored on ranks other than `root`.
      root: The rank whose object is sent.

    Returns:
      The object of `root`; on `root` this is `obj` itself.

    Raises:
      ConfigError: `obj` holds something else.
      CollectiveError: A rank has ended, or called something else.
    """
    here = world()
    check_root(root)
    if here.size == 1:
        return obj
    received = broadcast_bytes(pack(obj if here.rank == root else None), root, doing="broadcast_object")
    return obj if here.rank == root else unpack(received)


def broadcast_bytes(data: bytes, root: int, *, doing: str) -> bytes:
    """Give every rank the bytes of rank `root`; ``doing`` is for messages. There are several ranks.

    Raises:
      CollectiveError: A rank has ended, or called something else.
    """
    with _in_order(doing):
        return _through().broadcast(data, root)


def barrier() -> None:
    """Wait until every rank is here.

    Raises:
      CollectiveError: A rank has ended, or called something else.
    """
    if world().size == 1:
        return
    with _in_order("barrier"):
        _through().barrier()


@contextmanager
def _in_order(doing: str) -> Iterator[None]:
    """Exchange objects in a ``with`` block, when all ranks have come to it.

    Horovod waits for a rank that is in a collective of a lane instead, while that rank waits there for this
    one. So this rank first comes to the lane, where both find out.
    """
    with name_failures(doing):
        _through().come(doing)
        yield


def check_root(root: int) -> None:
    """Refuse a root that is no rank of the job."""
    if not 0 <= root < world().size:
        raise ConfigError(f"root is rank {root}, but the ranks are 0 to {world().size - 1}")
