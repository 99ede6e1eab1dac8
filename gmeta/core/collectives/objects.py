"""Collectives between steps: they exchange Python objects, or wait for all ranks.

All ranks call these functions eagerly and in the same order. Objects are sent as bytes, so the functions work
between ranks with different versions, and can detect the difference.

They are sent by the connection of the ranks: Horovod or, without it, gmeta's own lanes (`peers`).
`gmeta.init` sets the connection by `use_peers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import tensorflow as tf

from gmeta.core.collectives.monitoring import name_failures
from gmeta.core.collectives.place import RankPlace, World, world
from gmeta.core.collectives.wire import pack, unpack
from gmeta.core.errors import ConfigError
from gmeta.core.keras import submodules

T = TypeVar("T")


class Peers(Protocol):
    """The connection of a job's ranks; `name_failures` translates its errors.

    Attributes:
      packages: Packages, in addition to gmeta's requirements, whose versions must be equal on all ranks.
    """

    packages: tuple[str, ...]

    def start(self) -> RankPlace:
        """Find this rank's place."""

    def connect(self, here: World) -> None:
        """Connect to the other ranks; called once, after this rank has selected its GPU."""

    def come(self, name: str) -> None:
        """Wait until all ranks are about to exchange objects, unless their order is already checked."""

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks on every rank."""

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Return the bytes of one rank on every rank; the others' may have any length."""

    def barrier(self) -> None:
        """Wait for all ranks."""


_peers: Peers | None = None


def use_peers(peers: Peers) -> None:
    """Use this connection for objects from now on."""
    global _peers
    _peers = peers


def _through() -> Peers:
    if _peers is None:
        raise ConfigError("gmeta.init() hasn't brought the ranks together: call it first")
    return _peers


def allgather_objects(obj: T) -> list[T]:
    """Return the objects of all ranks on every rank.

    Args:
      obj: Numbers, texts, bytes, arrays, and lists, tuples and dicts of them
        (`gmeta.core.collectives.wire`).

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
    """Return the object of rank `root` on every rank.

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
    """Return the bytes of rank `root` on every rank of several; ``doing`` is for messages.

    Raises:
      CollectiveError: A rank has ended, or called something else.
    """
    with _in_order(doing):
        return _through().broadcast(data, root)


def barrier() -> None:
    """Wait until all ranks call this.

    Raises:
      CollectiveError: A rank has ended, or called something else.
    """
    if world().size == 1:
        return
    with _in_order("barrier"):
        _through().barrier()


@contextmanager
def _in_order(doing: str) -> Iterator[None]:
    """Exchange objects in a ``with`` block once all ranks have reached it.

    Otherwise, Horovod would wait for a rank that is in a collective of a lane, while that rank waits there
    for this one. This rank therefore first joins the lane, where both detect the mismatch.
    """
    with name_failures(doing):
        _through().come(doing)
        yield


def check_root(root: int) -> None:
    """Refuse a root that isn't a rank of the job."""
    if not 0 <= root < world().size:
        raise ConfigError(f"root is rank {root}, but the ranks are 0 to {world().size - 1}")


# Raises an error if ranks differ in values that must be equal, and names these ranks.


def check_agreement(what: Mapping[str, str], *, advice: str = "give every rank the same settings") -> None:
    """Check that all ranks have equal values, such as package versions or a digest of the settings.

    All ranks must call it. A single rank always agrees.

    Args:
      what: Name -> this rank's value.
      advice: What to do about a difference; the message ends with it.

    Raises:
      ConfigError: Any two ranks differ; every rank raises it. The message names the first few differing
        names, and each of their values with its ranks.
      CollectiveError: A rank has ended, or called something else.
    """
    differences = disagreements(allgather_objects(dict(what)))
    if differences:
        shown = "; ".join(differences[:3])
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ConfigError(f"ranks disagree on {shown}{more}; {advice}")


def disagreements(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """List where the ranks' mappings differ, one phrase per name; the list is empty if they agree.

    Example:
      >>> disagreements([{"numpy": "1.26.4"}, {"numpy": "1.26.4"}, {"numpy": "1.25.0"}])
      ['numpy: 1.25.0 on rank 2, 1.26.4 on ranks 0, 1']
    """
    phrases = []
    for name in dict.fromkeys(name for values in by_rank for name in values):
        values = [by_rank[rank].get(name, "nothing") for rank in range(len(by_rank))]
        if len(set(values)) > 1:
            few_first = sorted(Counter(values).items(), key=lambda item: (item[1], -values.index(item[0])))
            parts = (f"{value} on {_ranks(values, value)}" for value, _ in few_first)
            phrases.append(f"{name}: {', '.join(parts)}")
    return phrases


def _ranks(values: Sequence[str], value: str) -> str:
    ranks = [str(rank) for rank, other in enumerate(values) if other == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


# Sends one rank's initial weights to all ranks, and all ranks' states to each before one rank saves them.

_PIECE = 64 << 20  # bytes of weights in one broadcast


def broadcast_variables(variables: Sequence[tf.Variable], root: int = 0) -> None:
    """Set every rank's variables to their values on rank `root`.

    Variables are matched by their position in the sequence, because their names may depend on what a rank
    created before. They are sent as bytes, 64 MB per collective.

    Args:
      variables: Numeric or boolean, with the same shapes and types on all ranks.
      root: The rank whose values are sent.

    Raises:
      ConfigError: The ranks' variables differ in number, shape or type; the message names both.
      CollectiveError: A rank has ended, or called something else.
    """
    here = world()
    check_root(root)
    if here.size == 1:
        return
    values = [variable.numpy() for variable in variables]
    forms = {f"variable {i}": f"{value.shape} {value.dtype.name}" for i, value in enumerate(values)}
    advice = "build the same model on every rank before its weights are broadcast"
    check_agreement({"number of variables": str(len(forms)), **forms}, advice=advice)
    sent = b"".join(value.tobytes() for value in values) if here.rank == root else b""
    size = sum(value.nbytes for value in values)
    received = bytearray(size)
    for start in range(0, size, _PIECE):
        piece = sent[start : start + _PIECE]
        received[start : start + _PIECE] = broadcast_bytes(piece, root, doing="broadcast_variables")
    if here.rank != root:
        offset = 0
        for variable, value in zip(variables, values, strict=True):
            flat = np.frombuffer(received, value.dtype, count=value.size, offset=offset)
            variable.assign(flat.reshape(value.shape))
            offset += value.nbytes


@runtime_checkable
class RankState(Protocol):
    """A part of a model that one rank can save for all after the ranks exchange their states."""

    def gather_ranks(self) -> None:
        """Send the state of each rank to all ranks; all must call this together, between two steps."""


def gather_states(model: tf.Module) -> None:
    """Gather all such parts of the model, including the model itself.

    Call this before saving one rank's variables, or sending them to the others.
    """
    for part in (model, *submodules(model)):
        if isinstance(part, RankState):
            part.gather_ranks()
