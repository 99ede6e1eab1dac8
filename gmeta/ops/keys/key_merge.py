"""Merges raw ids of several features into keys of one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph.conditions import assert_first
from gmeta.core.native import load_op_library
from gmeta.ops.inputs import ids_tensor
from gmeta.ops.portable import is_portable

_native = load_op_library("ops")
tf.no_gradient("GmetaMergeKeys")


def merge_keys(
    ids: Sequence[Any], *, features: Sequence[str], prefixes: Sequence[int], id_bits: int
) -> tf.Tensor:
    """Compute ``prefix | id`` for the ids of each feature, one feature after another, in one checked pass.

    With ``prefix = i << id_bits`` for table number i, ids of different tables never collide (MTGenRec,
    section 3.2).

    Args:
      ids: For each feature a vector of integers in [0, 2^id_bits).
      features: Their names, for messages.
      prefixes: For each feature, the bits that are or-ed into its ids.
      id_bits: How many bits an id may have, 0 to 63.

    Returns:
      (n,) int64, n being the number of all ids.

    Raises:
      ConfigError: ``ids`` are not integers, or there are no features.
      tf.errors.InvalidArgumentError: An id is negative or too large. The error names the feature, the id, its
        position in the vector, and the limit.

    Example:
      >>> merge_keys([[3, 4], [3]], features=["user", "item"], prefixes=[0, 1 << 61], id_bits=61).numpy()
      array([                  3,                   4, 2305843009213693955])
    """
    if not ids:
        raise ConfigError("merge_keys: at least one feature is needed")
    vectors = [_vector(values, f"feature {name!r}") for values, name in zip(ids, features, strict=True)]
    if is_portable():
        return _portable(vectors, features, prefixes, id_bits)
    return _native.gmeta_merge_keys(
        ids=vectors, features=list(features), prefixes=list(prefixes), id_bits=id_bits
    )


def _vector(ids: Any, owner: str) -> tf.Tensor:
    """Convert ids to a dtype that the kernel takes; int32 tensors stay as they are, without a copy."""
    if tf.is_tensor(ids) and ids.dtype == tf.int32:
        return ids
    return ids_tensor(ids, owner)


def _portable(
    vectors: Sequence[tf.Tensor], features: Sequence[str], prefixes: Sequence[int], id_bits: int
) -> tf.Tensor:
    """Merge in TensorFlow's own ops. The error gives the range of the ids instead of the first bad id."""
    keys = []
    for ids, feature, prefix in zip(vectors, features, prefixes, strict=True):
        wide = tf.cast(ids, tf.int64)
        # An arithmetic shift gives 0 only for the ids that fit: for negative ids it stays negative.
        excess = tf.bitwise.right_shift(wide, tf.constant(id_bits, tf.int64))
        limits = [tf.reduce_min(wide), "to", tf.reduce_max(wide)]
        message = f"feature {feature}: ids must be in [0, {1 << id_bits}); got some in the range of"
        wide = assert_first(wide, tf.equal(excess, 0), [message, *limits])
        keys.append(tf.bitwise.bitwise_or(wide, tf.constant(prefix, tf.int64)))
    return tf.concat(keys, axis=0)
