"""CBML: each task begins from decision weights that its cluster of tasks makes of the shared ones.

Song et al., "CBML: A Cluster-based Meta-learning Model for Session-based Recommendation" (CIKM 2021), whose
clusters and gate are those of HSML: Yao et al., "Hierarchically Structured Meta-learning" (ICML 2019),
"Hierarchical Task Clustering" and "Knowledge Adaptation".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.models.meta.learner.adaptive_network import AdaptiveNetwork, inputs_by_name
from gmeta.models.meta.learner.task_view import TaskView
from gmeta.models.meta.meta_model import MetaModel
from gmeta.models.zoo.task_clusters import ParameterGate, SelfAttention, SoftClusters, aspect_columns
from gmeta.optimizers import SparseOptimizer


@tf.keras.saving.register_keras_serializable("gmeta")
class CBML(MetaModel):
    r"""A `MetaModel` whose tasks don't all start alike.

    From a task's support samples, of which each is its embeddings and its label y,

    .. math:: e = [\mathrm{attention}_{items}(S); \mathrm{attention}_{features}(S)], \quad
       p_k \propto \exp\left(-\|e - c_k\|^2 / 2 \sigma^2\right), \quad
       h = \sum_k p_k \tanh(W_k e + b_k), \quad
       \theta_0 = \theta \circ \sigma(W_g [e; h] + b_g)

    and from :math:`\theta_0` the task takes its inner steps, with :math:`\theta` the network's weights that
    adapt. The outer loop trains the attention blocks, centres and gates along with :math:`\theta` and the
    embeddings, through the inner steps. See `gmeta.models.zoo.task_clusters` for the parts.

    The two attention blocks, over items and over their features, the soft clusters and the parameter gate are
    CBML's; p, h and the gate are HSML's equations with one level of clusters. It differs from CBML in that a
    task is a support set with labels, such as a user's ratings, and not a session of clicks: the blocks see
    labels and no positions, and the decision network scores a sample in place of ranking all items. Gates
    start open, at 0.88.

    Args:
      collection: The embeddings; their vectors, side by side, are what the network gets.
      network: As for `MetaModel`, but it takes no inputs by name.
      items: The features of the first attention block, such as the item's id; the second has all others.
      clusters: How many clusters.
      dim: Width of each attention block.
      scale: :math:`\sigma`, in units of the root of e's width.
      seed: Of the initial weights of what isn't the network.
      **options: As for `MetaModel`.

    Raises:
      ConfigError: ``items`` names features that aren't there, none, or all; the network takes its inputs by
        name; a sample has several labels; or the inner loop is Reptile, which doesn't differentiate what a
        task starts from.

    Example:
      >>> model = CBML(
      ...     EmbeddingCollection([FeatureConfig("item", 8), FeatureConfig("year", 4)]),
      ...     MLP({"fc": 16, "out": 1}),
      ...     items=["item"],
      ...     clusters=4,
      ... )
      >>> model.compile("adam", "mse", metrics=["mae"], inner=meta.InnerLoop(steps=1, learning_rate=0.01))
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        network: AdaptiveNetwork | tf.keras.layers.Layer,
        *,
        items: Sequence[str],
        clusters: int = 8,
        dim: int = 32,
        scale: float = 1.0,
        seed: int = 0,
        name: str = "cbml",
        **options: Any,
    ) -> None:
        widths = [(feature.name, feature.dim) for feature in collection.features]
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
        super().__init__(collection, network, name=name, **options)
        self._settings = {
            "items": list(items),
            "clusters": clusters,
            "dim": dim,
            "scale": scale,
            "seed": seed,
        }
        self._columns = [
            aspect_columns(widths, items),
            aspect_columns(widths, [name for name in names if name not in items]),
        ]
        full = tf.keras.backend.floatx()  # under mixed precision too: what tasks start from isn't rounded
        self.attention = [
            SelfAttention(dim, seed=2 * seed + number, name=f"{aspect}_attention", dtype=full)
            for number, aspect in enumerate(("item", "feature"))
        ]
        self.soft_clusters = SoftClusters(clusters, scale, seed=seed, dtype=full)
        self.gate = ParameterGate(seed=seed, dtype=full)
        for block, columns in zip(self.attention, self._columns, strict=True):
            block(tf.zeros([1, 1, len(columns) + 1]), tf.ones([1, 1]))
        self.soft_clusters(tf.zeros([1, 2 * dim]))
        self._build_gate()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `MetaModel.compile`."""
        super().compile(*args, **kwargs)
        self._build_gate()  # for weights that another inner loop adapts

    def _build_gate(self) -> None:
        if self.inner.algorithm == "reptile":
            raise ConfigError(
                "CBML learns what tasks start from, which Reptile doesn't differentiate: choose maml, "
                "fomaml, anil, boil or meta-sgd"
            )
        self.gate.build_for(self.adapted_weights(), 4 * self.attention[0].dim)

    def task_embeddings(self, view: TaskView) -> tf.Tensor:
        """(tasks, 2 dim): e, out of the tasks' support samples."""
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
        """(tasks, clusters): p, how much each task belongs to each cluster."""
        return self.soft_clusters(self.task_embeddings(view))[0]

    def start_weights(self, view: TaskView) -> dict[str, tf.Tensor]:
        """What tasks start from, (tasks, ...): the shared weights through the tasks' gates."""
        e = self.task_embeddings(view)
        _, h = self.soft_clusters(e)
        return self.gate(tf.concat([e, h], axis=-1), super().start_weights(view))

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this model again, as JSON can hold them."""
        return {**super().get_config(), **self._settings}


def cbml(
    features: Sequence[FeatureConfig],
    *,
    items: Sequence[str],
    hidden: Sequence[int] = (64, 64),
    clusters: int = 8,
    dim: int = 32,
    scale: float = 1.0,
    inner: meta.InnerLoop | None = None,
    outer_samples: Literal["query", "all"] = "query",
    optimizer: SparseOptimizer | None = None,
    seed: int = 0,
) -> CBML:
    """`CBML` with decision layers ``fc1``, ``fc2``, …, ``linear_out``, all of them gated and adapted.

    Args:
      features: The features.
      items: See `CBML`.
      hidden: Units of the hidden decision layers.
      clusters: See `CBML`.
      dim: See `CBML`.
      scale: See `CBML`.
      inner: The inner loop.
      outer_samples: See `MetaModel`.
      optimizer: The tables' sparse optimizer; they follow the Keras optimizer where it isn't said.
      seed: Of the initial weights and rows.
    """
    units = {f"fc{number}": width for number, width in enumerate(hidden, 1)}
    return CBML(
        EmbeddingCollection(features, optimizer=optimizer, seed=seed),
        MLP({**units, "linear_out": 1}, seed=seed, name="decision"),
        items=items,
        clusters=clusters,
        dim=dim,
        scale=scale,
        inner=inner,
        outer_samples=outer_samples,
        seed=seed,
    )
