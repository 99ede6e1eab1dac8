"""The learner of `MetaGRM`: users are tasks, and the heads of a `GRM` adapt to them.

All exposures of a user are targets of one sequence, so the trunk, which is nearly all of the work, is
computed once. The inner steps change only experts, gates and towers, with the trunk's outputs as inputs.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta import meta
from gmeta.core.arguments import finite_number, whole_number
from gmeta.core.errors import ConfigError
from gmeta.layers import CollectionLookup, MMoE, TaskHeads, product_logits
from gmeta.losses import product_cross_entropy
from gmeta.models.meta.learner.task_learner import TaskLearner
from gmeta.models.meta.learner.task_view import TaskBatch, TaskView
from gmeta.models.sequence.grm_model import GRM
from gmeta.ops import Jagged, jagged


class ExposureHeads(tf.keras.layers.Layer):
    """The last layers of a `GRM` as one network: (samples, dim) -> (samples, towers), logits.

    Args:
      mixture: The experts.
      heads: The towers; products of their probabilities are computed from the logits elsewhere.
    """

    def __init__(self, mixture: MMoE, heads: TaskHeads, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mixture, self.heads = mixture, heads

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Compute the logits."""
        logits = self.heads(self.mixture(x))
        return tf.stack([logits[task] for task in self.heads.tasks], axis=-1)


class ExposureLearner(TaskLearner):
    """A `TaskLearner` over a `GRM`; `MetaGRM` has the equations.

    Args:
      ranker: As for `MetaGRM`.
      inner: The inner loop.
      query: As for `MetaGRM`.
      name: The model's name.
      **options: As for `TaskLearner`.

    Raises:
      ConfigError: As `MetaGRM`.
    """

    def __init__(
        self,
        ranker: GRM,
        inner: meta.InnerLoop | None = None,
        *,
        query: int | float,
        name: str,
        **options: Any,
    ) -> None:
        if not isinstance(ranker, GRM):
            raise ConfigError(f"{name}: ranker must be a GRM, got {type(ranker).__name__}")
        if ranker.mixture.report is not None or ranker.mixture.balance_loss:
            raise ConfigError(
                f"{name}: the mixture {ranker.mixture.name!r} has metrics or a loss of balance, which can't "
                "be where a graph is mapped over users: make it with report=None and balance_loss=0"
            )
        if ranker.mixture.sparse is True:
            raise ConfigError(
                f"{name}: the mixture {ranker.mixture.name!r} has sparse=True, which can't be where a graph "
                "is mapped over users: make it with sparse='auto'"
            )
        self.query = _check(name, query)
        self.ranker, self.columns = ranker, ranker.columns
        self.labels = list(ranker.labels)
        self._factors = {task: ranker.loss_of.tasks[task] for task in self.labels}
        self._weights_of_labels = dict(ranker.loss_of.weights)
        heads = ExposureHeads(ranker.mixture, ranker.heads, name="exposure_heads")
        heads(tf.zeros([0, ranker.trunk.leave.gamma.shape[-1]]))
        super().__init__(ranker.collection, heads, inner, self.exposure_losses, name=name, **options)

    def _build(self, network: Any) -> None:
        return None  # the heads have their weights, and their input is the trunk's output

    def _adapt_by(self, inner: meta.InnerLoop) -> None:
        """Adapt by another inner loop from now on.

        Raises:
          ConfigError: As in `TaskLearner.use`; or the inner loop adapts rows, or is Reptile or ridge.
        """
        refused = ("reptile", "ridge")
        if isinstance(inner, meta.InnerLoop) and (inner.adapts_embeddings or inner.algorithm in refused):
            raise ConfigError(
                f"{self.name}: embedding rows can't adapt, because the trunk is computed once, before the "
                "heads; Reptile doesn't differentiate the trunk, and ridge needs outputs whose losses don't "
                f"mix. Name layers in adapt, and take another algorithm, in {inner}"
            )
        super()._adapt_by(inner)

    @property
    def layers(self) -> list[tf.keras.layers.Layer]:
        """The layers that hold the shared weights, in a fixed order."""
        return [*super().layers, self.ranker, self.ranker.trunk]

    def tasks_of(self, batch: Any) -> TaskBatch:
        """Make tasks from the users in a batch of the ranker's kind."""
        if "support" in batch:
            return super().tasks_of(batch)
        layout = self.columns.layout(batch)
        exposures = Jagged(tf.range(layout.exposures), layout.targets)
        parts = jagged.split(exposures, self._support_sizes(jagged.lengths(exposures)))
        labels = self.columns.labels(batch, self.ranker.labels)
        return {
            "features": self.ranker.ids(batch),
            "label": tf.stack([labels[task] for task in self.labels], axis=-1),
            "task": batch["task"],
            **{name: _pad(part) for name, part in zip(("support", "query"), parts, strict=True)},
            "layout": layout,
        }

    def view(self, batch: TaskBatch, lookup: CollectionLookup, training: bool = False) -> TaskView:
        """Arrange the batch, with the trunk's outputs for the exposures as the network's inputs."""
        vectors = self.collection.embed(lookup)
        exposures = self.ranker.trunk(vectors, batch["layout"], training=training)
        return super().view(batch, lookup, training).with_samples(exposures)

    def exposure_losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """Compute the weighted sum of each exposure's losses: (..., labels) and (..., towers) -> (...)."""
        by_tower = self._by_tower(logits)
        losses = []
        for number, (task, factors) in enumerate(self._factors.items()):
            of_label = product_cross_entropy(labels[..., number], [by_tower[tower] for tower in factors])
            losses.append(self._weights_of_labels[task] * of_label)
        return tf.add_n(losses)

    def by_label(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """Compute the labels' logits from the towers' logits: (..., towers) -> label -> (...)."""
        by_tower = self._by_tower(logits)
        return {
            task: product_logits(*(by_tower[tower] for tower in factors))
            for task, factors in self._factors.items()
        }

    def by_task(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """Compute the ranker's logits from the towers' logits: (..., towers) -> task or product -> (...)."""
        by_tower = self._by_tower(logits)
        products = self.ranker.heads.products.items()
        made = {name: product_logits(*(by_tower[task] for task in factors)) for name, factors in products}
        return {**by_tower, **made}

    def _by_tower(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        return dict(zip(self.ranker.heads.tasks, tf.unstack(logits, axis=-1), strict=True))

    def _support_sizes(self, lengths: tf.Tensor) -> tf.Tensor:
        if isinstance(self.query, int):
            return tf.maximum(lengths - self.query, 0)
        nearest = tf.cast(tf.floor(tf.cast(lengths, tf.float64) * self.query + 0.5), tf.int64)
        return lengths - tf.clip_by_value(nearest, tf.minimum(lengths, 1), tf.maximum(lengths - 1, 1))


def _check(name: str, query: Any) -> int | float:
    if isinstance(query, float):
        if not 0 < finite_number(f"{name}: query", query) < 1:
            raise ConfigError(f"{name}: query must be a share above 0 and below 1, or a number, got {query}")
        return query
    return whole_number(f"{name}: query", query, least=1)


def _pad(part: Jagged) -> dict[str, tf.Tensor]:
    """Return the indices of exposures, (users, most), and a mask that is 0 for padding."""
    index = jagged.to_padded(part)
    mask = tf.sequence_mask(jagged.lengths(part), tf.shape(index)[1], tf.float32)
    return {"index": index, "mask": mask}
