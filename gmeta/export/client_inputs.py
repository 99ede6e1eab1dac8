"""Converts a signature's inputs: clients send dense tensors, with text where a feature hashes its ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.embedding.ids import PADDING as PADDING
from gmeta.layers.embedding.ids import TEXT_PADDING as TEXT_PADDING
from gmeta.ops import hash_text


def wire_specs(inputs: Mapping[str, tf.TypeSpec], texts: Collection[str]) -> dict[str, tf.TensorSpec]:
    """Return the specs of the tensors that clients send for each input.

    Args:
      inputs: Name -> the spec of the tensor that a signature's function takes.
      texts: Names of the int64 inputs that clients send as text.

    Raises:
      ConfigError: Clients can't send an input of this kind.
    """
    return {name: _wire_spec(name, spec, name in texts) for name, spec in inputs.items()}


def receive(value: tf.Tensor, spec: tf.TypeSpec) -> tf.Tensor | tf.RaggedTensor:
    """Convert the tensor that a client sent for an input to the one that the signature's function takes."""
    is_text = value.dtype == tf.string
    wanted: tf.Tensor | tf.RaggedTensor = value
    if isinstance(spec, tf.RaggedTensorSpec):
        padding = tf.constant(TEXT_PADDING if is_text else PADDING, value.dtype)
        wanted = tf.ragged.boolean_mask(value, tf.not_equal(value, padding))
    if is_text and spec.dtype != tf.string:
        wanted = _numbers(wanted)
    return tf.cast(wanted, tf.uint64) if spec.dtype == tf.uint64 else wanted


def _numbers(texts: tf.Tensor | tf.RaggedTensor) -> tf.Tensor | tf.RaggedTensor:
    if isinstance(texts, tf.RaggedTensor):
        return texts.with_flat_values(hash_text(texts.flat_values))
    numbers = hash_text(texts)
    if texts.shape.rank is None or texts.shape.rank < 2:
        return numbers
    return tf.where(tf.equal(texts, TEXT_PADDING), tf.constant(PADDING, tf.int64), numbers)


def _wire_spec(name: str, spec: tf.TypeSpec, text: bool) -> tf.TensorSpec:
    ragged = isinstance(spec, tf.RaggedTensorSpec)
    # A model that takes uint64 takes the int64 of the same bits, among which -1 is the padding.
    kind = tf.int64 if spec.dtype == tf.uint64 else spec.dtype
    if ragged and (kind not in (tf.int64, tf.string) or spec.shape.rank != 2):
        raise ConfigError(
            f"input {name!r} must be a TensorSpec or a RaggedTensorSpec of ids, int64 or string, with shape "
            f"(samples, None), got {spec}"
        )
    if not ragged and not isinstance(spec, tf.TensorSpec):
        raise ConfigError(f"input {name!r} must be a TensorSpec or a RaggedTensorSpec, got {spec}")
    dtype = tf.string if text and kind == tf.int64 else kind
    return tf.TensorSpec([spec.shape[0], None] if ragged else spec.shape, dtype, name)
