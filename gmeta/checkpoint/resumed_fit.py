"""Continues `fit` from a checkpoint: first the rest of a begun epoch, then the epochs after it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.data.position import uncounted
from gmeta.core.errors import ConfigError

Stages: TypeAlias = tuple[tuple[int, int], ...]
"""Steps of an epoch: (ranks, steps), for each number of ranks in turn."""

Data: TypeAlias = (
    tf.data.Dataset | Callable[[int], tf.data.Dataset] | Callable[[int, Stages], tf.data.Dataset]
)
"""Batches of an epoch; or a function that returns the batches of an epoch, given its number counted from 0,
and of the epochs after it; or such a function of that number and of the epoch's steps that are done."""


class EpochProgress(Protocol):
    """Progress in a begun epoch, as `ShardedCheckpoint` records it."""

    @property
    def batches_of_epoch(self) -> int:
        """Number of the epoch's batches that are done."""
        ...

    @property
    def stages_of_epoch(self) -> Stages:
        """Number of the epoch's steps that are done, for each number of ranks in turn."""
        ...

    @property
    def results_before(self) -> Mapping[str, float]:
        """Values of the metrics over those batches."""
        ...

    def rest_of_epoch(self, data: tf.data.Dataset) -> tf.data.Dataset:
        """Skip the steps that are done."""
        ...

    def goes_on(self, data: tf.data.Dataset) -> tf.data.Dataset:
        """Accept data that begin after those steps."""
        ...


def fit_on(
    checkpoints: EpochProgress,
    model: tf.keras.Model,
    data: Data,
    first: int,
    *,
    epochs: int,
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
    **options: Any,
) -> tf.keras.callbacks.History:
    """Train a model that `checkpoints` has restored; see `ShardedCheckpoint.fit`.

    Args:
      checkpoints: The callback.
      model: The model.
      data: Its data.
      first: How many epochs are done.
      epochs: How many epochs are to be done in the end.
      callbacks: Other callbacks than `checkpoints`.
      **options: Options of Keras' `fit`.
    """
    for name in ("initial_epoch", "steps_per_epoch"):
        if options.get(name) is not None:
            raise ConfigError(
                f"{name}={options[name]!r}: the checkpoint says where training begins, and an epoch is all "
                "of its data; give data of one epoch, such as data.take(steps)"
            )
    of = _with_stages(data)
    # `checkpoints` comes last: a save may end the process, and the others have ended the epoch by then.
    everyone = [*callbacks, checkpoints]
    history = _no_history()
    if checkpoints.batches_of_epoch:
        stages = checkpoints.stages_of_epoch

        def rest() -> tf.data.Dataset:
            left = of(first, stages)
            return checkpoints.rest_of_epoch(of(first, ())) if left is None else checkpoints.goes_on(left)

        if _has_batches(rest()):
            history = model.fit(
                rest(),
                initial_epoch=first,
                epochs=first + 1,
                callbacks=everyone,
                **options,
            )
        else:
            history = _end_epoch(checkpoints, model, first, everyone, options)
        first += 1
        if model.stop_training:
            return history
    if first < epochs:
        later = model.fit(of(first, ()), initial_epoch=first, epochs=epochs, callbacks=everyone, **options)
        later.epoch = [*history.epoch, *later.epoch]
        later.history = {
            name: [*history.history.get(name, []), *later.history.get(name, [])]
            for name in dict.fromkeys([*history.history, *later.history])
        }
        return later
    return history


def _with_stages(data: Data) -> Callable[[int, Stages], tf.data.Dataset | None]:
    """Return a function that gives an epoch's data without some steps; None if the data can't skip them."""
    if not callable(data):
        return lambda _, stages: None if stages else data
    wanted = [p for p in inspect.signature(data).parameters.values() if p.default is p.empty]
    two = len(wanted) > 1
    given: Callable[..., tf.data.Dataset] = data
    if two:
        return lambda epoch, stages: given(epoch, stages)
    return lambda epoch, stages: None if stages else given(epoch)


def _no_history() -> tf.keras.callbacks.History:
    history = tf.keras.callbacks.History()
    history.epoch = []
    return history


def _has_batches(data: tf.data.Dataset) -> bool:
    """Return whether any rank has batches left: Keras refuses to run an epoch without a batch."""
    known = int(data.cardinality())
    with uncounted(data):
        here = known != 0 if known != tf.data.UNKNOWN_CARDINALITY else any(True for _ in data.take(1))
    return any(collectives.allgather_objects(here))


def _end_epoch(
    checkpoints: EpochProgress,
    model: tf.keras.Model,
    epoch: int,
    callbacks: Sequence[tf.keras.callbacks.Callback],
    options: Mapping[str, Any],
) -> tf.keras.callbacks.History:
    """Do what `fit` does after an epoch's last batch.

    If the data's length is unknown, a checkpoint after the last batch counts as one from the middle of the
    epoch until the epoch has ended. If the process dies in between, the epoch must be ended without a batch.
    """
    logs = dict(checkpoints.results_before)
    validation = options.get("validation_data")
    if validation is not None and model._should_eval(epoch, options.get("validation_freq", 1)):
        x, y, weights = tf.keras.utils.unpack_x_y_sample_weight(validation)
        measured = model.evaluate(
            x,
            y,
            sample_weight=weights,
            batch_size=options.get("validation_batch_size"),
            steps=options.get("validation_steps"),
            verbose=0,
            return_dict=True,
        )
        logs |= {f"val_{name}": value for name, value in measured.items()}
    everyone = tf.keras.callbacks.CallbackList(list(callbacks), add_history=True, model=model)
    model.stop_training = False
    everyone.on_train_begin()
    everyone.on_epoch_begin(epoch)
    everyone.on_epoch_end(epoch, logs)
    everyone.on_train_end(logs)
    return model.history
