"""CBML: each task starts from shared decision weights that its clusters have modulated.

Song et al., "CBML: A Cluster-based Meta-learning Model for Session-based Recommendation" (CIKM 2021). Its
clusters and gate are those of HSML: Yao et al., "Hierarchically Structured Meta-learning" (ICML 2019),
"Hierarchical Task Clustering" and "Knowledge Adaptation".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from gmeta import meta
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.models.meta.learner.adaptive_network import AdaptiveNetwork
from gmeta.models.meta.learner.task_learner import OuterSamples
from gmeta.models.meta.meta_model import MetaModel
from gmeta.models.zoo.cluster_learner import ClusterLearner
from gmeta.optimizers import SparseOptimizer


@tf.keras.saving.register_keras_serializable("gmeta")
class CBML(MetaModel):
    r"""A `MetaModel` in which each task has its own start weights.

    A task's start weights come from its support samples S; a sample is its embeddings and its label y:

    .. math:: e = [\mathrm{attention}_{items}(S); \mathrm{attention}_{features}(S)], \quad
       p_k \propto \exp\left(-\|e - c_k\|^2 / 2 \sigma^2\right), \quad
       h = \sum_k p_k \tanh(W_k e + b_k), \quad
       \theta_0 = \theta \circ \sigma(W_g [e; h] + b_g)

    The task takes its inner steps from :math:`\theta_0`; :math:`\theta` are the network's weights that adapt.
    The outer loop trains the attention blocks, centres and gates along with :math:`\theta` and the
    embeddings, through the inner steps. See `gmeta.models.zoo.task_clusters` for the parts.

    The two attention blocks, over items and over their features, the soft clusters and the parameter gate are
    CBML's; p, h and the gate are HSML's equations with one level of clusters. This model differs from CBML:
    a task is a support set with labels, such as a user's ratings, and not a session of clicks. The blocks see
    labels and no positions, and the decision network scores single samples instead of ranking all items.
    Gates start open, at 0.88.

    Args:
      collection: The embeddings; the network gets their vectors side by side.
      network: As for `MetaModel`, but it can't take inputs by name.
      items: The features of the first attention block, such as the item's id; the second block gets the
        others.
      clusters: The number of clusters.
      dim: Width of each attention block.
      scale: :math:`\sigma`, in units of the square root of e's width.
      seed: The seed of the initial weights outside the network.
      **options: As for `MetaModel`.

    Raises:
      ConfigError: ``items`` names unknown features, no feature, or all features; the network takes its inputs
        by name; a sample has several labels; or the inner loop is Reptile, which doesn't differentiate a
        task's start weights.

    Example:
      >>> model = CBML(
      ...     EmbeddingCollection([FeatureConfig("item", dim=8), FeatureConfig("year", dim=4)]),
      ...     MLP({"fc": 16, "out": 1}),
      ...     items=["item"],
      ...     clusters=4,
      ... )
      >>> model.compile("adam", "mse", metrics=["mae"], inner=meta.InnerLoop(steps=1, learning_rate=0.01))
    """

    learner: ClusterLearner

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
        settings: dict[str, Any] = {
            "items": list(items),
            "clusters": clusters,
            "dim": dim,
            "scale": scale,
            "seed": seed,
        }
        learner = partial(ClusterLearner, **settings)
        super().__init__(collection, network, learner=learner, name=name, **options)
        self._settings, parts = settings, self.learner
        self.attention, self.soft_clusters, self.gate = parts.attention, parts.soft_clusters, parts.gate

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this model, in a form that JSON can hold."""
        config = super().get_config()
        del config["learner"]
        return {**config, **self._settings}


def cbml(
    features: Sequence[FeatureConfig],
    *,
    items: Sequence[str],
    hidden: Sequence[int] = (64, 64),
    clusters: int = 8,
    dim: int = 32,
    scale: float = 1.0,
    inner: meta.InnerLoop | None = None,
    outer_samples: OuterSamples = "query",
    optimizer: SparseOptimizer | None = None,
    seed: int = 0,
) -> CBML:
    """Make a `CBML` with decision layers ``fc1``, ``fc2``, …, ``linear_out``, all gated and adapted.

    Args:
      features: The features.
      items: See `CBML`.
      hidden: Units of the hidden decision layers.
      clusters: See `CBML`.
      dim: See `CBML`.
      scale: See `CBML`.
      inner: The inner loop.
      outer_samples: See `MetaModel`.
      optimizer: The tables' sparse optimizer. None: tables follow the Keras optimizer.
      seed: The seed of the initial weights and rows.
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
