"""A Keras model that is trained for how well it adapts.

One step is G-Meta's algorithm 1, lines 5 to 10: the rows of support and query are looked up once, together;
every task adapts its own copy of the network's fast weights, and of embedding rows if they adapt too, on its
support samples; the loss of the adapted networks on the query samples is differentiated with respect to the
shared weights and to the embedding rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import tensorflow as tf
from tf_keras.src.saving.serialization_lib import Config

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.core.graph.host_ops import made_ops, shapes_on_host
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.layers import CollectionLookup, EmbeddingCollection, RecordedLookups
from gmeta.layers.adaptive.task_network import TaskNetwork
from gmeta.meta.reduction import Reduction
from gmeta.models.meta.adapter.adapter import AdaptsToTasks
from gmeta.models.meta.batch_loops import LoopsOverTasks
from gmeta.models.meta.learner.adaptive_network import AdaptiveNetwork, adaptive, build, inputs_by_name
from gmeta.models.meta.learner.checks import (
    check_collection,
    check_compiled,
    check_inner,
    check_something_adapts,
)
from gmeta.models.meta.learner.inner_rates import InnerRates
from gmeta.models.meta.learner.outer_gradients import OuterGradients, reptile, through_the_steps
from gmeta.models.meta.learner.task_loops import TaskLoops
from gmeta.models.meta.learner.task_losses import SampleLoss, TaskMetrics, without_single_output
from gmeta.models.meta.learner.task_view import Part, TaskBatch, TaskView
from gmeta.models.training.compile_settings import check_compile
from gmeta.models.training.faults.batch_faults import fault_of_tasks
from gmeta.models.training.faults.nan_guard import NanGuard
from gmeta.models.training.optimizer.joint_optimizer import JointOptimizer
from gmeta.models.training.optimizer.table_rule import follow
from gmeta.models.training.ranks.step import rank_step
from gmeta.models.training.saves_tables import SavesTables


@tf.keras.saving.register_keras_serializable("gmeta")
class MetaModel(AdaptsToTasks, TaskLoops, SavesTables, LoopsOverTasks, tf.keras.Model):
    r"""Embeddings, a network, and the two loops around them.

    The outer loss of a step is

    .. math:: \frac{1}{n} \sum_t \sum_{q \in Q_t} \ell(f(x_q; \theta_t), y_q), \quad
       \theta_t = \theta - \alpha \nabla_\theta \frac{1}{|S_t|} \sum_{s \in S_t} \ell(f(x_s; \theta), y_s)

    (the inner step repeated ``inner.steps`` times), a mean over all n query samples of the batch, or with
    ``reduction="task"`` the mean over tasks of each task's mean. `gmeta.meta.InnerLoop` has the algorithms:
    what adapts, by which optimizer and rates, and what the outer gradient is.

    Args:
      collection: The embeddings.
      network: Any Keras layer or model, functional or subclassed, that maps (samples, ...) inputs to
        (samples, outputs), or a `gmeta.layers.MLP`. A functional model with named inputs gets the
        vectors of the features of these names, and columns of the data that the collection doesn't embed,
        such as floats; so does a network with an attribute ``takes_by_name``, a list of names. Any other gets
        all vectors side by side, (samples, sum of dims).
      inner: The inner loop; `compile` takes it too.
      outer_samples: ``"query"``: the outer loss is over the query samples. ``"all"``: over support and query
        alike; with ``inner.steps=0`` this is ordinary joint training, the baseline that any meta-learner
        has to be compared with.
      reduction: ``"sample"``: all query samples of a step count alike. ``"task"``: all its tasks do.

    On several ranks (see `gmeta.models.training.ranks.loops.RunsOnRanks`) n is the number of query samples,
    or of tasks, of all ranks, so a step is that of one rank with all their tasks. A task adapts where its
    samples
    are: only outer gradients travel, never task parameters (G-Meta, section 2.1.3).

    Compile with any Keras optimizer and loss; the tables follow that optimizer, or update with a fused one of
    their own, at the rate that it states or else at the Keras optimizer's current one. Metrics see the real
    query samples only, as (samples, outputs); a `gmeta.metrics.TaskMetric` sees them task by task.

    Example:
      >>> from gmeta.layers import FeatureConfig
      >>> network = tf.keras.Sequential(
      ...     [tf.keras.layers.Dense(16, "relu", name="fc"), tf.keras.layers.Dense(1, name="out")]
      ... )
      >>> model = MetaModel(EmbeddingCollection([FeatureConfig("item", dim=8)]), network)
      >>> model.compile(
      ...     optimizer="adam",
      ...     loss="mse",
      ...     metrics=["mae"],
      ...     inner=meta.InnerLoop(steps=1, learning_rate=0.01, adapt=["out"]),
      ... )
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        network: AdaptiveNetwork | tf.keras.layers.Layer,
        *,
        inner: meta.InnerLoop | None = None,
        outer_samples: Literal["query", "all"] = "query",
        reduction: Reduction = "sample",
        name: str = "meta_model",
    ) -> None:
        super().__init__(name=name)
        if outer_samples not in ("query", "all"):
            raise ConfigError(f"outer_samples must be 'query' or 'all', got {outer_samples!r}")
        if reduction not in ("sample", "task"):
            raise ConfigError(f"reduction must be 'sample' or 'task', got {reduction!r}")
        check_collection(collection)
        self.collection = collection
        self.network = adaptive(network)
        self._named_inputs = self._built_for(network)
        self.outer_samples = outer_samples
        self.reduction: Reduction = reduction
        self.built = True
        self.step_clock: Any = None
        self._set_inner(meta.InnerLoop() if inner is None else inner)

    def _built_for(self, network: Any) -> list[str] | None:
        """Give the network its weights; the names that it takes inputs by, None if it takes them as one."""
        names = inputs_by_name(network, self.collection)
        build(self.network, self.collection, names)
        return names

    def _set_inner(self, inner: meta.InnerLoop) -> None:
        check_inner(inner)
        self.inner = inner
        weights = self.adapted_weights()
        check_something_adapts(inner, weights, self.network.name)
        self.inner_rates = InnerRates(inner, weights, self.collection)

    def compile(
        self,
        optimizer: Any = "adam",
        loss: Any = "mse",
        metrics: Any = None,
        *,
        inner: meta.InnerLoop | None = None,
        accumulate_steps: int = 1,
        nan: Literal["raise", "allow"] = "raise",
        **kwargs: Any,
    ) -> None:
        """As `tf.keras.Model.compile`; the loss must be one that gives a value for each sample.

        Args:
          optimizer: As in Keras.
          loss: As in Keras.
          metrics: As in Keras, and `gmeta.metrics.TaskMetric` among them.
          inner: The inner loop, in place of the one that the model was made with.
          accumulate_steps: Make one outer step of every k batches of tasks; see `gmeta.models.Model.compile`.
          nan: As there: ``"raise"``, or ``"allow"`` to train on where the loss isn't finite.
          **kwargs: As in Keras.

        Raises:
          ConfigError: A loss that can't be taken by the sample, ``loss_weights``, what tables can't follow
            (``accumulate_steps`` below 1, XLA, several replicas in one process), or an inner loop that adapts
            layers which the network doesn't have.
        """
        check_compile(self, accumulate_steps, kwargs.get("jit_compile"))
        self._guard = NanGuard(self, nan, partial(fault_of_tasks, self))
        if kwargs.get("loss_weights") is not None:
            raise ConfigError(
                f"{self.name}: loss_weights don't reach the inner and the outer loss; make a loss of your "
                "own that weighs the outputs"
            )
        if inner is not None and inner != self.inner:
            self._set_inner(inner)
        self._task_metrics, others = TaskMetrics.among(metrics)
        super().compile(optimizer=optimizer, loss=loss, metrics=others, **kwargs)
        self._compile_config = Config(
            optimizer=optimizer,
            loss=loss,
            metrics=metrics,
            accumulate_steps=accumulate_steps,
            **({} if self._guard.raises else {"nan": nan}),
            **kwargs,
        )
        follow(self, self.optimizer)
        self._joint_optimizer = JointOptimizer(self.optimizer, accumulate_steps, raises=self._guard.raises)
        self._sample_loss = SampleLoss(loss)
        self._loss_metric = tf.keras.metrics.Mean(name="loss")

    @tf.autograph.experimental.do_not_convert
    def call(self, batch: TaskBatch, training: bool | None = None) -> tf.Tensor:
        """Query predictions (tasks, query samples) after ``inner.evaluation_steps`` steps."""
        return without_single_output(self._query_outputs(self.tasks_of(batch), insert=bool(training))[1])

    def _query_outputs(self, batch: TaskBatch, insert: bool) -> tuple[TaskView, tf.Tensor]:
        check_compiled(self)
        view = self.view(batch, self.collection.lookup(batch["features"], insert=insert))
        weights = self.adapted(view, steps=self.inner.steps_in("evaluation")).parameters
        return view, self.task_outputs(view, "query", weights)

    @tf.autograph.experimental.do_not_convert
    def gradients(self, batch: TaskBatch) -> tuple[OuterGradients, CollectionLookup]:
        """The outer loss and its gradients, and the lookup that they were made from.

        On several ranks they are of this rank's tasks.
        """
        lookup = self.collection.lookup(batch["features"], insert=self.collection.trainable)
        self.mark("lookup", *lookup.rows)
        rule = reptile if self.inner.algorithm == "reptile" else through_the_steps
        return rule(self, batch, lookup), lookup

    # AutoGraph would rewrite 600 functions of Keras' own for the first step: 8 s for nothing.
    @tf.autograph.experimental.do_not_convert
    def train_step(self, batch: TaskBatch) -> dict[str, tf.Tensor]:
        """One outer step on one batch of tasks."""
        batch = self.tasks_of(batch)
        with rank_step(self, batch["label"]) as step, shapes_on_host():
            outer, lookup = self.gradients(batch)
            counted = self._count_samples(batch, self._learnt_from)
            logs = self._report(outer.loss, self._count_samples(batch, self.outer_part))
            variables, trains_rows = self.trainable_variables, self.collection.trainable
            gradients = step.end_forward([*outer.dense, *(outer.rows if trains_rows else ())])
        self.mark("outer", *(g for g in gradients if g is not None))
        joint = self._joint_optimizer
        finite = self._guard.finite(outer.loss, batch, counted, joint.skips_bad_steps)
        with made_ops() as updates:
            joint.apply_gradients(
                gradients[: len(variables)],
                variables,
                self.collection.recorded(lookup) if trains_rows else RecordedLookups(),
                gradients[len(variables) :],
                counted,
                finite,
            )
        with tf.control_dependencies(updates):
            self.mark("update")
        return logs

    @tf.autograph.experimental.do_not_convert
    def test_step(self, batch: TaskBatch) -> dict[str, tf.Tensor]:
        """Adapt on the support samples, then measure on the query samples; nothing is stored."""
        batch = self.tasks_of(batch)
        with rank_step(self, batch["label"]) as step, shapes_on_host():
            view, outputs = self._query_outputs(batch, insert=False)
            loss = self.measured_loss(view, "query", outputs)
            return step.end_forward(self._report(loss, self._count_samples(batch, "query")))

    @tf.autograph.experimental.do_not_convert
    def predict_step(self, batch: TaskBatch) -> tf.Tensor:
        """Query predictions, as `call`."""
        batch = self.tasks_of(batch)
        with rank_step(self, batch["label"]) as step, shapes_on_host():
            return step.end_forward(self(batch, training=False))

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The loss and what `compile` was given; reset at each epoch."""
        own = [self._loss_metric] if hasattr(self, "_loss_metric") else []
        compiled = self.compiled_metrics.metrics if self.compiled_metrics is not None else []
        of_tasks = self._task_metrics.metrics if hasattr(self, "_task_metrics") else []
        return [*own, *compiled, *of_tasks]

    def scaled(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss to differentiate, under loss scaling."""
        return self._joint_optimizer.scaled(loss)

    def unscaled(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of the loss out of those of `scaled`."""
        return self._joint_optimizer.unscaled(gradients)

    def mark(self, part: str, *tensors: tf.Tensor) -> None:
        """Note that a part of the step is over when the tensors are there, if anyone times it."""
        if self.step_clock is not None:
            self.step_clock.mark(part, *tensors)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this model again, as JSON can hold them."""
        serialize = tf.keras.saving.serialize_keras_object
        given = self.network.network if isinstance(self.network, TaskNetwork) else self.network
        return {
            "collection": serialize(self.collection),
            "network": serialize(given),
            "inner": to_mapping(self.inner),
            "outer_samples": self.outer_samples,
            "reduction": self.reduction,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MetaModel:
        """The model that `get_config` described."""
        made = {
            part: tf.keras.saving.deserialize_keras_object(config[part], custom_objects)
            for part in ("collection", "network")
        }
        return cls(**{**config, **made, "inner": from_mapping(meta.InnerLoop, config["inner"], "inner")})

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """`compile` with what ``get_compile_config`` gave."""
        self.compile(**tf.keras.saving.deserialize_keras_object(config))
        self.optimizer.build(self.trainable_variables)

    def _count_samples(self, batch: TaskBatch, part: Part) -> tf.Tensor:
        """How many samples, or tasks, a mean over a part of the batch is of."""
        masks = [batch[each]["mask"] for each in (("support", "query") if part == "all" else (part,))]
        if self.reduction == "sample":
            return tf.add_n([tf.reduce_sum(mask) for mask in masks])
        real = tf.reduce_any(tf.concat(masks, axis=1) > 0, axis=1)
        return tf.reduce_sum(tf.cast(real, tf.float32))

    @property
    def _learnt_from(self) -> Part:
        """What the outer gradient is a mean over; Reptile's is of all samples, whatever is measured."""
        return "all" if self.inner.algorithm == "reptile" else self.outer_part

    def _report(self, loss: tf.Tensor, counted: tf.Tensor) -> dict[str, tf.Tensor]:
        self._loss_metric.update_state(loss, sample_weight=counted)
        return {metric.name: metric.result() for metric in self.metrics}
