"""One optimizer step for dense variables and table rows together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import NotFiniteError
from gmeta.core.lifted import lifted
from gmeta.layers import RecordedLookups, TableGradient
from gmeta.models.gradient_accumulator import GradientAccumulator
from gmeta.models.ranks.gradients import Gradient, all_finite, global_means, times_samples


class JointOptimizer:
    """A Keras optimizer that takes the rows of embedding tables along.

    Dense variables step with the Keras optimizer; then each table makes one update at its own rate or at the
    Keras optimizer's rate of that step. Loss scaling (``mixed_float16``) holds for both: a step whose
    gradients aren't all finite changes neither, and lowers the scale.

    With accumulation over k batches, gradients are summed, weighted with the batches' numbers of samples, and
    every k-th call makes one step with their mean: that of a k times larger batch, for a loss that is a mean
    over samples.

    On several ranks the step is that of one rank on the union of their batches: gradients are means over the
    samples of all ranks (see `gmeta.models.ranks.gradients`), for which it makes one grouped all-reduce a
    step, with accumulation one in k batches, and one exchange of the rows' gradients a batch. All ranks call
    its methods equally often. A gradient that isn't finite ends the step on all of them, with an error that
    names the rank it came from, unless loss scaling is there to deal with it.

    Args:
      optimizer: A Keras optimizer.
      accumulate_steps: k.

    Attributes:
      optimizer: The Keras optimizer.
      stop_asked: Whether this rank wants all to stop, a variable (`gmeta.models.ranks.stopping`).
      stop_agreed: Whether all do.
      seen: On several ranks, how many samples this one has trained on since somebody made it 0, a variable
        (`gmeta.models.ranks.averages`).
    """

    # Not a Trackable on purpose: what is kept here is for the moment and belongs to no checkpoint.

    def __init__(self, optimizer: Any, accumulate_steps: int = 1) -> None:
        self.optimizer = optimizer
        self._scaling = hasattr(optimizer, "get_scaled_loss")
        # Keras' optimizers do nothing at all where there are no variables: no step is counted, no schedule
        # moves, no loss scale. A model of embeddings alone gives them this one.
        self._stand_in = tf.Variable(0.0, name="no_dense_variables")
        self._accumulator = GradientAccumulator(accumulate_steps) if accumulate_steps > 1 else None
        self.stop_asked = tf.Variable(False, trainable=False, name="stop_asked")
        self.seen = tf.Variable(0, dtype=tf.int64, trainable=False, name="samples_seen")
        self.stop_agreed = tf.Variable(False, trainable=False, name="stop_agreed")

    @property
    def accumulates(self) -> bool:
        """Whether a step is made of several batches."""
        return self._accumulator is not None

    @property
    def _skips_bad_steps(self) -> bool:
        return self._scaling and self.optimizer.dynamic

    def scaled(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss to differentiate; call it inside the tape."""
        return self.optimizer.get_scaled_loss(loss) if self._scaling else loss

    def unscaled(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """The gradients of the loss out of those of `scaled`."""
        return self.optimizer.get_unscaled_gradients(gradients) if self._scaling else list(gradients)

    def apply_gradients(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[tf.Variable],
        lookups: RecordedLookups,
        row_gradients: Sequence[Gradient],
        samples: tf.Tensor,
    ) -> None:
        """Take one batch's gradients: a step, or with accumulation a k-th part of one.

        Args:
          gradients: Of the dense variables.
          variables: The dense variables.
          lookups: The step's lookups.
          row_gradients: The gradients of ``lookups.rows``.
          samples: How many samples the loss is a mean of, a scalar; accumulation and several ranks ask.

        Raises:
          tf.errors.InvalidArgumentError: On several ranks, a gradient isn't finite.
        """
        accumulator = self._accumulator
        if collectives.world().size > 1:
            # A step that ends the data may or may not come here, but has no samples.
            self.seen.assign_add(tf.cast(samples, tf.int64))
            gradients = times_samples(gradients, samples)
            row_gradients = times_samples(row_gradients, samples)
            finite = all_finite([*gradients, *row_gradients])
            tables = lookups.by_table(row_gradients)
            if accumulator is None:
                self._step_of_ranks(gradients, variables, tables, samples, finite)
            else:
                accumulator.add_sums(gradients, variables, tables, samples, finite)
        else:
            tables = lookups.by_table(row_gradients)
            if accumulator is None:
                self._step(gradients, variables, tables)
            else:
                accumulator.add(gradients, variables, tables, samples)
        if accumulator is not None:
            tf.cond(accumulator.is_full(), lambda: self._step_of_mean(accumulator), _nothing)

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients of some batches wait for their step."""
        accumulator = self._accumulator
        return accumulator is not None and not bool(accumulator.is_empty())

    def flush(self) -> None:
        """Make the step of the batches that were accumulated so far, if there are any."""
        accumulator = self._accumulator
        if accumulator is not None and accumulator.is_made:
            tf.cond(accumulator.is_empty(), _nothing, lambda: self._step_of_mean(accumulator))

    def _step_of_mean(self, accumulator: GradientAccumulator) -> tf.Tensor:
        if collectives.world().size > 1:
            self._step_of_ranks(*accumulator.drain_sums())
        else:
            self._step(*accumulator.drain())
        return _nothing()

    def _step_of_ranks(
        self,
        sums: Sequence[Gradient],
        variables: Sequence[tf.Variable],
        tables: Sequence[TableGradient],
        samples: tf.Tensor,
        finite: tf.Tensor,
    ) -> None:
        """The step of all ranks' samples, given this rank's sums over its own."""
        means = global_means(sums, samples, finite, self.stop_asked)
        self.stop_agreed.assign(means.stop)
        good = ~tf.reduce_any(means.bad_ranks)
        dense, scale = means.dense, means.scale
        if not self._skips_bad_steps:
            with tf.control_dependencies(_refusal(good, means.bad_ranks)):
                dense = [None if gradient is None else tf.identity(gradient) for gradient in dense]
                scale = tf.identity(scale)
        self._step(dense, variables, [part.times(scale) for part in tables], good)

    def _step(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[tf.Variable],
        tables: Sequence[TableGradient],
        finite: tf.Tensor | None = None,
    ) -> None:
        pairs = list(zip(gradients, variables, strict=True)) or [(tf.constant(0.0), self._stand_in)]
        # A data set that has run out ends a step where its data is used. Counting the step uses none.
        with tf.control_dependencies([*map(_dense_part, gradients), *(part.values for part in tables)]):
            self._step_on(pairs, tables, finite)

    def _step_on(
        self,
        pairs: Sequence[tuple[Gradient, tf.Variable]],
        tables: Sequence[TableGradient],
        finite: tf.Tensor | None,
    ) -> None:
        stepping = [variable for gradient, variable in pairs if gradient is not None]
        if stepping and hasattr(self.optimizer, "build"):  # its slots
            with lifted():
                self.optimizer.build(stepping)
        rate = rate_of_next_step(self.optimizer)  # asked now, so that tables needn't wait for the dense step
        if not self._skips_bad_steps:
            self.optimizer.apply_gradients(pairs)
            _update(tables, rate)
            return
        if finite is None:
            finite = all_finite([*(gradient for gradient, _ in pairs), *(part.values for part in tables)])
        # The optimizer judges by the dense gradients: it must hear of the rows' too.
        verdict = tf.where(finite, 0.0, float("nan"))
        self.optimizer.apply_gradients([(_plus(gradient, verdict), variable) for gradient, variable in pairs])
        tf.cond(finite, lambda: _update(tables, rate), _nothing)


def rate_of_next_step(optimizer: Any) -> tf.Tensor:
    """The learning rate of the step that `apply_gradients` will make."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    # A current Keras optimizer has its schedule here, and as `learning_rate` what it gave for the last step;
    # a legacy one has its schedule there.
    rate = getattr(optimizer, "_learning_rate", optimizer.learning_rate)
    return tf.convert_to_tensor(rate(optimizer.iterations) if callable(rate) else rate)


def _update(tables: Sequence[TableGradient], rate: tf.Tensor) -> tf.Tensor:
    for part in tables:
        part.apply(rate)
    return _nothing()


def _dense_part(gradient: Gradient) -> tf.Tensor:
    if gradient is None:
        return _nothing()
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _nothing() -> tf.Tensor:
    return tf.constant(True)


def _refusal(good: tf.Tensor, bad_ranks: tf.Tensor) -> list[tf.Operation]:
    check = tf.debugging.Assert(good, [_NOT_FINITE, tf.where(bad_ranks)[:, 0]], summarize=1024)
    return [] if check is None else [check]


_NOT_FINITE = "gradients are not finite on the ranks"


@contextmanager
def named_bad_gradients() -> Iterator[None]:
    """Turn the error of a step whose gradients aren't finite into one that is easy to read.

    Raises:
      NotFiniteError: It names the ranks that the gradients came from.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        # "... on the ranks] [0 1]" out of a graph, "... on the ranks'\n0, 1" where steps run eagerly
        found = re.search(rf"{_NOT_FINITE}\W*(\d[\d, ]*)", str(error.message))
        if found is None:
            raise
        ranks = ", ".join(re.findall(r"\d+", found[1]))
        raise NotFiniteError(
            f"the gradient of rank {ranks} of {collectives.world().size} isn't finite, and no rank has made "
            "the step: look at the loss and the data there, lower the learning rate, or under mixed_float16 "
            "use a LossScaleOptimizer, which leaves such steps out"
        ) from error


def _plus(gradient: Gradient, number: tf.Tensor) -> Gradient:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_plus(gradient.values, number), gradient.indices, gradient.dense_shape)
    return gradient + tf.cast(number, gradient.dtype)
