"""Prepares ranks to train together: checks that their settings agree, and gives them the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.keras import submodules
from gmeta.layers import EmbeddingCollection
from gmeta.layers.embedding.table_weights import tables_of

ADVICE = "run the same script with the same settings on every rank, and load weights on every rank"


def start_together(model: tf.keras.Model, element_spec: Any, batch: Any, loop: Mapping[str, Any]) -> None:
    """Refuse to train different models, then give all ranks the dense weights and optimizer state of rank 0.

    All ranks must call this together. The rows of tables aren't sent, because they are functions of seed and
    key.

    Args:
      model: The compiled model. If it has no weights yet, it is called on ``batch`` to create them.
      element_spec: The data's element specification.
      batch: A batch of the data, which may have no samples.
      loop: The arguments of `fit` that must be the same on all ranks, name -> value.

    Raises:
      ConfigError: Ranks differ; the message says which ranks and in what.
    """
    collectives.check_agreement(
        {**settings_of(model), **{name: repr(value) for name, value in loop.items()}}, advice=ADVICE
    )
    collectives.check_agreement({"form of the data": _form(element_spec)}, advice=ADVICE)
    if model.built:
        model.merge_moving_averages()  # of steps outside of fit; else only rank 0's would count
    make_variables(model, batch)
    collectives.gather_states(model)
    state = model.optimizer.variables
    state = state() if callable(state) else state
    variables = list({id(v): v for v in [*model.variables, *state]}.values())
    collectives.broadcast_variables([v for v in variables if _travels(v)])


def make_variables(model: tf.keras.Model, batch: Any) -> None:
    """Make the variables of a compiled model and of its optimizer that its first step would make.

    Args:
      model: If it has no weights yet, it is called on ``batch`` to create them.
      batch: A batch of the data, which may have no samples.
    """
    if not model.built:
        x, _, _ = tf.keras.utils.unpack_x_y_sample_weight(batch)
        model(x, training=False)
    if hasattr(model.optimizer, "build"):
        model.optimizer.build(model.trainable_variables)


def settings_of(model: tf.keras.Model) -> dict[str, str]:
    """Return the settings that must be the same on all ranks: name -> value, as text."""
    settings = {f"{model.name}'s compile settings": _text(_compile_config(model))}
    for table in tables_of(model):  # weights that only some ranks have loaded
        settings[f"the step of table {table.name!r}"] = str(int(table.step()))
    for layer in submodules(model):
        if isinstance(layer, EmbeddingCollection):
            for name, value in layer.get_config().items():
                settings[f"{layer.name}'s {name}"] = _text(value)
    return settings


def _compile_config(model: tf.keras.Model) -> Any:
    try:
        return model.get_compile_config()
    except Exception:  # settings that Keras can't serialize, such as a user's own loss
        return type(model.optimizer).__name__


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)


def _form(spec: Any) -> str:
    """Describe an element's parts by name and type. Their sizes are left out, as they may differ."""
    parts = [
        f"{type(part).__name__} {getattr(part, 'dtype', None)} rank {part.shape.rank}"
        for part in tf.nest.flatten(spec)
    ]
    return f"{tf.nest.map_structure(lambda _: 0, spec)} of {parts}"


def _travels(variable: tf.Variable) -> bool:
    return variable.dtype != tf.string and variable.dtype != tf.resource
