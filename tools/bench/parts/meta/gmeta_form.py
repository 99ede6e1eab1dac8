"""gmeta's side: a `MetaModel` and the step that `fit` takes."""

from __future__ import annotations

from typing import Any

from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from gmeta.models.meta.outer_rules import choose_form, outer_gradients
from gmeta.optimizers import Adam

import numpy as np
import tensorflow as tf
from parts.meta.batches import Batch, Lists
from parts.meta.case import INNER_RATE, OUTER_RATE, Case, Outer, Start

KERAS_LOSSES = {"mse": "mse", "bce": tf.keras.losses.BinaryCrossentropy(from_logits=True)}


def set_threads(count: int) -> None:
    """Set the threads of TensorFlow's two pools; call it before anything runs."""
    tf.config.experimental.enable_tensor_float_32_execution(False)  # forms are compared to float32 rounding
    tf.config.threading.set_intra_op_parallelism_threads(count)
    tf.config.threading.set_inter_op_parallelism_threads(count)


def collection_of(case: Case) -> EmbeddingCollection:
    """The tables; two collections of a case start with the same rows."""
    start = Normal(0.0, 1.0 if case.loss == "mse" else 0.1)
    features = [
        FeatureConfig(
            field.name,
            TableConfig(field.name, case.dim, initializer=start),
            combiner="mean" if field.several else None,
        )
        for field in case.fields
    ]
    return EmbeddingCollection(features, optimizer=Adam(OUTER_RATE))


def tensors(batch: Batch) -> dict[str, Any]:
    """A batch in the form of `gmeta.io.tasks`."""
    ids = {
        name: tf.RaggedTensor.from_row_lengths(column.values, column.lengths)
        if isinstance(column, Lists)
        else tf.constant(column)
        for name, column in batch.columns.items()
    }
    labels = batch.labels[:, 0] if batch.labels.shape[1] == 1 else batch.labels
    parts = {"support": batch.support, "query": batch.query}
    return {
        "features": ids,
        "label": tf.constant(labels),
        "task": tf.range(batch.tasks, dtype=tf.int64),
        **{name: {"index": tf.constant(p.index), "mask": tf.constant(p.mask)} for name, p in parts.items()},
    }


def of_open_size(batch: Any) -> Any:
    """The types of a batch whose sizes are known only when it arrives."""

    def spec(value: Any) -> Any:
        if isinstance(value, tf.RaggedTensor):
            return tf.RaggedTensorSpec([None, None], value.dtype, row_splits_dtype=value.row_splits.dtype)
        return tf.TensorSpec([None] * value.shape.rank, value.dtype)

    return tf.nest.map_structure(spec, batch)


class GMeta:
    """A model of gmeta."""

    def __init__(self, case: Case, recompute: bool = False) -> None:
        self.case = case
        self.model = MetaModel(
            collection_of(case),
            MLP(case.units),
            inner=InnerLoop(
                steps=case.steps, learning_rate=INNER_RATE, order=case.order, recompute=recompute
            ),
        )
        self.model.compile(tf.keras.optimizers.Adam(OUTER_RATE), KERAS_LOSSES[case.loss])
        self.batches = [tensors(batch) for batch in case.batches]
        types = of_open_size(self.batches[0])
        types["label"] = tf.TensorSpec([None, case.outputs][: self.batches[0]["label"].shape.rank])
        self._train = tf.function(self.model.train_step, input_signature=[types])
        self._gradients = tf.function(self._outer, input_signature=[types])

    def start(self) -> Start:
        """The present values of all weights."""
        ids = {
            f.name: tf.range(f.vocabulary, dtype=tf.int64)[:, None]
            if f.several
            else tf.range(f.vocabulary, dtype=tf.int64)
            for f in self.case.fields
        }
        found = self.model.collection.embed(self.model.collection.lookup(ids, insert=False))
        weights = {name: value.numpy() for name, value in self.model.network.fast_weights().items()}
        return Start(weights, {name: rows.numpy() for name, rows in found.items()})

    def _outer(self, batch: Any) -> Any:
        learner = self.model.learner
        lookup = learner.collection.lookup(batch["features"])
        outer = outer_gradients(
            learner, batch, lookup, self.model.trainable_variables, form=choose_form(learner)
        )
        places = {n: p.flat_values if hasattr(p, "flat_values") else p for n, p in lookup.positions.items()}
        of_table = zip(outer.rows, self.model.collection.merged, strict=True)
        by_field = {f.name: tf.gather(g, places[f.name]) for g, merged in of_table for f in merged.features}
        return outer.measured.loss, outer.dense, by_field

    def outer(self, number: int) -> Outer:
        """See `Form`."""
        loss, dense, rows = self._gradients(self.batches[self.case.batch(number)])
        names = {v.ref(): name for name, v in self.model.network.fast_weights().items()}
        variables = self.model.trainable_variables
        weights = {names[v.ref()]: g.numpy() for v, g in zip(variables, dense, strict=True)}
        return Outer(float(loss), weights, {name: np.asarray(g) for name, g in rows.items()})

    def step(self, number: int) -> None:
        """See `Form`."""
        self._train(self.batches[self.case.batch(number)])["loss"].numpy()
