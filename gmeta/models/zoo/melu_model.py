"""MeLU: cold-start recommendation by adapting the decision layers to a user.

Lee et al., "MeLU: Meta-Learned User Preference Estimator for Cold-Start Recommendation" (KDD 2019),
section 3.2: the model embeds categorical attributes of user and item, and predicts by two hidden layers and
an output layer. The inner loop adapts those layers, but not the embeddings, to a user's few ratings.

This implementation differs: the output has no activation (ratings are regressed), the embeddings are rows of
dynamic hash tables and start N(0, 1), and all tasks of a step adapt in one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gmeta.initializers.distributions import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models.meta.meta_model import MetaModel
from gmeta.optimizers import SparseOptimizer


def melu_features(dim: int = 32) -> tuple[FeatureConfig, ...]:
    """Return MovieLens' attributes: the item's year and genres; the user's gender, age, occupation and area.

    Args:
      dim: Width of every embedding; because widths are equal, all share one physical table.
    """
    start = Normal(0.0, 1.0)
    return (
        FeatureConfig("year", TableConfig("year", dim, initializer=start)),
        FeatureConfig("genre", TableConfig("genre", dim, initializer=start), combiner="mean"),
        FeatureConfig("gender", TableConfig("gender", dim, initializer=start)),
        FeatureConfig("age", TableConfig("age", dim, initializer=start)),
        FeatureConfig("occupation", TableConfig("occupation", dim, initializer=start)),
        FeatureConfig("area", TableConfig("area", dim, initializer=start)),
    )


def melu(
    features: Sequence[FeatureConfig] | None = None,
    *,
    hidden: Sequence[int] = (64, 64),
    inner: InnerLoop | None = None,
    outer_samples: Literal["query", "all"] = "query",
    optimizer: SparseOptimizer | None = None,
    seed: int = 0,
) -> MetaModel:
    """Make MeLU as a `MetaModel`, with decision layers ``fc1``, ``fc2``, …, ``linear_out``, all adapted.

    Args:
      features: The attributes. None: those of `melu_features`.
      hidden: Units of the hidden layers.
      inner: The inner loop.
      outer_samples: See `MetaModel`.
      optimizer: The tables' sparse optimizer. None: tables follow the Keras optimizer.
      seed: The seed of the initial weights and rows.

    Example:
      >>> model = melu(inner=InnerLoop(steps=1, learning_rate=5e-3))
      >>> sorted(model.network.fast_weights())[:2]
      ['fc1/bias', 'fc1/kernel']
    """
    units = {f"fc{index + 1}": width for index, width in enumerate(hidden)}
    return MetaModel(
        EmbeddingCollection(features or melu_features(), optimizer=optimizer, seed=seed),
        MLP({**units, "linear_out": 1}, seed=seed, name="decision"),
        inner=inner,
        outer_samples=outer_samples,
        name="melu",
    )
