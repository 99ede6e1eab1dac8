"""The attributes that MeLU published for MovieLens-1M, with the initial values of their embeddings.

They are from Lee et al. (KDD 2019), section 4.1, and the authors' code. A movie has its rating (G, PG, R,
...), genres, directors and actors; a user has gender, age, occupation and postal code; each is 32 wide. If a
movie has several values of an attribute, their embeddings are averaged.
"""

from __future__ import annotations

import math

from gmeta.initializers.distributions import Normal, Uniform
from gmeta.layers import FeatureConfig, TableConfig

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
