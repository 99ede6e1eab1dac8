"""A Keras model whose train step trains embedding tables along with the dense weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import tensorflow as tf
from tf_keras.src.engine import functional

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.graph import collect_ops, read_where_it_is, shapes_on_host
from gmeta.core.keras import refuse_keras_3
from gmeta.core.step import mark_end, step_context, upstream_of, within_step
from gmeta.layers import EmbeddingCollection, record_lookups
from gmeta.layers.embedding.table_weights import tables_of
from gmeta.ops.table.finite import NamedGradient
from gmeta.training.compile_settings import LossScale, OwnStep, check_compile, make_metrics
from gmeta.training.faults import NanGuard, fault_of_samples
from gmeta.training.joint_optimizer import JointOptimizer
from gmeta.training.mean_gradients import StepGradients
from gmeta.training.pipeline import Pipeline, check_pipeline, step_number
from gmeta.training.rank_loops import RunsOnRanks
from gmeta.training.rank_steps import RankNotes, rank_step
from gmeta.training.saves_tables import SavesTables
from gmeta.training.steps_ahead import Queue, QuickCalls, StepsAhead
from gmeta.training.table_rule import check_rule, follow
from gmeta.training.windows import Windows, column_keys, count_units, take_units

Observer = Callable[[Any, Any, Any, Any, Any], None]

_ACCUMULATE, _SHARD = "accumulate_steps", "shard_optimizer"
_Functional: Any = tf.keras.Sequential.__base__  # Keras has no public name for the class of functional models


@functools.cache
def _functional(cls: Any) -> Any:
    """Return the class for functional models of class ``cls``.

    Keras would change the bases of ``cls`` itself and of its base classes, so that after one functional model
    no subclassed model of the same base could be created.
    """
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls, _KeepsIds, _Functional), same)


def _name_collections_apart(outputs: Any) -> None:
    """Give unnamed collections different names, as layers of a functional model must have.

    The names depend on the model alone, so all ranks and all processes that create it have the same ones.
    """
    if not all(hasattr(output, "_keras_history") for output in tf.nest.flatten(outputs)):
        return  # Keras says what is wrong
    _, layers = functional._build_map(outputs)
    unnamed = [each for each in layers if isinstance(each, EmbeddingCollection) and not each.has_own_name]
    taken = {layer.name for layer in layers if layer not in unnamed}
    for collection in unnamed:
        if collection.name in taken:
            free = (f"{collection.name}_{number}" for number in itertools.count(1))
            collection.rename(next(name for name in free if name not in taken))
        taken.add(collection.name)


class _KeepsIds:
    """A mixin that keeps Keras' functional models from casting inputs, which would truncate floats to ids."""

    def _conform_to_reference_input(self, tensor: Any, ref_input: Any) -> Any:
        given, wanted = getattr(tensor, "dtype", None), ref_input.dtype
        if given is not None and wanted.is_integer and (given.is_floating or given == tf.string):
            remedy = (
                "make it tf.keras.Input(..., dtype=tf.string), of a feature with hash=True"
                if given == tf.string
                else "cast them if they are ids, or make the input one of floats"
            )
            raise ConfigError(f"input {ref_input.name!r} takes {wanted.name}, got {given.name}: {remedy}")
        return super()._conform_to_reference_input(tensor, ref_input)  # type: ignore[misc]


class Model(SavesTables, RunsOnRanks, tf.keras.Model):
    """A `tf.keras.Model` for models that contain a `gmeta.layers.EmbeddingCollection`.

    Use it like `tf.keras.Model`, in functional style (``Model(inputs, outputs)``) or as a base class. Write
    the rest of the script as usual: any loss, optimizer, metrics, callbacks, sample and class weights,
    learning rate schedules, ``mixed_float16``, ``run_eagerly``, ``steps_per_execution``.

    A train step records the lookups of the model's collections, wherever and however often they are called.
    It differentiates the loss with respect to the trainable variables and the rows of these lookups. Each
    physical table then makes one update, in which gradients to the same key are summed.

    On several ranks the same script trains one model (see `gmeta.training.rank_loops.RunsOnRanks`).

    Saving: ``save_weights`` (TensorFlow's format, and ``.weights.h5``), ``tf.train.Checkpoint`` and
    ``.keras`` save the complete tables, with optimizer slots. The older ``.h5`` and SavedModel are refused,
    because they would leave the tables out. So are, on several ranks, formats that one process writes; use
    ``BackupAndRestore`` or `gmeta.checkpoint.ShardedCheckpoint`, which save all ranks' rows.

    Example:
      >>> user = tf.keras.Input([], name="user", dtype=tf.int64)
      >>> item = tf.keras.Input([], name="item", dtype=tf.int64)
      >>> collection = EmbeddingCollection([FeatureConfig("user", dim=8), FeatureConfig("item", dim=8)])
      >>> vectors = collection({"user": user, "item": item})
      >>> logit = tf.keras.layers.Dot(axes=1)([vectors["user"], vectors["item"]])
      >>> model = Model({"user": user, "item": item}, logit)
      >>> model.compile("adam", tf.keras.losses.BinaryCrossentropy(from_logits=True))
    """

    lookup_inputs: Callable[[Any], Sequence[tuple[EmbeddingCollection, Mapping[str, Any]]]] | None = None
    """A method of a batch that returns the lookups of its train step, in their order: collections and their
    inputs. A model defines it if `compile` with a pipeline can't find them in the forward pass. They may
    depend on the batch and on `step_number`."""

    refused_settings: ClassVar[Mapping[str, str]] = {
        "jit_compile": "XLA can't compile lookups in dynamic tables"
    }
    """Arguments of `compile`, of Keras' and of gmeta's, that the model can't use -> what to use in their
    place, or why. A model with its own loss adds ``"loss"``."""

    observer: Observer | None = None
    """The function that `observe` has set."""
    _extra_pass = False

    train_function: Any
    test_function: Any
    predict_function: Any
    gradients_part = "backward"
    """The part of a step that computes the gradients, for `gmeta.callbacks.StepTimes`."""

    # The positional parameters are those of Keras' functional models. Keras checks them when it clones a
    # model, to see whether it can create another model of this class.
    def __init__(
        self, inputs: Any = None, outputs: Any = None, name: Any = None, trainable: Any = True, **kwargs: Any
    ) -> None:
        refuse_keras_3(type(self).__name__, inputs, outputs)
        if inputs is None and outputs is None:
            super().__init__(name=name, trainable=trainable, **kwargs)
            return
        if not isinstance(self, _Functional):
            cls: Any = type(self)
            self.__class__ = _functional(cls)
        _name_collections_apart(outputs)
        super().__init__(inputs=inputs, outputs=outputs, name=name, trainable=trainable, **kwargs)

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        *args: Any,
        accumulate_steps: int = 1,
        nan: Literal["raise", "allow"] = "raise",
        pipeline: Pipeline | None = None,
        shard_optimizer: bool = False,
        **kwargs: Any,
    ) -> None:
        """Configure training, as `tf.keras.Model.compile` does.

        Args:
          optimizer: As in Keras.
          loss: As in Keras.
          *args: As in Keras.
          accumulate_steps: k. Every k batches make one optimizer step, with the gradient of a batch k times
            as large: the mean over all their samples. The loss must be a mean over samples, as Keras' losses
            are. The end of an epoch makes a step of the batches accumulated so far, even if there are fewer
            than k. Lookups count as uses of a row once per batch, not once per step.
          nan: ``"raise"``: a loss or a gradient that isn't finite ends training before its step, with an
            error that names the cause. ``"allow"``: train on.
          pipeline: How `fit` fetches ahead of a batch, and in how many micro-batches a step computes it; see
            `gmeta.Pipeline`. None: no fetches ahead, and no micro-batches.
          shard_optimizer: Whether N ranks divide the optimizer's slots of the dense weights, so that each has
            about 1 / N of them: each rank then gets the mean gradients of its weights only, updates them,
            and sends them to the others (ZeRO, stage 1). Weights are divided whole. It changes no result in
            host memory, and nothing at all on one rank.
          **kwargs: As in Keras.

        Raises:
          ConfigError: An argument is among ``refused_settings``; or tables can't support the settings:
            several replicas in one process, accumulation of fewer than one batch, or a loss reduced by a sum
            with accumulation, micro-batches or on several ranks; or ``shard_optimizer`` with a legacy
            optimizer or ``use_ema``. `fit` raises it too, if the model's own ``train_step`` would ignore
            accumulation, micro-batches or ``shard_optimizer``, or if the optimizer has state that several
            weights share, as Nadam has, and ranks were to divide it.
          KerasError: An argument, or a layer of the model, is of Keras 3.
        """
        own = {
            _ACCUMULATE: accumulate_steps,
            "pipeline": pipeline,
            _SHARD: shard_optimizer,
        }
        check_compile(self, optimizer, loss, args, {**kwargs, **own})
        trained = tables_of(self, trained=True)
        check_rule(self, trained, tf.keras.optimizers.get(optimizer))
        self._pipeline, self._queue = check_pipeline(pipeline), Queue()
        micro_batches = self._pipeline.micro_batches
        self._check_loss(loss, accumulate_steps)
        self._windows = Windows(self, self._pipeline) if micro_batches > 1 else None
        obeyed = {_ACCUMULATE: accumulate_steps, "micro_batches": micro_batches, _SHARD: shard_optimizer}
        self._own_step = OwnStep(self, obeyed)
        self._guard = NanGuard(self, nan, self.find_fault)
        super().compile(optimizer, loss, *args, **kwargs)
        self._accumulate_steps, self._shard_optimizer = accumulate_steps, shard_optimizer
        follow(self, trained, self.optimizer)
        self._loss_scale, self._notes = LossScale(self.optimizer), RankNotes()
        self._joint_optimizer = JointOptimizer(
            self.optimizer,
            accumulate_steps,
            raises=self._guard.raises,
            notes=self._notes,
            trainer=self,
            shard_optimizer=shard_optimizer,
        )

    def _check_loss(self, loss: Any, accumulate_steps: int) -> None:
        ranks = collectives.world().size
        who = {
            f"training on {ranks} ranks": ranks > 1,
            "accumulate_steps": accumulate_steps > 1,
            "micro_batches": self._pipeline.micro_batches > 1,
        }
        if any(who.values()) and any(_is_sum(each) for each in tf.nest.flatten(loss)):
            raise ConfigError(
                f"{next(name for name in who if who[name])} makes means over the samples of several batches, "
                "but a loss is reduced by SUM: use SUM_OVER_BATCH_SIZE"
            )

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Train on one batch: call `compute_gradients`, then update dense weights and tables."""
        self._own_step.note()
        with rank_step(self, data) as step:
            windows = self._windows
            found = self.compute_gradients(data) if windows is None else windows.compute_gradients(data)
            mark_end(self.gradients_part, found.dense, found.rows)
            gradients = step.end_forward([*found.dense, *found.rows])
        count, variables = len(found.dense), self.trainable_variables
        dense, rows = gradients[:count], gradients[count:]
        named = [*NamedGradient.of_weights(dense, variables), *found.lookups.named(rows)]
        skips = self._loss_scale.skips_bad_steps
        finite = self._guard.finite(found.loss, named, data, found.samples, skips)
        with collect_ops() as updates:
            self._joint_optimizer.apply_gradients(
                dense, variables, found.lookups, rows, found.samples, finite
            )
        with tf.control_dependencies(updates):
            mark_end("update")
        return found.logs

    def compute_gradients(self, data: Any) -> StepGradients:
        """Compute the gradients for `train_step`; a model that learns in another way overrides this method.

        Args:
          data: A batch, as Keras passes it to ``train_step``.
        """
        scale = self._loss_scale
        with tf.GradientTape() as tape, record_lookups(tape) as lookups:
            loss, samples, measure = self.learn(data)
            mark_end("forward", loss)
            scaled = scale.scale(loss)
        variables = self.trainable_variables
        with shapes_on_host():
            of_loss = tape.gradient(scaled, [*variables, *lookups.rows], output_gradients=upstream_of(scaled))
        gradients = scale.unscale(of_loss)
        dense, rows = gradients[: len(variables)], gradients[len(variables) :]
        return StepGradients(loss, samples, dense, rows, lookups, measure())

    def observe(self, observer: Observer | None, *, extra_pass: bool = False) -> None:
        """Call a function in each train step, with what the weights before the step predict.

        It is called where the step is traced, after the forward pass. Models with their own `learn` call it
        there, if they predict labels.

        Args:
          observer: A function of the inputs, the labels, the outputs, sample weights or None, and users or
            None. None: no function.
          extra_pass: Whether the outputs are those of a forward pass with ``training=False``, made before the
            one in training, which may change moving averages. False: those of the pass in training.
        """
        self.observer, self._extra_pass = observer, extra_pass and observer is not None
        if self.train_function is not None:  # it was traced with another observer
            self.make_train_function(force=True)

    def predict_before(self, predict: Callable[[], Any]) -> Any:
        """Return the outputs of the extra pass for the observer; None if it doesn't need one.

        Args:
          predict: A function that computes the outputs with ``training=False``. Its lookups don't belong to
            the step.
        """
        if not self._extra_pass or step_context().wanted is not None:
            return None
        with within_step(recording=None, samples=None, fetched=None):
            return predict()

    def count_units(self, data: Any) -> tf.Tensor:
        """Count the units of a batch that `split_batch` doesn't divide, () int64: samples.

        Args:
          data: A batch, as Keras passes it to ``train_step``.

        Raises:
          ConfigError: Parts of the batch have different first dimensions, or none.
        """
        return count_units(self.name, data)

    def split_batch(self, data: Any, units: Sequence[tf.Tensor]) -> list[Any]:
        """Split a batch into micro-batches; a model whose units aren't samples overrides this method.

        Args:
          data: A batch, as Keras passes it to ``train_step``.
          units: For each micro-batch (n,) int64, the numbers of its units, in the order that it gets them.
            Each unit of `count_units` is in one of them; a micro-batch may have none.
        """
        return [take_units(data, chosen) for chosen in units]

    def unit_keys(self, data: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the keys that units may share, by which ``Pipeline(cluster=True)`` brings them together.

        These are the integers and texts of a batch's inputs, each a key of its column. A model whose units
        aren't samples overrides this method.

        Args:
          data: A batch, as Keras passes it to ``train_step``.

        Returns:
          (n,) int64 keys, and (n,) int64, for each key the number of the unit that has it.
        """
        return column_keys(tf.keras.utils.unpack_x_y_sample_weight(data)[0])

    def find_fault(self, data: Any) -> str:
        """Describe what in a batch is at fault if the loss isn't finite; return "" if nothing is."""
        return fault_of_samples(data)

    @property
    def joint_optimizer(self) -> JointOptimizer:
        """The optimizer of a compiled model's dense weights and tables, for a custom ``train_step``."""
        self._assert_compile_was_called()
        return self._joint_optimizer

    @property
    def step_number(self) -> tf.Tensor:
        """The number of the optimizer step that trains the batch at hand, () int64, from 0 on.

        Read it, and not ``optimizer.iterations``, where what a step looks up depends on this number: a
        pipeline finds the lookups of a batch before its step.
        """
        return step_number(self.optimizer)

    @property
    def batches_ahead(self) -> int:
        """The number of batches that `fit` takes from its data before it trains them."""
        return self._pipeline.depth

    def learn(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, Callable[[], dict[str, tf.Tensor]]]:
        """Run the forward pass of a train step; a model with its own loss overrides this method.

        Args:
          data: A batch, as Keras passes it to ``train_step``.

        Returns:
          The loss, a scalar that is a mean over the batch's samples; the number of samples, (); and a
          function that updates metrics and returns their results. It is called outside of the tape.
        """
        x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(data)
        before = self.predict_before(lambda: self(x, training=False))
        y_pred = self(x, training=True)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        self._validate_target_and_loss(y, loss)

        def measure() -> dict[str, tf.Tensor]:
            if self.observer is not None:
                self.observer(x, y, y_pred if before is None else before, sample_weight, None)
            return self.compute_metrics(x, y, y_pred, sample_weight)

        return loss, _samples(y_pred), measure

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, tf.Tensor]:
        """Compute metrics as `tf.keras.Model.compute_metrics` does."""
        make_metrics(self.compiled_metrics, y, y_pred)
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def get_compile_config(self) -> dict[str, Any] | None:
        """Return the arguments that `compile` was called with."""
        config = super().get_compile_config()
        if config is None:
            return None
        nan = {} if self._guard.raises else {"nan": "allow"}
        ahead = {} if self._pipeline == Pipeline(depth=0) else {"pipeline": self._pipeline}
        shard = {_SHARD: True} if self._shard_optimizer else {}
        return {**config, _ACCUMULATE: self._accumulate_steps, **nan, **ahead, **shard}

    def make_train_function(self, force: bool = False) -> Any:
        """Call `tf.keras.Model.make_train_function`, or make one that fetches ahead."""
        if self.train_function is not None and not force:
            return super().make_train_function()
        if self._pipeline.depth == 0:
            made = QuickCalls.of(super().make_train_function(force))
        else:
            self._follow_late()
            made = StepsAhead(self, self._pipeline.depth, self._queue)
        self.train_function = self._own_step.watch(made)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Call `tf.keras.Model.make_test_function`."""
        self.test_function = QuickCalls.of(super().make_test_function(force))
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """Call `tf.keras.Model.make_predict_function`."""
        self.predict_function = QuickCalls.of(super().make_predict_function(force))
        return self.predict_function

    def _configure_steps_per_execution(self, steps: int) -> None:
        with tf.device("CPU:0"):  # Keras reads this number before each step, and on a GPU waits for the last
            super()._configure_steps_per_execution(steps)
        read_where_it_is(self._steps_per_execution)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Call `compile` with the result of `get_compile_config`."""
        self.compile(**tf.keras.saving.deserialize_keras_object(config))
        if self.built and self.trainable_variables and hasattr(self.optimizer, "build"):
            self.optimizer.build(self.trainable_variables)


def _samples(y_pred: Any) -> tf.Tensor:
    first = tf.nest.flatten(y_pred)[0]
    return first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]


def _is_sum(loss: Any) -> bool:
    return getattr(loss, "reduction", None) == tf.keras.losses.Reduction.SUM
