"""A factor model that adapts to a user in closed form: the recipe for cold start.

Items have ids and attributes, users have attributes and a few ratings. All that is learnt has a Gaussian
prior, and what a user's ratings say is solved for by ridge regression.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gmeta.core.errors import ConfigError
from gmeta.initializers.distributions import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.layers.embedding.feature_config import Combiner
from gmeta.meta import HeadPrior, InnerLoop
from gmeta.models.meta.meta_model import MetaModel
from gmeta.models.zoo.factor_network import FactorNetwork
from gmeta.models.zoo.scaled_numbers import ScaledNumbers
from gmeta.optimizers import Adam, LearningRate, RowPrior


@dataclass(frozen=True)
class FactorSettings:
    """The size of a factor model and the prior variances of its rows, in the square of the labels' unit.

    The defaults were chosen on warm users of MovieLens-100K and -1M that training had left out.

    Attributes:
      dim: The number of factors.
      dropout: The probability that training leaves out a sample's own row, if items have attributes, which
        then speak for it. If they have none, no row is left out.
      noise: The variance of labels that no model explains, for a squared error under an inner loop that
        doesn't learn it (``HeadPrior(likelihood=False)``). 0.5 for a logistic loss and for any other that is
        a negative log-likelihood.
      own_bias: The prior variance of the bias in an item's own row.
      own_factors: That of its loading and factors.
      bias: That of the bias in the row of an item's attribute.
      factors: That of this row's loading and factors.
      user: That of the row of a user's attribute.
    """

    dim: int = 8
    dropout: float = 0.4
    noise: float = 0.8
    own_bias: float = 0.3
    own_factors: float = 0.01
    bias: float = 0.003
    factors: float = 0.001
    user: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"FactorSettings: dropout must lie in [0, 1), got {self.dropout!r}")


_DEFAULTS = FactorSettings()

FACTOR_LOOP = InnerLoop("ridge", prior=HeadPrior(variance=1.0, pace=0.2, likelihood=True))
"""The inner loop of `factor_ridge`."""


def factor_ridge(
    item: str | None,
    attributes: Sequence[str] = (),
    lists: Sequence[str] | Mapping[str, Combiner] = (),
    user: Sequence[str] = (),
    *,
    samples: int,
    floats: Mapping[str, Sequence[float]] | None = None,
    mean: float = 0.0,
    deviation: float = 1.0,
    settings: FactorSettings = _DEFAULTS,
    hash: bool | Collection[str] = False,
    inner: InnerLoop | None = None,
    outer_samples: Literal["query", "all"] = "query",
    learning_rate: LearningRate = None,
    seed: int = 0,
    name: str = "factor_ridge",
) -> MetaModel:
    r"""Make a factor model that adapts by ridge regression, as a `MetaModel`.

    An item's vector :math:`(b_i, l_i, f_i)` is its own row plus its attributes' rows. Own rows are dropped at
    random in training, so that attributes speak for new items (`gmeta.layers.EntityVector`). With u, the sum
    of the user's attributes' rows:

    .. math:: \hat y = \mu + s \left(b_i + (1 + l_i,\ f_i)^T (u + h)\right)

    From a user's ratings, ridge regression finds the head h, with a mean, variances and a noise that the
    outer loop learns (``InnerLoop("ridge")``). Rows have Gaussian priors (`gmeta.optimizers.RowPrior`) and
    take Adam's steps.

    Train it with support and query cut anew in each epoch, and most rows in the query
    (``gmeta.io.tasks(query=0.7, resample=True)``), with Adam at a rate of 5e-3 that rises and falls
    (`gmeta.callbacks.OneCycle`), for 20 to 40 epochs.

    Args:
      item: The column of the item's id; None: items have only attributes.
      attributes: Columns with one attribute of the item a sample.
      lists: Columns with any number of them; or such columns -> how they are pooled, ``"sqrtn"`` if not
        given.
      user: Columns with one attribute of the user a sample.
      samples: The number of labels in the training data; the more there are, the less priors weigh.
      floats: Float columns of the item -> (mean, deviation).
      mean: :math:`\mu`, the mean label of the training data; for a logistic loss, its logit.
      deviation: s, the labels' unit.
      settings: Sizes and priors.
      hash: Whether ids are texts or any 64-bit numbers (see `gmeta.layers.FeatureConfig`), or in which
        columns.
      inner: Another inner loop than `FACTOR_LOOP`: ridge, whose prior starts at 1 and moves slowly.
      outer_samples: See `MetaModel`.
      learning_rate: The rows' rate; None: they follow the Keras optimizer's.
      seed: The seed of the initial weights and rows, and of what is dropped.
      name: The model's name.

    Raises:
      ConfigError: No column of items is named, a column is named twice, or a number is out of its range.

    Example:
      >>> model = factor_ridge("film", ["year"], ["genre"], ["age"], samples=100_000, mean=3.6)
      >>> model.compile("adam", "mse", metrics=["mae"])
      >>> list(model.learner.adapted_weights())
      ['head/kernel']
    """
    floats = floats or {}
    pooled: dict[str, Combiner | None] = dict.fromkeys([*([] if item is None else [item]), *attributes])
    pooled |= lists if isinstance(lists, Mapping) else dict.fromkeys(lists, "sqrtn")
    named = [*([] if item is None else [item]), *attributes, *lists, *user, *floats]
    twice = sorted({each for each in named if named.count(each) > 1})
    if twice:
        raise ConfigError(
            f"{name}: {', '.join(twice)} has two roles among item, attributes, lists, user and floats"
        )
    unknown = sorted(set(hash) - set(named)) if not isinstance(hash, bool) else []
    if unknown:
        raise ConfigError(f"{name}: hash names {', '.join(unknown)}, which aren't columns of the model")

    inner = inner or FACTOR_LOOP
    # The loss is so many times the negative log-likelihood.
    unit = 1.0 if inner.learns_variance else 2 * settings.noise * deviation**2

    def feature(column: str, spread: float, variance: Sequence[float]) -> FeatureConfig:
        prior = RowPrior(tuple(variance), samples, unit)
        start, steps = Normal(0.0, spread), Adam(learning_rate, prior=prior)
        table = TableConfig(column, len(variance), start, optimizer=steps)
        hashed = hash if isinstance(hash, bool) else column in hash
        return FeatureConfig(column, table, pooled.get(column), hash=hashed)

    own = [settings.own_bias, *[settings.own_factors] * (settings.dim + 1)]
    shared = [settings.bias, *[settings.factors] * (settings.dim + 1)]
    features = [
        *(feature(each, *((0.01, own) if each == item else (0.01, shared))) for each in pooled),
        *(feature(each, 0.01, [settings.user] * (settings.dim + 1)) for each in user),
    ]
    others = [each for each in pooled if each != item]
    network = FactorNetwork(
        item,
        others,
        user,
        floats=list(floats),
        dim=settings.dim,
        mean=mean,
        deviation=deviation,
        dropout=settings.dropout if others or floats else 0.0,
        seed=seed,
    )
    names, widths = [each.name for each in features], [each.width for each in features]
    return MetaModel(
        EmbeddingCollection(features, seed=seed),
        ScaledNumbers(network, names, widths, floats) if floats else network,
        inner=inner,
        outer_samples=outer_samples,
        name=name,
    )
