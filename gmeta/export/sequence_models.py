"""What can be asked of an exported model over sequences: what comes next, and how exposures rank."""

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


def next_item_signatures(
    model: NextItemModel, *, k: int | None = None, leave_out_seen: bool = False, text_ids: bool = True
) -> dict[str, Signature]:
    """The signatures of a model of what comes next.

    =============  ==========================================  ==========================================
    signature      inputs                                      answer
    =============  ==========================================  ==========================================
    ``recommend``  histories: the item's column, and the       ``items`` (samples, k) ids, the likeliest
                   time's if the model has one                 first, and ``scores`` (samples, k)
    ``query``      the same                                    ``query`` (samples, d), as `predict` gives
    =============  ==========================================  ==========================================

    Histories are matrices (samples, width) in the order of time, filled up with -1, or with the empty text.
    The catalogue's vectors are computed at the export. Ids are answered as the model's ``items=`` has them.

    Args:
      model: The model.
      k: How many items are answered. None: 10, or the whole catalogue where it has fewer.
      leave_out_seen: Whether those of the history, as far as it is read, are left out. Where fewer than k are
        left, the others are -1 or the empty text, of score -inf.
      text_ids: Whether clients send texts, where the feature hashes.

    Raises:
      ConfigError: The catalogue has fewer than k items.
    """
    k = min(10, model.items) if k is None else whole_number("k", k, least=1)
    if k > model.items:
        raise ConfigError(f"k must be at most {model.items}, the catalogue's size, got {k}")
    (feature,) = model.collection.features
    inputs = {model.item: id_spec(feature, text_ids, matrix=True)}
    if model.time is not None:
        inputs[model.time] = tf.TensorSpec([None, None], tf.int64)

    @functools.cache
    def vectors() -> tf.Variable:
        with tf.init_scope():
            return tf.Variable(model.item_vectors(), trainable=False, name="item_vectors")

    def histories(given: Mapping[str, tf.Tensor]) -> dict[str, tf.RaggedTensor]:
        columns = {name: given[name] for name in inputs}
        return ragged_columns(columns, {model.item: columns[model.item]})[0]

    def recommend(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        items, scores = model.recommend(
            histories(given), k, leave_out_seen=leave_out_seen, vectors=tf.convert_to_tensor(vectors())
        )
        return {"items": items, "scores": scores}

    def query(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        return {"query": model(histories(given), training=False)}

    return {"recommend": Signature(recommend, inputs), "query": Signature(query, inputs)}


def exposure_signatures(model: GRM, *, text_ids: bool = True) -> dict[str, Signature]:
    """The signature ``predict`` of a model that ranks exposures.

    Inputs are as `gmeta.export.padded_sequences` says. Of each label, which is called by its column, the
    answer has the exposures' probability, and beside it ``<label>_logit``; so of a task or product without
    a label of its own, by its name. They are (samples, width) like the columns of targets, 0 where those are
    filled up.

    Args:
      model: The model.
      text_ids: Whether clients send texts for features that hash.
    """
    wire = PaddedSequences(model.columns, model.collection, text_ids)

    def predict(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        batch, here = wire.batch(given)
        return answers(model, model.logits(batch, training=False)[0], here)

    return {"predict": Signature(predict, wire.inputs)}


def answers(model: GRM, logits: Mapping[str, tf.Tensor], here: tf.Tensor) -> dict[str, tf.Tensor]:
    """What is answered of exposures.

    Args:
      model: The model that names them.
      logits: Task or product -> (exposures,).
      here: (samples, width), where those stand among the targets.
    """
    names = {task: model.labels.get(task, task) for task in logits}
    if len(set(names.values())) < len(names):  # tasks that share a label
        names = {task: task for task in logits}
    found = {}
    for task, logit in logits.items():
        found[names[task]] = as_matrix(tf.sigmoid(logit), here)
        found[f"{names[task]}_logit"] = as_matrix(logit, here)
    return found
