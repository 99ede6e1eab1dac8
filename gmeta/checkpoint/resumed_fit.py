"""`fit` from a checkpoint on: the rest of an epoch that was begun, then the epochs after it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError

Stages: TypeAlias = tuple[tuple[int, int], ...]
"""(ranks, steps) of an epoch, for each number of ranks in turn."""

Data: TypeAlias = (
    tf.data.Dataset | Callable[[int], tf.data.Dataset] | Callable[[int, Stages], tf.data.Dataset]
)
"""Batches of an epoch; or what gives them for an epoch's number, counted from 0, and for those after it; or
for that number and the steps of it that are passed."""


class EpochProgress(Protocol):
    """What has to be known of an epoch that was begun; `ShardedCheckpoint` knows it."""

    @property
    def batches_of_epoch(self) -> int:
        """Count the batches of the epoch that are done."""
        ...

    @property
    def stages_of_epoch(self) -> Stages:
        """Count the same by numbers of ranks."""
        ...

    @property
    def results_before(self) -> Mapping[str, float]:
        """Give the metrics over those batches."""
        ...

    def rest_of_epoch(self, data: tf.data.Dataset) -> tf.data.Dataset:
        """Skip the steps that are done."""
        ...

    def goes_on(self, data: tf.data.Dataset) -> tf.data.Dataset:
        """Take data that begin behind those steps."""
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
      epochs: How many it is to have in the end.
      callbacks: Besides `checkpoints`.
      **options: Of Keras' `fit`.
    """
    for name in ("initial_epoch", "steps_per_epoch"):
        if options.get(name) is not None:
            raise ConfigError(
                f"{name}={options[name]!r}: the checkpoint says where training begins, and an epoch is all "
                "of its data; give data of one epoch, such as data.take(steps)"
            )
    of = _with_stages(data)
    # Saved last, an epoch has ended for all of them: a save may be the end of the process.
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
    """The data of an epoch without some of its steps; None where it can't leave them out by itself."""
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
    """Whether any rank has something left of the epoch, which Keras refuses to end without a batch."""
    known = int(data.cardinality())
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

    Where data doesn't tell its length, a checkpoint after the last batch is one from the middle of the epoch
    until the epoch has ended. If the process ends in between, there is an epoch to end without a batch.
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
