"""Converts sequences from the padded matrices that clients send to the batches that models take.

A column's input has the name of its part and its own name: ``contexts_city`` (samples,), ``history_item``
(samples, width), ``targets_item`` (samples, another width). All columns of a part have padding at the same
places: -1 for ids, or the empty text for texts. The padding of a column of times may hold any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from gmeta.core.graph.conditions import assert_first
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.layers.embedding.ids import PADDING, TEXT_PADDING
from gmeta.models.sequence.sequence_columns import SequenceColumns

LABELS = "labels"


def id_spec(feature: FeatureConfig, text_ids: bool, *, matrix: bool) -> tf.TensorSpec:
    """Return the spec of a feature on the wire: ids, or texts if it hashes and ``text_ids`` is true."""
    dtype = tf.string if feature.hash and text_ids else tf.int64
    return tf.TensorSpec([None, None] if matrix else [None], dtype)


def is_there(ids: tf.Tensor) -> tf.Tensor:
    """Return where ids aren't padding, bool of their shape."""
    return tf.not_equal(ids, tf.constant(TEXT_PADDING if ids.dtype == tf.string else PADDING, ids.dtype))


def ragged_columns(
    columns: Mapping[str, tf.Tensor], ids: Mapping[str, tf.Tensor]
) -> tuple[dict[str, tf.RaggedTensor], tf.Tensor]:
    """Remove the padding of one part's columns.

    Args:
      columns: Name in errors -> a matrix (samples, width); the first one holds ids.
      ids: The columns that hold ids.

    Returns:
      The columns, ragged; and a bool matrix that is true where they stood in the matrices.

    Raises:
      InvalidArgumentError: The matrices have different shapes, or ids have padding at different places.
    """
    first, like = next(iter(columns.items()))
    here, shape = is_there(like), tf.shape(like)
    found = {}
    for name, column in columns.items():
        alike = tf.reduce_all(tf.shape(column) == shape)
        told = [f"{name} must be of the shape of {first}, but they are of", tf.shape(column), "and", shape]
        column = assert_first(column, alike, told)
        if name in ids and name != first:
            told = [f"{name} and {first} must be filled up at the same places"]
            column = assert_first(column, is_there(column) == here, told)
        found[name] = tf.ragged.boolean_mask(column, here)
    return found, here


def as_matrix(values: tf.Tensor, here: tf.Tensor) -> tf.Tensor:
    """Put values (n,) at the n true places of the matrix ``here``, and 0 at the others."""
    return tf.scatter_nd(tf.where(here), values, tf.shape(here, tf.int64))


class PaddedSequences:
    """The columns of a `gmeta.models.GRM` on the wire.

    Args:
      columns: The model's columns.
      collection: The model's embeddings.
      text_ids: Whether clients send ids of features that hash as texts.

    Attributes:
      inputs: Name -> the spec of the tensor that clients send.
    """

    def __init__(self, columns: SequenceColumns, collection: EmbeddingCollection, text_ids: bool) -> None:
        features = {feature.name: feature for feature in collection.features}
        self._parts: dict[str, list[str]] = {
            part: list(getattr(columns, part)) for part in ("contexts", "history", "targets")
        }
        self.inputs: dict[str, tf.TypeSpec] = {}
        for part, names in self._parts.items():
            for name in names:
                matrix = part != "contexts" or features[name].combiner is not None
                self.inputs[f"{part}_{name}"] = id_spec(features[name], text_ids, matrix=matrix)
        self._ids = set(self.inputs)
        if columns.time is not None:
            self._add("history", columns.time)
            self._add("targets", columns.time)
        if columns.scenario is not None:
            of_user = columns.scenario in columns.contexts and columns.scenario not in columns.targets
            self._add("contexts" if of_user else "targets", columns.scenario)

    def _add(self, part: str, name: str) -> None:
        if name not in self._parts[part]:
            self._parts[part].append(name)
            shape = [None] if part == "contexts" else [None, None]
            self.inputs[f"{part}_{name}"] = tf.TensorSpec(shape, tf.int64)

    def batch(self, given: Mapping[str, tf.Tensor]) -> tuple[dict[str, Any], tf.Tensor]:
        """Make a batch as the model takes it, and the mask of its exposures in the matrices of targets.

        Args:
          given: The inputs by name; it may hold others too.

        Raises:
          InvalidArgumentError: The columns don't fit together.
        """
        found: dict[str, Any] = {"contexts": {}}
        here: dict[str, tf.Tensor] = {}
        for part in ("history", "targets"):
            matrices = {f"{part}_{name}": given[f"{part}_{name}"] for name in self._parts[part]}
            of_ids = {name: matrix for name, matrix in matrices.items() if name in self._ids}
            ragged, here[part] = ragged_columns(matrices, of_ids)
            found[part] = {name: ragged[f"{part}_{name}"] for name in self._parts[part]}
        users = tf.shape(here["targets"])[0]
        first = f"targets_{self._parts['targets'][0]}"
        for name in self._parts["contexts"]:
            column = given[f"contexts_{name}"]
            told = [f"contexts_{name} and {first} must be of as many samples, but are of"]
            own = tf.shape(column)[0]
            found["contexts"][name] = assert_first(column, own == users, [*told, own, "and", users])
        return found, here["targets"]
