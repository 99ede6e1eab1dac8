"""Collectives between steps: they exchange Python objects, or wait for all ranks.

All ranks call these functions eagerly and in the same order. Objects travel as bytes, so the functions work
between ranks with different versions, and such a difference can be found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from gmeta.core.collectives.backend import import_horovod
from gmeta.core.collectives.counting import count, count_start
from gmeta.core.collectives.failures import name_failures
from gmeta.core.collectives.place import world
from gmeta.core.collectives.wire import pack, unpack
from gmeta.core.errors import ConfigError

T = TypeVar("T")


def allgather_objects(obj: T) -> list[T]:
    """Give every rank the objects of all ranks.

    Args:
      obj: Numbers, texts, bytes, arrays, and lists, tuples and dicts of them (`gmeta.core.collectives.wire`).

    Returns:
      The objects by rank; ``[obj]`` with one rank.

    Raises:
      ConfigError: `obj` holds something else.
      CollectiveError: A rank has ended, or called something else.
    """
    if world().size == 1:
        return [obj]
    sent = np.frombuffer(pack(obj), np.uint8)
    with name_failures("allgather_objects"):
        sizes = _allgather("sizes", tf.int64)(tf.constant([sent.size], tf.int64)).numpy()
        received = _allgather("objects", tf.uint8)(tf.constant(sent)).numpy()
    ends = np.cumsum(sizes)
    return [unpack(received[end - size : end].tobytes()) for end, size in zip(ends, sizes, strict=True)]


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
    sent = np.frombuffer(pack(obj if here.rank == root else None), np.uint8)
    with name_failures("broadcast_object"):
        size = broadcast("size", tf.int64, root)(tf.constant([sent.size], tf.int64)).numpy()[0]
        if here.rank != root:
            sent = np.zeros(size, np.uint8)
        received = broadcast("object", tf.uint8, root)(tf.constant(sent)).numpy()
    return obj if here.rank == root else unpack(received.tobytes())


def barrier() -> None:
    """Wait until every rank is here.

    Raises:
      CollectiveError: A rank has ended, or called something else.
    """
    if world().size == 1:
        return
    with name_failures("barrier"):
        _barrier()()


def check_root(root: int) -> None:
    """Refuse a root that is no rank of the job."""
    if not 0 <= root < world().size:
        raise ConfigError(f"root is rank {root}, but the ranks are 0 to {world().size - 1}")


# An eager collective has the name of its op. Inside a function it has a name of its own, which Horovod
# reports when a rank is missing. The input signatures leave the length open, so no function is traced twice.


def _function(dtype: tf.DType, run: Callable[[tf.Tensor], tf.Tensor], kind: str) -> Any:
    def function(tensor: tf.Tensor) -> tf.Tensor:
        result = run(*count_start(kind, [tensor]))
        count(kind, tf.size(tensor) * dtype.size, after=result)
        return result

    return tf.function(function, input_signature=[tf.TensorSpec([None], dtype)], autograph=False)


@functools.cache
def _allgather(name: str, dtype: tf.DType) -> Any:
    hvd = import_horovod()
    return _function(
        dtype, lambda t: hvd.allgather(t, name=f"gmeta_{name}", ignore_name_scope=True), "allgather"
    )


@functools.cache
def broadcast(name: str, dtype: tf.DType, root: int) -> Any:
    """Make a function that gives every rank the vector of rank ``root``; messages show its name."""
    hvd = import_horovod()
    return _function(
        dtype, lambda t: hvd.broadcast(t, root, name=f"gmeta_{name}", ignore_name_scope=True), "broadcast"
    )


@functools.cache
def _barrier() -> Any:
    hvd = import_horovod()

    def run(tensor: tf.Tensor) -> tf.Tensor:
        return hvd.mpi_ops._allreduce(tensor, name="gmeta_barrier", op=hvd.Sum, ignore_name_scope=True)

    function = _function(tf.int32, run, "barrier")
    return lambda: function(tf.constant([1]))
