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
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.layers.embedding.feature_config import PADDING as PADDING
from gmeta.layers.embedding.feature_config import TEXT_PADDING as TEXT_PADDING
from gmeta.models.sequence.history_model import HistoryModel
from gmeta.models.sequence.sequence_columns import SequenceColumns
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


# Converts sequences from the padded matrices that clients send to the batches that models take.

PARTS = ("contexts", "history", "targets")


def history_inputs(model: HistoryModel, text_ids: bool) -> dict[str, tf.TensorSpec]:
    """Return the columns of histories that clients send: items, and times if the model has them."""
    inputs = {model.item: id_spec(model.feature, text_ids, matrix=True)}
    if model.time is not None:
        inputs[model.time] = tf.TensorSpec([None, None], tf.int64)
    return inputs


def histories(
    inputs: Mapping[str, tf.TensorSpec], item: str, given: Mapping[str, tf.Tensor]
) -> dict[str, tf.RaggedTensor]:
    """Make a model's batch from the matrices that clients send; their padding is where the item's is."""
    columns = {name: given[name] for name in inputs}
    return ragged_columns(columns, {item: columns[item]})[0]


class PaddedSequences:
    """The columns of a `gmeta.models.GRM` on the wire.

    A column's input is named by its part and its own name: ``contexts_city`` (samples,), ``history_item``
    (samples, width), ``targets_item`` (samples, another width). All columns of a part are padded in the same
    places: with -1 for ids, or with the empty text for texts. The padding of a column of times may hold any
    value.

    Args:
      columns: The model's columns.
      collection: The model's embeddings.
      text_ids: Whether clients send ids of features that hash as texts.

    Attributes:
      inputs: Name -> the spec of the tensor that clients send.
    """

    def __init__(self, columns: SequenceColumns, collection: EmbeddingCollection, text_ids: bool) -> None:
        features = {feature.name: feature for feature in collection.features}
        self._parts: dict[str, list[str]] = {part: list(getattr(columns, part)) for part in PARTS}
        self.inputs: dict[str, tf.TypeSpec] = {}
        for part, names in self._parts.items():
            for name in names:
                matrix = part != "contexts" or features[name].combiner is not None
                self.inputs[f"{part}_{name}"] = id_spec(features[name], text_ids, matrix=matrix)
        self._ids = set(self.inputs)
        self._of_user: str | None = None
        if columns.time is not None:
            self._add("history", columns.time)
            self._add("targets", columns.time)
        if columns.scenario is not None:
            of_user = columns.scenario in columns.contexts and columns.scenario not in columns.targets
            self._add("contexts" if of_user else "targets", columns.scenario)
            self._of_user = f"contexts_{columns.scenario}" if of_user else None

    def _add(self, part: str, name: str) -> None:
        if name not in self._parts[part]:
            self._parts[part].append(name)
            shape = [None] if part == "contexts" else [None, None]
            self.inputs[f"{part}_{name}"] = tf.TensorSpec(shape, tf.int64)

    def inputs_of(self, *parts: str) -> dict[str, tf.TypeSpec]:
        """Return the inputs of some parts."""
        names = [f"{part}_{name}" for part in parts for name in self._parts[part]]
        return {name: self.inputs[name] for name in names}

    @property
    def scenario(self) -> dict[str, tf.TypeSpec]:
        """The input of a scenario that is a context; empty if there is none."""
        return {} if self._of_user is None else {self._of_user: self.inputs[self._of_user]}

    def with_scenario(self, batch: dict[str, Any], given: Mapping[str, tf.Tensor]) -> dict[str, Any]:
        """Return a batch of targets with the scenario that is a context."""
        if self._of_user is None:
            return batch
        column, first = given[self._of_user], f"targets_{self._parts['targets'][0]}"
        own, users = tf.shape(column)[0], tf.shape(given[first])[0]
        told = [
            f"{self._of_user} and {first} must have equal numbers of samples, but have",
            own,
            "and",
            users,
        ]
        name = self._of_user.removeprefix("contexts_")
        return {**batch, "contexts": {name: assert_first(column, own == users, told)}}

    def batch(
        self, given: Mapping[str, tf.Tensor], parts: Sequence[str] = PARTS
    ) -> tuple[dict[str, Any], tf.Tensor]:
        """Make the batch that the model takes, and the mask of the last part's tokens in its matrices.

        Args:
          given: The inputs by name; further entries are ignored.
          parts: The parts to make.

        Raises:
          InvalidArgumentError: The columns don't match.
        """
        found: dict[str, Any] = {"contexts": {}}
        here: dict[str, tf.Tensor] = {}
        for part in parts:
            if part == "contexts":
                continue
            matrices = {f"{part}_{name}": given[f"{part}_{name}"] for name in self._parts[part]}
            of_ids = {name: matrix for name, matrix in matrices.items() if name in self._ids}
            ragged, here[part] = ragged_columns(matrices, of_ids)
            found[part] = {name: ragged[f"{part}_{name}"] for name in self._parts[part]}
        last = parts[-1]
        users = tf.shape(here[last])[0]
        first = f"{last}_{self._parts[last][0]}"
        for name in self._parts["contexts"] if "contexts" in parts else []:
            column = given[f"contexts_{name}"]
            told = [f"contexts_{name} and {first} must have equal numbers of samples, but have"]
            own = tf.shape(column)[0]
            found["contexts"][name] = assert_first(column, own == users, [*told, own, "and", users])
        return found, here[last]
