"""Keras' `fit`, `evaluate` and `predict` on several ranks, with the same results as on one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import tensorflow as tf
from tf_keras.src.engine import data_adapter
from tf_keras.src.utils import tf_utils

from gmeta.core import collectives
from gmeta.core.collectives.shared_data import empty_batch
from gmeta.core.errors import ConfigError
from gmeta.core.graph import name_refusals
from gmeta.core.keras import refuse_keras_3
from gmeta.core.position import CountTrained, positions_in
from gmeta.core.step import StepCallback
from gmeta.layers.embedding.table_weights import tables_of
from gmeta.training.faults import NanGuard, name_bad_ids
from gmeta.training.joint_optimizer import JointOptimizer
from gmeta.training.rank_data import RankData, SameElements, near_gpu, rank_dataset
from gmeta.training.rank_steps import RankNotes, merge_over_ranks, rank_step, start_together
from gmeta.training.table_rule import follow_late

# Merges the ranks' moving averages into averages over all ranks' samples.
#
# A layer such as `tf.keras.layers.BatchNormalization` keeps averages of its inputs in training, and uses them
# in evaluation. Each rank sees only its own samples. So before the model is evaluated or saved, but not in
# every step, the ranks' averages :math:`m_r` are replaced by
#
# .. math:: m = \frac{1}{N} \sum_r n_r m_r, \quad N = \sum_r n_r,
#
# where :math:`n_r` is the number of samples that rank r has trained on since the last merge. A rank without
# samples has no weight. All ranks then hold m and continue from it.


def merge_moving_averages(model: tf.keras.Model, seen: tf.Variable) -> None:
    """Give all ranks the same moving averages, in one collective.

    A model without moving averages needs no collective. Call this eagerly, on all ranks, between two steps.

    Args:
      model: The compiled model, the same on all ranks.
      seen: () int64: the number of samples that this rank has trained on since the last merge. It is reset
        to 0.
    """
    variables = moving_averages(model)
    if collectives.world().size == 1 or not variables:
        return
    # In float64, values that are equal on all ranks stay equal bit for bit.
    weight = tf.cast(seen, tf.float64)
    sent = [tf.math.multiply_no_nan(tf.cast(v, tf.float64), weight) for v in variables]
    *totals, everywhere = collectives.allreduce_sum([*sent, weight], name="moving_averages")
    seen.assign(0)
    if float(everywhere) == 0:
        return
    for variable, total in zip(variables, totals, strict=True):
        variable.assign(tf.cast(total / everywhere, variable.dtype))


def moving_averages(model: tf.keras.Model) -> list[tf.Variable]:
    """Return the untrained variables whose aggregation over replicas is MEAN."""
    if not model.built:
        return []
    measured = {id(variable) for metric in model.metrics for variable in metric.variables}
    return [
        variable
        for variable in {id(v): v for v in model.non_trainable_variables}.values()
        if variable.dtype.is_floating
        and variable.aggregation == tf.VariableAggregation.MEAN
        and id(variable) not in measured
    ]


# Lets all ranks decide together when to stop.


class StopTogether(StepCallback):
    """A callback that sets ``model.stop_training`` on all ranks, in the same step, if any rank sets it.

    Within an epoch, a rank that wants to stop says so in the all-reduce of its next optimizer step, and every
    rank stops after that step. A rank that stopped at once would leave the others waiting. At the end of an
    epoch ranks agree immediately; callbacks see the same logs there on all ranks.

    Args:
      notes: The rank's notes. The all-reduce sends ``stop_asked`` and writes ``stop_agreed``.
    """

    def __init__(self, notes: RankNotes) -> None:
        super().__init__()
        self._asked, self._agreed = notes.stop_asked, notes.stop_agreed

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset the request and the agreement to stop."""
        self._asked.assign(False)
        self._agreed.assign(False)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Request a stop instead of stopping at once; stop if all ranks have agreed."""
        if self.model.stop_training:
            self._asked.assign(True)
        self.model.stop_training = bool(self._agreed.numpy())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree with all ranks on whether to stop."""
        wanted = self.model.stop_training or bool(self._asked.numpy())
        self.model.stop_training = any(collectives.allgather_objects(bool(wanted)))


_GENERATOR = ("max_queue_size", "workers", "use_multiprocessing")


class RunsOnRanks:
    """A mixin, placed before `tf.keras.Model` in gmeta's models, that runs Keras' loops on several ranks.

    On one rank it passes all calls on to Keras. After ``gmeta.init()`` under a launcher, the same script
    trains one model on all ranks:

    * ``fit`` and ``evaluate`` give each rank its part of the data: every N-th sample of arrays, every N-th
      element of a data set (see `gmeta.training.rank_data`, also for passing each rank its own
      part). ``batch_size`` counts one rank's samples, so a step has N times as many, and its gradient is that
      of the mean over all of them. Ranks take equally many steps; a rank whose data has ended takes steps
      without samples. In an elastic job a step has the samples of as many ranks as the job was started with,
      however many it has now.
    * ``predict`` on a rank predicts all data that this rank receives.
    * Dense weights and optimizer state start with the values of rank 0.
    * The results of ``fit`` and ``evaluate``, and the logs that callbacks see at the end of an epoch, cover
      all ranks' samples and are the same on all ranks. Within an epoch, logs cover the rank's own samples.
      All ranks stop if one wants to.
    * Moving averages (of ``BatchNormalization``, and of any variable that isn't trained and has the
      aggregation MEAN) are a rank's own within an epoch, so a batch is normalized by the rank's part of it.
      All ranks get their mean, weighted by the ranks' samples, before the model is evaluated, at the end of
      an epoch, and when `ShardedCheckpoint` saves the model; your own loops call `merge_moving_averages`.
      Other state that a forward pass writes stays the rank's own.
    * Only rank 0 shows progress.
    """

    _joint_optimizer: JointOptimizer
    _guard: NanGuard
    _notes: RankNotes
    _warned_of_trainable: frozenset[tuple[str, bool]] = frozenset()

    def fit(self, *args: Any, **kwargs: Any) -> tf.keras.callbacks.History:
        """Train the model as `tf.keras.Model.fit` does; see `RunsOnRanks`.

        If training ends by an error or Ctrl-C, batches that were accumulated for the next step are dropped.

        Raises:
          ConfigError: Ranks differ in the model, its settings, or the arguments of `fit`; or they can't train
            on the data together; or the model's position in its data would count batches that a pipeline
            reads ahead; or a callback would save one rank's rows.
          CollectiveError: Another rank has ended.
          NotFiniteError: The loss, or a rank's gradient, isn't finite; no rank has made the step.
          KerasError: A callback is of Keras 3.
        """
        own = _arguments(tf.keras.Model.fit, self, args, kwargs)
        refuse_keras_3("fit", own["callbacks"])
        _check_savers(own["callbacks"])
        self._check_position()
        if collectives.world().shares.total > 1:
            self._assert_compile_was_called()  # type: ignore[attr-defined]
            own = self._fit_on_ranks(own)
        own["x"] = near_gpu(own["x"])
        own = self._with_class_weight(own)
        own["callbacks"] = self._with_callbacks(own["callbacks"])
        self._warn_of_trainable()
        if dropped := self._drop_accumulated():
            warnings.warn(
                f"{self.name}: fit starts without {dropped} accumulated batches, which wait for their step: "  # type: ignore[attr-defined]
                "call apply_accumulated before fit to make it",
                stacklevel=2,
            )
        with self._name_failures("fit"):
            try:
                return super().fit(**own)  # type: ignore[misc]
            except BaseException:  # of Ctrl-C too
                self._drop_accumulated()
                self.observe(None)  # type: ignore[attr-defined]
                raise

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch as `tf.keras.Model.train_on_batch` does.

        Raises:
          CollectiveError: Another rank has ended.
          NotFiniteError: The loss, or a rank's gradient, isn't finite.
        """
        self._warn_of_trainable()
        with self._name_failures("train_on_batch"):
            return super().train_on_batch(*args, **kwargs)  # type: ignore[misc]

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch as `tf.keras.Model.test_on_batch` does.

        Raises:
          CollectiveError: Another rank has ended.
        """
        with self._name_failures("test_on_batch"):
            return super().test_on_batch(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the model as `tf.keras.Model.evaluate` does; see `RunsOnRanks`.

        Raises:
          ConfigError: Ranks can't evaluate on the data together.
          CollectiveError: Another rank has ended.
          KerasError: A callback is of Keras 3.
        """
        of_fit = kwargs.get("_use_cached_eval_dataset")  # fit has prepared the data
        if of_fit:
            # Keras would make two iterators for its one epoch; tf.data takes a tenth of a second for each.
            adapter = self._eval_data_handler._adapter  # type: ignore[attr-defined]
            adapter.should_recreate_iterator = lambda: False
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]
        own = _arguments(tf.keras.Model.evaluate, self, args, kwargs)
        refuse_keras_3("evaluate", own["callbacks"])
        if collectives.world().shares.total == 1:
            with self._name_failures("evaluate"):
                return super().evaluate(*args, **kwargs)  # type: ignore[misc]
        data = rank_dataset(
            own["x"],
            own.pop("y"),
            own.pop("sample_weight"),
            batch_size=own.pop("batch_size"),
            shuffle=False,
            steps=own["steps"],
            **_generator(own),
        )
        own["x"] = data.dataset
        own["callbacks"] = _add(own["callbacks"], last=_checks(data, "test"))
        own["verbose"] = _verbose(own["verbose"])
        with self._name_failures("evaluate"):
            self.merge_moving_averages()
            return super().evaluate(**own)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as `tf.keras.Model.predict` does; see `RunsOnRanks`.

        Raises:
          ConfigError: Ranks can't go through the data together.
          CollectiveError: Another rank has ended.
          KerasError: A callback is of Keras 3.
        """
        own = _arguments(tf.keras.Model.predict, self, args, kwargs)
        refuse_keras_3("predict", own["callbacks"])
        if collectives.world().size == 1:
            with self._name_failures("predict"):
                return super().predict(*args, **kwargs)  # type: ignore[misc]
        own["x"] = rank_dataset(
            own["x"],
            batch_size=own.pop("batch_size"),
            shuffle=False,
            steps=own["steps"],
            shard=False,
            **_generator(own),
        ).dataset
        own["verbose"] = _verbose(own["verbose"])
        with self._name_failures("predict"):
            self.merge_moving_averages()
            return super().predict(**own)  # type: ignore[misc]

    def make_train_function(self, force: bool = False) -> Any:
        """Call `tf.keras.Model.make_train_function`; first, newly made tables follow the optimizer."""
        self._follow_late()
        return super().make_train_function(force)  # type: ignore[misc]

    def _follow_late(self) -> None:
        if getattr(self, "_joint_optimizer", None) is not None:
            follow_late(self, tables_of(self, trained=True), self._joint_optimizer.optimizer)

    def test_step(self, data: Any) -> Any:
        """Evaluate one batch as `tf.keras.Model.test_step` does."""
        with rank_step(self, data) as step:
            return step.end_forward(super().test_step(data))  # type: ignore[misc]

    def predict_step(self, data: Any) -> Any:
        """Predict one batch as `tf.keras.Model.predict_step` does."""
        with rank_step(self, data) as step:
            return step.end_forward(super().predict_step(data))  # type: ignore[misc]

    @property
    def is_accumulating(self) -> bool:
        """Whether accumulated gradients wait for their step; checkpoints don't include them."""
        return self._joint_optimizer.is_accumulating

    def apply_accumulated(self) -> None:
        """Make the step of the batches accumulated so far, if there are any.

        Training loops over `train_on_batch` call this, on all ranks; `fit` does so at the end of an epoch.
        """
        self._joint_optimizer.flush()

    def _warn_of_trainable(self: Any) -> None:
        """Warn of layers whose ``trainable`` was set after `compile`, which has no effect until the next one.

        Keras' training goes by the values at `compile`, so that models that share layers can freeze them each
        for itself. It does so in silence. There is one warning for each set of such layers.
        """
        changed = {
            layer.name: was
            for layer, was in (self._compiled_trainable_state or {}).items()
            if layer.trainable != was and (layer._trainable_weights or getattr(layer, "tables", ()))
        }
        warned, self._warned_of_trainable = self._warned_of_trainable, frozenset(changed.items())
        if changed and warned != self._warned_of_trainable:
            does = [f"{name!r} {'is' if was else 'is not'} trained" for name, was in changed.items()]
            more = f" and {len(does) - 5} more" if len(does) > 5 else ""
            warnings.warn(
                f"{self.name}: trainable was set after compile and has no effect before the next compile, as "
                f"in Keras: {', '.join(does[:5])}{more}",
                stacklevel=3,
            )

    def _drop_accumulated(self) -> int:
        joint = getattr(self, "_joint_optimizer", None)
        return 0 if joint is None else joint.drop()

    def merge_moving_averages(self) -> None:
        """Give all ranks the same moving averages (see `RunsOnRanks`), in one collective if there are any.

        Training loops over `train_on_batch` call this, on all ranks, before the weights are used outside of
        `evaluate` and `predict`; `fit` does so at the end of an epoch. On one rank it does nothing.
        """
        notes = getattr(self, "_notes", None)
        if notes is not None and collectives.world().size > 1:
            merge_moving_averages(self, notes.seen)

    @contextmanager
    def _name_failures(self, doing: str) -> Iterator[None]:
        guard = getattr(self, "_guard", None)
        named = guard.name_errors() if guard else nullcontext()
        with named, collectives.name_failures(doing), name_refusals(), name_bad_ids():
            yield

    def _fit_on_ranks(self, own: dict[str, Any]) -> dict[str, Any]:
        """Convert the arguments of `fit` to those for this rank."""
        own = dict(own)
        data = own["x"], own.pop("y"), own.pop("sample_weight")
        if own["validation_split"] and own["validation_data"] is None:
            data, own["validation_data"] = data_adapter.train_validation_split(data, own["validation_split"])
        own["validation_split"] = 0.0
        batch_size, generator = own.pop("batch_size"), _generator(own)
        training = rank_dataset(
            *data,
            batch_size=batch_size,
            shuffle=own["shuffle"],
            steps=own["steps_per_epoch"],
            model=self,
            **generator,
        )
        own["x"], checks = training.dataset, _checks(training, "training")
        validation = own["validation_data"]
        if validation is not None:
            measured = rank_dataset(
                *tf.keras.utils.unpack_x_y_sample_weight(validation),
                batch_size=own.pop("validation_batch_size") or batch_size,
                shuffle=False,
                steps=own["validation_steps"],
                **generator,
            )
            own["validation_data"] = measured.dataset
            checks += _checks(measured, "test")
        own["callbacks"] = _add(own["callbacks"], last=checks)
        alike = (
            "epochs",
            "initial_epoch",
            "steps_per_epoch",
            "validation_steps",
            "validation_freq",
            "class_weight",
        )
        loop = {name: own[name] for name in alike}
        loop["validation_data"] = validation is not None
        spec = training.dataset.element_spec
        start_together(self, spec, empty_batch(spec), loop)
        own["verbose"] = _verbose(own["verbose"])
        return own

    def _with_class_weight(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `fit`; a model with its own handling of ``class_weight`` overrides this."""
        return own

    def _check_position(self) -> None:
        """Refuse a position that would count what the pipeline reads ahead of its training."""
        ahead = getattr(self, "batches_ahead", 0)
        counting = [part for part in positions_in(self) if not part.counts_training]
        if ahead and counting:
            raise ConfigError(
                f"the model's {type(counting[0]).__name__} would count {ahead} batches that are read and not "
                "trained: compile with Pipeline(depth=0), or let ShardedCheckpoint.fit count the steps"
            )

    def _with_callbacks(self, given: Any) -> Any:
        """Put the user's callbacks between those that complete the model and those that stop all ranks."""
        joint = getattr(self, "_joint_optimizer", None)
        if joint is None:
            return given
        several = collectives.world().size > 1
        first: list[tf.keras.callbacks.Callback] = [_Complete(self)] if several or joint.accumulates else []
        first += [CountTrained(part) for part in positions_in(self) if part.counts_training]
        last = [StopTogether(self._notes)] if several else []
        return _add(given, first, last)

    def _validate_and_get_metrics_result(self, logs: Any) -> Any:
        """Return the results of an epoch or an evaluation; Keras calls this at its end."""
        merge_over_ranks(self.metrics)  # type: ignore[attr-defined]
        if collectives.world().size == 1 or not isinstance(logs, dict):
            return super()._validate_and_get_metrics_result(logs)  # type: ignore[misc]
        # The last step's logs cover only this rank. Keras would replace all of them, or none if the model has
        # some metrics for training and others for evaluation.
        results = self.get_metrics_result()  # type: ignore[attr-defined]
        merged = {name: value for name, value in results.items() if name in logs}
        return {**logs, **tf_utils.sync_to_numpy_or_python_type(merged)}


class _Complete(tf.keras.callbacks.Callback):
    """A callback that completes the model before it is evaluated or saved.

    It makes the step of the accumulated batches, and merges the moving averages of all ranks.
    """

    def __init__(self, model: RunsOnRanks) -> None:
        super().__init__()
        self._owner = model

    def on_test_begin(self, logs: Any = None) -> None:
        """Complete the model, so that validation sees the whole epoch's training."""
        self._complete()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Complete the model, so that the callbacks after this one see the whole epoch's training."""
        self._complete()

    def _complete(self) -> None:
        self._owner.apply_accumulated()
        self._owner.merge_moving_averages()


def _arguments(function: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Keras method by name, with defaults for those that weren't given."""
    bound = inspect.signature(function).bind(model, *args, **kwargs)
    bound.apply_defaults()
    rest = bound.arguments.pop("kwargs", {})
    bound.arguments.pop("self")
    return {**bound.arguments, **rest}


def _add(
    given: Any,
    first: Sequence[tf.keras.callbacks.Callback] = (),
    last: Sequence[tf.keras.callbacks.Callback] = (),
) -> Any:
    """Add callbacks before and after the user's callbacks, whatever form these have."""
    if isinstance(given, tf.keras.callbacks.CallbackList):
        for callback in (*last, *reversed(first)):
            given.append(callback)
        for _ in first:
            given.callbacks.insert(0, given.callbacks.pop())
        return given
    return [*first, *tf.nest.flatten(given or []), *last] if first or last else given


def _check_savers(given: Any) -> None:
    """Refuse, before training, a callback whose first save would be refused (`SavesTables`)."""
    here = collectives.world()
    callbacks = getattr(given, "callbacks", None) or tf.nest.flatten(given or [])
    if here.size > 1 and any(isinstance(each, tf.keras.callbacks.ModelCheckpoint) for each in callbacks):
        raise ConfigError(
            f"fit: ModelCheckpoint saves from one process, and rank {here.rank} of {here.size} has only the "
            "rows that it owns: take tf.keras.callbacks.BackupAndRestore or "
            "gmeta.checkpoint.ShardedCheckpoint, to which every rank adds its rows"
        )


def _checks(data: RankData, of: Literal["training", "test"]) -> list[tf.keras.callbacks.Callback]:
    return [] if data.digest is None else [SameElements(data.digest, of=of)]


def _generator(own: dict[str, Any]) -> dict[str, Any]:
    return {name: own[name] for name in _GENERATOR}


def _verbose(verbose: Any) -> Any:
    return verbose if collectives.world().rank == 0 else 0
