"""Divides the keys and the units of a step that computes one micro-batch after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.native import load_op_library
from gmeta.ops.device import DEVICE_NAMES

_native = load_op_library("ops")
for _name in ("GmetaKeyClasses", "GmetaMovePlaces", "GmetaCollectKeys", "GmetaClusterUnits"):
    tf.no_gradient(_name)


class ClassifiedKeys(NamedTuple):
    """The keys of a table by class.

    Attributes:
      by_class: For each class (u,) int64, its distinct keys, in the order of their first appearance.
      places: For each micro-batch (n,) int32: the place of each of its keys among those of the open classes.
    """

    by_class: tuple[tf.Tensor, ...]
    places: tuple[tf.Tensor, ...]


class CollectedKeys(NamedTuple):
    """The keys of several vectors.

    Attributes:
      distinct: (v,) int64, in the order of their first appearance.
      places: For each vector (w,) int32, the places among ``distinct`` of the keys that were asked for.
    """

    distinct: tf.Tensor
    places: tuple[tf.Tensor, ...]


def classify_keys(keys: Sequence[tf.Tensor]) -> ClassifiedKeys:
    """Divide the keys of a table into classes.

    The class (f, l) has the keys that micro-batch f is the first to have, and l the last. With N
    micro-batches there are N (N + 1) / 2 classes, in the order of f, then of l. A class is open in
    micro-batch i if f <= i <= l. See ``ops/window/key_classes.h``.

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
    """Return a `ClassifiedKeys`' places after the keys of each class were put in another order.

    Args:
      within: For each class (u,) int32, the new place in its class of each of its keys.
      places: For each micro-batch the places before.

    Raises:
      tf.errors.InvalidArgumentError: A place isn't that of a key.
    """
    with tf.device(DEVICE_NAMES["cpu"]):
        return tuple(_native.gmeta_move_places(within=within, places=places))


def collect_keys(keys: Sequence[tf.Tensor], positions: Sequence[tf.Tensor]) -> CollectedKeys:
    """Find the distinct keys of several vectors, and where keys at some of their positions are among them.

    Args:
      keys: Vectors of int64.
      positions: For each of them (w,) int32, positions in it.

    Raises:
      tf.errors.InvalidArgumentError: A position isn't that of a key.
    """
    with tf.device(DEVICE_NAMES["cpu"]):
        distinct, places = _native.gmeta_collect_keys(keys=keys, positions=positions)
    return CollectedKeys(distinct, tuple(places))


def cluster_units(keys: tf.Tensor, units: tf.Tensor, sizes: Any) -> tf.Tensor:
    r"""Divide the units of a batch into micro-batches so that units which share keys come together.

    Units are taken in their order. Each goes to the micro-batch m with the highest score

    .. math:: s_m = (1 - n_m / c_m) \sum_{k \in m} 1 / f_k

    over those of its keys k that m already has, where m has n of c units, and k occurs f times in the batch.
    See ``ops/window/clusters.h``.

    Args:
      keys: (n,) int64.
      units: (n,) int64, for each key the number of the unit that has it.
      sizes: (N,) int64, the sizes of 1 to 8 micro-batches, whose sum is the number of units.

    Returns:
      (units,) int64, the numbers of the units: those of the first micro-batch in ascending order, and so on.

    Raises:
      tf.errors.InvalidArgumentError: There is no such unit, or there are more micro-batches.

    Example:
      >>> keys, units = tf.constant([5, 6, 5, 6], tf.int64), tf.constant([0, 1, 2, 3], tf.int64)
      >>> cluster_units(keys, units, [2, 2]).numpy()
      array([0, 2, 1, 3])
    """
    with tf.device(DEVICE_NAMES["cpu"]):
        sizes = tf.convert_to_tensor(sizes, tf.int64)
        return _native.gmeta_cluster_units(keys=keys, units=units, sizes=sizes)
