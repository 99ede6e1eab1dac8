"""Signatures of exported models over sequences: they recommend next items, or rank exposures."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.export.padded_sequences import PaddedSequences, as_matrix, id_spec, ragged_columns
from gmeta.export.signature import Signature
from gmeta.models import GRM, NextItemModel
from gmeta.models.sequence.history_model import HistoryModel

UNKNOWN = "unknown_history"
"""The name of the answer that counts what a history holds and the model has never seen."""


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
    export computes the catalogue's vectors. Answers hold ids as the model's ``items=`` has them.
    ``unknown_history`` is int64: how many items of a history, as far as the model reads it, aren't in the
    catalogue. The model reads the initial row for them.

    Args:
      model: The model.
      k: How many items the answer has. None: 10, or the whole catalogue if it has fewer.
      leave_out_seen: Whether to leave out the items of the history, as far as the model reads it. If fewer
        than k items remain, the other places hold -1 or the empty text, with score -inf.
      text_ids: Whether clients send texts if the feature hashes.

    Raises:
      ConfigError: The catalogue has fewer than k items.
    """
    k = min(10, model.items) if k is None else whole_number("k", k, least=1)
    if k > model.items:
        raise ConfigError(f"k must be at most {model.items}, the catalogue's size, got {k}")
    inputs = history_inputs(model, text_ids)

    @functools.cache
    def vectors() -> tf.Variable:
        with tf.init_scope():
            return tf.Variable(model.item_vectors(), trainable=False, name="item_vectors")

    def recommend(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        x = histories(inputs, model.item, given)
        items, scores = model.recommend(
            x,
            k,
            leave_out_seen=leave_out_seen,
            vectors=tf.convert_to_tensor(vectors()),
            popular=most_popular(model, k),
        )
        return {"items": items, "scores": scores, UNKNOWN: model.unknown_history(x)}

    def query(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        return {"query": model(histories(inputs, model.item, given), training=False)}

    return {"recommend": Signature(recommend, inputs), "query": Signature(query, inputs)}


def history_inputs(model: HistoryModel, text_ids: bool) -> dict[str, tf.TensorSpec]:
    """Return the columns of histories that clients send: of items, and of times if the model has them."""
    inputs = {model.item: id_spec(model.feature, text_ids, matrix=True)}
    if model.time is not None:
        inputs[model.time] = tf.TensorSpec([None, None], tf.int64)
    return inputs


def most_popular(model: HistoryModel, k: int, allow: Any = None) -> list[tf.Tensor]:
    """Return the answer to a history without items, as constants of a graph."""
    with tf.init_scope():
        found = model.catalogue.most_popular(k, allow)
    return [tf.constant(each.numpy()) for each in found]


def histories(
    inputs: Mapping[str, tf.TensorSpec], item: str, given: Mapping[str, tf.Tensor]
) -> dict[str, tf.RaggedTensor]:
    """Make a model's batch of the matrices that clients send, padded where the item is."""
    columns = {name: given[name] for name in inputs}
    return ragged_columns(columns, {item: columns[item]})[0]


def exposure_signatures(model: GRM, *, text_ids: bool = True) -> dict[str, Signature]:
    """Make the signature ``predict`` of a model that ranks exposures.

    Inputs are as `gmeta.export.padded_sequences` says. For each label, named by its column, the answer has
    the exposures' probability and ``<label>_logit``. A task or product without a label of its own has both
    too, under its own name. All are (samples, width) like the columns of targets, and 0 where those columns
    are padded. ``unknown_history`` (samples,) int64 is how many ids in the columns of a history have no row:
    training has never seen them.

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
      here: (samples, width), true where the exposures stand among the targets.
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
