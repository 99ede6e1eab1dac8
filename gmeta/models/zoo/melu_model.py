"""MeLU: cold-start recommendation by adapting the decision layers to a user.

Lee et al., "MeLU: Meta-Learned User Preference Estimator for Cold-Start Recommendation" (KDD 2019),
section 3.2: categorical attributes of user and item are embedded, two hidden layers and an output layer
decide, and the inner loop adapts those layers to a user's few ratings while the embeddings stay.

Where this differs: the output has no activation (ratings are regressed), the embeddings are rows of dynamic
hash tables and start N(0, 1), and all tasks of a step adapt in one graph.
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
    """MovieLens' attributes: of the item its year and genres, of the user gender, age, occupation, area.

    Args:
      dim: Width of every embedding; equal widths make them one physical table.
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
    """MeLU as a `MetaModel`: decision layers ``fc1``, ``fc2``, …, ``linear_out``, all of them adapted.

    Args:
      features: The attributes; `melu_features` where it isn't said.
      hidden: Units of the hidden layers.
      inner: The inner loop.
      outer_samples: See `MetaModel`.
      optimizer: The tables' sparse optimizer; they follow the Keras optimizer where it isn't said.
      seed: Of the initial weights and rows.

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
