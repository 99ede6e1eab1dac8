"""The inner and the outer loop of a model: what a task starts from, how it adapts, what is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from gmeta import meta
from gmeta.layers import CollectionLookup, EmbeddingCollection
from gmeta.meta.reduction import Reduction
from gmeta.models.meta.learner.checks import columns_beside, task_batch
from gmeta.models.meta.learner.inner_rates import InnerRates
from gmeta.models.meta.learner.task_losses import SampleLoss, TaskMetrics, like_outputs, without_single_output
from gmeta.models.meta.learner.task_view import Part, TaskBatch, TaskView
from gmeta.models.training.compile_settings import make_metrics


class TaskLoops:
    """What `gmeta.models.MetaModel` does with a batch of tasks.

    A model with a start, a loss or inputs of its own derives from `MetaModel` and overrides `start_weights`,
    `outer_loss` or `task_outputs`: everything else, adaptation at serving included, then follows.
    """

    collection: EmbeddingCollection
    network: Any
    inner: meta.InnerLoop
    inner_rates: InnerRates
    reduction: Reduction
    outer_samples: str
    compiled_metrics: Any
    _named_inputs: list[str] | None
    _sample_loss: SampleLoss
    _task_metrics: TaskMetrics

    if TYPE_CHECKING:  # what Keras and `MetaModel` have; a declaration here would hide theirs
        name: str
        layers: Sequence[tf.keras.layers.Layer]
        trainable_variables: Sequence[tf.Variable]

        def mark(self, part: str, *tensors: tf.Tensor) -> None:
            """Note that a part of the step is over."""

        def scaled(self, loss: tf.Tensor) -> tf.Tensor:
            """Scale a loss, under loss scaling."""

        def unscaled(self, gradients: Sequence[Any]) -> list[Any]:
            """Undo it in gradients."""

    def adapted_weights(self) -> dict[str, tf.Variable]:
        """Name -> variable: the network's weights that a task adapts."""
        found = self.network.task_weights()
        chosen = self.inner.adapted_layers(_layers(found), _layers(self.network.fast_weights()))
        return {name: variable for name, variable in found.items() if name.rpartition("/")[0] in chosen}

    def tasks_of(self, batch: Any) -> TaskBatch:
        """The tasks of what the model is given to learn from; a model of other batches makes them here.

        Raises:
          ConfigError: It is no batch of tasks, or lacks a column that the network takes.
        """
        return task_batch(batch, columns_beside(self))

    def view(self, batch: TaskBatch, lookup: CollectionLookup, training: bool = False) -> TaskView:
        """A batch, as the loops see it.

        Args:
          batch: The batch.
          lookup: The rows of its samples.
          training: For a model that computes the network's inputs by layers of its own: whether these act as
            in training.
        """
        return TaskView(
            batch,
            self.collection,
            lookup,
            names=self._named_inputs,
            adapts_rows=self.inner.adapts_embeddings,
        )

    def start_weights(self, view: TaskView) -> dict[str, tf.Tensor]:
        """What tasks adapt of the network, before adaptation.

        Returns:
          Name -> tensor, of the variable's shape where all tasks start alike, otherwise (tasks, ...).
        """
        return {name: tf.convert_to_tensor(value) for name, value in self.adapted_weights().items()}

    def task_outputs(
        self,
        view: TaskView,
        part: Part,
        weights: Mapping[str, tf.Tensor],
        training: bool = False,
    ) -> tf.Tensor:
        """Outputs for samples of the tasks, with their own weights: (tasks, samples, outputs)."""
        of_network = {name: value for name, value in weights.items() if name not in view.owners()}
        outputs = self.network(view.inputs(part, weights), of_network, training=training)
        return tf.cast(outputs, tf.float32) if outputs.dtype.size < 4 else outputs  # as losses need it

    def support_loss(
        self,
        view: TaskView,
        weights: Mapping[str, tf.Tensor],
        part: Part = "support",
        training: bool = False,
    ) -> tf.Tensor:
        """The tasks' mean losses on their support samples, (tasks,)."""
        return self.mean_losses(view, part, self.task_outputs(view, part, weights, training))

    def mean_losses(self, view: TaskView, part: Part, outputs: tf.Tensor) -> tf.Tensor:
        """The tasks' mean losses of outputs, (tasks,)."""
        return meta.task_means(self._sample_loss(view.labels(part), outputs), view.mask(part))

    def outer_loss(self, view: TaskView, weights: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """The loss of adapted weights that a step minimizes, a scalar; metrics are updated on the way."""
        part = self.outer_part
        return self.measured_loss(view, part, self.task_outputs(view, part, weights, training=True))

    @property
    def outer_part(self) -> Part:
        """The samples that the outer loss is of."""
        return "all" if self.outer_samples == "all" else "query"

    # No Python here branches on a tensor: in a user's tf.function too, AutoGraph has nothing to convert.
    @tf.autograph.experimental.do_not_convert
    def adapted(
        self, view: TaskView, *, steps: int, part: Part = "support", training: bool = False
    ) -> meta.Adapted:
        """Tasks after so many steps on their support samples.

        Args:
          view: The batch.
          steps: Inner gradient steps.
          part: The samples to adapt on.
          training: Whether outer gradients are to pass through the steps, and layers such as Dropout are to
            act as in training.
        """
        return self._further(view, self._start(view, steps > 0), steps, part, training)

    def _start(self, view: TaskView, to_adapt: bool = True) -> meta.Adapted:
        weights = self.start_weights(view)
        if to_adapt:
            shapes = self.adapted_weights()
            alike = {n: v for n, v in weights.items() if n in shapes and v.shape.rank == shapes[n].shape.rank}
            weights = {**weights, **meta.per_task(alike, view.tasks)}
        parameters = {**weights, **view.row_parameters()}
        return self.inner.adaptation().begin(parameters, view.owners())

    def _further(
        self,
        view: TaskView,
        adapted: meta.Adapted,
        steps: int,
        part: Part = "support",
        training: bool = False,
    ) -> meta.Adapted:
        rule = self.inner.adaptation(self.inner_rates.values(), order=None if training else 1)
        if not (self.inner.recompute and training):
            return rule.run(lambda w: self.support_loss(view, w, part, training), adapted, steps)
        # What a step reads has to be handed to it, so that it can be read anew.
        return rule.run(
            lambda w, samples: self.support_loss(view.with_samples(samples), w, part, training),
            adapted,
            steps,
            view.samples(),
        )

    @tf.autograph.experimental.do_not_convert
    def predict_after(self, batch: TaskBatch, steps: Sequence[int]) -> dict[int, tf.Tensor]:
        """Query predictions after several numbers of inner steps, each continuing the one before.

        Args:
          batch: A batch of tasks. Nothing is stored.
          steps: Numbers of inner gradient steps, e.g. (0, 1, 5).

        Returns:
          Steps -> (tasks, query samples), or (tasks, query samples, outputs) if there are several.

        Raises:
          ConfigError: The batch is none of tasks, or lacks a column that the network takes.
        """
        batch = self.tasks_of(batch)
        view = self.view(batch, self.collection.lookup(batch["features"], insert=False))
        adapted, found = self._start(view), {}
        for goal in sorted(set(steps)):
            adapted = self._further(view, adapted, goal - adapted.steps)
            found[goal] = without_single_output(self.task_outputs(view, "query", adapted.parameters))
        return found

    def measured_loss(self, view: TaskView, part: Part, outputs: tf.Tensor) -> tf.Tensor:
        """The mean loss of outputs; metrics see them."""
        labels, mask = view.labels(part), view.mask(part)
        real = mask > 0
        true, predicted = tf.boolean_mask(like_outputs(labels), real), tf.boolean_mask(outputs, real)
        make_metrics(self.compiled_metrics, true, predicted)
        self.compiled_metrics.update_state(true, predicted)
        self._task_metrics.update(labels, outputs, mask)
        return meta.reduce_tasks(self._sample_loss(labels, outputs), mask, self.reduction)


def _layers(weights: Mapping[str, tf.Variable]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition("/")[0] for name in weights))
