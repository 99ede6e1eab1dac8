"""Stops training at a loss or gradient that isn't finite, before the step is made, and names the cause.

Each step checks its loss, one number, and its gradients (`gmeta.ops.table.finite`). Only if the loss isn't
finite does Python code search for the cause: in the batch's labels, its columns of floats, the weights and
rows, and, for a model that adapts, its tasks. If the loss is finite, the error names the weights, or the
tables and ids, whose gradient isn't.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, NotFiniteError
from gmeta.core.graph.conditions import hold
from gmeta.models.training.faults.batch_faults import fault_of_rows, fault_of_weights
from gmeta.ops.table.finite import ADVICE, NamedGradient, describe_bad

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
        told = tf.constant("") if skips else describe_bad(gradients, samples if several else 1.0)
        parts = tf.nest.flatten(data, expand_composites=True)
        parts = [part for part in parts if part is not None]
        form = tf.nest.map_structure(
            lambda part: None if part is None else tf.type_spec_from_value(part), data
        )
        # TensorFlow keeps `look` for good, so it may hold neither the model nor a tensor of the graph.
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
            passes = tf.ensure_shape(tf.py_function(look, [sound, told, *parts], tf.bool), [])
            if several:  # others would wait for this rank
                return passes
            return hold(passes, refusal(passes, tf.reshape(~passes, [1])))

        sound = tf.math.is_finite(loss)
        if several:
            sound |= tf.equal(tf.cast(samples, tf.float32), 0.0)
        with tf.device("CPU:0"):  # the branches handle strings, for which a GPU has no kernels
            verdict = tf.cond(sound & tf.equal(told, ""), lambda: tf.constant(True), bad)
        if not tf.executing_eagerly():
            # Keep one op that calls a function, instead of a switch for each part of the batch.
            verdict.op.inputs[0].op._set_attr("_lower_using_switch_merge", attr_value_pb2.AttrValue(b=False))
        return verdict

    def _look_at_loss(self, data: Any) -> bool:
        try:
            found = self._find(data)
        except Exception:  # a user's own model may fail in the search; the loss is bad all the same
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
