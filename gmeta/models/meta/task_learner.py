"""The inner and the outer loop over an embedding collection and a network.

This module defines the weights that tasks start from, how they adapt, and the outer loss. It is independent
of Keras models and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.core.settings import to_mapping
from gmeta.layers import EmbeddingCollection
from gmeta.layers.embedding.collection import CollectionLookup
from gmeta.meta.adaptation import Adapted, per_task
from gmeta.meta.inner_loop import Reduction, reduce_tasks, task_means
from gmeta.models.meta.ridge_steps import (
    RidgePrior,
    is_squared_error,
    likelihood_loss,
    posterior_variance,
    run_ridge,
)
from gmeta.models.meta.task_losses import (
    InnerRates,
    SampleLoss,
    check_collection,
    check_inner,
    columns_beside,
    task_batch,
    without_single_output,
)
from gmeta.models.meta.task_view import (
    AdaptiveNetwork,
    Part,
    TaskBatch,
    TaskView,
    adaptive,
    build,
    inputs_by_name,
)

OuterSamples = Literal["query", "all"]


class OuterLoss(NamedTuple):
    """The loss of adapted tasks, with its samples and outputs.

    Attributes:
      loss: () the loss that an outer step minimizes.
      part: The samples that the loss is computed on.
      outputs: (tasks, samples of the part, outputs).
    """

    loss: tf.Tensor
    part: Part
    outputs: tf.Tensor


class TaskLearner:
    r"""A learner of shared weights that tasks adapt from.

    .. math:: \frac{1}{n} \sum_t \sum_{q \in Q_t} \ell(f(x_q; \theta_t), y_q), \quad
       \theta_t = \theta - \alpha \nabla_\theta \frac{1}{|S_t|} \sum_{s \in S_t} \ell(f(x_s; \theta), y_s)

    `gmeta.models.MetaModel` trains it with Keras; `gmeta.models.meta.outer_rules` computes the
    gradients of a batch, and `gmeta.models.meta.adapter` adapts at serving. For other start weights, losses
    or inputs, derive a class that overrides `start_weights`, `outer_loss`, `task_outputs` or `view`, and pass
    it as ``MetaModel(..., learner=...)``.

    Args:
      collection: The embeddings.
      network: As for `gmeta.models.MetaModel`.
      inner: The inner loop.
      loss: A Keras loss that gives a value for each sample; None: set it later, before anything adapts.
      outer_samples: As for `gmeta.models.MetaModel`.
      reduction: As for `gmeta.models.MetaModel`.
      name: The learner's name in errors and fast weights.

    Attributes:
      collection: The embeddings.
      network: The network, an `AdaptiveNetwork`, which is called with weights.
      inner: The inner loop; `use` sets another.
      inner_rates: The learned inner rates.
      loss: The loss of a sample.
      input_names: The inputs that the network takes by name; None: all vectors side by side.
      mark: A function, called as ``mark(part, *tensors)`` when a part of a step is over.
      forms: The names of the forms (`gmeta.models.meta.outer_rules`) in which its loops may be computed. A
        derived class has ``("plain",)`` unless it sets ``forms`` itself.

    Raises:
      ConfigError: The collection, network and inner loop don't go together.

    Example:
      >>> from gmeta.layers import FeatureConfig, MLP
      >>> collection = EmbeddingCollection([FeatureConfig("item", dim=4)])
      >>> learner = TaskLearner(collection, MLP({"fc": 8, "out": 1}), meta.InnerLoop("anil"), "mse")
      >>> sorted(learner.adapted_weights())
      ['out/bias', 'out/kernel']
    """

    forms: ClassVar[tuple[str, ...]] = ("plain", "dual", "grouped", "dual in groups")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forms" not in vars(cls):
            cls.forms = ("plain",)

    def __init__(
        self,
        collection: EmbeddingCollection,
        network: AdaptiveNetwork | tf.keras.layers.Layer,
        inner: meta.InnerLoop | None = None,
        loss: Any = None,
        *,
        outer_samples: OuterSamples = "query",
        reduction: Reduction = "sample",
        name: str = "learner",
    ) -> None:
        if outer_samples not in ("query", "all"):
            raise ConfigError(f"outer_samples must be 'query' or 'all', got {outer_samples!r}")
        if reduction not in ("sample", "task"):
            raise ConfigError(f"reduction must be 'sample' or 'task', got {reduction!r}")
        check_collection(collection)
        self.name, self.collection, self.network = name, collection, adaptive(network)
        self.input_names = self._build(network)
        self.outer_samples: OuterSamples = outer_samples
        self.reduction: Reduction = reduction
        self.loss = None if loss is None else SampleLoss(loss)
        self._adapt_by(meta.InnerLoop() if inner is None else inner)
        if inner is not None:
            self.check_adapts()

    def _build(self, network: Any) -> list[str] | None:
        """Create the network's weights; return the names of the inputs that it takes by name."""
        names = inputs_by_name(network, self.collection)
        build(self.network, self.collection, names)
        return names

    def use(self, inner: meta.InnerLoop) -> None:
        """Adapt by another inner loop from now on; learned inner rates are reset.

        Raises:
          ConfigError: It isn't an inner loop, or it adapts layers that the network doesn't have, or nothing.
        """
        self._adapt_by(inner)
        self.check_adapts()

    def check_adapts(self) -> None:
        """Refuse inner steps that would change nothing.

        Raises:
          ConfigError: The network is frozen or has no weights, and rows don't adapt either.
        """
        if self.inner.steps and not self.adapted_weights() and not self.inner.adapts_embeddings:
            raise ConfigError(
                f"{self.network.name} has no trainable weights for the {self.inner.steps} inner steps to "
                "adapt: make its layers trainable before the model, adapt rows with "
                "InnerLoop(adapt='embeddings'), or set steps=0"
            )

    def _adapt_by(self, inner: meta.InnerLoop) -> None:
        """Take the inner loop, whether weights adapt by it or not; learners refuse what they can't do."""
        check_inner(inner)
        if inner.learns_variance and self.outer_samples == "all":
            raise ConfigError(
                f"{self.name}: HeadPrior(likelihood=True) measures predictions of rows that a head hasn't "
                'seen: take outer_samples="query"'
            )
        self.inner = inner
        weights = self.adapted_weights()
        kind = RidgePrior if inner.algorithm == "ridge" else InnerRates
        self.inner_rates = kind(inner, weights, self.collection)

    def get_config(self) -> dict[str, Any]:
        """Return the settings other than collection and network, in a form that JSON can hold."""
        return {
            "inner": to_mapping(self.inner),
            "outer_samples": self.outer_samples,
            "reduction": self.reduction,
            "name": self.name,
        }

    @property
    def layers(self) -> list[tf.keras.layers.Layer]:
        """The layers that hold the shared weights, in a fixed order."""
        return [self.collection, self.network, self.inner_rates]

    @property
    def outer_part(self) -> Part:
        """The samples that the outer loss is computed on."""
        return "all" if self.outer_samples == "all" else "query"

    @property
    def learns_variance(self) -> bool:
        """Whether the outer loss is a likelihood under predicted variances; see `gmeta.meta.HeadPrior`."""
        if not self.inner.learns_variance:
            return False
        head = self.adapted_weights()[self.inner_rates.kernel]
        return is_squared_error(self, int(head.shape[-1]))

    def adapted_weights(self) -> dict[str, tf.Variable]:
        """Return name -> variable for the network's weights that a task adapts."""
        found = self.network.task_weights()
        chosen = self.inner.adapted_layers(_layers(found), _layers(self.network.fast_weights()))
        return {name: variable for name, variable in found.items() if name.rpartition("/")[0] in chosen}

    def tasks_of(self, data: Any) -> TaskBatch:
        """Return the batch of tasks in the data; a learner that takes other batches converts them here.

        Raises:
          ConfigError: It isn't a batch of tasks, or it lacks a column that the network takes.
        """
        return task_batch(data, columns_beside(self))

    def view(self, batch: TaskBatch, lookup: CollectionLookup, training: bool = False) -> TaskView:
        """Arrange a batch as the loops see it.

        Args:
          batch: The batch.
          lookup: The rows of its samples.
          training: Whether layers that compute the network's inputs act as in training; only a learner with
            such layers uses it.
        """
        return TaskView(
            batch,
            self.collection,
            lookup,
            names=self.input_names,
            adapts_rows=self.inner.adapts_embeddings,
        )

    def start_weights(self, view: TaskView) -> dict[str, tf.Tensor]:
        """Compute the network's weights that tasks adapt, as they are before adaptation.

        Returns:
          Name -> tensor, of the variable's shape if all tasks start alike, otherwise (tasks, ...).
        """
        return {name: tf.convert_to_tensor(value) for name, value in self.adapted_weights().items()}

    def task_outputs(
        self,
        view: TaskView,
        part: Part,
        weights: Mapping[str, tf.Tensor],
        training: bool = False,
    ) -> tf.Tensor:
        """Compute the outputs of each task with its own weights, (tasks, samples, outputs)."""
        of_network = {name: value for name, value in weights.items() if name not in view.owners()}
        outputs = self.network(view.inputs(part, weights), of_network, training=training)
        return tf.cast(outputs, tf.float32) if outputs.dtype.size < 4 else outputs  # for the loss

    def support_loss(
        self,
        view: TaskView,
        weights: Mapping[str, tf.Tensor],
        part: Part = "support",
        training: bool = False,
    ) -> tf.Tensor:
        """Compute the tasks' mean losses on their support samples, (tasks,)."""
        return self.mean_losses(view, part, self.task_outputs(view, part, weights, training))

    def mean_losses(self, view: TaskView, part: Part, outputs: tf.Tensor) -> tf.Tensor:
        """Compute the tasks' mean losses of outputs, (tasks,)."""
        return task_means(self.sample_losses(view, part, outputs), view.mask(part))

    def sample_losses(self, view: TaskView, part: Part, outputs: tf.Tensor) -> tf.Tensor:
        """Compute the losses of outputs, (tasks, samples)."""
        assert self.loss is not None
        return self.loss(view.labels(part), outputs)

    def outer_loss(self, view: TaskView, weights: Mapping[str, tf.Tensor]) -> OuterLoss:
        """Compute the loss that an outer step minimizes, from adapted weights."""
        part = self.outer_part
        if self.learns_variance:
            losses, outputs = likelihood_loss(self, view, weights, part)
            return OuterLoss(reduce_tasks(losses, view.mask(part), self.reduction), part, outputs)
        return self.loss_of(view, part, self.task_outputs(view, part, weights, training=True))

    def unadapted_loss(self, view: TaskView) -> tf.Tensor | float:
        """Compute what the outer loss adds for samples as predicted before adaptation; without ridge 0."""
        if not self.inner.unadapted:
            return 0.0
        weights, part = self.start_weights(view), self.outer_part
        if self.learns_variance:
            losses = likelihood_loss(self, view, weights, part, adapted=False).losses
            loss = reduce_tasks(losses, view.mask(part), self.reduction)
        else:
            loss = self.loss_of(view, part, self.task_outputs(view, part, weights, training=True)).loss
        return tf.cast(self.inner.unadapted, loss.dtype) * loss

    def loss_of(self, view: TaskView, part: Part, outputs: tf.Tensor) -> OuterLoss:
        """Reduce the losses of outputs over the batch."""
        losses = self.sample_losses(view, part, outputs)
        return OuterLoss(reduce_tasks(losses, view.mask(part), self.reduction), part, outputs)

    def adapt(self, view: TaskView, *, steps: int, part: Part = "support", training: bool = False) -> Adapted:
        """Take ``steps`` inner steps on the tasks' samples, by default those of the support.

        Args:
          view: The batch.
          steps: Inner gradient steps.
          part: The samples to adapt on.
          training: Whether outer gradients pass through the steps and layers such as Dropout act as in
            training.
        """
        return self._continue(view, self._start(view, steps > 0), steps, part, training)

    def _start(self, view: TaskView, to_adapt: bool = True) -> Adapted:
        weights = self.start_weights(view)
        if to_adapt:
            shapes = self.adapted_weights()
            alike = {n: v for n, v in weights.items() if n in shapes and v.shape.rank == shapes[n].shape.rank}
            weights = {**weights, **per_task(alike, view.tasks)}
        parameters = {**weights, **view.row_parameters()}
        return self.inner.adaptation().begin(parameters, view.owners())

    def _continue(
        self,
        view: TaskView,
        adapted: Adapted,
        steps: int,
        part: Part = "support",
        training: bool = False,
    ) -> Adapted:
        if self.inner.algorithm == "ridge":
            return run_ridge(self, view, adapted, steps, part, training)
        rule = self.inner.adaptation(self.inner_rates.values(), order=None if training else 1)
        if not (self.inner.recompute and training):
            return rule.run(lambda w: self.support_loss(view, w, part, training), adapted, steps)
        # To be recomputed, a step must get what it reads as an argument.
        return rule.run(
            lambda w, samples: self.support_loss(view.with_samples(samples), w, part, training),
            adapted,
            steps,
            view.samples(),
        )

    def predict_after(self, data: Any, steps: Sequence[int]) -> dict[int, tf.Tensor]:
        """Predict the query after each of several numbers of inner steps; each continues the one before.

        Args:
          data: A batch of tasks. Nothing is stored.
          steps: Numbers of inner gradient steps, e.g. (0, 1, 5).

        Returns:
          Steps -> (tasks, query samples), or (tasks, query samples, outputs) if there are several.

        Raises:
          ConfigError: It isn't a batch of tasks, or it lacks a column that the network takes.
        """
        batch = self.tasks_of(data)
        view = self.view(batch, self.collection.lookup(batch["features"], insert=False))
        adapted, found = self._start(view), {}
        for goal in sorted(set(steps)):
            adapted = self._continue(view, adapted, goal - adapted.steps)
            found[goal] = without_single_output(self.task_outputs(view, "query", adapted.parameters))
        return found

    def predict_variance(self, data: Any, steps: int | None = None) -> tf.Tensor:
        """Compute how uncertain the query's outputs are after adaptation by ridge, for exploration.

        Args:
          data: A batch of tasks. Nothing is stored.
          steps: Inner steps; None: as many as in evaluation.

        Returns:
          (tasks, query samples), or (tasks, query samples, outputs) if there are several: the variance under
          the posterior of the head, in the square of the outputs' unit, the noise of labels left out.

        Raises:
          ConfigError: The inner loop is another one, which knows no variance; or the batch is none of tasks.
        """
        if self.inner.algorithm != "ridge":
            raise ConfigError(
                f"{self.name}: the inner loop is {self.inner.algorithm!r}, and only ridge knows how "
                "uncertain its outputs are: InnerLoop('ridge')"
            )
        batch = self.tasks_of(data)
        view = self.view(batch, self.collection.lookup(batch["features"], insert=False))
        steps = self.inner.steps_in("evaluation") if steps is None else steps
        adapted = self.adapt(view, steps=steps)
        return without_single_output(posterior_variance(self, view, adapted.parameters))


def _layers(weights: Mapping[str, tf.Variable]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition("/")[0] for name in weights))
