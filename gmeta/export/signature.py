"""Signatures of an exported model: the requests of clients and their inputs."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import assert_first
from gmeta.layers import FeatureConfig
from gmeta.layers.embedding.feature_config import PADDING as PADDING
from gmeta.layers.embedding.feature_config import TEXT_PADDING as TEXT_PADDING
from gmeta.ops import hash_text

DEFAULT_SIGNATURE = "serving_default"
"""The signature that TensorFlow Serving calls when a client names none."""

OUTPUT = "output"
"""The name of an output tensor that has no name of its own."""


@dataclass(frozen=True)
class Signature:
    """A request that an exported model answers.

    Attributes:
      function: Maps the inputs by name to a tensor, or to tensors by name.
      inputs: Name -> ``tf.TensorSpec``, or a ``tf.RaggedTensorSpec`` of ids, (samples, None): clients send
        them dense and padded, and ``function`` receives them ragged. If an int64 input has the name of a
        feature that hashes, clients send text and ``function`` receives the hashes.
    """

    function: Callable[[dict[str, Any]], tf.Tensor | Mapping[str, tf.Tensor]]
    inputs: Mapping[str, tf.TypeSpec]


def feature_inputs(features: Sequence[FeatureConfig]) -> dict[str, tf.TypeSpec]:
    """Map each feature to the spec of its ids: (samples,), or ragged (samples, None) if they are pooled."""
    return {
        feature.name: tf.TensorSpec([None], tf.int64)
        if feature.combiner is None
        else tf.RaggedTensorSpec([None, None], tf.int64)
        for feature in features
    }


# Sequences on the wire: padded matrices, and what they become.


def id_spec(feature: FeatureConfig, text_ids: bool, *, matrix: bool) -> tf.TensorSpec:
    """Return the spec of a feature on the wire: ids, or texts if it hashes and ``text_ids`` is true."""
    dtype = tf.string if feature.hash and text_ids else tf.int64
    return tf.TensorSpec([None, None] if matrix else [None], dtype)


def is_there(ids: tf.Tensor) -> tf.Tensor:
    """Return a mask of the ids that aren't padding, bool of their shape."""
    return tf.not_equal(ids, tf.constant(TEXT_PADDING if ids.dtype == tf.string else PADDING, ids.dtype))


def ragged_columns(
    columns: Mapping[str, tf.Tensor], ids: Mapping[str, tf.Tensor]
) -> tuple[dict[str, tf.RaggedTensor], tf.Tensor]:
    """Remove the padding of one part's columns.

    Args:
      columns: Name in errors -> a matrix (samples, width); the first one holds ids.
      ids: The columns that hold ids.

    Returns:
      The columns, ragged; and a bool matrix that is true where the matrices held values.

    Raises:
      InvalidArgumentError: The matrices have different shapes, or ids have padding in different places.
    """
    first, like = next(iter(columns.items()))
    here, shape = is_there(like), tf.shape(like)
    found = {}
    for name, column in columns.items():
        alike = tf.reduce_all(tf.shape(column) == shape)
        told = [f"{name} must have the shape of {first}, but the shapes are", tf.shape(column), "and", shape]
        column = assert_first(column, alike, told)
        if name in ids and name != first:
            told = [f"{name} and {first} must be padded at the same places"]
            column = assert_first(column, is_there(column) == here, told)
        found[name] = tf.ragged.boolean_mask(column, here)
    return found, here


def as_matrix(values: tf.Tensor, here: tf.Tensor) -> tf.Tensor:
    """Place values (n,) at the n true places of the matrix ``here``, and 0 elsewhere."""
    return tf.scatter_nd(tf.where(here), values, tf.shape(here, tf.int64))


# Converts a signature's inputs: clients send dense tensors, with text where a feature hashes its ids.


def wire_specs(inputs: Mapping[str, tf.TypeSpec], texts: Collection[str]) -> dict[str, tf.TensorSpec]:
    """Return the specs of the tensors that clients send for each input.

    Args:
      inputs: Name -> the spec of the tensor that a signature's function takes.
      texts: Names of the int64 inputs that clients send as text.

    Raises:
      ConfigError: Clients can't send an input of this kind.
    """
    return {name: _wire_spec(name, spec, name in texts) for name, spec in inputs.items()}


def wire_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to the name that clients send, which TensorFlow must accept as an argument's name.

    ASCII letters, digits and ``_`` stay, other characters become ``_``; a leading digit gets the prefix
    ``arg_``, and a Python keyword the suffix ``_``.

    Raises:
      ConfigError: Two names would become the same.

    Example:
      >>> wire_names(["price", "User-ID", "class", "7th"])
      {'price': 'price', 'User-ID': 'User_ID', 'class': 'class_', '7th': 'arg_7th'}
    """
    found: dict[str, str] = {}
    for name in names:
        safe = re.sub(r"\W", "_", name, flags=re.ASCII)
        safe = safe if re.match("[A-Za-z]", safe) else f"arg_{safe}"
        safe += "_" * keyword.iskeyword(safe)
        if safe in found.values():
            other = next(each for each, sent in found.items() if sent == safe)
            raise ConfigError(
                f"inputs {other!r} and {name!r} would both be {safe!r} to clients: prepare the data with "
                "other names of columns"
            )
        found[name] = safe
    return found


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
    # A model that takes uint64 receives int64 with the same bits, where -1 is the padding.
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
