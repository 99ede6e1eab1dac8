"""The models that an experiment can name, and how they are compiled.

A model is a function from (experiment, method, features, seed) to a `MetaModel`; `MODELS` has them by the
name that a method's ``model`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import FeatureConfig
from gmeta.models import MetaModel, cbml, dlrm, melu, melu_features
from gmeta.models.melu_features import published_features
from gmeta.ops.initializers import Normal
from gmeta.ops.optimizers import Adam, SparseOptimizer
from gmeta.training.experiment_config import ExperimentConfig
from gmeta.training.method_config import MethodConfig
from gmeta.training.rated_at_least import RatedAtLeast, RatedAtLeastAUC

Build = Callable[[ExperimentConfig, MethodConfig, Sequence[FeatureConfig], int], MetaModel]
FEATURES: Mapping[str, Callable[[int], Sequence[FeatureConfig]]] = {
    "movielens": melu_features,
    "melu": published_features,
}
"""What an experiment's ``features`` names -> the columns, of a given width."""


def _melu(
    config: ExperimentConfig, method: MethodConfig, features: Sequence[FeatureConfig], seed: int
) -> MetaModel:
    return melu(
        features,
        hidden=config.hidden,
        inner=method.inner,
        outer_samples=method.outer_samples,
        optimizer=_row_optimizer(method),
        seed=seed,
    )


def _cbml(
    config: ExperimentConfig, method: MethodConfig, features: Sequence[FeatureConfig], seed: int
) -> MetaModel:
    """The first attention block reads the item's attributes, the second the user's."""
    return cbml(
        features,
        items=[feature.name for feature in features if feature.name not in _OF_USERS],
        hidden=config.hidden,
        inner=method.inner,
        outer_samples=method.outer_samples,
        optimizer=_row_optimizer(method),
        seed=seed,
    )


def _dlrm(
    config: ExperimentConfig, method: MethodConfig, features: Sequence[FeatureConfig], seed: int
) -> MetaModel:
    """Rows start N(0, 1/dim), so that their products start as large as their entries would be at N(0, 1)."""
    start = Normal(0.0, config.embedding_dim**-0.5)
    return dlrm(
        [replace(feature, initializer=start) for feature in features],
        top=config.hidden,
        head="rating",  # any number: a rating, or the logit that the other loss takes
        inner=method.inner,
        outer_samples=method.outer_samples,
        optimizer=_row_optimizer(method),
        seed=seed,
    )


MODELS: Mapping[str, Build] = {"melu": _melu, "cbml": _cbml, "dlrm": _dlrm}
"""What a method's ``model`` names."""


def _row_optimizer(method: MethodConfig) -> SparseOptimizer | None:
    """None follows the Keras optimizer's rate."""
    return None if method.row_learning_rate is None else Adam(learning_rate=method.row_learning_rate)


_OF_USERS = ("gender", "age", "occupation", "area", "zipcode")


def build_model(config: ExperimentConfig, method: str, seed: int) -> MetaModel:
    """The compiled model of a method at its initial weights.

    Raises:
      ConfigError: The method names a model that there isn't.
    """
    settings = config.methods[method]
    if settings.model not in MODELS:
        raise ConfigError(f"method {method!r}: no model {settings.model!r}; there are {', '.join(MODELS)}")
    features = FEATURES[config.features](config.embedding_dim)
    model = MODELS[settings.model](config, settings, features, seed)
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
