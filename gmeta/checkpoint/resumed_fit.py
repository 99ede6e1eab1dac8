"""Continues `fit` from a checkpoint: first the rest of an unfinished epoch, then the epochs after it."""

from __future__ import annotations

import inspect
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from gmeta.checkpoint.record_file import RESTORE_ADVICE
from gmeta.core import collectives
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.position import uncounted

Stages: TypeAlias = tuple[tuple[int, int], ...]
"""Steps of an epoch: (ranks, steps), for each number of ranks in turn."""

Data: TypeAlias = (
    tf.data.Dataset | Callable[[int], tf.data.Dataset] | Callable[[int, Stages], tf.data.Dataset]
)
"""Batches of an epoch; or a function that returns the batches of an epoch, given its number counted from 0,
and of the epochs after it; or such a function of that number and of the epoch's steps that are done."""


class EpochProgress(Protocol):
    """Progress in an unfinished epoch, as `ShardedCheckpoint` records it."""

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
        """Accept data that start after those steps."""
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
      epochs: The total number of epochs to train.
      callbacks: Callbacks other than `checkpoints`.
      **options: Options of Keras' `fit`.
    """
    for name in ("initial_epoch", "steps_per_epoch"):
        if options.get(name) is not None:
            raise ConfigError(
                f"{name}={options[name]!r}: the checkpoint determines where training begins, and an epoch is "
                "all of its data; give data of one epoch, such as data.take(steps)"
            )
    of = _with_stages(data)
    # `checkpoints` comes last: a save may end the process, after the others have handled the epoch's end.
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
    """Return a function that returns an epoch's data without some steps; None if the data can't skip them."""
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
    epoch until the epoch has ended. If the process dies in between, the resumed run must end the epoch
    without a batch.
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


# Sums of an epoch's metrics, saved in a checkpoint from the middle of the epoch.
#
# A Keras metric keeps sums. The values of the ranks add up to them, and so do the parts of an epoch before
# and after a checkpoint: the sums of the first part are saved and added to those of the second. The epoch's
# metrics then cover all its batches.

Sums: TypeAlias = Mapping[str, np.ndarray[Any, Any]]
"""Metric and number of its variable -> the variable's sum over all ranks, as float64."""


def sums_of(model: tf.keras.Model) -> Sums:
    """Compute the sums of the epoch so far, over the batches of all ranks. All ranks call it together."""
    variables = _sum_up(model)
    totals = collectives.allreduce_sum(
        [tf.cast(variable, tf.float64) for variable in variables.values()], name="checkpoint/metrics"
    )
    return {name: total.numpy() for name, total in zip(variables, totals, strict=True)}


def results_of(model: tf.keras.Model, sums: Sums) -> dict[str, float]:
    """Compute the metrics' values for some sums, without changing the metrics' own sums."""
    variables = _sum_up(model)
    own = {name: variable.numpy() for name, variable in variables.items()}
    try:
        _assign(variables, sums)
        return {name: float(value) for name, value in model.get_metrics_result().items()}
    finally:
        _assign(variables, own)


def add_sums(model: tf.keras.Model, sums: Sums) -> None:
    """Add the sums of an earlier part of the epoch to the metrics. Rank 0 does so for all ranks.

    Metrics that keep something other than sums, or that the model didn't have when it was saved, cover only
    the rest of the epoch; a warning names the latter.
    """
    variables = _sum_up(model)
    fitting = {n: v for n, v in variables.items() if n in sums and sums[n].shape == tuple(v.shape)}
    other = sorted({name.rpartition("/")[0] for name in variables.keys() ^ fitting.keys()})
    if other:
        warnings.warn(
            f"the checkpoint from the middle of the epoch hasn't the metrics {', '.join(other)}: they are of "
            "the rest of the epoch alone",
            stacklevel=3,
        )
    if collectives.world().rank == 0:
        _assign(variables, {name: variables[name].numpy() + sums[name] for name in fitting})


def write_metrics(file: Path, sums: Sums, results: Mapping[str, float]) -> None:
    """Write sums and values of metrics into a file."""
    parts = {f"sum/{name}": value for name, value in sums.items()}
    parts |= {f"result/{name}": np.asarray(value) for name, value in results.items()}
    with file.open("wb") as stream:
        np.savez(stream, **parts)


def read_metrics(file: Path) -> tuple[Sums, dict[str, float]]:
    """Read what `write_metrics` wrote; nothing if there is no such file.

    Raises:
      DataError: The file is damaged.
    """
    if not file.exists():
        return {}, {}
    try:
        with np.load(file) as parts:
            named = {name: parts[name] for name in parts}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"the metrics' sums can't be read: {error}", path=file, advice=RESTORE_ADVICE
        ) from error
    sums = {name.removeprefix("sum/"): value for name, value in named.items() if name.startswith("sum/")}
    results = {
        name.removeprefix("result/"): float(v) for name, v in named.items() if name.startswith("result/")
    }
    return sums, results


def _assign(variables: Mapping[str, tf.Variable], values: Sums) -> None:
    for name, value in values.items():
        variables[name].assign(tf.cast(value, variables[name].dtype))


def _sum_up(model: tf.keras.Model) -> dict[str, tf.Variable]:
    named = {
        f"{metric.name}/{number}": variable
        for metric in model.metrics
        for number, variable in enumerate(metric.variables)
        if variable.aggregation == tf.VariableAggregation.SUM
    }
    first = {
        id(variable): name for name, variable in reversed(named.items())
    }  # one of two metrics is one sum
    return {name: variable for name, variable in named.items() if first[id(variable)] == name}
