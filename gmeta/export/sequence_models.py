"""Signatures of exported models over sequences: they recommend next items, or rank exposures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.graph import assert_first
from gmeta.export.derived import Derived
from gmeta.export.signature import Signature, feature_inputs
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.layers.embedding.feature_config import PADDING, TEXT_PADDING
from gmeta.models import GRM, FlatRetriever, GenerativeRetriever, NextItemModel, TwoTower
from gmeta.models.sequence.history_model import HistoryModel
from gmeta.models.sequence.sequence_columns import SequenceColumns

# Converts sequences from the padded matrices that clients send to the batches that models take.

LABELS = "labels"


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
        """Make the batch that the model takes, and the mask of its exposures in the matrices of targets.

        Args:
          given: The inputs by name; further entries are ignored.

        Raises:
          InvalidArgumentError: The columns don't match.
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
            told = [f"contexts_{name} and {first} must have equal numbers of samples, but have"]
            own = tf.shape(column)[0]
            found["contexts"][name] = assert_first(column, own == users, [*told, own, "and", users])
        return found, here["targets"]


UNKNOWN = "unknown_history"
"""The name of the answer that counts the items or ids of a history that the model has never seen."""


def next_item_signatures(
    model: NextItemModel, *, k: int | None = None, leave_out_seen: bool = False, text_ids: bool = True
) -> dict[str, Signature]:
    """Make the signatures of a next-item model.

    =============  ==========================================  ==========================================
    signature      inputs                                      answer
    =============  ==========================================  ==========================================
    ``recommend``  histories: the item's column, and the       ``items`` (samples, k) ids, the likeliest
                   time's if the model has one                 first, ``scores`` (samples, k), and
                                                               ``unknown_history`` (samples,)
    ``query``      the same                                    ``query`` (samples, d), as `predict` gives
    =============  ==========================================  ==========================================

    Histories are matrices (samples, width) in the order of time, padded with -1 or with the empty text. The
    catalogue's vectors, and the answer to a history without items, are computed at export, and again by
    deltas (`gmeta.export.derived`). Answers hold ids as in the model's ``items=``. ``unknown_history`` is
    int64: how many items in the part of a history that the model reads aren't in the catalogue. The model
    reads the initial row for them.

    Args:
      model: The model.
      k: How many items the answer has. None: 10, or the whole catalogue if it has fewer.
      leave_out_seen: Whether to leave out the items in the part of the history that the model reads. If fewer
        than k items remain, the other places hold -1 or the empty text, with score -inf.
      text_ids: Whether clients send texts if the feature hashes.

    Raises:
      ConfigError: The catalogue has fewer than k items.
    """
    k = min(10, model.items) if k is None else whole_number("k", k, least=1)
    if k > model.items:
        raise ConfigError(f"k must be at most {model.items}, the catalogue's size, got {k}")
    inputs = history_inputs(model, text_ids)
    alone = type(model) is NextItemModel  # the vectors of a subclass may have matrix products
    vectors = of_items("item_vectors", model, model.item_vectors, alone=alone)
    popular = most_popular(model, k)

    def recommend(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        x = histories(inputs, model.item, given)
        items, scores = model.recommend(
            x, k, leave_out_seen=leave_out_seen, vectors=vectors()[0], popular=popular()
        )
        return {"items": items, "scores": scores, UNKNOWN: model.unknown_history(x)}

    def query(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        return {"query": model(histories(inputs, model.item, given), training=False)}

    return {"recommend": Signature(recommend, inputs), "query": Signature(query, inputs)}


def two_tower_signatures(
    model: TwoTower, *, k: int | None = None, leave_out_seen: bool = True, text_ids: bool = True
) -> dict[str, Signature]:
    """Make the signatures of a two-tower model.

    They are ``recommend`` and ``query``, with the answers of `next_item_signatures` except
    ``unknown_history``. Inputs are the item's column, a matrix (samples, width) padded with -1 or with the
    empty text, and the columns of users. The catalogue's vectors are computed at export, and again by deltas
    (`gmeta.export.derived`).

    Args:
      model: The model.
      k: How many items the answer has. None: 10, or the whole catalogue if it has fewer.
      leave_out_seen: Whether to leave out the items of the history.
      text_ids: Whether clients send texts if a feature hashes.
    """
    k = min(10, model.items) if k is None else k
    columns = [each for each in model.collection.features if each.name in model.user_columns]
    item = {model.item: id_spec(model.feature, text_ids, matrix=True)}
    inputs: dict[str, tf.TypeSpec] = {**item, **feature_inputs(columns)}
    vectors = of_items("item_vectors", model, model.item_vectors, alone=not model.hidden)

    def batch(given: dict[str, Any]) -> dict[str, Any]:
        return {**given, **histories(item, model.item, given)}

    def recommend(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        items, scores = model.recommend(batch(given), k, leave_out_seen=leave_out_seen, vectors=vectors()[0])
        return {"items": items, "scores": scores}

    def query(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        return {"query": model(batch(given), training=False)}

    return {"recommend": Signature(recommend, inputs), "query": Signature(query, inputs)}


def history_inputs(model: HistoryModel, text_ids: bool) -> dict[str, tf.TensorSpec]:
    """Return the columns of histories that clients send: items, and times if the model has them."""
    inputs = {model.item: id_spec(model.feature, text_ids, matrix=True)}
    if model.time is not None:
        inputs[model.time] = tf.TensorSpec([None, None], tf.int64)
    return inputs


def of_items(
    name: str, model: NextItemModel | TwoTower, compute: Callable[..., tf.Tensor], *, alone: bool
) -> Derived:
    """Return a value of all items of a model's catalogue; see `Derived`."""
    inputs, collection = model.item_inputs, model.collection
    return Derived(name, compute, items=model.items, collection=collection, inputs=inputs, alone=alone)


def most_popular(model: HistoryModel, k: int, allow: Any = None) -> Derived:
    """Return the answer to a history without items."""
    return Derived("most_popular", lambda: model.catalogue.most_popular(k, allow))


def histories(
    inputs: Mapping[str, tf.TensorSpec], item: str, given: Mapping[str, tf.Tensor]
) -> dict[str, tf.RaggedTensor]:
    """Make a model's batch from the matrices that clients send; their padding is where the item's is."""
    columns = {name: given[name] for name in inputs}
    return ragged_columns(columns, {item: columns[item]})[0]


def exposure_signatures(model: GRM, *, text_ids: bool = True) -> dict[str, Signature]:
    """Make the signature ``predict`` of a model that ranks exposures.

    Inputs are those of `PaddedSequences`. For each label, named by its column, the answer has the exposures'
    probability and ``<label>_logit``. A task or product without a label has both too, under the task's or
    product's name. All are (samples, width) like the columns of targets, and 0 where those columns are
    padded. ``unknown_history`` (samples,) int64 is how many ids in the columns of a history have no row,
    because training never saw them.

    Args:
      model: The model.
      text_ids: Whether clients send texts for features that hash.

    Raises:
      ConfigError: A label has the name ``unknown_history``.
    """
    wire = PaddedSequences(model.columns, model.collection, text_ids)

    def predict(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        batch, here = wire.batch(given)
        return answers(model, batch, model.logits(batch, training=False)[0], here)

    return {"predict": Signature(predict, wire.inputs)}


def answers(
    model: GRM, batch: Mapping[str, Any], logits: Mapping[str, tf.Tensor], here: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Arrange the answers for exposures.

    Args:
      model: The model that names the answers.
      batch: The batch.
      logits: Task or product -> (exposures,).
      here: (samples, width), true where the targets hold an exposure.
    """
    names = {task: model.labels.get(task, task) for task in logits}
    if len(set(names.values())) < len(names):  # tasks that share a label
        names = {task: task for task in logits}
    if UNKNOWN in names.values():
        raise ConfigError(f"{model.name}: a label can't have the name {UNKNOWN!r}, which another answer has")
    found = {UNKNOWN: model.unknown_history(batch)}
    for task, logit in logits.items():
        found[names[task]] = as_matrix(tf.sigmoid(logit), here)
        found[f"{names[task]}_logit"] = as_matrix(logit, here)
    return found


# The signature of exported generative retrievers.


def retrieval_signatures(
    model: GenerativeRetriever | FlatRetriever,
    *,
    k: int | None = None,
    beam: int | None = None,
    allow: Any = None,
    leave_out_seen: bool = False,
    text_ids: bool = True,
) -> dict[str, Signature]:
    """Make the signature ``retrieve`` of a generative retriever.

    It takes histories, the item's column and the time's if the model has one, and returns ``items``
    (samples, k), ids, the likeliest first, ``scores`` (samples, k), logs of their probabilities, and
    ``unknown_history`` (samples,) int64, how many items of a history aren't in the catalogue. TensorFlow ops
    compute the search; the rows of all items, if the model has any, are a weight of the exported model,
    which deltas compute again (`gmeta.export.derived`).
    Histories are matrices (samples, width) in the order of time, padded with -1 or with the empty text.

    Args:
      model: The model, of either form.
      k: How many items the answer has. None: 10, or the whole catalogue if it has fewer.
      beam: How many prefixes are kept at each digit. None: the model's.
      allow: bool (V,), which items are allowed; None: all.
      leave_out_seen: Whether to leave out the items in the part of the history that the model reads. Where
        fewer than k items are found, the other places hold -1 or the empty text, with score -inf.
      text_ids: Whether clients send texts if the feature hashes.

    Raises:
      ConfigError: ``beam`` is below k, or k above the number of items.
    """
    k = min(10, model.items) if k is None else whole_number("k", k, least=1)
    if k > model.items:
        raise ConfigError(f"k must be at most {model.items}, the catalogue's size, got {k}")
    if (beam := model.beam if beam is None else whole_number("beam", beam, least=1)) < k:
        raise ConfigError(f"beam must be at least {k}, the items wanted, got {beam}")
    inputs = history_inputs(model, text_ids)
    popular = most_popular(model, k, allow)
    rows = None
    if isinstance(model, GenerativeRetriever):
        rows = of_items("item_rows", model, model.item_rows, alone=True)

    def retrieve(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        search = model.retrieve
        if isinstance(model, GenerativeRetriever) and rows is not None:
            search = functools.partial(model.retrieve, rows=rows()[0])
        x = histories(inputs, model.item, given)
        items, scores = search(x, k, beam=beam, allow=allow, leave_out_seen=leave_out_seen, popular=popular())
        return {"items": items, "scores": scores, UNKNOWN: model.unknown_history(x)}

    return {"retrieve": Signature(retrieve, inputs)}
