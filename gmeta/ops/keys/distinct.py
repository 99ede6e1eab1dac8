"""Deduplication of the ids of a batch, and their order by owner."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.logical_shards import LOGICAL_SHARDS
from gmeta.core.native import load_op_library
from gmeta.ops.device import DEVICE_NAMES, Place
from gmeta.ops.inputs import ids_tensor, keys_vector
from gmeta.ops.portable import is_portable

_native = load_op_library("ops")
tf.no_gradient("GmetaUnique")
tf.no_gradient("GmetaOrderByOwner")


class Unique(NamedTuple):
    """Distinct keys and their positions in the ids.

    Attributes:
      keys: (u,) int64, distinct, in the order of their first appearance.
      inverse: int32, in the shape of the ids: ``tf.gather(keys, inverse)`` restores the ids.
    """

    keys: tf.Tensor
    inverse: tf.Tensor


def unique(ids: Any, *, device: Place = "cpu") -> Unique:
    """Find the distinct ids of a tensor of any shape, and the inverse mapping.

    Args:
      ids: Integers of any shape; any int64 is a valid id. uint64 are taken as the int64 of the same bits.
      device: Where to compute and keep the result: ``"cpu"``, where ids mostly are, or ``"gpu"``, the first
        GPU that this process sees.

    Returns:
      A `Unique`.

    Raises:
      ConfigError: ``ids`` are not integers.

    Example:
      >>> keys, inverse = unique([[7, 3], [7, 9]])
      >>> keys.numpy()
      array([7, 3, 9])
      >>> inverse.numpy()
      array([[0, 1],
             [0, 2]], dtype=int32)
    """
    ids = ids_tensor(ids, "unique")
    if is_portable():
        keys, inverse = tf.unique(tf.reshape(ids, [-1]))
        return Unique(keys, tf.reshape(inverse, tf.shape(ids)))
    with tf.device(DEVICE_NAMES[device]):
        return Unique(*_native.gmeta_unique(ids=ids)[:2])


class UniqueByOwner(NamedTuple):
    """Keys by owner, and their positions in the ids.

    Attributes:
      keys: (u,) int64, the keys that rank 0 owns, then those of rank 1, …. `unique_by_owner` returns distinct
        ones, those of a rank in the order of their first appearance.
      inverse: (n,) int32: ``tf.gather(keys, inverse)`` restores the ids.
      counts: (W,) int32, in host memory: how many keys each rank owns.
    """

    keys: tf.Tensor
    inverse: tf.Tensor
    counts: tf.Tensor


def unique_by_owner(ids: Any, *, world_size: int, device: Place = "cpu") -> UniqueByOwner:
    """Find the distinct ids of a vector, grouped by the rank that owns them.

    `gmeta.ops.route_keys` defines the owner of a key. It does the same for several tables at once in host
    memory, and makes messages of the keys.

    Args:
      ids: (n,) integers; any int64 is a valid id.
      world_size: How many ranks there are, W, 1 up to 1024.
      device: As in `unique`.

    Returns:
      A `UniqueByOwner`.

    Raises:
      ConfigError: ``ids`` is not a vector of integers, or ``world_size`` is out of range.

    Example:
      >>> found = unique_by_owner([1, 0, 1, 7], world_size=2)  # rank 0 owns keys 0 and 7, rank 1 key 1
      >>> found.keys.numpy(), found.inverse.numpy(), found.counts.numpy()
      (array([0, 7, 1]), array([2, 0, 2, 1], dtype=int32), array([2, 1], dtype=int32))

    References:
      MTGenRec, section 3.3.
    """
    ids = _ids_of_ranks(ids, world_size, "unique_by_owner")
    with tf.device(DEVICE_NAMES[device]):
        return UniqueByOwner(*_native.gmeta_unique(ids=ids, ranks=world_size))


def owned_by(keys: Any, rank: int, world_size: int) -> tf.Tensor:
    """Check which keys a rank owns.

    Args:
      keys: (n,) integers; any int64 is a valid key.
      rank: The rank, from 0 to ``world_size - 1``.
      world_size: As in `unique_by_owner`.

    Returns:
      (n,) bool.

    Raises:
      ConfigError: As in `unique_by_owner`.

    Example:
      >>> owned_by([1, 0, 1, 7], 0, world_size=2).numpy()
      array([False,  True, False,  True])
    """
    _, place, counts = unique_by_owner(keys, world_size=world_size)
    end = tf.reduce_sum(counts[: rank + 1])
    return (place < end) & (place >= end - counts[rank])


def order_by_owner(ids: Any, *, world_size: int, device: Place = "cpu") -> UniqueByOwner:
    """Order the ids of a vector by the rank that owns them, and leave none out.

    An id that occurs several times stays so often, to measure what deduplication saves.

    Args:
      ids: As in `unique_by_owner`; so are world_size and device.
      world_size: How many ranks there are.
      device: Where to compute.

    Returns:
      A `UniqueByOwner` of all (n,) ids; those of a rank are in the order in which they came.

    Raises:
      ConfigError: As in `unique_by_owner`.

    Example:
      >>> found = order_by_owner([1, 0, 1, 7], world_size=2)  # rank 0 owns keys 0 and 7, rank 1 key 1
      >>> found.keys.numpy(), found.inverse.numpy(), found.counts.numpy()
      (array([0, 7, 1, 1]), array([2, 0, 3, 1], dtype=int32), array([2, 2], dtype=int32))

    References:
      MTGenRec, section 3.3.
    """
    ids = _ids_of_ranks(ids, world_size, "order_by_owner")
    with tf.device(DEVICE_NAMES[device]):
        return UniqueByOwner(*_native.gmeta_order_by_owner(ids=ids, ranks=world_size))


def _ids_of_ranks(ids: Any, world_size: int, owner: str) -> tf.Tensor:
    if not 1 <= world_size <= LOGICAL_SHARDS:
        raise ConfigError(f"{owner}: world_size must lie in [1, {LOGICAL_SHARDS}], got {world_size}")
    return keys_vector(ids, owner)
