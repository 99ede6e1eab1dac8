"""Converts a feature's ids, as users pass them, to one of two forms: a Tensor or a RaggedTensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph.conditions import refuse_unless
from gmeta.core.keras import refuse_keras_3
from gmeta.layers.embedding.feature_config import FeatureConfig
from gmeta.ops.inputs import integers_of
from gmeta.ops.keys.id_hash import hash_text

Ids: TypeAlias = "tf.Tensor | tf.RaggedTensor"
"""A feature's ids: a Tensor of any shape, or ragged."""

PADDING = -1
"""The value that stands for "no id" in a dense matrix of ids to pool."""

TEXT_PADDING = b""
"""The value that stands for "no id" if ids are text."""


def feature_ids(inputs: Mapping[str, Any], feature: FeatureConfig) -> Ids:
    """Return one feature's ids, in a shape that fits its combiner, cut to its ``max_length``.

    If the feature has a combiner, a dense matrix of ids becomes ragged ids without the padding. uint64
    becomes int64 of the same bits.

    Args:
      inputs: Feature name -> Tensor, RaggedTensor, SparseTensor (its columns give the order of a sample's
        ids), or anything that converts to a Tensor.
      feature: The feature.

    Raises:
      ConfigError: The feature is missing, or the shape or dtype of its ids doesn't fit it.
      KerasError: The ids are a tensor of Keras 3's ``Input``.
    """
    if feature.name not in inputs:
        raise ConfigError(f"feature {feature.name!r} is missing from the input; it has {', '.join(inputs)}")
    ids = inputs[feature.name]
    refuse_keras_3(f"feature {feature.name!r}", type(ids))
    if isinstance(ids, tf.SparseTensor):
        ids = _ragged_of_sparse(ids, feature)
    if isinstance(ids, tf.RaggedTensor):
        ids = ids.with_flat_values(integers_of(ids.flat_values))
    else:
        ids = integers_of(ids)
    _check_shape(ids, feature)
    _check_dtype(ids, feature)
    if isinstance(ids, tf.Tensor) and ids.shape.rank > 1:
        ids = _without_padding(ids, feature)
    return ids if feature.max_length is None else ids[:, -feature.max_length :]


def numbers_of_texts(ids: Mapping[str, Ids]) -> dict[str, Ids]:
    """Replace each text by its number, `gmeta.ops.hash_text`. One op hashes all texts.

    Args:
      ids: Feature -> its ids.
    """
    texts = {name: flat_ids(each) for name, each in ids.items() if each.dtype == tf.string}
    if not texts:
        return dict(ids)
    sizes = [tf.size(each) for each in texts.values()]
    numbers = tf.split(hash_text(tf.concat(list(texts.values()), axis=0)), sizes, num=len(sizes))
    return {**ids, **{name: like_ids(ids[name], part) for name, part in zip(texts, numbers, strict=True)}}


def flat_ids(ids: Ids) -> tf.Tensor:
    """Return all ids as a vector."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.flat_values
    return ids if ids.shape.rank == 1 else tf.reshape(ids, [-1])


def like_ids(ids: Ids, flat: tf.Tensor) -> Ids:
    """Give a vector with one value per `flat_ids` entry the shape of ``ids``."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(flat)
    return flat if ids.shape.rank == 1 else tf.reshape(flat, tf.shape(ids))


def _ragged_of_sparse(ids: tf.SparseTensor, feature: FeatureConfig) -> tf.RaggedTensor:
    if ids.shape.rank != 2:
        raise ConfigError(
            f"feature {feature.name!r} takes a SparseTensor of shape (samples, length), got {ids.shape}"
        )
    return tf.RaggedTensor.from_value_rowids(ids.values, ids.indices[:, 0], nrows=ids.dense_shape[0])


def _without_padding(ids: tf.Tensor, feature: FeatureConfig) -> Ids:
    padding = TEXT_PADDING if ids.dtype == tf.string else PADDING
    present = tf.not_equal(ids, tf.constant(padding, ids.dtype)) if not ids.dtype.is_unsigned else None
    if feature.combiner is not None:
        present = tf.ones_like(ids, tf.bool) if present is None else present
        lengths = tf.math.count_nonzero(present, axis=1)
        return tf.RaggedTensor.from_row_lengths(tf.boolean_mask(ids, present), lengths, validate=False)
    if not feature.hash or present is None:  # without hash, the lookup itself refuses negative ids
        return ids
    return refuse_unless(
        ids,
        present,
        f"feature {feature.name!r}: {padding!r} stands for no id where ids are pooled, and this feature has "
        "no combiner: give ragged ids, or the feature a combiner",
    )


def _check_dtype(ids: Ids, feature: FeatureConfig) -> None:
    if ids.dtype == tf.string and not feature.hash:
        raise ConfigError(
            f"feature {feature.name!r} got strings: FeatureConfig({feature.name!r}, ..., hash=True) takes"
            " them"
        )
    if ids.dtype != tf.string and not ids.dtype.is_integer:
        raise ConfigError(
            f"feature {feature.name!r}: ids must be integers (int64){' or strings' * feature.hash}, got "
            f"{ids.dtype.name}: cast them, or give such numbers to the network beside the embeddings"
        )


def _check_shape(ids: Ids, feature: FeatureConfig) -> None:
    ragged = isinstance(ids, tf.RaggedTensor)
    rank = ids.shape.rank
    if rank is None or rank == 0:
        wanted = "ids of at least one dimension, of known rank"
    elif ragged and ids.flat_values.shape.rank != 1:
        wanted = "ragged ids without inner dimensions of one size"
    elif feature.combiner is not None and rank != 2:
        wanted = "a RaggedTensor, a SparseTensor or a Tensor, of shape (samples, length)"
    elif feature.max_length is not None and rank < 2:
        wanted = f"ids of shape (samples, length), of which it keeps the last {feature.max_length}"
    else:
        return
    joins = feature.join is not None and feature.combiner is not None
    raise ConfigError(
        f"feature {feature.name!r} has combiner={feature.combiner!r} and takes {wanted}; "
        f"got a {'RaggedTensor' if ragged else 'Tensor'} of shape {ids.shape}"
        + ("; a combiner pools a sample's ids, and join puts the tables' vectors together" if joins else "")
    )
