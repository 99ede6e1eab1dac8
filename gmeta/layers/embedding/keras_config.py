"""Converts gmeta's settings (frozen dataclasses) to JSON-compatible configs of Keras layers, and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import tensorflow as tf

from gmeta import initializers, optimizers, policies
from gmeta.core.errors import ConfigError
from gmeta.layers.embedding.feature_config import FeatureConfig
from gmeta.layers.embedding.table_config import TableConfig
from gmeta.ops import attention_inputs
from gmeta.ops.device import VARIABLE, asked_place
from gmeta.policies import admission, eviction, storage

_KIND = "kind"
_SCHEDULE = "keras_schedule"


def to_config(value: Any) -> Any:
    """Convert a setting to a dict of its class's name and fields; numbers, strings and None stay as they are.

    Raises:
      ConfigError: The setting holds something that JSON can't, such as a function.
    """
    if is_dataclass(value) and not isinstance(value, type):
        written = {f.name: to_config(getattr(value, f.name)) for f in fields(value)}
        return {_KIND: type(value).__name__, **written}
    if isinstance(value, tf.keras.optimizers.schedules.LearningRateSchedule):
        return {_SCHEDULE: tf.keras.optimizers.schedules.serialize(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [to_config(each) for each in value]
    raise ConfigError(
        f"{value!r} can't be written into a layer's config; for a learning rate use a number, None, or a "
        "tf.keras.optimizers.schedules.LearningRateSchedule"
    )


def from_config(config: Any) -> Any:
    """Recreate the setting from what `to_config` returned.

    Raises:
      ConfigError: The config names a class that isn't one of gmeta's settings.
    """
    if isinstance(config, list):
        return [from_config(each) for each in config]
    if not isinstance(config, dict):
        return config
    if _SCHEDULE in config:
        return tf.keras.optimizers.schedules.deserialize(config[_SCHEDULE])
    kind = config.get(_KIND)
    given = {name: from_config(value) for name, value in config.items() if name != _KIND}
    if kind == FeatureConfig.__name__ and "pooling" in given:
        return _feature_of_old(given)
    modules = (optimizers, admission, eviction, storage, initializers, attention_inputs)
    found = [getattr(module, str(kind)) for module in modules if hasattr(module, str(kind))]
    own = {each.__name__: each for each in (FeatureConfig, TableConfig)}
    made = own[kind] if kind in own else found[0] if found else None
    if not (isinstance(made, type) and is_dataclass(made)):
        raise ConfigError(f"a layer's config names {kind!r}, which isn't a setting that gmeta knows")
    return made(**given)


def tiers_of(config: Mapping[str, Any]) -> policies.Tiers | None:
    """Read the tiers of a collection's config; earlier versions wrote ``device_rows`` in their place."""
    tiers: policies.Tiers | None = from_config(config.get("tiers"))
    rows = config.get("device_rows")
    if tiers is None and rows is not None and config.get("device") != "cpu":
        return policies.Tiers(hbm_rows=rows)
    return tiers


def tiers_here(config: Mapping[str, Any]) -> policies.Tiers | None:
    """Return the tiers that a collection's tables can have in this process.

    Those of a GPU can't be where the config's device is host memory here, which a warning says.
    """
    tiers, name = tiers_of(config), config.get("name", "embeddings")
    if tiers is None or tiers.hbm_rows is None:
        return tiers
    if asked_place(config.get("device", "auto"), f"{name!r}") == "gpu":
        return tiers
    here = tiers.without_gpu()
    warnings.warn(
        f"{name!r} was saved with {tiers}, for tables on a GPU. Its tables are in host memory now, with "
        f"{'all rows' if here is None else here}; {VARIABLE}=gpu puts them on a GPU",
        stacklevel=3,
    )
    return here


def _feature_of_old(given: dict[str, Any]) -> FeatureConfig:
    """Read a feature's config from before tables had configs of their own."""
    of_table = ("dim", "initializer", "admission", "eviction", "precision")
    name = given["table"] or given["name"]
    table = TableConfig(name, **{key: given[key] for key in of_table if key in given})
    kept = {key: given[key] for key in ("max_length", "hash") if key in given}
    return FeatureConfig(given["name"], table, given["pooling"], **kept)
