"""What users write in TensorFlow: a compiled function for a task, a loop over tasks, summed gradients.

The function is traced once for all sizes, so a task isn't padded. Rows come from the table that gmeta's own
side uses, one lookup a task, and are updated once a step, by the same fused Adam: with Keras' embeddings all
moments would decay at every step, which for large vocabularies takes most of the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from parts.meta.batches import Lists
from parts.meta.case import INNER_RATE, OUTER_RATE, Case, Outer, Start, values
from parts.meta.gmeta_form import KERAS_LOSSES, collection_of, of_open_size


class LoopForm:
    """Keras layers, nested tapes, Adam."""

    def __init__(self, case: Case, start: Start) -> None:
        self.case = case
        self.collection = collection_of(case)
        self.optimizer = tf.keras.optimizers.Adam(OUTER_RATE)
        self.weights = {name: tf.Variable(value, name=name) for name, value in start.weights.items()}
        self._loss = tf.keras.losses.get(KERAS_LOSSES[case.loss])
        self.batches = [[self._task(batch, task) for task in range(batch.tasks)] for batch in case.batches]
        types = of_open_size(self.batches[0][0])
        types["labels"] = tf.TensorSpec([None, case.outputs])
        self._of_task = tf.function(self._gradients, input_signature=[types])
        # Explicit, or the update would be retraced for every new number of rows.
        _, *parts = self._of_task.get_concrete_function().structured_outputs
        types = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), parts[:3])
        tasks = len(self.batches[0])
        self._apply = tf.function(self._update, input_signature=[[part] * tasks for part in types])

    def _task(self, batch: Any, task: int) -> dict[str, Any]:
        """A task's samples, support first."""
        rows = np.concatenate([batch.support.rows(task), batch.query.rows(task)])
        ids = {
            name: tf.RaggedTensor.from_row_lengths(column.values, column.lengths)
            if isinstance(column, Lists)
            else tf.constant(column)
            for name, column in batch.take(rows).items()
        }
        return {
            "ids": ids,
            "labels": tf.constant(batch.labels[rows]),
            "support": tf.constant(len(batch.support.rows(task)), tf.int64),
            "query_samples": tf.constant(batch.query.mask.sum()),
        }

    def _network(self, x: tf.Tensor, weights: Mapping[str, Any]) -> tf.Tensor:
        for name in self.case.units:
            x = x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]
            if name != "out":
                x = tf.nn.relu(x)
        return x

    def _losses(self, x: tf.Tensor, labels: tf.Tensor, weights: Mapping[str, Any]) -> tf.Tensor:
        out = self._network(x, weights)
        return self._loss.call(labels, out) if hasattr(self._loss, "call") else self._loss(labels, out)

    def _gradients(self, task: Mapping[str, Any]) -> Any:
        lookup = self.collection.lookup(task["ids"], insert=True)
        with tf.GradientTape() as outer:
            outer.watch(lookup.rows)
            x, support = self.collection.concat(lookup), task["support"]
            weights: dict[str, Any] = dict(self.weights)
            for _ in range(self.case.steps):
                with tf.GradientTape() as inner:
                    inner.watch(weights)
                    loss = tf.reduce_mean(self._losses(x[:support], task["labels"][:support], weights))
                gradients = inner.gradient(loss, weights)
                if self.case.order == 1:
                    gradients = tf.nest.map_structure(tf.stop_gradient, gradients)
                weights = {name: weights[name] - INNER_RATE * gradients[name] for name in weights}
            losses = self._losses(x[support:], task["labels"][support:], weights)
            outer_loss = tf.reduce_sum(losses) / task["query_samples"]
        dense, rows = outer.gradient(outer_loss, (self.weights, lookup.rows))
        return outer_loss, dense, [tf.convert_to_tensor(part) for part in rows], lookup.keys, lookup.positions

    def _update(self, dense: Any, rows: Any, keys: Any) -> None:
        sums = {name: tf.add_n([of_task[name] for of_task in dense]) for name in self.weights}
        self.optimizer.apply_gradients([(sums[name], self.weights[name]) for name in self.weights])
        for table, gradients, of_table in zip(
            self.collection.tables, zip(*rows, strict=True), zip(*keys, strict=True), strict=True
        ):
            table.apply_gradients(tf.concat(of_table, 0), tf.concat(gradients, 0))

    def outer(self, number: int) -> Outer:
        """See `Form`."""
        place = self.case.batch(number)
        found = [self._of_task(task) for task in self.batches[place]]
        loss = sum(float(of_task[0]) for of_task in found)
        weights = {name: sum(of_task[1][name].numpy() for of_task in found) for name in self.weights}
        rows = {}
        for field in self.case.fields:
            ids = values(self.case.batches[place], field.name)
            total = np.zeros((field.vocabulary, self.case.dim), np.float32)
            for task, of_task in zip(self.batches[place], found, strict=True):
                table = self._table_of(field.name)
                own, places = task["ids"][field.name], of_task[4][field.name]
                own, places = (getattr(part, "flat_values", part).numpy() for part in (own, places))
                distinct, first = np.unique(own, return_index=True)
                total[distinct] += of_task[2][table].numpy()[places[first]]
            rows[field.name] = total[ids]
        return Outer(loss, weights, rows)

    def _table_of(self, field: str) -> int:
        return next(
            n for n, merged in enumerate(self.collection.merged) if field in [f.name for f in merged.features]
        )

    def step(self, number: int) -> None:
        """See `Form`."""
        found = [self._of_task(task) for task in self.batches[self.case.batch(number)]]
        _, dense, rows, keys, _ = zip(*found, strict=True)
        self._apply(list(dense), list(rows), list(keys))
        next(iter(self.weights.values())).numpy()
