"""A Keras model over a `TaskLearner`, which trains and evaluates on batches of tasks.

One step is G-Meta's algorithm 1, lines 5 to 10. It looks up the rows of support and query once, together.
Every task adapts its own copy of the network's fast weights, and of embedding rows if they adapt too, on its
support samples. The loss of the adapted networks on the query samples is differentiated with respect to the
shared weights and to the embedding rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf
from tf_keras.src.saving.serialization_lib import Config

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.core.graph.host_ops import shapes_on_host
from gmeta.layers import CollectionLookup, EmbeddingCollection, RecordedLookups
from gmeta.meta.reduction import Reduction
from gmeta.models.meta.batch_loops import refuse_beside, run_batch, weigh_data, weigh_tasks
from gmeta.models.meta.learner.checks import check_compiled
from gmeta.models.meta.learner.forms import Form, choose_form
from gmeta.models.meta.learner.outer_rules import (
    OuterGradients,
    count_samples,
    learned_part,
    outer_gradients,
)
from gmeta.models.meta.learner.task_learner import OuterSamples, TaskLearner
from gmeta.models.meta.learner.task_losses import SampleLoss, TaskMetrics, like_outputs, without_single_output
from gmeta.models.meta.learner.task_view import Part, TaskBatch, TaskView
from gmeta.models.meta.task_parts import split_tasks, task_keys
from gmeta.models.training.compile_settings import make_metrics
from gmeta.models.training.faults.batch_faults import fault_of_tasks
from gmeta.models.training.model import Model
from gmeta.models.training.optimizer.step_gradients import StepGradients
from gmeta.models.training.ranks.step import rank_step


class TaskModel(Model):
    """A Keras model over a learner; `gmeta.models.MetaModel` and `gmeta.models.MetaGRM` derive from it.

    On several ranks (see `gmeta.models.training.ranks.loops.RunsOnRanks`) the outer loss is a mean over the
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
          metrics: As in Keras; a `gmeta.metrics.TaskMetric` may be among them.
          inner: The inner loop, which replaces the model's present one.
          form: How a training step computes its inner loop. It changes the speed, and results only by
            rounding: ``"plain"``, ``"dual"``, ``"grouped"`` or ``"dual in groups"``
            (`gmeta.models.meta.learner.forms`); ``"auto"`` chooses the quickest.
          accumulate_steps: Make one outer step of every k batches of tasks; see `gmeta.models.Model.compile`.
          nan: As in `gmeta.models.Model.compile`: ``"raise"``, or ``"allow"`` to train on if the loss isn't
            finite.
          **kwargs: As in Keras.

        Raises:
          ConfigError: The loss can't give a value for each sample; ``loss_weights`` is given; tables don't
            support a setting (``accumulate_steps`` below 1, XLA, several replicas in one process); the inner
            loop adapts layers which the network doesn't have, or it doesn't allow the form.
        """
        if kwargs.get("loss_weights") is not None:
            raise ConfigError(
                f"{self.name}: loss_weights don't reach the inner and the outer loss; make a loss of your "
                "own that weighs the outputs"
            )
        if inner is not None and inner != self.inner:
            self.learner.use(inner)
            self.inner_rates = self.learner.inner_rates
        else:
            self.learner.check_adapts()
        self._form = choose_form(self.learner, form)
        self._task_metrics, others = TaskMetrics.among(metrics)
        super().compile(optimizer, loss, others, accumulate_steps=accumulate_steps, nan=nan, **kwargs)
        asked = {} if form == "auto" else {"form": form}
        self._compile_config = Config(optimizer=optimizer, loss=loss, metrics=metrics, **asked, **kwargs)
        self.learner.loss = SampleLoss(loss)
        self._loss_metric = tf.keras.metrics.Mean(name="loss")

    def _check_loss(self, loss: Any, accumulate_steps: int) -> None:
        """Accept any loss: its values are computed for each sample, whatever its own reduction."""

    @tf.autograph.experimental.do_not_convert
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

    @tf.autograph.experimental.do_not_convert
    def lookup_inputs(self, data: Any) -> list[tuple[EmbeddingCollection, Any]]:
        """Return the one lookup of a train step: of all samples, support and query together."""
        return [(self.collection, self.learner.tasks_of(data)["features"])]

    # AutoGraph would needlessly rewrite 600 Keras functions before the first step, which takes 8 s.
    @tf.autograph.experimental.do_not_convert
    def compute_gradients(self, data: Any) -> StepGradients:
        """Compute the outer gradients of a batch of tasks for `train_step`."""
        batch = self.learner.tasks_of(data)
        with shapes_on_host():
            outer, lookup = self.outer_gradients(batch)
            self._measure(outer.view, outer.measured.part, outer.measured.outputs)
            logs = self._report(outer.loss, count_samples(self.learner, batch, outer.measured.part))
            samples = count_samples(self.learner, batch, learned_part(self.learner))
        if not self.collection.trainable:
            return StepGradients(outer.loss, samples, outer.dense, [], RecordedLookups(), logs)
        lookups = self.collection.recording_of(lookup)
        return StepGradients(outer.loss, samples, outer.dense, outer.rows, lookups, logs)

    def outer_gradients(self, batch: TaskBatch) -> tuple[OuterGradients, CollectionLookup]:
        """Compute the outer loss and its gradients, and return them with the lookup.

        On several ranks they cover only the tasks of this rank.
        """
        lookup = self.collection.lookup(batch["features"], insert=self.collection.trainable)
        variables, scale = self.trainable_variables, self._loss_scale
        found = outer_gradients(self.learner, batch, lookup, variables, form=self._form, scale=scale)
        return found, lookup

    @tf.autograph.experimental.do_not_convert
    def count_units(self, data: Any) -> tf.Tensor:
        """Count the tasks of a batch, () int64."""
        return tf.shape(data["task"], tf.int64)[0] if _has_indices(data) else super().count_units(data)

    @tf.autograph.experimental.do_not_convert
    def split_batch(self, data: Any, units: Sequence[tf.Tensor]) -> list[Any]:
        """Split a batch into micro-batches of whole tasks."""
        return split_tasks(data, units) if _has_indices(data) else super().split_batch(data, units)

    @tf.autograph.experimental.do_not_convert
    def unit_keys(self, data: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the keys of tasks: the integers and texts of their samples' features."""
        return task_keys(data) if _has_indices(data) else super().unit_keys(data)

    @tf.autograph.experimental.do_not_convert
    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Adapt on the support samples, then measure on the query samples; nothing is stored."""
        batch = self.learner.tasks_of(data)
        with rank_step(self, data) as step, shapes_on_host():
            view, outputs = self._query_outputs(batch, insert=False)
            self._measure(view, "query", outputs)
            loss = self.learner.loss_of(view, "query", outputs).loss
            return step.end_forward(self._report(loss, count_samples(self.learner, batch, "query")))

    @tf.autograph.experimental.do_not_convert
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
        """Say which part of a batch makes the loss not finite; empty if none does."""
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
