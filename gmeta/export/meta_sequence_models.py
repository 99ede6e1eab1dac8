"""Signatures of an exported `MetaGRM`: predict, adapt to a user, and predict with the user's deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from gmeta.core.graph.conditions import assert_first
from gmeta.export.delta_strings import WEIGHTS, DeltaStrings, Stale
from gmeta.export.padded_sequences import LABELS, PaddedSequences
from gmeta.export.sequence_models import answers, exposure_signatures
from gmeta.export.signature import Signature
from gmeta.models import MetaGRM
from gmeta.models.meta.adapter.deltas import one_task, query_outputs, task_deltas
from gmeta.models.meta.adapter.fast_weights import DeltaDtype


def meta_sequence_signatures(
    model: MetaGRM,
    *,
    steps: int | None = None,
    dtype: DeltaDtype = "float32",
    stale: Stale = "refuse",
    text_ids: bool = True,
) -> dict[str, Signature]:
    """Make the three signatures of a `GRM` that adapts to users.

    ================  ========================================================  ============================
    signature         inputs                                                    answer
    ================  ========================================================  ============================
    ``predict``       sequences, as for `exposure_signatures`                   as there, by shared weights
    ``adapt``         one user's sequence, its targets the exposures to learn   ``weights_bytes``
                      from, and of each label ``labels_<column>``
    ``predict_with``  one user's sequence, its targets other exposures, and     as of ``predict``, adapted
                      ``weights_bytes``
    ================  ========================================================  ============================

    ``labels_<column>`` are (1, width) float32 like the targets; ``weights_bytes`` is as in
    `gmeta.export.meta_models`.

    Args:
      model: The model, compiled.
      steps: Number of inner steps of ``adapt``; None: ``inner.steps_in("serving")``.
      dtype: The dtype of the deltas that ``adapt`` answers.
      stale: As for `gmeta.export.meta_models`.
      text_ids: Whether clients send texts for features that hash.

    Raises:
      ConfigError: The model isn't compiled, or a setting has an unknown value.
    """
    ranker, learner = model.ranker, model.learner
    strings = DeltaStrings(model, steps, dtype, stale)
    wire = PaddedSequences(ranker.columns, model.collection, text_ids)
    labels = {task: f"{LABELS}_{ranker.labels[task]}" for task in learner.labels}

    def adapt(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        batch, here = wire.batch(given)
        here = _of_one_user(here)
        columns = {name: _labels(given[name], name, here) for name in labels.values()}
        task = _task(model, batch, tf.stack(list(columns.values()), axis=-1), "support")
        return {WEIGHTS: strings.encode(task_deltas(learner, task, strings.steps), columns)}

    def predict_with(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        deltas, rows = strings.decode(given[WEIGHTS])
        batch, here = wire.batch(given)
        here = _of_one_user(here)
        exposures = tf.math.count_nonzero(here)
        task = _task(model, batch, tf.zeros([exposures, len(labels)]), "query")
        towers = query_outputs(learner, task, deltas, rows)[0]
        return answers(ranker, batch, learner.by_task(towers), here)

    of_labels = {name: tf.TensorSpec([None, None], tf.float32) for name in labels.values()}
    return {
        **exposure_signatures(ranker, text_ids=text_ids),
        "adapt": Signature(adapt, {**wire.inputs, **of_labels}),
        "predict_with": Signature(predict_with, {**wire.inputs, WEIGHTS: tf.TensorSpec([], tf.string)}),
    }


def _task(model: MetaGRM, batch: Mapping[str, Any], labels: tf.Tensor, part: str) -> dict[str, Any]:
    """Make a task of one user, with all exposures in one part of it."""
    every = tf.range(tf.shape(labels, tf.int64)[0])[tf.newaxis]
    parts = {"support": every[:, :0], "query": every[:, :0], part: every}
    return {
        **one_task(model.ranker.ids(batch), labels, **parts),
        "layout": model.learner.columns.layout(batch),
    }


def _of_one_user(here: tf.Tensor) -> tf.Tensor:
    users = tf.shape(here)[0]
    told = ["adapt and predict_with take one user a request, and inputs are of as many samples as", users]
    return assert_first(here, users == 1, told)


def _labels(given: tf.Tensor, name: str, here: tf.Tensor) -> tf.Tensor:
    """Return the labels of the exposures, (exposures,)."""
    told = [f"{name} must be of the shape of the targets, but they are of"]
    alike = tf.reduce_all(tf.shape(given) == tf.shape(here))
    found = tf.boolean_mask(assert_first(given, alike, [*told, tf.shape(given), tf.shape(here)]), here)
    finite = tf.math.is_finite(found)
    return assert_first(found, finite, [f"{name} holds NaN or infinity: leave such exposures out"])
