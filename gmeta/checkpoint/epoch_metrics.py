"""Sums of an epoch's metrics, saved in a checkpoint from the middle of the epoch.

A Keras metric keeps sums. The values of the ranks add up to them, and so do the parts of an epoch before and
after a checkpoint: the sums of the first part are saved and added to those of the second. The epoch's metrics
then cover all its batches.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from gmeta.checkpoint.files.record_file import RESTORE_ADVICE
from gmeta.core import collectives
from gmeta.core.errors import DataError

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
    """Compute the metrics' values for some sums, and leave the metrics' own sums as they were."""
    variables = _sum_up(model)
    own = {name: variable.numpy() for name, variable in variables.items()}
    try:
        _assign(variables, sums)
        return {name: float(value) for name, value in model.get_metrics_result().items()}
    finally:
        _assign(variables, own)


def add_sums(model: tf.keras.Model, sums: Sums) -> None:
    """Add the sums of an earlier part of the epoch to the metrics. Rank 0 does so for all ranks.

    Metrics that keep something other than sums, or that the model didn't have then, cover only the rest of
    the epoch; a warning names the latter.
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
