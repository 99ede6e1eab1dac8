"""MeLU: cold-start recommendation by adapting the decision layers to a user.

Lee et al., "MeLU: Meta-Learned User Preference Estimator for Cold-Start Recommendation" (KDD 2019),
section 3.2: the model embeds categorical attributes of user and item, and predicts by two hidden layers and
an output layer. The inner loop adapts those layers, but not the embeddings, to a user's few ratings.

This implementation differs: the output has no activation (ratings are regressed), the embeddings are rows of
dynamic hash tables and start N(0, 1), and all tasks of a step adapt in one graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from gmeta.initializers import Normal, Uniform
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


# The attributes that MeLU published for MovieLens-1M, with the initial values of their embeddings.
#
# They are from Lee et al. (KDD 2019), section 4.1, and the authors' code. A movie has its rating (G, PG, R,
# and so on), genres, directors and actors; a user has gender, age, occupation and postal code; each is 32
# wide. If a movie has several values of an attribute, their embeddings are averaged.

_LIST_SIZES = {"genre": 25, "director": 2186, "actor": 8030}


def published_features(dim: int = 32) -> tuple[FeatureConfig, ...]:
    r"""Return MeLU's attributes of MovieLens-1M, as `gmeta prepare` stores them.

    Embeddings of single attributes start N(0, 1), as PyTorch's embeddings do. Those of lists start
    :math:`U(-1/\sqrt{n}, 1/\sqrt{n})` for n names, because the authors compute them by a linear layer over n
    flags.

    Args:
      dim: Width of every embedding.

    Example:
      >>> [feature.name for feature in published_features()][:4]
      ['rate', 'genre', 'director', 'actor']
    """

    def single(name: str) -> FeatureConfig:
        return FeatureConfig(name, TableConfig(name, dim, initializer=Normal(0.0, 1.0)))

    def several(name: str) -> FeatureConfig:
        limit = 1 / math.sqrt(_LIST_SIZES[name])
        return FeatureConfig(
            name, TableConfig(name, dim, initializer=Uniform(-limit, limit)), combiner="mean"
        )

    users = (single(name) for name in ("gender", "age", "occupation", "zipcode"))
    return (single("rate"), *(several(name) for name in _LIST_SIZES), *users)
