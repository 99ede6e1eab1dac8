"""A network that takes one feature's row as a weight, with one row per task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.models.zoo.task_clusters import aspect_columns

GENERATED = "generated/row"
"""The name of the row among the adapted weights."""


class RowNetwork(tf.keras.layers.Layer):
    """A frozen network that reads one vector of a feature for all samples of a task.

    The vector is the only weight that a task may adapt, so `gmeta.models.MetaModel` treats it like any other
    weight. It is 0 if none is passed.

    Args:
      network: The network; see `gmeta.models.meta.learner.adaptive_network.AdaptiveNetwork`.
      widths: The features' names and widths, in the order of their vectors.
      feature: The feature whose vectors are replaced.
      by_name: Whether the network takes {feature: vectors}.

    Shapes:
      (tasks, samples, sum of widths) -> (tasks, samples, outputs).
    """

    def __init__(self, network: Any, widths: Sequence[tuple[str, int]], feature: str, by_name: bool) -> None:
        super().__init__(name=f"{network.name}_of_rows", dtype=tf.keras.backend.floatx())
        self.network, self._widths, self._feature, self._by_name = network, tuple(widths), feature, by_name
        self.row = self.add_weight("row", [dict(widths)[feature]], initializer="zeros", trainable=False)

    def task_weights(self) -> dict[str, tf.Variable]:
        """Return only the row."""
        return {GENERATED: self.row}

    def fast_weights(self) -> dict[str, tf.Variable]:
        """Return only the row."""
        return self.task_weights()

    def call(
        self, x: tf.Tensor, weights: Mapping[str, tf.Tensor] | None = None, training: bool | None = None
    ) -> tf.Tensor:
        """Run the network.

        Args:
          x: (tasks, samples, sum of widths): all features' vectors side by side.
          weights: The row, (dim,) for all tasks or (tasks, dim).
          training: Has no effect: the network is trained already.
        """
        row = tf.cast((weights or {}).get(GENERATED, self.row), x.dtype)
        vectors = {
            name: tf.gather(x, aspect_columns(self._widths, [name]), axis=-1) for name, _ in self._widths
        }
        own = row[:, tf.newaxis] if row.shape.rank == 2 else row
        vectors[self._feature] = tf.broadcast_to(own, tf.shape(vectors[self._feature]))
        if self._by_name:
            return self.network(vectors, training=False)
        return self.network(tf.concat(list(vectors.values()), axis=-1), training=False)
