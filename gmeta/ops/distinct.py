"""Deduplication of the ids of a batch, and their order by owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.core.shares import LOGICAL_SHARDS
from gmeta.ops.device import DEVICE_NAMES, DeviceKind, ids_tensor, is_portable, keys_vector

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


def unique(ids: Any, *, device: DeviceKind = "cpu") -> Unique:
    """Find the distinct ids of a tensor of any shape, and the inverse mapping.

    Args:
      ids: Integers of any shape; any int64 is a valid id. uint64 are taken as the int64 of the same bits.
      device: Where to compute and keep the result: ``"cpu"``, where ids usually are, or ``"gpu"``, the first
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
        keys, those of a rank in the order of their first appearance.
      inverse: (n,) int32: ``tf.gather(keys, inverse)`` restores the ids.
      counts: (W,) int32, in host memory: how many keys each rank owns.
    """

    keys: tf.Tensor
    inverse: tf.Tensor
    counts: tf.Tensor


def unique_by_owner(ids: Any, *, world_size: int, device: DeviceKind = "cpu") -> UniqueByOwner:
    """Find the distinct ids of a vector, grouped by the rank that owns them.

    `gmeta.ops.key_messages.route_keys` defines the owner of a key. It does the same for several tables at
    once in host memory, and builds messages of the keys.

    Args:
      ids: (n,) integers; any int64 is a valid id.
      world_size: W, the number of ranks, from 1 to 1024.
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


def order_by_owner(ids: Any, *, world_size: int, device: DeviceKind = "cpu") -> UniqueByOwner:
    """Order the ids of a vector by the rank that owns them, without deduplication.

    Repeated ids are kept, to measure what deduplication saves.

    Args:
      ids: As in `unique_by_owner`, like world_size and device.
      world_size: The number of ranks.
      device: Where to compute.

    Returns:
      A `UniqueByOwner` of all (n,) ids; those of a rank keep their input order.

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


# Divides the keys and the units of a step that computes micro-batches one after another.

for _name in ("GmetaKeyClasses", "GmetaMovePlaces", "GmetaCollectKeys", "GmetaClusterUnits"):
    tf.no_gradient(_name)


class ClassifiedKeys(NamedTuple):
    """The keys of a table by class.

    Attributes:
      by_class: For each class (u,) int64, its distinct keys, in the order of their first appearance.
      places: For each micro-batch, (n,) int32: the place of each of its keys among those of the open classes.
    """

    by_class: tuple[tf.Tensor, ...]
    places: tuple[tf.Tensor, ...]


class CollectedKeys(NamedTuple):
    """The keys of several vectors.

    Attributes:
      distinct: (v,) int64, in the order of their first appearance.
      places: For each vector, (w,) int32, the places of the requested keys among ``distinct``.
    """

    distinct: tf.Tensor
    places: tuple[tf.Tensor, ...]


def classify_keys(keys: Sequence[tf.Tensor]) -> ClassifiedKeys:
    """Divide the keys of a table into classes.

    The class (f, l) contains the keys that first occur in micro-batch f and last in l. With N micro-batches,
    there are N (N + 1) / 2 classes, ordered by f, then by l. A class is open in micro-batch i if f <= i <= l.
    See ``ops/window/key_classes.h``.

    Args:
      keys: For each of N = 1 to 8 micro-batches (n,) int64.

    Raises:
      tf.errors.InvalidArgumentError: There are more micro-batches, or 2^31 keys.

    Example:
      >>> found = classify_keys([tf.constant([7, 3], tf.int64), tf.constant([3, 9], tf.int64)])
      >>> [each.numpy().tolist() for each in found.by_class]  # (0, 0), (0, 1), (1, 1)
      [[7], [3], [9]]
      >>> [each.numpy().tolist() for each in found.places]
      [[0, 1], [0, 1]]
    """
    with tf.device(DEVICE_NAMES["cpu"]):
        by_class, places = _native.gmeta_key_classes(keys=keys, classes=len(keys) * (len(keys) + 1) // 2)
    return ClassifiedKeys(tuple(by_class), tuple(places))


def move_places(within: Sequence[tf.Tensor], places: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Return the places of a `ClassifiedKeys` after the keys of each class were reordered.

    Args:
      within: For each class, (u,) int32, the new place of each of its keys in the class.
      places: For each micro-batch, the previous places.

    Raises:
      tf.errors.InvalidArgumentError: A place doesn't belong to a key.
    """
    with tf.device(DEVICE_NAMES["cpu"]):
        return tuple(_native.gmeta_move_places(within=within, places=places))


def collect_keys(keys: Sequence[tf.Tensor], positions: Sequence[tf.Tensor]) -> CollectedKeys:
    """Find the distinct keys of several vectors, and the places of the keys at some positions among them.

    Args:
      keys: Vectors of int64.
      positions: For each vector, (w,) int32, positions in it.

    Raises:
      tf.errors.InvalidArgumentError: A position is out of range.
    """
    with tf.device(DEVICE_NAMES["cpu"]):
        distinct, places = _native.gmeta_collect_keys(keys=keys, positions=positions)
    return CollectedKeys(distinct, tuple(places))


def cluster_units(keys: tf.Tensor, units: tf.Tensor, sizes: Any) -> tf.Tensor:
    r"""Divide the units of a batch into micro-batches, grouping units that share keys.

    Units are processed in order. Each is assigned to the micro-batch m with the highest score

    .. math:: s_m = (1 - n_m / c_m) \sum_{k \in m} 1 / f_k

    over its keys k that m already has, where m has n of c units, and k occurs f times in the batch.
    See ``ops/window/clusters.h``.

    Args:
      keys: (n,) int64.
      units: (n,) int64, for each key, the number of its unit.
      sizes: (N,) int64, the sizes of 1 to 8 micro-batches, whose sum is the number of units.

    Returns:
      (units,) int64, the numbers of the units: those of the first micro-batch in ascending order, then of the
      next.

    Raises:
      tf.errors.InvalidArgumentError: A unit is out of range, or there are more than 8 micro-batches.

    Example:
      >>> keys, units = tf.constant([5, 6, 5, 6], tf.int64), tf.constant([0, 1, 2, 3], tf.int64)
      >>> cluster_units(keys, units, [2, 2]).numpy()
      array([0, 2, 1, 3])
    """
    with tf.device(DEVICE_NAMES["cpu"]):
        sizes = tf.convert_to_tensor(sizes, tf.int64)
        return _native.gmeta_cluster_units(keys=keys, units=units, sizes=sizes)
