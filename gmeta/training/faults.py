"""Reports in one line which id a step has refused, instead of TensorFlow's dump of the graph."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, NotFiniteError
from gmeta.core.graph import hold, keep_whole
from gmeta.layers.embedding.table_weights import tables_of
from gmeta.ops.table.finite import (
    ADVICE,
    ROWS_ADVICE,
    NamedGradient,
    check_gradients,
    describe_bad_rows,
    if_unsound,
)

# Matches the error message of ``ops/merge_keys/kernels.cc``.
_REFUSAL = re.compile(r"feature '[^'\n]*': id (?P<id>-?\d+) at position .*? takes any id")
_MINUS_ONE = "; -1 stands for no id only in a matrix of ids of a feature with a combiner"


class BadIdError(ConfigError, tf.errors.InvalidArgumentError):
    """The error for an id that no row can have.

    Args:
      message: The feature, the id, the limit, and what to do.
    """

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


@contextmanager
def name_bad_ids() -> Iterator[None]:
    """Turn the error of a graph that received an id out of range into one line.

    Raises:
      BadIdError: An id is out of range. The message names the feature, the id, its position and the limit.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _REFUSAL.search(str(error.message))
        if found is None:
            raise
        raise BadIdError(found[0] + (_MINUS_ONE if found["id"] == "-1" else "")) from None


# Describes which part of a batch isn't finite. It runs eagerly, when a loss isn't finite.

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
      learner: The `gmeta.models.meta.task_learner.TaskLearner`.
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


# Stops training at a loss or gradient that isn't finite, before the step is made, and names the cause.
#
# Each step checks its loss, one number, and its gradients (`gmeta.ops.table.finite`). Only if the loss isn't
# finite does Python code search for the cause: in the batch's labels, its columns of floats, the weights and
# rows, and, for a model that adapts, its tasks. If the loss is finite, the error names the weights, or the
# tables and ids, whose gradient isn't.

_LOSS = "the loss isn't finite"
_NOT_FINITE = "gradients are not finite on the ranks"


class NanGuard:
    """The guard that keeps a model from learning NaN.

    Args:
      model: The model.
      nan: ``"raise"``, or ``"allow"`` to train on.
      find: A function that describes what in a batch is at fault; its result is empty if nothing is.

    Raises:
      ConfigError: ``nan`` has another value.
    """

    def __init__(self, model: Any, nan: str, find: Callable[[Any], str]) -> None:
        if nan not in ("raise", "allow"):
            raise ConfigError(f"compile: nan must be 'raise' or 'allow', got {nan!r}")
        self.raises = nan == "raise"
        self._model, self._find = model, find
        self._what, self._cause = _LOSS, ""
        self._skips = False

    def finite(
        self,
        loss: tf.Tensor,
        gradients: Sequence[NamedGradient],
        data: Any,
        samples: tf.Tensor,
        skips: bool = False,
    ) -> tf.Tensor:
        """Return whether a batch may make a step, () bool. On one rank, False raises an error instead.

        Args:
          loss: The loss.
          gradients: This rank's gradients of the loss.
          data: The batch that the loss belongs to.
          samples: The number of samples that the loss is a mean of. With no samples on one of several ranks,
            any loss and gradients pass.
          skips: Whether the optimizer skips steps whose gradients aren't finite. The optimizer then handles
            them, and a loss that isn't finite, unless the batch is at fault, which no later step would mend.
        """
        if not self.raises:
            return tf.constant(True)
        self._skips = skips
        several = collectives.world().size > 1
        check = check_gradients([] if skips else gradients, samples if several else 1.0)
        parts = tf.nest.flatten(data, expand_composites=True)
        parts = [part for part in parts if part is not None]
        form = tf.nest.map_structure(
            lambda part: None if part is None else tf.type_spec_from_value(part), data
        )
        # TensorFlow never frees `look`, so it may hold neither the model nor a tensor of the graph.
        here = weakref.ref(self)

        def look(sound: tf.Tensor, told: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
            given = iter(tensors)
            filled = [
                None if part is None else next(given)
                for part in tf.nest.flatten(form, expand_composites=True)
            ]
            guard = here()
            if guard is None:
                return tf.constant(True)
            batch = tf.nest.pack_sequence_as(form, filled, expand_composites=True)
            return guard._look_at_loss(batch) if not sound else guard._note_gradient(told)

        def bad() -> tf.Tensor:
            passes = tf.ensure_shape(tf.py_function(look, [sound, check.bad, *parts], tf.bool), [])
            if several:  # others would wait for this rank
                return passes
            return hold(passes, refusal(passes, tf.reshape(~passes, [1])))

        sound = tf.math.is_finite(loss)
        if several:
            sound |= tf.equal(tf.cast(samples, tf.float32), 0.0)
        with tf.device("CPU:0"):  # the branches handle strings, for which a GPU has no kernels
            verdict = tf.cond(sound & tf.equal(check.bad, ""), lambda: tf.constant(True), bad)
            quick = sound & check.sound
        keep_whole(verdict)  # instead of a switch for each part of the batch
        return if_unsound(quick, lambda: tf.identity(verdict))

    def _look_at_loss(self, data: Any) -> bool:
        try:
            found = self._find(data)
        except Exception:  # a custom model may fail in the search; the loss is bad nevertheless
            found = ""
        if self._skips and not found:
            return True
        return self._note(_LOSS, found or fault_of_weights(self._model))

    def _note_gradient(self, told: tf.Tensor) -> bool:
        return self._note(f"the loss is finite, but not its gradient for {told.numpy().decode()}", ADVICE)

    def _note(self, what: str, cause: str) -> bool:
        # With accumulation on several ranks, only the step raises the error: name the first bad batch then.
        if not self._cause:
            self._what, self._cause = what, cause
        return False

    @contextmanager
    def name_errors(self) -> Iterator[None]:
        """Turn the error of a refused step into one that is easy to read.

        Raises:
          NotFiniteError: A step was refused. The message says what is at fault; on several ranks it names
            those that the fault came from.
        """
        self._what, self._cause = _LOSS, ""
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            # "... on the ranks] [0 1]" from a graph, "... on the ranks'\n0, 1" from an eager step
            found = re.search(rf"{_NOT_FINITE}\W*(\d[\d, ]*)", str(error.message))
            if found is None:
                raise
            raise NotFiniteError(self._message(re.findall(r"\d+", found[1]))) from error

    def _message(self, ranks: list[str]) -> str:
        here = collectives.world()
        if here.size == 1:
            return (
                f"{self._model.name}: {self._what}, and no step was made: {self._cause}; "
                "compile(nan='allow') trains on"
            )
        # A rank that isn't at fault may own the row that is.
        cause = self._cause or fault_of_rows(self._model)
        if self._what != _LOSS:
            cause = f"{self._what}: {cause}"
        cause = f"rank {here.rank}: {cause}; " if cause else ""
        if self._skips:  # the optimizer has skipped every other kind of bad step
            what = "data"
            remedy = f"{'' if cause else 'mend the data there; '}compile(nan='allow') leaves such steps out"
        else:
            what = "gradient"
            remedy = (
                "look at the loss and the data there, lower the learning rate, or under mixed_float16 use a "
                "LossScaleOptimizer, which leaves such steps out"
            )
        return (
            f"the {what} of rank {', '.join(ranks)} of {here.size} isn't finite, and no rank has made the "
            f"step: {cause}{remedy}"
        )


def refusal(good: tf.Tensor, bad_ranks: tf.Tensor) -> list[tf.Operation]:
    """Return the check that a step must wait for, so that the step is made only if all is finite.

    `NanGuard.name_errors` reads the check's error.
    """
    check = tf.debugging.Assert(good, [_NOT_FINITE, tf.where(bad_ranks)[:, 0]], summarize=1024)
    return [] if check is None else [check]
