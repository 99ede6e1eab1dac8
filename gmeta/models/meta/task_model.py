"""A Keras model over a `TaskLearner`, which trains and evaluates on batches of tasks.

One step is G-Meta's algorithm 1, lines 5 to 10. It looks up the rows of support and query once, together.
Every task adapts its own copy of the network's fast weights, and of embedding rows if they adapt too, on its
support samples. The loss of the adapted networks on the query samples is differentiated with respect to the
shared weights and to the embedding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import tensorflow as tf
from tf_keras.src.engine.training_utils import RespectCompiledTrainableState
from tf_keras.src.utils import tf_utils

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.core.graph import shapes_on_host
from gmeta.layers import EmbeddingCollection
from gmeta.layers.exchange.recorded_lookups import RecordedLookups
from gmeta.meta.inner_loop import Reduction
from gmeta.models.meta.outer_rules import (
    Form,
    choose_form,
    count_samples,
    learned_part,
    outer_gradients,
)
from gmeta.models.meta.task_learner import OuterSamples, TaskLearner
from gmeta.models.meta.task_losses import (
    SampleLoss,
    TaskMetrics,
    check_compiled,
    like_outputs,
    without_single_output,
)
from gmeta.models.meta.task_view import SUPPORT_AND_QUERY, Part, TaskBatch, TaskView
from gmeta.training.compile_settings import make_metrics, refuse_settings
from gmeta.training.faults import fault_of_tasks
from gmeta.training.mean_gradients import StepGradients
from gmeta.training.model import Model
from gmeta.training.rank_steps import rank_step
from gmeta.training.windows import column_keys, take_units

# Keras' loops over batches of tasks: one batch at a time, and with class weights.


def run_batch(
    model: Any, doing: str, batch: Any, reset_metrics: bool = False, return_dict: bool = True
) -> Any:
    """Run Keras' train, test or predict function on one batch of tasks.

    Keras' own one-batch methods expect the same number of samples in all parts of a batch; a batch of tasks
    has samples and tasks.

    Args:
      model: A `TaskModel`.
      doing: ``"train"``, ``"test"`` or ``"predict"``.
      batch: The batch.
      reset_metrics: As in Keras.
      return_dict: As in Keras.
    """
    if doing != "predict":
        model._assert_compile_was_called()
    model._check_call_args(f"{doing}_on_batch")
    trains = doing == "train"
    if trains:
        model._warn_of_trainable()
    with (
        model.distribute_strategy.scope(),
        model._name_failures(f"{doing}_on_batch"),
        RespectCompiledTrainableState(model) if trains else nullcontext(),
    ):
        make: Callable[[], Callable[[Any], Any]] = getattr(model, f"make_{doing}_function")
        results = make()(iter(tf.data.Dataset.from_tensors(model.learner.tasks_of(batch))))
    results = tf_utils.sync_to_numpy_or_python_type(results)
    if reset_metrics:
        model.reset_metrics()
    if return_dict:
        return results
    values = [results[name] for name in model.metrics_names]
    return values[0] if len(values) == 1 else values


def weigh_data(learner: TaskLearner, data: Any, class_weight: Mapping[int, float]) -> tf.data.Dataset:
    r"""Weigh the samples of each batch of a data set by their labels.

    The weights multiply the masks of support and query, so that the inner and the outer loss are weighted
    means: :math:`\sum_i w_i l_i / \sum_i w_i`. Samples of a class with weight 0 are left out, also from
    metrics.

    Raises:
      ConfigError: The data aren't a data set; or as `weigh_tasks`.
    """
    if not isinstance(data, tf.data.Dataset):
        raise ConfigError(
            "class_weight goes with a tf.data.Dataset of task batches, as gmeta.io.tasks gives, got "
            f"{type(data).__name__}"
        )
    return data.map(lambda batch: weigh_tasks(learner.tasks_of(batch), class_weight))


def weigh_tasks(batch: Mapping[str, Any], class_weight: Mapping[int, float]) -> dict[str, Any]:
    """Weigh the samples of a batch of tasks by their labels.

    Args:
      batch: The batch, with one label per sample.
      class_weight: Label -> weight, at least 0; other labels have weight 1.

    Raises:
      ConfigError: Samples have several labels, or a weight is negative or isn't finite.
    """
    label = tf.convert_to_tensor(batch["label"])
    if label.shape.rank != 1:
        raise ConfigError("class_weight requires one label per sample; weigh several in a custom loss")
    bad = {name: weight for name, weight in class_weight.items() if not 0 <= weight < float("inf")}
    if bad:
        raise ConfigError(f"class_weight must be numbers from 0 on, got {bad}")
    classes = tf.cast(tf.constant(list(class_weight)), label.dtype)
    weights = tf.constant(list(class_weight.values()), tf.float32)
    of_class = tf.equal(label[:, tf.newaxis], classes)
    weight = tf.where(
        tf.reduce_any(of_class, axis=1), tf.reduce_sum(tf.where(of_class, weights, 0.0), axis=1), 1.0
    )
    parts = {
        part: {**batch[part], "mask": batch[part]["mask"] * tf.gather(weight, batch[part]["index"])}
        for part in ("support", "query")
    }
    return {**batch, **parts}


def refuse_beside(**given: Any) -> None:
    """Refuse arguments that can't accompany a batch of tasks.

    Raises:
      ConfigError: An argument isn't None.
    """
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ConfigError(
            f"a batch of tasks has its labels and masks in it: leave {' and '.join(named)} out, and put "
            "weights of samples into the masks of support and query"
        )


# Splits a batch of tasks into micro-batches of whole tasks.

_OF_SAMPLES, _OF_TASKS = ("features", "label"), ("task", *SUPPORT_AND_QUERY)


def split_tasks(batch: TaskBatch, units: Sequence[tf.Tensor]) -> list[dict[str, Any]]:
    """Split a batch of tasks.

    A part gets the samples that its tasks' indices name, in the batch's order, and indices among these. A
    sample that no index names is looked up too, so it goes to the first part.

    Args:
      batch: The batch.
      units: For each part (n,) int64, the numbers of its tasks.

    Raises:
      ConfigError: The batch has a part that belongs neither to samples nor to tasks.
    """
    strange = [name for name in batch if name not in (*_OF_SAMPLES, *_OF_TASKS)]
    if strange:
        raise ConfigError(
            f"micro_batches can't divide {', '.join(map(str, strange))} of a batch of tasks: pass the model "
            "batches as its reader gives them, or leave micro_batches out"
        )
    samples = tf.shape(batch["label"], tf.int64)[0]
    of_tasks = [take_units({name: batch[name] for name in _OF_TASKS}, chosen) for chosen in units]
    nowhere = ~_named(batch, samples)
    return [
        _with_samples(batch, tasks, _named(tasks, samples) | (nowhere if number == 0 else False))
        for number, tasks in enumerate(of_tasks)
    ]


def task_keys(batch: TaskBatch) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the keys of tasks' features, and which task has each; see `gmeta.models.Model.unit_keys`.

    A sample that several tasks name counts for the last of them.
    """
    keys, samples = column_keys(batch["features"])
    index = [batch[part]["index"] for part in SUPPORT_AND_QUERY]
    tasks = tf.concat(
        [tf.repeat(tf.range(tf.shape(each, tf.int64)[0]), tf.shape(each)[1]) for each in index], axis=0
    )
    named = tf.concat([tf.reshape(each, [-1]) for each in index], axis=0)
    task_of = tf.math.unsorted_segment_max(tasks, named, tf.shape(batch["label"], tf.int64)[0])
    units = tf.gather(task_of, samples)
    return tf.boolean_mask(keys, units >= 0), tf.boolean_mask(units, units >= 0)


def _named(tasks: TaskBatch, samples: tf.Tensor) -> tf.Tensor:
    """Return for each sample of a batch whether an index of some tasks names it, (samples,) bool."""
    index = tf.concat([tf.reshape(tasks[part]["index"], [-1]) for part in SUPPORT_AND_QUERY], axis=0)
    return tf.math.unsorted_segment_sum(tf.ones_like(index, tf.int32), index, samples) > 0


def _with_samples(batch: TaskBatch, tasks: dict[str, Any], named: tf.Tensor) -> dict[str, Any]:
    numbers = tf.cumsum(tf.cast(named, tf.int32), exclusive=True)
    own = {
        part: {**tasks[part], "index": _number(tasks[part]["index"], numbers)} for part in SUPPORT_AND_QUERY
    }
    of_samples = take_units({name: batch[name] for name in _OF_SAMPLES}, tf.where(named)[:, 0])
    return {**of_samples, "task": tasks["task"], **own}


def _number(index: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.gather(numbers, index), index.dtype)


class TaskModel(Model):
    """A Keras model over a learner; `gmeta.models.MetaModel` and `gmeta.models.MetaGRM` derive from it.

    On several ranks (see `gmeta.training.rank_loops.RunsOnRanks`) the outer loss is a mean over the
    query samples, or tasks, of all ranks, so a step equals that of one rank with all tasks. A task adapts on
    the rank that has its samples: ranks exchange outer gradients, never task parameters (G-Meta, section
    2.1.3).

    Args:
      learner: The learner.
      name: The name of the model and of the learner.

    Attributes:
      learner: The learner.
      collection: Its embeddings.
      network: Its network.
      inner_rates: Its learned inner rates.
    """

    refused_settings: ClassVar[Mapping[str, str]] = {
        **Model.refused_settings,
        "loss_weights": "they don't reach the inner and the outer loss; make a loss of your own that weighs "
        "the outputs",
    }
    gradients_part = "outer"
    learner: TaskLearner

    def __init__(self, learner: TaskLearner, *, name: str) -> None:
        super().__init__(name=name)
        learner.name = name
        self.learner = learner
        self.collection: EmbeddingCollection = learner.collection
        self.network: Any = learner.network
        self.inner_rates = learner.inner_rates
        self.built = True

    @property
    def inner(self) -> meta.InnerLoop:
        """The inner loop."""
        return self.learner.inner

    @property
    def outer_samples(self) -> OuterSamples:
        """The samples that the outer loss is over: ``"query"`` or ``"all"``."""
        return self.learner.outer_samples

    @property
    def reduction(self) -> Reduction:
        """The unit that counts equally in means: ``"sample"`` or ``"task"``."""
        return self.learner.reduction

    def compile(  # type: ignore[override]
        self,
        optimizer: Any = "adam",
        loss: Any = "mse",
        metrics: Any = None,
        *,
        inner: meta.InnerLoop | None = None,
        form: Form | Literal["auto"] = "auto",
        accumulate_steps: int = 1,
        nan: Literal["raise", "allow"] = "raise",
        **kwargs: Any,
    ) -> None:
        """Compile as `tf.keras.Model.compile` does; the loss must give a value for each sample.

        Args:
          optimizer: As in Keras.
          loss: As in Keras.
          metrics: As in Keras; a `gmeta.metrics.ranking.TaskMetric` may be among them.
          inner: The inner loop, which replaces the model's present one.
          form: How a training step computes its inner loop. It changes the speed, and results only by
            rounding: ``"plain"``, ``"dual"``, ``"grouped"`` or ``"dual in groups"``
            (`gmeta.models.meta.outer_rules`); ``"auto"`` chooses the quickest.
          accumulate_steps: Make one outer step of every k batches of tasks; see `gmeta.models.Model.compile`.
          nan: As in `gmeta.models.Model.compile`: ``"raise"``, or ``"allow"`` to train on if the loss isn't
            finite.
          **kwargs: As in Keras.

        Raises:
          ConfigError: The loss can't give a value for each sample; ``loss_weights`` are given; tables don't
            support a setting (``accumulate_steps`` below 1, XLA, several replicas in one process); the inner
            loop adapts layers which the network doesn't have, or it doesn't allow the form.
        """
        refuse_settings(self, {**kwargs, "loss": loss, "metrics": metrics})
        if inner is not None and inner != self.inner:
            self.learner.use(inner)
            self.inner_rates = self.learner.inner_rates
        else:
            self.learner.check_adapts()
        self._form = choose_form(self.learner, form)
        self._task_metrics, others = TaskMetrics.among(metrics)
        super().compile(optimizer, loss, others, accumulate_steps=accumulate_steps, nan=nan, **kwargs)
        asked = {} if form == "auto" else {"form": form}
        self._compile_config.config |= {"metrics": metrics, **asked}
        self.learner.loss = self._sample_loss(loss)
        self._loss_metric = tf.keras.metrics.Mean(name="loss")

    def _sample_loss(self, loss: Any) -> SampleLoss:
        return SampleLoss(loss)

    def _check_loss(self, loss: Any, accumulate_steps: int) -> None:
        """Accept any loss: its values are computed for each sample, whatever its own reduction."""

    def call(self, batch: TaskBatch, training: bool | None = None) -> tf.Tensor:
        """Predict the query samples after ``inner.evaluation_steps`` steps, (tasks, query samples)."""
        batch = self.learner.tasks_of(batch)
        return without_single_output(self._query_outputs(batch, insert=bool(training))[1])

    def _query_outputs(self, batch: TaskBatch, insert: bool) -> tuple[TaskView, tf.Tensor]:
        learner = self.learner
        check_compiled(learner)
        view = learner.view(batch, self.collection.lookup(batch["features"], insert=insert))
        weights = learner.adapt(view, steps=self.inner.steps_in("evaluation")).parameters
        return view, learner.task_outputs(view, "query", weights)

    def lookup_inputs(self, data: Any) -> list[tuple[EmbeddingCollection, Any]]:
        """Return the one lookup of a train step: of all samples, support and query together."""
        return [(self.collection, self.learner.tasks_of(data)["features"])]

    def compute_gradients(self, data: Any) -> StepGradients:
        """Compute the outer gradients of a batch of tasks, on several ranks those of this rank's tasks."""
        batch, trains_rows = self.learner.tasks_of(data), self.collection.trainable
        with shapes_on_host():
            lookup = self.collection.lookup(batch["features"], insert=trains_rows)
            variables, scale = self.trainable_variables, self._loss_scale
            outer = outer_gradients(self.learner, batch, lookup, variables, form=self._form, scale=scale)
            loss, part, outputs = outer.measured
            self._measure(outer.view, part, outputs)
            logs = self._report(loss, count_samples(self.learner, batch, part))
            samples = count_samples(self.learner, batch, learned_part(self.learner))
        if not trains_rows:
            return StepGradients(loss, samples, outer.dense, [], RecordedLookups(), logs)
        lookups = self.collection.recording_of(lookup)
        return StepGradients(loss, samples, outer.dense, outer.rows, lookups, logs)

    def count_units(self, data: Any) -> tf.Tensor:
        """Count the tasks of a batch, () int64."""
        return tf.shape(data["task"], tf.int64)[0] if _has_indices(data) else super().count_units(data)

    def split_batch(self, data: Any, units: Sequence[tf.Tensor]) -> list[Any]:
        """Split a batch into micro-batches of whole tasks."""
        return split_tasks(data, units) if _has_indices(data) else super().split_batch(data, units)

    def unit_keys(self, data: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the keys of tasks: the integers and texts of their samples' features."""
        return task_keys(data) if _has_indices(data) else super().unit_keys(data)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Adapt on the support samples, then measure on the query samples; nothing is stored."""
        batch = self.learner.tasks_of(data)
        with rank_step(self, data) as step, shapes_on_host():
            view, outputs = self._query_outputs(batch, insert=False)
            self._measure(view, "query", outputs)
            loss = self.learner.loss_of(view, "query", outputs).loss
            return step.end_forward(self._report(loss, count_samples(self.learner, batch, "query")))

    def predict_step(self, data: Any) -> tf.Tensor:
        """Predict the query samples, as `call` does."""
        with rank_step(self, data) as step, shapes_on_host():
            return step.end_forward(self(data, training=False))

    def predict_after(self, batch: Any, steps: Sequence[int]) -> dict[int, tf.Tensor]:
        """Predict the query after each of several numbers of inner steps; each continues the one before.

        Args:
          batch: A batch of tasks. Nothing is stored.
          steps: Numbers of inner gradient steps, e.g. (0, 1, 5).

        Returns:
          Steps -> (tasks, query samples), or (tasks, query samples, outputs) if there are several.

        Raises:
          ConfigError: It isn't a batch of tasks, or it lacks a column that the network takes.
        """
        return self.learner.predict_after(batch, steps)

    def predict_variance(self, batch: Any, steps: int | None = None) -> tf.Tensor:
        """Compute how uncertain the query's outputs are after ridge; see `TaskLearner.predict_variance`."""
        return self.learner.predict_variance(batch, steps)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        reset_metrics: bool = True,
        return_dict: bool = False,
    ) -> Any:
        """Train on a batch of tasks, which contains its labels, as `tf.keras.Model.train_on_batch` does.

        Raises:
          ConfigError: Labels or sample weights are given beside the batch.
          CollectiveError: Another rank has ended.
          NotFiniteError: The loss, or a rank's gradient, isn't finite.
        """
        refuse_beside(y=y, sample_weight=sample_weight)
        batch = x if class_weight is None else weigh_tasks(self.learner.tasks_of(x), class_weight)
        return run_batch(self, "train", batch, reset_metrics, return_dict)

    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        reset_metrics: bool = True,
        return_dict: bool = False,
    ) -> Any:
        """Evaluate a batch of tasks, which contains its labels, as `tf.keras.Model.test_on_batch` does.

        Raises:
          ConfigError: Labels or sample weights are given beside the batch.
          CollectiveError: Another rank has ended.
        """
        refuse_beside(y=y, sample_weight=sample_weight)
        return run_batch(self, "test", x, reset_metrics, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Predict the query samples of a batch of tasks, as `tf.keras.Model.predict_on_batch` does."""
        return run_batch(self, "predict", x)

    def _with_class_weight(self, own: dict[str, Any]) -> dict[str, Any]:
        weights = own["class_weight"]
        if weights is None:
            return own
        return {**own, "x": weigh_data(self.learner, own["x"], weights), "class_weight": None}

    def find_fault(self, data: Any) -> str:
        """Return which part of a batch makes the loss not finite; empty if none does."""
        return fault_of_tasks(self.learner, self.learner.tasks_of(data))

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The loss and the metrics passed to `compile`, all reset at each epoch."""
        own = [self._loss_metric] if hasattr(self, "_loss_metric") else []
        compiled = self.compiled_metrics.metrics if self.compiled_metrics is not None else []
        of_tasks = self._task_metrics.metrics if hasattr(self, "_task_metrics") else []
        return [*own, *compiled, *of_tasks]

    def _measure(self, view: TaskView, part: Part, outputs: tf.Tensor) -> None:
        """Update the metrics with outputs."""
        labels, mask = view.labels(part), view.mask(part)
        real = mask > 0
        true, predicted = tf.boolean_mask(like_outputs(labels), real), tf.boolean_mask(outputs, real)
        make_metrics(self.compiled_metrics, true, predicted)
        self.compiled_metrics.update_state(true, predicted)
        self._task_metrics.update(labels, outputs, mask)

    def _report(self, loss: tf.Tensor, samples: tf.Tensor) -> dict[str, tf.Tensor]:
        self._loss_metric.update_state(loss, sample_weight=samples)
        return {metric.name: metric.result() for metric in self.metrics}


def _has_indices(data: Any) -> bool:
    """Return whether a batch is one of tasks, not of users that a learner makes tasks of."""
    return isinstance(data, Mapping) and "support" in data
