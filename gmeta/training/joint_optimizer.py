"""Makes one optimizer step for dense variables and table rows together, and sets the optimizer's rate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.graph import hold, hold_gradients, lift_variables
from gmeta.core.schedules import OneCycle, Warmup
from gmeta.core.step import StepCallback
from gmeta.layers.exchange.recorded_lookups import RecordedLookups, RowGradients, TableGradient
from gmeta.ops.table.finite import NamedGradient, check_gradients, refuse_bad
from gmeta.training.compile_settings import LossScale, check_shard_optimizer
from gmeta.training.dense_updates import OptimizerShards, ShardedStep, UpdatesJoined
from gmeta.training.faults import refusal
from gmeta.training.mean_gradients import (
    NOT_FINITE,
    SOUND,
    Gradient,
    GradientAccumulator,
    PackedGradients,
    all_finite,
    global_means,
    pack_gradients,
    state_of,
    sum_early,
    take_shapes,
    times_samples,
    with_number,
)
from gmeta.training.rank_steps import RankNotes
from gmeta.training.table_rule import Clipping, follow_late


class JointOptimizer:
    """A Keras optimizer that also updates the rows of embedding tables.

    Dense variables step with the Keras optimizer. Then each table makes one update, at its own rate or at the
    Keras optimizer's rate of that step, with gradients clipped like the Keras optimizer's
    (`gmeta.training.table_rule`). Loss scaling (``mixed_float16``) covers both: if not all
    gradients are finite, the step changes neither and lowers the scale.

    With accumulation over k batches, gradients are summed, weighted by the batches' numbers of samples. Every
    k-th call makes one step with their mean. For a loss that is a mean over samples, this is the step of a
    batch k times as large.

    On several ranks the step equals that of one rank on the union of their batches: gradients are means over
    the samples of all ranks (see `gmeta.training.mean_gradients`). This takes one grouped all-reduce per step
    (with accumulation, one per k batches), on CPU ranks a few if gradients are large and not accumulated, and
    one exchange of the rows' gradients per batch. All ranks must call its methods equally often. A gradient
    that isn't finite ends the step on all ranks, with an error that names the rank it came from. Loss scaling
    skips such a step instead, unless the batch's data are at fault.

    A compiled `gmeta.models.Model` has one, its ``joint_optimizer``. In a custom training loop, `step`
    makes the steps that `fit` makes.

    Args:
      optimizer: A Keras optimizer.
      accumulate_steps: k.
      raises: Whether a step whose gradients aren't finite is an error, if loss scaling doesn't handle it.
      notes: The rank's notes: its count of samples, and its request to stop, which travels with the step's
        all-reduce.
      trainer: The model that was compiled with the optimizer. None: tables follow this object.
      shard_optimizer: Whether several ranks divide the Keras optimizer's state, as in
        `gmeta.models.Model.compile`.

    Attributes:
      optimizer: The Keras optimizer.
      name: Its name, for messages.

    Example:
      >>> from gmeta.layers import EmbeddingCollection, FeatureConfig, record_lookups
      >>> users, head = EmbeddingCollection([FeatureConfig("user", dim=4)]), tf.keras.layers.Dense(1)
      >>> optimizer = JointOptimizer(tf.keras.optimizers.SGD(0.1, clipnorm=1.0))
      >>> for batch in tf.data.Dataset.from_tensor_slices({"user": [7, 8, 7, 9]}).batch(2):
      ...     with tf.GradientTape() as tape, record_lookups(tape) as lookups:
      ...         loss = tf.reduce_mean((head(users(batch, training=True)["user"]) - 1.0) ** 2)
      ...     variables = head.trainable_variables
      ...     optimizer.step(tape.gradient(loss, [*variables, *lookups.rows]), variables, lookups)
      >>> type(users.tables[0].optimizer).__name__
      'SGD'
    """

    # Not a Trackable on purpose: this state is temporary and belongs in no checkpoint.

    def __init__(
        self,
        optimizer: Any,
        accumulate_steps: int = 1,
        *,
        raises: bool = True,
        notes: RankNotes | None = None,
        trainer: Any = None,
        shard_optimizer: bool = False,
    ) -> None:
        check_shard_optimizer(shard_optimizer, optimizer)
        if OptimizerShards.of(optimizer) is not None and not shard_optimizer:
            raise ConfigError(
                f"{type(optimizer).__name__} has been divided among the ranks, and shard_optimizer is False: "
                "give True, or a new optimizer"
            )
        self.optimizer, self._shards = optimizer, shard_optimizer
        self.name = f"a loop with {type(optimizer).__name__}"
        self._trainer = trainer
        self._raises = raises
        self._notes = notes or RankNotes()
        self._skips_bad_steps = LossScale(optimizer).skips_bad_steps
        self._clipping = Clipping.of(optimizer)
        self._updates_joined = UpdatesJoined(optimizer)
        self._accumulator = GradientAccumulator(accumulate_steps) if accumulate_steps > 1 else None

    @property
    def accumulates(self) -> bool:
        """Whether several batches make one step."""
        return self._accumulator is not None

    @property
    def divides(self) -> bool:
        """Whether several ranks divide the state of the Keras optimizer."""
        return self._shards and collectives.world().size > 1

    @property
    def divided_slots(self) -> list[tf.Variable]:
        """The slots of all dense variables if ranks have divided them, else none."""
        shards = OptimizerShards.of(self.optimizer)
        return [] if shards is None else shards.slots

    def divide(self, variables: Sequence[tf.Variable]) -> OptimizerShards:
        """Build the Keras optimizer, and release the slots of variables that other ranks update."""
        return OptimizerShards.divide(self.optimizer, variables)

    def whole_slots(self, gather: bool) -> AbstractContextManager[None]:
        """Return a context in which divided slots can be saved or loaded; see `OptimizerShards.whole`."""
        shards = OptimizerShards.of(self.optimizer)
        return nullcontext() if shards is None else shards.whole(gather)

    def predict_steps(self, batches: int) -> tf.Tensor | int:
        """Predict how many steps some more batches make, unless `flush` makes another; a number, or () int64.

        A step that loss scaling skips counts, as it does for Keras.
        """
        return batches if self._accumulator is None else self._accumulator.times_full(batches)

    def step(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[tf.Variable],
        lookups: RecordedLookups,
        samples: tf.Tensor | int | None = None,
    ) -> None:
        """Make the step of a batch in a custom training loop or ``train_step``.

        Tables without their own optimizer follow the Keras optimizer as they do in `gmeta.models.Model.fit`:
        in kind, hyperparameters, rate and clipping. With accumulation, the step is added to the next one.

        Args:
          gradients: The gradients of the loss with respect to ``[*variables, *lookups.rows]``. If the
            optimizer scales losses, they are unscaled.
          variables: The dense variables.
          lookups: The step's lookups, as `gmeta.layers.record_lookups` yields them.
          samples: The number of samples that the loss is a mean of. Accumulation and several ranks require
            it.

        Raises:
          NotFiniteError: A gradient isn't finite, and no step was made.
          ConfigError: There are more or fewer gradients than variables and rows; the number of samples is
            missing; or a model that shares a table trains it by another optimizer.
        """
        if len(gradients) != len(variables) + len(lookups.rows):
            raise ConfigError(
                f"{self.name}: step takes the gradients of [*variables, *lookups.rows], which are "
                f"{len(variables)} and {len(lookups.rows)}, got {len(gradients)}"
            )
        ranks = collectives.world().size
        if samples is None and (self.accumulates or ranks > 1):
            raise ConfigError(
                f"{self.name}: step takes samples=, the number of samples that the loss is a mean of, "
                f"{f'on {ranks} ranks' if ranks > 1 else 'with accumulate_steps'}"
            )
        if self._trainer is not None:
            self._trainer._own_step.note("accumulate_steps", "shard_optimizer")
        trainer = self if self._trainer is None else self._trainer
        follow_late(trainer, lookups.tables, self.optimizer)
        dense, rows = list(gradients[: len(variables)]), list(gradients[len(variables) :])
        count, allowed = tf.convert_to_tensor(1 if samples is None else samples), tf.constant(True)
        if self._raises and not self._skips_bad_steps:  # no guard has checked these gradients
            named = [*NamedGradient.of_weights(dense, variables), *lookups.named(rows)]
            if ranks > 1:  # on which all must end together
                allowed = check_gradients(named, count).passes()
            else:
                dense, rows = refuse_bad(named, [dense, rows])
        self.apply_gradients(dense, variables, lookups, rows, count, allowed)

    def apply_gradients(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[tf.Variable],
        lookups: RowGradients,
        row_gradients: Sequence[Gradient],
        samples: tf.Tensor,
        allowed: tf.Tensor,
    ) -> None:
        """Make a step with one batch's gradients; with accumulation, add them to the next step.

        Args:
          gradients: The gradients of the dense variables.
          variables: The dense variables.
          lookups: The step's lookups.
          row_gradients: The gradients of rows that ``lookups.by_table`` takes.
          samples: The number of samples that the loss is a mean of, a scalar. Only accumulation and several
            ranks use it.
          allowed: Whether a step may be made from loss and gradients, () bool, as returned by
            `NanGuard.finite`.

        Raises:
          tf.errors.InvalidArgumentError: No step may be made, on several ranks from those of any rank.
        """
        accumulator = self._accumulator
        if collectives.world().size > 1:
            # The step that ends the data may or may not run this line; its number of samples is 0.
            self._notes.seen.assign_add(tf.cast(samples, tf.int64))
            take_shapes(gradients, variables)
            packed = pack_gradients(gradients)
            packed = packed._replace(parts=times_samples(packed.parts, samples))
            row_gradients = times_samples(row_gradients, samples)
            # Where loss scaling skips no step, the guard has checked the gradients.
            checked = [*packed.parts, *row_gradients] if self._skips_bad_steps else []
            state = state_of(checked, allowed)
            early = [] if self._shards or accumulator is not None else sum_early(packed.parts)
            tables = lookups.by_table(row_gradients)
            if accumulator is None:
                self._step_of_ranks(packed, variables, tables, samples, state, early)
            else:
                sums = packed.unpack(packed.parts)
                accumulator.add_sums(sums, variables, tables, samples, state)
        else:
            if self._raises:
                gradients = hold_gradients(list(gradients), [allowed])
                row_gradients = hold_gradients(list(row_gradients), [allowed])
            tables = lookups.by_table(row_gradients)
            if accumulator is None:
                self._step(gradients, variables, tables)
            else:
                accumulator.add(gradients, variables, tables, samples)
        if accumulator is not None:
            tf.cond(accumulator.is_full(), lambda: self._step_of_mean(accumulator), _nothing)

    @property
    def is_accumulating(self) -> bool:
        """Whether accumulated gradients wait for their step."""
        accumulator = self._accumulator
        return accumulator is not None and not bool(accumulator.is_empty())

    def drop(self) -> int:
        """Forget the batches accumulated so far, and return their number."""
        accumulator = self._accumulator
        if accumulator is None:
            return 0
        batches = accumulator.batches
        if batches:
            accumulator.clear()
        return batches

    def flush(self) -> None:
        """Make the step of the batches accumulated so far, if there are any."""
        accumulator = self._accumulator
        if accumulator is not None and accumulator.is_made:
            tf.cond(accumulator.is_empty(), _nothing, lambda: self._step_of_mean(accumulator))

    def _step_of_mean(self, accumulator: GradientAccumulator) -> tf.Tensor:
        if collectives.world().size > 1:
            sums, *rest = accumulator.drain_sums()
            self._step_of_ranks(pack_gradients(sums), *rest)
        else:
            self._step(*accumulator.drain())
        return _nothing()

    def _step_of_ranks(
        self,
        sums: PackedGradients,
        variables: Sequence[tf.Variable],
        tables: Sequence[TableGradient],
        samples: tf.Tensor,
        state: tf.Tensor,
        summed: Sequence[tf.Tensor | None] = (),
    ) -> None:
        """Make the step of all ranks' samples from this rank's sums, of which some are `summed` early."""
        shard, unpack = None, sums.unpack
        if self._shards and variables:
            terms = sums.unpack(sums.parts)
            shard, unpack = self.divide(variables).step(self.optimizer, variables, terms), list
            means = shard.means(terms, samples, state, self._notes.stop_asked)
        else:
            means = global_means(sums.parts, samples, state, self._notes.stop_asked, summed)
        self._notes.stop_agreed.assign(means.stop)
        dense, scale = means.dense, means.scale
        if self._raises:
            with tf.device("CPU:0"):
                passes = means.states <= (NOT_FINITE if self._skips_bad_steps else SOUND)
                checks = refusal(tf.reduce_all(passes), ~passes)
            dense, scale = hold_gradients(dense, checks), hold(scale, checks)
        finite = tf.reduce_all(means.states <= SOUND)
        self._step(unpack(dense), variables, [part.times(scale) for part in tables], finite, shard)

    def _step(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[tf.Variable],
        tables: Sequence[TableGradient],
        finite: tf.Tensor | None = None,
        shard: ShardedStep | None = None,
    ) -> None:
        if shard is None:
            gradients, tables = self._clipping.clip(gradients, tables)
        else:
            norm = shard.global_norm if shard.has_gradients else None
            gradients, tables = self._clipping.clip(gradients, tables, norm)
            gradients = shard.clip(gradients, self._clipping.global_norm)
            if self._skips_bad_steps:  # ranks have different gradients, and must decide alike
                finite = finite & shard.all_finite(gradients)
        pairs = list(zip(gradients, variables, strict=True))
        # Tables need the rate in host memory. A later read would wait for the GPU.
        rate = rate_of_next_step(self.optimizer)
        # If the data set has run out, the step must end before it is counted. It ends where an op uses the
        # data, and counting uses none, so let counting wait for the gradients.
        with tf.control_dependencies([*map(_dense_part, gradients), *(part.values for part in tables)]):
            self._step_on(pairs, tables, rate, finite, shard)

    def _step_on(
        self,
        pairs: Sequence[tuple[Gradient, tf.Variable]],
        tables: Sequence[TableGradient],
        rate: tf.Tensor,
        finite: tf.Tensor | None,
        shard: ShardedStep | None,
    ) -> None:
        if pairs and hasattr(self.optimizer, "build"):  # its slots
            with lift_variables():
                self.optimizer.build([variable for _, variable in pairs])
        if not self._skips_bad_steps:
            self._step_dense(pairs, tables, shard)
            _update(tables, rate)
            return
        if finite is None:
            finite = all_finite([*(gradient for gradient, _ in pairs), *(part.values for part in tables)])
        # The optimizer checks only the dense gradients, so make them NaN if the rows' aren't finite.
        verdict = tf.where(finite, 0.0, float("nan"))
        judged = [(with_number(tf.add, gradient, verdict), variable) for gradient, variable in pairs]
        self._step_dense(judged, tables, shard, verdict)
        tf.cond(finite, lambda: _update(tables, rate), _nothing)

    def _step_dense(
        self,
        pairs: Sequence[tuple[Gradient, tf.Variable]],
        tables: Sequence[TableGradient],
        shard: ShardedStep | None,
        verdict: tf.Tensor | None = None,
    ) -> None:
        """Make the Keras optimizer's step.

        Without any dense gradient, Keras' optimizers do nothing or raise an error. If rows or other ranks'
        variables have gradients, the step is counted here instead, and moves the schedule and the loss scale.

        Args:
          pairs: The dense gradients and their variables.
          tables: The gradients of rows.
          shard: The division of the variables among the ranks, of which this one updates its own.
          verdict: With loss scaling, a number that isn't finite if the step is skipped.
        """
        elsewhere = shard is not None and shard.has_gradients
        own = pairs if shard is None else shard.own(pairs)
        if not (tables or elsewhere) or any(gradient is not None for gradient, _ in own):
            with self._updates_joined(), nullcontext() if shard is None else shard.clipped():
                self.optimizer.apply_gradients(own)
        else:
            self._count_step(pairs if not elsewhere else [], verdict)
        if shard is not None:
            shard.send_weights()

    def _count_step(self, pairs: Sequence[tuple[Gradient, tf.Variable]], verdict: tf.Tensor | None) -> None:
        if pairs:
            names = [variable.name for _, variable in pairs]
            tf.get_logger().warning("Gradients do not exist for variables %s when minimizing the loss", names)
        if verdict is not None:
            self.optimizer._loss_scale.update([verdict])
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        if hasattr(inner, "_compute_current_learning_rate"):  # of a schedule, for callbacks that read it
            inner._compute_current_learning_rate()
        inner.iterations.assign_add(1)


def rate_of_next_step(optimizer: Any) -> tf.Tensor:
    """Return the learning rate of the step that `apply_gradients` will make."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(optimizer, "_decayed_lr"):  # a legacy optimizer, which applies its decay on top of its rate
        return optimizer._decayed_lr(tf.float32)
    # `_learning_rate` holds the schedule; `learning_rate` is its value for the last step.
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


class RateInFit(StepCallback):
    """Sets the Keras optimizer's rate by a schedule that is made when `fit` begins.

    It is for a schedule whose number of steps isn't known before. An optimizer takes any other schedule in
    place of its rate. Tables whose optimizer has no rate of its own follow.

    Args:
      make: A function that returns the schedule, of the rate that the optimizer was compiled with, and of the
        number of steps of this `fit` (None if its data have an unknown length).

    Raises:
      ConfigError: When training begins, the optimizer's rate is a schedule, which would set it too.
    """

    def __init__(self, make: Callable[[float, int | None], Callable[[tf.Tensor], tf.Tensor]]) -> None:
        super().__init__()
        self._make = make
        self._compiled: float | None = None
        self._last: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Make the schedule."""
        optimizer = self.model.optimizer
        own = getattr(optimizer, "_learning_rate", None)
        if isinstance(own, tf.keras.optimizers.schedules.LearningRateSchedule):
            raise ConfigError(
                f"{type(self).__name__}: the optimizer's rate is a {type(own).__name__}, which sets the rate "
                "too: compile with a number"
            )
        if self._compiled is None:
            self._compiled = float(optimizer.learning_rate)
        batches = self.params.get("steps")
        schedule = self._make(self._compiled, int(batches) * int(self.params["epochs"]) if batches else None)
        self._rate = tf.function(lambda: schedule(optimizer.iterations))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the next step, if it is another one."""
        rate = float(self._rate())
        if rate != self._last:
            self.model.optimizer.learning_rate = self._last = rate


# Callbacks of the last release, by their old names in `gmeta.callbacks`.


def warmup_callback(steps: int) -> RateInFit:
    """Make the callback that was ``gmeta.callbacks.LearningRateWarmup``."""
    _advise("LearningRateWarmup", f"Warmup(rate, steps={steps}, start=1 / ranks)")
    Warmup(0.0, steps)
    return RateInFit(lambda rate, _: Warmup(rate, steps, 1 / collectives.world().shares.total))


def one_cycle_callback(steps: int | None = None, warm_up: float = 0.3) -> RateInFit:
    """Make the callback that was ``gmeta.callbacks.OneCycle``; ``steps`` None: those of `fit`."""
    _advise("OneCycle", f"OneCycle(rate, steps={'...' if steps is None else steps})")
    OneCycle(0.0, 1 if steps is None else steps, warm_up)

    def make(rate: float, of_fit: int | None) -> OneCycle:
        all_steps = steps or of_fit
        if all_steps is None:
            raise ConfigError(
                "OneCycle: the number of batches in an epoch is unknown: give OneCycle(steps=...), or "
                "fit(steps_per_epoch=...)"
            )
        return OneCycle(rate, all_steps, warm_up)

    return RateInFit(make)


def _advise(old: str, new: str) -> None:
    warnings.warn(
        f"gmeta.callbacks.{old} goes in the next release: give the optimizer the schedule "
        f"gmeta.optimizers.{new} in place of its rate",
        DeprecationWarning,
        stacklevel=3,
    )
