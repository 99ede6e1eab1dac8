"""The models that an experiment can name, and how they are compiled.

`MODELS` maps the name in a method's ``model`` to a function. The function takes (experiment, features,
options) and returns a `MetaModel`; the options are those that every model takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.experiment.plan.experiment_config import FACTORS, ExperimentConfig, FeatureSettings, MethodConfig
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import CBML, MetaModel, dlrm, factor_ridge, melu
from gmeta.models.meta.meta_model import melu_features, published_features
from gmeta.models.zoo.dlrm_model import DLRMNetwork
from gmeta.models.zoo.factor_model import ScaledNumbers
from gmeta.optimizers import Adam

# Loss and AUC for ratings as binary labels: at least a number of stars, or fewer.
#
# The labels stay ratings. So regression and classification can use the same batches, and ranking metrics keep
# their gains.


class RatedAtLeast(tf.keras.losses.Loss):
    r"""Binary cross-entropy of :math:`1[rating \geq r]` and a logit.

    Args:
      rating: r.

    Shapes:
      Ratings (..., 1) and logits (..., 1) -> losses (...).
    """

    def __init__(self, rating: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rating = rating

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Compute the loss of each sample."""
        liked = tf.cast(y_true >= self.rating, y_pred.dtype)
        # A NaN belongs to neither class, so the loss is NaN too.
        liked = tf.where(tf.math.is_nan(tf.cast(y_true, tf.float32)), tf.constant(np.nan, liked.dtype), liked)
        return tf.keras.losses.binary_crossentropy(liked, y_pred, from_logits=True)


class RatedAtLeastAUC(tf.keras.metrics.AUC):
    """Area under the ROC curve of "rated at least ``rating``", from the logits of all samples together.

    It uses Keras' 200 thresholds, and so approximates `gmeta.experiment.results.metrics.auc`, which is exact
    and needs all predictions.

    Args:
      rating: A sample with at least this rating is positive.
    """

    def __init__(self, rating: float, name: str = "auc", **kwargs: Any) -> None:
        super().__init__(name=name, from_logits=True, **kwargs)
        self.rating = rating

    def update_state(self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: Any = None) -> Any:
        """Add a batch of samples to the metric."""
        return super().update_state(tf.cast(y_true >= self.rating, tf.float32), y_pred, sample_weight)


# The squared error in units of the labels' spread, so that one learning rate suits labels of any size.


class ScaledError(tf.keras.losses.Loss):
    r"""Mean of :math:`((y - \hat y) / \sigma)^2` over outputs.

    Args:
      deviation: :math:`\sigma`, the labels' standard deviation.

    Shapes:
      Labels (..., outputs) and predictions (..., outputs) -> losses (...).
    """

    def __init__(self, deviation: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.deviation = deviation

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Compute the loss of each sample."""
        return tf.reduce_mean(tf.square((tf.cast(y_true, y_pred.dtype) - y_pred) / self.deviation), axis=-1)


Options = dict[str, Any]
Build = Callable[[ExperimentConfig, Sequence[FeatureConfig], Options], MetaModel]
FEATURES: Mapping[str, Callable[[int], Sequence[FeatureConfig]]] = {
    "movielens": melu_features,
    "melu": published_features,
    "melu+year": lambda dim: (*published_features(dim), FeatureConfig("year", dim=dim)),
    "melu+year+writer": lambda dim: (
        *published_features(dim),
        FeatureConfig("year", dim=dim),
        FeatureConfig("writer", dim=dim, combiner="mean"),
    ),
}
"""The name in an experiment's ``features`` -> a function from the embedding width to the columns."""


def _melu(config: ExperimentConfig, features: Sequence[FeatureConfig], options: Options) -> MetaModel:
    if not _has_scales(config):
        return melu(features, hidden=config.hidden, **options)
    units = {f"fc{number}": width for number, width in enumerate(config.hidden, 1)}
    stack = MLP({**units, "linear_out": 1}, seed=options["seed"], name="decision")
    return _scale(config, features, stack, options, "melu")


def _cbml(config: ExperimentConfig, features: Sequence[FeatureConfig], options: Options) -> MetaModel:
    """Build CBML: its first attention block reads the item's attributes, the second the user's."""
    if config.own_columns:
        raise ConfigError(
            "cbml needs to know which attributes are items' and which are users', as it does only for "
            "MovieLens: take melu or dlrm"
        )
    items = [feature.name for feature in features if feature.name not in _OF_USERS]
    return CBML.of(features, items=items, hidden=config.hidden, **options)


def _dlrm(config: ExperimentConfig, features: Sequence[FeatureConfig], options: Options) -> MetaModel:
    """Build DLRM with rows from N(0, 1/dim), whose products start as large as entries from N(0, 1)."""
    features = [
        replace(each, table=replace(table, initializer=Normal(0.0, table.dim**-0.5)))
        for each in features
        for table in each.tables
    ]
    top: Options = {"top": config.hidden, "head": "rating"}  # the output is any number: a label, or its logit
    if not _has_scales(config):
        return dlrm(features, **top, **options)
    width, *others = sorted({feature.width for feature in features})
    if others:
        raise ConfigError(f"dlrm takes features of one width, got {[width, *others]}")
    names = [feature.name for feature in features]
    network = DLRMNetwork(names, width, floats=list(config.numbers), seed=options["seed"], **top)
    return _scale(config, features, network, options, "dlrm")


def _has_scales(config: ExperimentConfig) -> bool:
    return bool(config.numbers) or config.label_scale is not None


def _scale(
    config: ExperimentConfig,
    features: Sequence[FeatureConfig],
    network: tf.keras.layers.Layer,
    options: Options,
    name: str,
) -> MetaModel:
    """Build a model whose network also takes columns of numbers, or predicts on the label's scale."""
    answer = config.label_scale
    scaled = ScaledNumbers(
        network,
        [feature.name for feature in features],
        [feature.width for feature in features],
        {column: (scale.mean, scale.deviation) for column, scale in config.numbers.items()},
        answer=None if answer is None else (answer.mean, answer.deviation),
    )
    collection = EmbeddingCollection(features, optimizer=options["optimizer"], seed=options["seed"])
    own = {key: options[key] for key in ("inner", "outer_samples")}
    return MetaModel(collection, scaled, name=name, **own)


def _factor_ridge(config: ExperimentConfig, features: Sequence[FeatureConfig], options: Options) -> MetaModel:
    """Build the factor model: features of the task describe the user, and the others the item."""
    if config.labels is None:
        raise ConfigError(
            "factor_ridge needs labels = { count = ..., mean = ... }, which `gmeta train` reads"
        )
    of_task = task_columns(config)
    _refuse_widths(config)
    scale, count = config.label_scale, config.labels.count
    deviation = 1.0 if scale is None else scale.deviation
    settings, regresses = options["factors"], config.loss == "mse"
    noise = settings.noise / deviation**2 if regresses else 0.5  # `ScaledError` is in the deviation's unit
    mean = config.labels.mean
    if not regresses:
        rate = (mean * count + 0.5) / (count + 1)  # finite, if all labels are alike
        mean = math.log(rate / (1 - rate))
    names = [feature.name for feature in features if feature.name != config.item]
    pooled = {feature.name: feature.combiner for feature in features if feature.combiner is not None}
    if not config.own_columns:
        pooled = dict.fromkeys(pooled, "sqrtn")
    optimizer = options["optimizer"]
    return factor_ridge(
        config.item,
        [name for name in names if name not in pooled and name not in of_task],
        pooled,
        [name for name in names if name in of_task],
        samples=count,
        floats={column: (each.mean, each.deviation) for column, each in config.numbers.items()},
        mean=mean,
        deviation=deviation if regresses else 1.0,
        settings=replace(settings, noise=noise),
        hash=[feature.name for feature in features if feature.hash],
        learning_rate=None if optimizer is None else optimizer.learning_rate,
        **{name: options[name] for name in ("inner", "outer_samples", "seed")},
    )


def _refuse_widths(config: ExperimentConfig) -> None:
    """Refuse settings of columns that the factor model doesn't use."""
    features: Mapping[str, FeatureSettings] = {} if isinstance(config.features, str) else config.features
    for name, given in features.items():
        taken = [each for each in ("dim", "table", "max_length") if getattr(given, each) is not None]
        if taken:
            raise ConfigError(f"features.{name}: factor_ridge takes no {', '.join(taken)}: leave it out")


MODELS: Mapping[str, Build] = {"melu": _melu, "cbml": _cbml, "dlrm": _dlrm, FACTORS: _factor_ridge}
"""The name in a method's ``model`` -> the function that builds the model."""


def _options(method: MethodConfig, seed: int) -> Options:
    """Return the options of every model; without a separate optimizer, rows use the Keras optimizer."""
    own_rate = method.row_learning_rate
    return {
        "inner": method.inner,
        "outer_samples": method.outer_samples,
        "optimizer": None if own_rate is None else Adam(learning_rate=own_rate),
        "seed": seed,
    }


_OF_USERS = ("gender", "age", "occupation", "area", "zipcode")


def task_columns(config: ExperimentConfig) -> Sequence[str]:
    """Return the columns that are known to be the same in all rows of a task."""
    return config.task_columns if config.own_columns else _OF_USERS


def experiment_features(config: ExperimentConfig) -> Sequence[FeatureConfig]:
    """Return the columns that an experiment embeds."""
    if isinstance(config.features, str):
        return FEATURES[config.features](config.embedding_dim)
    return [_feature(name, settings, config) for name, settings in config.features.items()]


def _feature(name: str, settings: FeatureSettings, config: ExperimentConfig) -> FeatureConfig:
    """Build a feature whose rows start small: most ids are rare, and have little effect until trained."""
    return FeatureConfig(
        name,
        TableConfig(settings.table or name, settings.dim or config.embedding_dim),
        combiner=settings.combiner,
        max_length=settings.max_length,
        hash=bool(settings.hash),
    )


def build_model(config: ExperimentConfig, method: str, seed: int) -> MetaModel:
    """Build and compile the model of a method, at its initial weights.

    Raises:
      ConfigError: The method names an unknown model, or the model doesn't support the method's inner loop.
    """
    settings = config.methods[method]
    if settings.model not in MODELS:
        raise ConfigError(f"method {method!r}: no model {settings.model!r}; there are {', '.join(MODELS)}")
    features, options = experiment_features(config), _options(settings, seed)
    if settings.model == FACTORS:
        options["factors"] = settings.factors
    try:
        model = MODELS[settings.model](config, features, options)
    except ConfigError as error:
        raise ConfigError(f"method {method!r}: {error}") from error
    regresses = config.loss == "mse"
    metric = tf.keras.metrics.MeanAbsoluteError("mae") if regresses else RatedAtLeastAUC(config.positive)
    model.compile(
        optimizer=tf.keras.optimizers.Adam(settings.learning_rate),
        loss=_error(config) if regresses else RatedAtLeast(config.positive),
        metrics=[metric],
    )
    # A checkpoint restores the optimizer's moments into existing variables, so they must be built now.
    model.optimizer.build(model.trainable_variables)
    return model


def _error(config: ExperimentConfig) -> Any:
    return "mse" if config.label_scale is None else ScaledError(config.label_scale.deviation)
