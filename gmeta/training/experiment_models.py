"""The models that an experiment can name, and how they are compiled.

A model is a function from (experiment, method, features, seed) to a `MetaModel`; `MODELS` has them by the
name that a method's ``model`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import FeatureConfig
from gmeta.models import MetaModel, melu, melu_features
from gmeta.models.melu_features import published_features
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
        features, hidden=config.hidden, inner=method.inner, outer_samples=method.outer_samples, seed=seed
    )


MODELS: Mapping[str, Build] = {"melu": _melu}
"""What a method's ``model`` names."""


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
