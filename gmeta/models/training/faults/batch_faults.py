"""Describes in words what in a batch isn't finite. It runs eagerly, when a loss isn't finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core import collectives
from gmeta.layers.embedding.table_weights import tables_of
from gmeta.ops.table.finite import ROWS_ADVICE, describe_bad_rows

_SHOWN = 5  # tasks that a message names


def fault_of_samples(data: Any) -> str:
    """Describe what is wrong in a batch of samples; the result is empty if nothing is."""
    x, y, weights = tf.keras.utils.unpack_x_y_sample_weight(data)
    for what, part in (("label", y), ("sample weight", weights), ("feature", x)):
        for name, values in _float_columns(part):
            bad = _bad(values)
            if bad.any():
                called = f"{what} {name!r}" if name else what
                first = int(np.flatnonzero(bad)[0])
                shown = np.asarray(getattr(values, "flat_values", values)).reshape(len(bad), -1)[first]
                value = shown[~np.isfinite(shown)][0]
                return (
                    f"{int(bad.sum())} of {len(bad)} values of {called} in the batch are not finite, the "
                    f"first is {value} at place {first}: mend the data, or leave these samples out"
                )
    return ""


def fault_of_tasks(learner: Any, batch: Mapping[str, Any]) -> str:
    """Describe what is wrong in a batch of tasks; the result is empty if nothing is.

    Args:
      learner: The `gmeta.models.meta.learner.task_learner.TaskLearner`.
      batch: The batch, in the form that the inner and outer loops take.
    """
    columns = [("label", batch["label"])]
    columns += [(f"feature {name!r}", values) for name, values in _float_columns(batch["features"])]
    for what, values in columns:
        bad = _bad(values)
        if bad.any():
            return f"{what} of {_tasks(batch, _tasks_with(batch, bad))} is not finite: mend the data"
    return _fault_of_steps(learner, batch)


def _fault_of_steps(learner: Any, batch: Mapping[str, Any]) -> str:
    """Name the tasks whose outputs are finite with the shared weights but not after the inner steps."""
    steps = learner.inner.steps
    if not steps or collectives.world().size > 1:  # one of several ranks can't make a lookup alone
        return ""
    outputs = learner.predict_after(batch, (0, steps))
    mask = np.asarray(batch["query"]["mask"]) > 0
    lost = {number: _far(values) & mask for number, values in outputs.items()}
    tasks = (lost[steps] & ~lost[0]).any(axis=1)
    if not tasks.any():
        return ""
    return (
        f"the inner loop diverges at {_tasks(batch, tasks)}: outputs are finite before its {steps} "
        f"step{'s' * (steps > 1)} and not after: lower InnerLoop(learning_rate=...), now "
        f"{learner.inner.learning_rate}, or give it clip_norm"
    )


def fault_of_weights(model: Any) -> str:
    """Describe what is wrong if the batch isn't at fault."""
    for variable in model.trainable_variables:
        if not bool(tf.reduce_all(tf.math.is_finite(variable))):
            return f"the weights {variable.name} aren't finite any more: load the last checkpoint"
    here = collectives.world()
    rows = "rows" if here.size == 1 else f"the rows of rank {here.rank}"
    return fault_of_rows(model) or (
        f"labels, features, dense weights and {rows} are finite, so training diverges: lower the learning "
        "rate, or clip gradients with clipnorm="
    )


def fault_of_rows(model: Any) -> str:
    """Name the rows of this rank that aren't finite; the result is empty if all are."""
    found = [bad for table in tables_of(model) if (bad := describe_bad_rows(table))]
    return f"the rows of {', '.join(found)} hold NaN or infinity: {ROWS_ADVICE}" if found else ""


def _float_columns(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the columns of floats, with their names."""
    if isinstance(part, Mapping):
        for name, value in part.items():
            yield from _float_columns(value, f"{path}/{name}" if path else str(name))
    elif isinstance(part, list | tuple):
        for place, value in enumerate(part):
            yield from _float_columns(value, f"{path}/{place}" if path else str(place))
    elif part is not None and part.dtype.is_floating:
        yield path, part.values if isinstance(part, tf.SparseTensor) else part


def _bad(values: Any) -> npt.NDArray[np.bool_]:
    """Return which samples aren't finite, (samples,); for a ragged column, which of its flat values."""
    flat = np.asarray(getattr(values, "flat_values", values))
    return ~np.isfinite(flat).reshape(len(flat), -1).all(axis=1) if flat.ndim else ~np.isfinite(flat[None])


def _far(outputs: Any) -> npt.NDArray[np.bool_]:
    """Return which samples' outputs, or the squares of these, aren't finite: (tasks, samples)."""
    numbers = np.asarray(outputs, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        lost = ~np.isfinite(np.square(numbers))
    return lost.reshape(*numbers.shape[:2], -1).any(axis=-1)


def _tasks_with(batch: Mapping[str, Any], bad: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(np.asarray(batch["task"])), np.bool_)
    for part in ("support", "query"):
        index, mask = (np.asarray(batch[part][name]) for name in ("index", "mask"))
        if index.size:
            found |= (bad[index] & (mask > 0)).any(axis=1)
    return found


def _tasks(batch: Mapping[str, Any], chosen: npt.NDArray[np.bool_]) -> str:
    names = [each.decode() if isinstance(each, bytes) else each for each in np.asarray(batch["task"])[chosen]]
    shown = ", ".join(map(str, names[:_SHOWN]))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"task{'s' * (len(names) != 1)} {shown}{more}"
