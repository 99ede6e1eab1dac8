"""Converts Keras' initializers to gmeta's, for those that have an equal one there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers.distributions import Constant, Initializer, Normal, TruncatedNormal, Uniform, Zeros

_EQUALS: dict[str, Callable[[Mapping[str, Any]], Initializer]] = {
    "Zeros": lambda config: Zeros(),
    "Ones": lambda config: Constant(1.0),
    "Constant": lambda config: Constant(float(config["value"])),
    "RandomUniform": lambda config: Uniform(float(config["minval"]), float(config["maxval"])),
    "RandomNormal": lambda config: Normal(float(config["mean"]), float(config["stddev"])),
    "TruncatedNormal": lambda config: TruncatedNormal(float(config["mean"]), float(config["stddev"])),
}


def table_initializer(given: Any, owner: str) -> Initializer:
    """Convert the row initializer that a user gave to one of gmeta's.

    Args:
      given: One of `gmeta.initializers`, one of ``tf.keras.initializers``, or the name of one of these.
      owner: The feature or table that it belongs to, for messages.

    Raises:
      ConfigError: gmeta has no equal initializer, or the given one has a seed of its own.

    Example:
      >>> table_initializer("uniform", "feature 'user'")
      Uniform(low=-0.05, high=0.05)
    """
    if isinstance(given, Initializer):
        return given
    ours = "give one of gmeta.initializers: Uniform, Normal, TruncatedNormal, Constant or Zeros"
    try:
        found = tf.keras.initializers.get(given) if isinstance(given, str) else given
    except ValueError:
        found = None
    make = _EQUALS.get(type(found).__name__) if isinstance(found, tf.keras.initializers.Initializer) else None
    if make is None:
        raise ConfigError(f"{owner}: rows can't start from initializer={given!r}: {ours}")
    config = found.get_config()
    if config.get("seed") is not None:
        raise ConfigError(
            f"{owner}: the seed of initializer={type(found).__name__}(seed={config['seed']}) isn't a row's: "
            "leave it out, and give EmbeddingCollection(seed=...)"
        )
    try:
        return make(config)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{owner}: initializer={type(found).__name__}({config}) isn't of single numbers: {ours}"
        ) from error
