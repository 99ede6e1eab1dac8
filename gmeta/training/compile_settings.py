"""Handles arguments of `compile`: refuses settings that tables can't support, creates metrics by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.graph import lift_variables
from gmeta.core.keras import refuse_keras_3, submodules
from gmeta.training.mean_gradients import Gradient


def check_compile(
    model: Any, optimizer: Any, loss: Any, args: Sequence[Any], settings: Mapping[str, Any]
) -> None:
    """Refuse arguments of `compile` that a model or its tables can't support.

    Args:
      model: The `gmeta.models.Model` that is compiled.
      optimizer: The argument of `compile`.
      loss: The argument of `compile`.
      args: Its other positional arguments, which are Keras'.
      settings: Its other named arguments, Keras' and gmeta's.

    Raises:
      ConfigError: A launcher's rank hasn't called `gmeta.init`; an argument is among the model's
        ``refused_settings``; or the settings request accumulation of fewer than one batch, or several
        replicas in one process.
      KerasError: As `check_keras`.
    """
    check_keras(model, optimizer, loss, args, settings)
    collectives.check_init()
    names = inspect.signature(tf.keras.Model.compile).bind_partial(model, optimizer, loss, *args).arguments
    refuse_settings(model, {**names, **settings})
    whole_number("accumulate_steps", settings["accumulate_steps"], least=1)
    check_shard_optimizer(settings["shard_optimizer"], tf.keras.optimizers.get(optimizer))
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ConfigError(
            f"{type(model.distribute_strategy).__name__} has {replicas} replicas in one process, and "
            "tables serve one: use tf.distribute's default strategy, a process for each device"
        )


def check_shard_optimizer(shard: Any, optimizer: Any) -> None:
    """Check the argument ``shard_optimizer`` of `compile`.

    Args:
      shard: The argument.
      optimizer: The Keras optimizer.

    Raises:
      ConfigError: It isn't a bool; or it is true, and the optimizer's state can't be divided among ranks.
    """
    if not isinstance(shard, bool):
        raise ConfigError(f"shard_optimizer takes True or False, got {shard!r}")
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if shard and not hasattr(inner, "build"):
        raise ConfigError(
            f"shard_optimizer takes a tf.keras.optimizers.Optimizer, got the legacy {type(inner).__name__}: "
            "take one without legacy in its module, or leave shard_optimizer out"
        )
    if shard and inner.use_ema:
        raise ConfigError(
            f"shard_optimizer and use_ema: {type(inner).__name__} would replace all weights by their moving "
            "averages, of which a rank has only some: leave one of the two out"
        )


def check_keras(model: tf.keras.Model, *given: Any) -> None:
    """Refuse Keras 3 objects: arguments of `compile`, and attributes of the model or of its layers.

    An optimizer of Keras 2 can't train the weights of an attribute that is a layer of Keras 3.

    Args:
      model: The model that is compiled.
      *given: The arguments of `compile`.

    Raises:
      KerasError: One of them is of Keras 3.
    """
    refuse_keras_3(f"{model.name}: compile", *given)
    for part in (model, *submodules(model)):
        for name, value in vars(part).items():
            if name.startswith("_self_"):  # Keras' own lists of the other attributes
                continue
            refuse_keras_3(f"{getattr(part, 'name', type(part).__name__)}.{name}", value)


def refuse_settings(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse arguments of `compile` that are among a model's ``refused_settings``.

    Args:
      model: The `gmeta.models.Model` that is compiled.
      given: Argument -> its value; None or False if it wasn't given.

    Raises:
      ConfigError: One of the arguments was given.
    """
    for name, instead in model.refused_settings.items():
        value = given.get(name)
        if value is not None and value is not False:
            raise ConfigError(f"{model.name}: compile takes no {name}, got {value!r}: {instead}")


def make_metrics(container: Any, y_true: Any, y_pred: Any) -> None:
    """Create the metrics that `compile` received by name, as Keras does when it first updates them.

    Args:
      container: A compiled model's ``compiled_metrics``; None if it has none.
      y_true: The labels that the metrics receive.
      y_pred: The model's outputs.
    """
    if container is not None and not container.built:
        with lift_variables():
            container.build(y_pred, container._conform_to_outputs(y_pred, y_true))


def only_columns(model: str, data: Any) -> Any:
    """Return the columns of a batch, which must have no labels or sample weights beside them.

    Args:
      model: The name of a model that finds its labels among a batch's columns.
      data: A batch, as Keras passes it to ``train_step``.

    Raises:
      ConfigError: The batch has labels or sample weights beside the columns, which the model would ignore.
    """
    x, y, weights = tf.keras.utils.unpack_x_y_sample_weight(data)
    for given, what in ((y, "labels (y)"), (weights, "sample weights")):
        if given is not None:
            raise ConfigError(
                f"{model}: a batch is a dict of columns, what is learnt among them, and {what} beside it "
                "have no use: leave them out"
            )
    return x


# Refuses an overridden train step that would ignore arguments of `compile`.

Function = Callable[[Any], Any]


class OwnStep:
    """Checks that a model's train step calls that of `gmeta.models.Model`, which applies some settings.

    Args:
      model: The model.
      settings: Arguments of `compile` -> their values. A train step may ignore those that are 1 or False.
    """

    def __init__(self, model: Any, settings: Mapping[str, int]) -> None:
        self._model = model
        self._settings = {name: value for name, value in settings.items() if value is True or value > 1}
        self._noted = not self._settings

    def note(self, *obeyed: str) -> None:
        """Note that a train step applies some settings; without names, all of them."""
        for name in obeyed:
            self._settings.pop(name, None)
        self._noted = not obeyed or not self._settings

    def watch(self, function: Function) -> Function:
        """Return a train function that checks the train step when it is traced, before it has any effect."""
        return function if self._noted else lambda iterator: self._call(function, iterator)

    def _call(self, function: Function, iterator: Any) -> Any:
        model = self._model
        if self._noted or "train_step" in vars(model):  # another step replaces it for this call
            return function(iterator)
        step = model.train_step

        def train_step(data: Any) -> Any:
            logs = step(data)
            self._check()
            return logs

        model.train_step = train_step
        try:
            return function(iterator)
        finally:
            del model.train_step

    def _check(self) -> None:
        if self._noted:
            return
        self._model.train_function = None  # TensorFlow would go on with the traced part
        told = ", ".join(f"{name}={value}" for name, value in self._settings.items())
        raise ConfigError(
            f"{self._model.name}: compile received {told}, and {type(self._model).__name__}.train_step "
            "ignores it, because it doesn't call super().train_step(data): call it, and override "
            "compute_gradients(data) or learn(data) instead; or leave these settings out"
        )


# Applies the loss scaling of a Keras optimizer, which ``mixed_float16`` needs.


class LossScale:
    """The loss scaling of a ``LossScaleOptimizer``: scales losses and unscales gradients.

    With any other optimizer it changes nothing.

    Args:
      optimizer: A Keras optimizer. None: no scaling.
    """

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizer = optimizer if hasattr(optimizer, "get_scaled_loss") else None

    @property
    def skips_bad_steps(self) -> bool:
        """Whether the optimizer skips steps whose gradients aren't finite."""
        return self._optimizer is not None and self._optimizer.dynamic

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Scale the loss before differentiation; call this inside the tape."""
        return loss if self._optimizer is None else self._optimizer.get_scaled_loss(loss)

    def unscale(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Compute the gradients of the loss from those of the scaled loss."""
        if self._optimizer is None:
            return list(gradients)
        return self._optimizer.get_unscaled_gradients(gradients)
