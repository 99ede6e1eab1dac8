"""The models that an experiment can name, and how they are compiled.

A model is a function from (experiment, features, options) to a `MetaModel`, where the options are those that
every model takes; `MODELS` has them by the name that a method's ``model`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import FeatureConfig
from gmeta.models import MetaModel, cbml, dlrm, melu, melu_features
from gmeta.models.melu_features import published_features
from gmeta.ops.initializers import Normal
from gmeta.ops.optimizers import Adam
from gmeta.training.experiment_config import ExperimentConfig
from gmeta.training.method_config import MethodConfig
from gmeta.training.rated_at_least import RatedAtLeast, RatedAtLeastAUC

Options = dict[str, Any]
Build = Callable[[ExperimentConfig, Sequence[FeatureConfig], Options], MetaModel]
FEATURES: Mapping[str, Callable[[int], Sequence[FeatureConfig]]] = {
    "movielens": melu_features,
    "melu": published_features,
}
"""What an experiment's ``features`` names -> the columns, of a given width."""


def _melu(config: ExperimentConfig, features: Sequence[FeatureConfig], options: Options) -> MetaModel:
    return melu(features, hidden=config.hidden, **options)


def _cbml(config: ExperimentConfig, features: Sequence[FeatureConfig], options: Options) -> MetaModel:
    """The first attention block reads the item's attributes, the second the user's."""
    items = [feature.name for feature in features if feature.name not in _OF_USERS]
    return cbml(features, items=items, hidden=config.hidden, **options)


def _dlrm(config: ExperimentConfig, features: Sequence[FeatureConfig], options: Options) -> MetaModel:
    """Rows start N(0, 1/dim), so that their products start as large as their entries would be at N(0, 1)."""
    start = Normal(0.0, config.embedding_dim**-0.5)
    return dlrm(
        [replace(feature, initializer=start) for feature in features],
        top=config.hidden,
        head="rating",  # any number: a rating, or the logit that the other loss takes
        **options,
    )


MODELS: Mapping[str, Build] = {"melu": _melu, "cbml": _cbml, "dlrm": _dlrm}
"""What a method's ``model`` names."""


def _options(method: MethodConfig, seed: int) -> Options:
    """What every model takes. Without an optimizer of their own, rows follow the Keras optimizer."""
    own_rate = method.row_learning_rate
    return {
        "inner": method.inner,
        "outer_samples": method.outer_samples,
        "optimizer": None if own_rate is None else Adam(learning_rate=own_rate),
        "seed": seed,
    }


_OF_USERS = ("gender", "age", "occupation", "area", "zipcode")


def experiment_features(config: ExperimentConfig) -> Sequence[FeatureConfig]:
    """The columns that an experiment embeds."""
    return FEATURES[config.features](config.embedding_dim)


def build_model(config: ExperimentConfig, method: str, seed: int) -> MetaModel:
    """The compiled model of a method at its initial weights.

    Raises:
      ConfigError: The method names a model that there isn't, or has an inner loop that isn't for it.
    """
    settings = config.methods[method]
    if settings.model not in MODELS:
        raise ConfigError(f"method {method!r}: no model {settings.model!r}; there are {', '.join(MODELS)}")
    features = experiment_features(config)
    try:
        model = MODELS[settings.model](config, features, _options(settings, seed))
    except ConfigError as error:
        raise ConfigError(f"method {method!r}: {error}") from error
    regresses = config.loss == "mse"
    metric = tf.keras.metrics.MeanAbsoluteError("mae") if regresses else RatedAtLeastAUC(config.positive)
    model.compile(
        optimizer=tf.keras.optimizers.Adam(settings.learning_rate),
        loss="mse" if regresses else RatedAtLeast(config.positive),
        metrics=[metric],
    )
    # A checkpoint restores the optimizer's moments into variables that exist, so they have to exist now.
    model.optimizer.build(model.trainable_variables)
    return model
