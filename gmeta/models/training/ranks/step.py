"""One step that all ranks take together.

A rank whose data has ended takes steps on batches of no samples. These steps contribute nothing, and they
must not change the rank's own state: a layer's moving average of no values would be NaN. When no rank has
samples any more, the step raises the error of an exhausted iterator, on all ranks in the same step. Keras
takes that as the end of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.graph.conditions import hold
from gmeta.layers.exchange.sample_counts import StepSamples, step_samples


class KeptState:
    """The state of a model's layers and metrics as it was when this object was made.

    Args:
      model: The model; None: no state.
    """

    def __init__(self, model: tf.keras.Model | None) -> None:
        # Reading a variable that the step doesn't write costs no copy.
        self._kept = [] if model is None else [(v, v.read_value()) for v in _state(model)]

    @tf.autograph.experimental.do_not_convert
    def restore_unless(self, changed: tf.Tensor) -> tf.Tensor:
        """Restore the state unless ``changed``, () bool; return a tensor that is computed after that."""
        return tf.cond(changed, _nothing, self._restore)

    def _restore(self) -> tf.Tensor:
        for variable, value in self._kept:
            variable.assign(value)
        return _nothing()


class RankStep:
    """A step of one rank among several. With only one rank it does nothing."""

    def __init__(self, model: tf.keras.Model, samples: StepSamples | None) -> None:
        self._samples = samples
        self._kept = KeptState(None if samples is None else model)

    def end_forward(self, tensors: Any) -> Any:
        """End the forward pass and the metrics; call this before any weight is updated.

        Args:
          tensors: The tensors that the rest of the step uses, a nest that may contain None.

        Returns:
          The same tensors. They are available only if the step goes on.

        Raises:
          tf.errors.OutOfRangeError: No rank has samples. Computing the returned tensors raises it.
        """
        samples = self._samples
        if samples is None:
            return tensors
        restored = self._kept.restore_unless(samples.own > 0)
        if samples.everywhere is None:  # no lookup has exchanged the numbers
            (samples.everywhere,) = collectives.allreduce_sum([samples.own], name="step/samples")
        with tf.control_dependencies([restored, *samples.before_end]):
            over = tf.identity(samples.everywhere) <= 0
        ended = tf.cond(over, _end, _nothing)
        return hold(tensors, [ended])


@contextmanager
def rank_step(model: tf.keras.Model, data: Any) -> Iterator[RankStep]:
    """Begin a step on a batch.

    Args:
      model: The model.
      data: The batch, a nest of tensors whose first dimension is samples.
    """
    if collectives.world().size == 1:
        yield RankStep(model, None)
        return
    with tf.device("CPU:0"):
        own = batch_size(data)
    with step_samples(own) as samples:
        yield RankStep(model, samples)


def batch_size(data: Any) -> tf.Tensor:
    """Return the first dimension of the first part of a batch that has one, () int64; 1 if none has."""
    for part in tf.nest.flatten(data):
        if isinstance(part, tf.RaggedTensor):
            return tf.cast(part.nrows(), tf.int64)
        if isinstance(part, tf.SparseTensor):
            return tf.cast(part.dense_shape[0], tf.int64)
        if part is not None and part.shape.rank != 0:
            return tf.shape(part, out_type=tf.int64)[0]
    return tf.constant(1, tf.int64)


def _state(model: tf.keras.Model) -> Sequence[tf.Variable]:
    """Return the variables that a forward pass may change: the state of layers and metrics."""
    own = [*model.non_trainable_variables, *(v for metric in model.metrics for v in metric.variables)]
    return list({id(variable): variable for variable in own}.values())


def _nothing() -> tf.Tensor:
    return tf.constant(True)


def _end() -> tf.Tensor:
    # TensorFlow's ops that raise OutOfRangeError are those that read a data set.
    iterator = iter(tf.data.Dataset.range(0))
    return iterator.get_next() >= 0
