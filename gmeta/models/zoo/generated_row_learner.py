"""Tasks that start from generated rows: the learner of `MetaEmb`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection
from gmeta.models.meta.learner.checks import check_inner
from gmeta.models.meta.learner.task_learner import OuterLoss, TaskLearner
from gmeta.models.meta.learner.task_view import TaskView
from gmeta.models.zoo.row_network import GENERATED, RowNetwork
from gmeta.models.zoo.task_clusters import aspect_columns


class GeneratedRowLearner(TaskLearner):
    """A `TaskLearner` whose tasks adapt one generated row each; `MetaEmb` has the equations.

    Args:
      collection: The base's embeddings.
      network: The base's network, wrapped so that it takes the row.
      inner: The inner loop.
      widths: (feature, dim) for all features.
      attributes: The features that rows are generated from.
      generator: As for `MetaEmb`.
      cold_weight: As for `MetaEmb`.
      **options: As for `TaskLearner`.

    Raises:
      ConfigError: The inner loop adapts something other than the row.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        network: RowNetwork,
        inner: meta.InnerLoop | None = None,
        *,
        widths: Sequence[tuple[str, int]],
        attributes: Sequence[str],
        generator: Any,
        cold_weight: float,
        **options: Any,
    ) -> None:
        super().__init__(collection, network, inner, **options)
        self.attributes, self.generator = list(attributes), generator
        self._widths, self._cold_weight = list(widths), cold_weight
        generator(tf.zeros([1, sum(dim for name, dim in widths if name in attributes)]))

    def _adapt_by(self, inner: meta.InnerLoop) -> None:
        """Adapt by another inner loop from now on.

        Raises:
          ConfigError: The inner loop adapts something other than the row.
        """
        check_inner(inner)
        if inner.algorithm not in ("maml", "fomaml", "meta-sgd") or inner.adapt:
            raise ConfigError(
                "MetaEmb: a task adapts its generated row alone, by maml, fomaml or meta-sgd: leave adapt "
                f"out of {inner}"
            )
        super()._adapt_by(inner)

    @property
    def layers(self) -> list[tf.keras.layers.Layer]:
        """The layers that hold the shared weights, in a fixed order."""
        return [*super().layers, self.generator]

    def generate(self, features: Mapping[str, Any]) -> tf.Tensor:
        """Generate rows for ids from their attributes.

        Args:
          features: Attribute -> its ids for n items, as in a batch of samples.

        Returns:
          (n, dim).
        """
        first = features[self.attributes[0]]
        samples = first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]
        nothing = tf.zeros([samples], tf.int64)
        ids = {name: features[name] if name in self.attributes else nothing for name, _ in self._widths}
        vectors = self.collection.embed(self.collection.lookup(ids, insert=False))
        return self.generator(tf.concat([vectors[name] for name in self.attributes], axis=-1))

    def start_weights(self, view: TaskView) -> dict[str, tf.Tensor]:
        """Generate the tasks' rows, (tasks, dim)."""
        first = tf.argmax(tf.cast(view.mask("all") > 0, tf.int32), axis=1)
        vectors = tf.gather(view.inputs("all"), first, axis=1, batch_dims=1)
        columns = [column for name in self.attributes for column in aspect_columns(self._widths, [name])]
        return {GENERATED: self.generator(tf.gather(vectors, columns, axis=-1))}

    def outer_loss(self, view: TaskView, weights: Mapping[str, tf.Tensor]) -> OuterLoss:
        """Compute the mean over tasks of the weighted sum of cold support loss and warm query loss."""
        warm = self.task_outputs(view, "query", weights)
        mask = view.mask("query")
        losses = self._cold_weight * self.support_loss(view, self.start_weights(view)) + (
            1 - self._cold_weight
        ) * self.mean_losses(view, "query", warm)
        real = tf.cast(tf.reduce_any(mask > 0, axis=1), losses.dtype)
        loss = tf.math.divide_no_nan(tf.reduce_sum(losses * real), tf.reduce_sum(real))
        return OuterLoss(loss, "query", warm)
