"""A factor model that adapts to a user in closed form: the recipe for cold start.

Items have ids and attributes, users have attributes and a few ratings. All learned weights have Gaussian
priors, and ridge regression solves for a user's head from the ratings.

`ScaledNumbers` scales number columns and labels inside a network. The scales are part of the network, so an
exported model takes and returns numbers as they are in the data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.layers.embedding.feature_config import Combiner
from gmeta.layers.embedding.pooling import EntityVector
from gmeta.meta import HeadPrior, InnerLoop
from gmeta.models.meta.meta_model import MetaModel
from gmeta.optimizers import Adam, LearningRate, RowPrior

# A factor model's network: items are vectors, and a user's ratings are linear in these vectors.

_HEAD, _CENTRE, _FLOATS = "head/kernel", "item/centre", "item/floats"


@tf.keras.saving.register_keras_serializable("gmeta")
class FactorNetwork(tf.keras.layers.Layer):
    r"""The network of `factor_ridge` after the embeddings, with one head or one for each task.

    An item's vector :math:`(b, l, f)` is a centre plus `EntityVector`, plus a learned vector times each
    float: a bias, a loading of the user's bias, and ``dim`` factors. A user's vector u, the sum of the
    user's attributes, and the head h see its features:

    .. math:: \hat y = \mu + s \left(b + \phi^T (u + h)\right), \quad \phi = (1 + l,\ f)

    Tasks adapt h, ``head/kernel``; what the outer loop learns is the head of a user without ratings.

    Args:
      item: The feature of the item's id; None: items have only attributes.
      attributes: The features of the item's attributes; all of the item are ``dim + 2`` wide.
      user: The features of the user's attributes, ``dim + 1`` wide.
      floats: Float columns of the item, one number per sample.
      dim: The number of factors.
      mean: :math:`\mu`, the prediction for an average item.
      deviation: s, the unit of labels.
      dropout: See `EntityVector`.
      seed: The seed of dropout.

    Shapes:
      {feature: (..., samples, width), column: (..., samples)} -> (..., samples, 1).

    Example:
      >>> network = FactorNetwork("film", ["genre"], ["age"], dim=2, mean=3.6)
      >>> vectors = {"film": tf.zeros([5, 7, 4]), "genre": tf.zeros([5, 7, 4]), "age": tf.zeros([5, 7, 3])}
      >>> network(vectors).shape
      TensorShape([5, 7, 1])
    """

    def __init__(
        self,
        item: str | None,
        attributes: Sequence[str] = (),
        user: Sequence[str] = (),
        *,
        floats: Sequence[str] = (),
        dim: int = 8,
        mean: float = 0.0,
        deviation: float = 1.0,
        dropout: float = 0.2,
        seed: int = 0,
        name: str = "factor_network",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.vector = EntityVector(item, attributes, dropout=dropout, seed=seed, name="item")
        self.user, self.floats, self.seed = tuple(user), tuple(floats), seed
        self.dim = whole_number(f"{name}: dim", dim, least=1)
        self.mean, self.deviation = float(mean), float(deviation)
        self._weights_of = {
            _CENTRE: self.add_weight(_CENTRE, [dim + 2], initializer="zeros"),
            **({_FLOATS: self._of_floats(len(floats), dim + 2, seed)} if floats else {}),
            _HEAD: self.add_weight(_HEAD, [dim + 1, 1], initializer="zeros"),
        }
        self.built = True

    def _of_floats(self, columns: int, width: int, seed: int) -> tf.Variable:
        start = tf.keras.initializers.RandomNormal(stddev=0.05, seed=seed)
        return self.add_weight(_FLOATS, [columns, width], initializer=start)

    @property
    def takes_by_name(self) -> list[str]:
        """The features and columns that the network takes by name; see `AdaptiveNetwork`."""
        return [*self.vector.names, *self.user, *self.floats]

    def task_weights(self) -> dict[str, tf.Variable]:
        """Return the items' centre, the floats' vectors and the head."""
        return dict(self._weights_of)

    def fast_weights(self) -> dict[str, tf.Variable]:
        """Return the head."""
        return {_HEAD: self._weights_of[_HEAD]}

    def call(
        self,
        x: Mapping[str, tf.Tensor],
        weights: Mapping[str, tf.Tensor] | None = None,
        training: bool | None = None,
    ) -> tf.Tensor:
        """Run the network.

        Args:
          x: Vectors and floats, by name.
          weights: Replacements by name, of the variable's shape or with a leading task dimension.
          training: Whether to drop items' own rows.
        """
        used = {**self._weights_of, **(weights or {})}
        centre = used[_CENTRE]
        if centre.shape.rank > 1:  # one for each task
            centre = centre[:, tf.newaxis]
        item = self.vector(x, training=training) + centre
        if self.floats:
            item += tf.matmul(tf.stack([x[name] for name in self.floats], axis=-1), used[_FLOATS])
        features = tf.concat([1.0 + item[..., 1:2], item[..., 2:]], axis=-1)
        answer = item[..., :1] + tf.matmul(features, used[_HEAD])
        if self.user:
            user = tf.add_n([x[name] for name in self.user])
            answer += tf.reduce_sum(features * user, axis=-1, keepdims=True)
        return self.mean + self.deviation * answer

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {
            **super().get_config(),
            "item": self.vector.own,
            "attributes": list(self.vector.attributes),
            "user": list(self.user),
            "floats": list(self.floats),
            "dropout": self.vector.drop.rate,
            **{name: getattr(self, name) for name in ("dim", "mean", "deviation", "seed")},
        }


@dataclass(frozen=True)
class FactorSettings:
    """The size of a factor model and the prior variances of its rows, in the square of the labels' unit.

    The defaults were chosen on warm users of MovieLens-100K and -1M that training had left out.

    Attributes:
      dim: The number of factors.
      dropout: The probability that training leaves out a sample's own row, if items have attributes, so that
        these learn to predict alone. If they have none, no row is left out.
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
    random in training, so that attributes describe new items (`gmeta.layers.embedding.pooling.EntityVector`).
    With u, the sum of the user's attributes' rows:

    .. math:: \hat y = \mu + s \left(b_i + (1 + l_i,\ f_i)^T (u + h)\right)

    From a user's ratings, ridge regression finds the head h, with a mean, variances and a noise that the
    outer loop learns (``InnerLoop("ridge")``). Rows have Gaussian priors (`gmeta.optimizers.RowPrior`) and
    take Adam's steps.

    Train it with a new split into support and query in each epoch, and most rows in the query
    (``gmeta.io.tasks(query=0.7, resample=True)``), with Adam at a rate of 5e-3 that rises and falls
    (`gmeta.optimizers.OneCycle`), for 20 to 40 epochs.

    Args:
      item: The column of the item's id; None: items have only attributes.
      attributes: Columns with one attribute of the item per sample.
      lists: Columns with any number of them; or such columns -> how they are pooled, ``"sqrtn"`` if not
        given.
      user: Columns with one attribute of the user per sample.
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
    # The ratio of the loss to the negative log-likelihood.
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


FARTHEST = 5.0
"""The number of deviations from the mean at which numbers are clipped. Without the clipping, a price with a
misplaced decimal point could move a weight a hundred times as far as other prices do."""


@tf.keras.saving.register_keras_serializable("gmeta")
class ScaledNumbers(tf.keras.layers.Layer):
    r"""A network whose inputs are features' vectors and numbers scaled by :math:`(x - \mu) / \sigma`.

    Scaled numbers are clipped to -5 and 5. A number that isn't finite counts as the mean.

    Args:
      network: A `gmeta.layers.MLP`, which gets vectors and numbers side by side, or a network that
        takes columns by name (``takes_by_name``), such as `gmeta.models.zoo.dlrm_model.DLRMNetwork`.
      features: The names of the features.
      widths: The width of each feature's vectors.
      scales: Column -> (mean, deviation).
      answer: (mean, deviation) of the labels: outputs y become :math:`\mu + \sigma y`. None: outputs stay y.

    Shapes:
      {feature: (..., samples, width), column: (..., samples)} -> the network's outputs.

    Example:
      >>> from gmeta.layers import MLP
      >>> network = ScaledNumbers(MLP({"out": 1}), ["item"], [4], {"price": (10.0, 2.0)})
      >>> network({"item": tf.zeros([2, 3, 4]), "price": tf.fill([2, 3], 12.0)}).shape
      TensorShape([2, 3, 1])
    """

    def __init__(
        self,
        network: tf.keras.layers.Layer,
        features: Sequence[str],
        widths: Sequence[int],
        scales: Mapping[str, Sequence[float]],
        answer: Sequence[float] | None = None,
        name: str = "scaled_numbers",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.network = network
        self._features, self._widths = tuple(features), tuple(widths)
        self._scales = {name: (float(mean), float(deviation)) for name, (mean, deviation) in scales.items()}
        self._answer = (0.0, 1.0) if answer is None else (float(answer[0]), float(answer[1]))
        vectors = {name: tf.zeros([1, 1, width]) for name, width in zip(features, widths, strict=True)}
        self({**vectors, **{name: tf.zeros([1, 1]) for name in self._scales}})  # creates the weights

    @property
    def takes_by_name(self) -> list[str]:
        """The features and columns that the network takes by name; see `AdaptiveNetwork`."""
        return [*self._features, *self._scales]

    def task_weights(self) -> dict[str, tf.Variable]:
        """Return the task weights of the inner network."""
        return dict(self.network.task_weights())

    def fast_weights(self) -> dict[str, tf.Variable]:
        """Return the fast weights of the inner network."""
        return dict(self.network.fast_weights())

    def call(
        self,
        x: Mapping[str, tf.Tensor],
        weights: Mapping[str, tf.Tensor] | None = None,
        training: bool | None = None,
    ) -> tf.Tensor:
        """Run the network.

        Args:
          x: Vectors and numbers, by name.
          weights: Weights by name, as the inner network takes them.
          training: As in Keras.
        """
        numbers = {name: _scale(x[name], *scale) for name, scale in self._scales.items()}
        vectors = {name: x[name] for name in self._features}
        if hasattr(self.network, "takes_by_name"):
            given: Any = {**vectors, **numbers}
        else:
            columns = [number[..., tf.newaxis] for number in numbers.values()]
            given = tf.concat([*vectors.values(), *columns], axis=-1)
        mean, deviation = self._answer
        return mean + deviation * self.network(given, weights, training=training)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {
            **super().get_config(),
            "network": tf.keras.saving.serialize_keras_object(self.network),
            "features": list(self._features),
            "widths": list(self._widths),
            "scales": {name: list(scale) for name, scale in self._scales.items()},
            "answer": list(self._answer),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ScaledNumbers:
        """Create the layer that a config from `get_config` describes."""
        return cls(**{**config, "network": tf.keras.saving.deserialize_keras_object(config["network"])})


def _scale(x: tf.Tensor, mean: float, deviation: float) -> tf.Tensor:
    finite = tf.where(tf.math.is_finite(x), x, np.float32(mean))
    return tf.clip_by_value((finite - mean) / deviation, -FARTHEST, FARTHEST)
