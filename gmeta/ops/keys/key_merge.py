"""Merges raw ids of several features into keys of one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from gmeta.core.data.merged_keys import HASHED_BITS, Fold, MergedKeys
from gmeta.core.errors import ConfigError
from gmeta.core.graph.conditions import assert_first
from gmeta.core.native import load_op_library
from gmeta.ops.inputs import ids_tensor
from gmeta.ops.keys.id_hash import fold_ids
from gmeta.ops.portable import is_portable

_native = load_op_library("ops")
tf.no_gradient("GmetaMergeKeys")


def merge_keys(
    ids: Sequence[Any],
    *,
    features: Sequence[str],
    prefixes: Sequence[int],
    id_bits: int,
    hashed: Sequence[bool] | None = None,
    mix: bool | tf.Tensor = True,
) -> tf.Tensor:
    """Compute ``prefix | id`` for the ids of each feature, one feature after another, in one checked pass.

    With ``prefix = i << id_bits`` for table number i, ids of different tables never collide (MTGenRec,
    section 3.2).

    Args:
      ids: For each feature a vector of integers in [0, 2^id_bits); where ``hashed``, of any integers.
      features: Their names, for messages.
      prefixes: For each feature, the bits that are or-ed into its ids.
      id_bits: How many bits an id may have, 0 to 63.
      hashed: For each feature, whether its numbers are folded into ids (`gmeta.ops.fold_ids`). None: those of
        no feature are.
      mix: How they are folded: True by "mix" into `gmeta.core.data.merged_keys.HASHED_BITS` bits, False by
        "xor" into ``id_bits``. A tensor is read when the graph runs.

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
    hashed = [False] * len(vectors) if hashed is None else list(hashed)
    if is_portable():
        return _portable(vectors, features, prefixes, id_bits, hashed, mix)
    return _native.gmeta_merge_keys(
        mix=mix,
        ids=vectors,
        features=list(features),
        prefixes=list(prefixes),
        hashed=hashed,
        id_bits=id_bits,
        mix_bits=HASHED_BITS,
    )


def _vector(ids: Any, owner: str) -> tf.Tensor:
    """Convert ids to a dtype that the kernel takes; int32 tensors stay as they are, without a copy."""
    if tf.is_tensor(ids) and ids.dtype == tf.int32:
        return ids
    return ids_tensor(ids, owner)


def _portable(
    vectors: Sequence[tf.Tensor],
    features: Sequence[str],
    prefixes: Sequence[int],
    id_bits: int,
    hashed: Sequence[bool],
    mix: bool | tf.Tensor,
) -> tf.Tensor:
    """Merge in TensorFlow's own ops. The error gives the range of the ids instead of the first bad id."""
    keys = []
    for ids, feature, prefix, hashes in zip(vectors, features, prefixes, hashed, strict=True):
        wide = tf.cast(ids, tf.int64)
        if hashes:
            mixes = tf.get_static_value(mix)
            if mixes is None:
                raise ConfigError("merge_keys: a portable graph has one fold: give mix=True or mix=False")
            wide = fold_ids(wide, HASHED_BITS, "mix") if mixes else fold_ids(wide, id_bits, "xor")
        else:
            # An arithmetic shift gives 0 only for the ids that fit: for negative ids it stays negative.
            excess = tf.bitwise.right_shift(wide, tf.constant(id_bits, tf.int64))
            limits = [tf.reduce_min(wide), "to", tf.reduce_max(wide)]
            message = f"feature {feature}: ids must be in [0, {1 << id_bits}); got some in the range of"
            wide = assert_first(wide, tf.equal(excess, 0), [message, *limits])
        keys.append(tf.bitwise.bitwise_or(wide, tf.constant(prefix, tf.int64)))
    return tf.concat(keys, axis=0)


class HoldsMergedKeys:
    """A mixin of a table whose keys are made of the ids of a collection's tables."""

    _merged_keys: MergedKeys | None = None
    _mixes: tf.Variable | None = None
    name: str

    @property
    def merged_keys(self) -> MergedKeys | None:
        """How the ids of a collection's tables become this table's keys; None: any int64 is a key."""
        return self._merged_keys

    @merged_keys.setter
    def merged_keys(self, keys: MergedKeys) -> None:
        self._merged_keys = keys
        mixes = keys.fold == "mix"
        with tf.init_scope(), tf.device("CPU:0"):
            if self._mixes is not None:
                self._mixes.assign(mixes)
            elif keys.hashed:  # a variable, because graphs that are there already must follow
                self._mixes = tf.Variable(mixes, trainable=False, name="mixes_ids")

    @property
    def mixes_ids(self) -> bool | tf.Variable:
        """Whether hashed ids are folded by "mix", as `gmeta.ops.merge_keys` takes it.

        An exported graph keeps the fold that the table has when it is exported.
        """
        if self._mixes is None or is_portable():
            return self.fold == "mix"
        return self._mixes

    @property
    def fold(self) -> Fold:
        """How hashed ids are folded (`gmeta.core.data.merged_keys`)."""
        return "mix" if self._merged_keys is None else self._merged_keys.fold

    def follow_fold(self, fold: Fold) -> None:
        """Fold hashed ids as those of the rows that are loaded, which no other fold finds."""
        if self._merged_keys is not None:
            self.merged_keys = replace(self._merged_keys, fold=fold)
