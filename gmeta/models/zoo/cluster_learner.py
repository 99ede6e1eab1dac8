"""The learner of `CBML`, whose tasks start from shared weights that their clusters have modulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection
from gmeta.models.meta.learner.adaptive_network import inputs_by_name
from gmeta.models.meta.learner.task_learner import TaskLearner
from gmeta.models.meta.learner.task_view import TaskView
from gmeta.models.zoo.task_clusters import ParameterGate, SelfAttention, SoftClusters, aspect_columns


class ClusterLearner(TaskLearner):
    """A `TaskLearner` whose tasks have their own start weights; `CBML` has the equations.

    Args:
      collection: As for `CBML`.
      network: As for `CBML`.
      inner: The inner loop.
      items: As for `CBML`.
      clusters: As for `CBML`.
      dim: As for `CBML`.
      scale: As for `CBML`.
      seed: As for `CBML`.
      **options: As for `TaskLearner`.

    Raises:
      ConfigError: As `CBML`.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        network: Any,
        inner: meta.InnerLoop | None = None,
        *,
        items: Sequence[str],
        clusters: int,
        dim: int,
        scale: float,
        seed: int,
        **options: Any,
    ) -> None:
        widths = [(feature.name, feature.width) for feature in collection.in_order("CBML")]
        names = [name for name, _ in widths]
        if not set(items) <= set(names) or not 0 < len(set(items)) < len(names):
            raise ConfigError(
                f"CBML: items must name some of the features {', '.join(names)}, and leave others for the "
                f"second attention block, got {list(items)!r}"
            )
        if clusters < 1 or dim < 1:
            raise ConfigError(f"CBML: clusters={clusters} and dim={dim} must be at least 1")
        if inputs_by_name(network, collection) is not None:
            raise ConfigError("CBML: the network must take all vectors side by side, not inputs by name")
        self._columns = [
            aspect_columns(widths, items),
            aspect_columns(widths, [name for name in names if name not in items]),
        ]
        full = tf.keras.backend.floatx()  # under mixed precision too, so start weights aren't rounded
        self.attention = [
            SelfAttention(dim, seed=2 * seed + number, name=f"{aspect}_attention", dtype=full)
            for number, aspect in enumerate(("item", "feature"))
        ]
        self.soft_clusters = SoftClusters(clusters, scale, seed=seed, dtype=full)
        self.gate = ParameterGate(seed=seed, dtype=full)
        for block, columns in zip(self.attention, self._columns, strict=True):
            block(tf.zeros([1, 1, len(columns) + 1]), tf.ones([1, 1]))
        self.soft_clusters(tf.zeros([1, 2 * dim]))
        super().__init__(collection, network, inner, **options)

    def _adapt_by(self, inner: meta.InnerLoop) -> None:
        """Adapt by another inner loop from now on; newly adapted weights get gates.

        Raises:
          ConfigError: As in `TaskLearner.use`; or the algorithm is Reptile.
        """
        super()._adapt_by(inner)
        if inner.algorithm == "reptile":
            raise ConfigError(
                "CBML learns what tasks start from, which Reptile doesn't differentiate: choose maml, "
                "fomaml, anil, boil or meta-sgd"
            )
        self.gate.build_for(self.adapted_weights(), 4 * self.attention[0].dim)

    @property
    def layers(self) -> list[tf.keras.layers.Layer]:
        """The layers that hold the shared weights, in a fixed order."""
        return [*super().layers, *self.attention, self.soft_clusters, self.gate]

    def task_embeddings(self, view: TaskView) -> tf.Tensor:
        """Compute e from the tasks' support samples, (tasks, 2 dim)."""
        labels = view.labels("support")
        if labels.shape.rank != 2:
            raise ConfigError(f"CBML: a sample must have one label, got labels of shape {labels.shape}")
        vectors, mask = view.inputs("support"), view.mask("support")
        labels = tf.cast(labels, vectors.dtype)[..., tf.newaxis]
        return tf.concat(
            [
                block(tf.concat([tf.gather(vectors, columns, axis=-1), labels], axis=-1), mask)
                for block, columns in zip(self.attention, self._columns, strict=True)
            ],
            axis=-1,
        )

    def assignments(self, view: TaskView) -> tf.Tensor:
        """Compute p, how much each task belongs to each cluster, (tasks, clusters)."""
        return self.soft_clusters(self.task_embeddings(view))[0]

    def start_weights(self, view: TaskView) -> dict[str, tf.Tensor]:
        """Compute the start weights of tasks, (tasks, ...): the shared weights times the tasks' gates."""
        e = self.task_embeddings(view)
        _, h = self.soft_clusters(e)
        return self.gate(tf.concat([e, h], axis=-1), super().start_weights(view))
