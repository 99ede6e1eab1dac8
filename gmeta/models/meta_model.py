"""A Keras model that is trained for how well it adapts.

One step is G-Meta's algorithm 1, lines 5 to 10: the rows of support and query are looked up once, together;
every task adapts its own copy of the network's fast weights on its support rows; the loss of the adapted
networks on the query rows is differentiated with respect to the shared weights and to the embedding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.core.placement import shapes_on_host
from gmeta.layers import CollectionLookup, EmbeddingCollection
from gmeta.models.joint_optimizer import JointOptimizer
from gmeta.models.ranks.loops import RunsOnRanks
from gmeta.models.ranks.step import rank_step
from gmeta.models.saves_tables import SavesTables

TaskBatch = Mapping[str, Any]
"""An element of `gmeta.io.tasks`: flat columns of all samples, and for every task which are its support and
which its query."""


class AdaptiveNetwork(Protocol):
    """A network whose fast weights can be handed in."""

    trainable_variables: list[tf.Variable]

    def fast_weights(self) -> Mapping[str, tf.Variable]:
        """Name -> variable: what a task adapts."""

    def __call__(self, x: tf.Tensor, weights: Mapping[str, tf.Tensor] | None = None) -> tf.Tensor:
        """(tasks, samples, in) -> (tasks, samples, 1), with each task's own weights."""


class MetaModel(SavesTables, RunsOnRanks, tf.keras.Model):
    r"""Embeddings, a network, and the two loops around them.

    The outer loss of a step is

    .. math:: \frac{1}{n} \sum_t \sum_{q \in Q_t} \ell(f(x_q; \theta_t), y_q), \quad
       \theta_t = \theta - \alpha \nabla_\theta \frac{1}{|S_t|} \sum_{s \in S_t} \ell(f(x_s; \theta), y_s)

    (the inner step repeated ``inner.steps`` times), a mean over all n query samples of the batch. The rows
    of the embedding tables take part in the outer loop alone.

    Args:
      collection: The embeddings; their vectors, side by side, are the network's input.
      network: Maps (tasks, samples, width) to (tasks, samples, 1); see `AdaptiveNetwork`.
      inner: The inner loop.
      outer_samples: ``"query"``: the outer loss is over the query samples. ``"all"``: over support and query
        alike; with ``inner.steps=0`` this is ordinary joint training, the baseline that any meta-learner
        has to be compared with.

    On several ranks (see `gmeta.models.ranks.loops.RunsOnRanks`) n is the number of query samples of all
    ranks, so a step is that of one rank with all their tasks. A task adapts where its samples are: only outer
    gradients travel, never task parameters (G-Meta, section 2.1.3).

    Compile with any Keras optimizer and loss; the tables update with their own fused optimizer, at the rate
    that it states or else at the Keras optimizer's current one. Metrics see the real query samples only, as
    (samples, 1).

    Example:
      >>> from gmeta.layers import DenseStack, FeatureConfig
      >>> model = MetaModel(
      ...     EmbeddingCollection([FeatureConfig("item", dim=8)]),
      ...     DenseStack({"fc": 16, "out": 1}),
      ...     inner=meta.InnerLoop(steps=1, learning_rate=0.01),
      ... )
      >>> model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        network: AdaptiveNetwork,
        *,
        inner: meta.InnerLoop | None = None,
        outer_samples: Literal["query", "all"] = "query",
        name: str = "meta_model",
    ) -> None:
        super().__init__(name=name)
        if outer_samples not in ("query", "all"):
            raise ConfigError(f"outer_samples must be 'query' or 'all', got {outer_samples!r}")
        self.collection = collection
        self.network = network
        self.inner = inner or meta.InnerLoop()
        self.outer_samples = outer_samples
        width = sum(feature.dim for feature in collection.features)
        network(tf.zeros([1, 1, width]))  # creates the weights
        self.built = True

    def compile(
        self, optimizer: Any = "adam", loss: Any = "mse", *, accumulate_steps: int = 1, **kwargs: Any
    ) -> None:
        """As `tf.keras.Model.compile`; the loss must be one that gives a value for each sample.

        Args:
          optimizer: As in Keras.
          loss: As in Keras.
          accumulate_steps: Make one outer step of every k batches of tasks; see `gmeta.models.Model.compile`.
          **kwargs: As in Keras.

        Raises:
          ConfigError: A loss that can't be taken by the sample, or ``accumulate_steps`` below 1.
        """
        if accumulate_steps < 1:
            raise ConfigError(f"accumulate_steps must be at least 1, got {accumulate_steps}")
        super().compile(optimizer=optimizer, loss=loss, **kwargs)
        self._joint_optimizer = JointOptimizer(self.optimizer, accumulate_steps)
        self._sample_loss = _sample_loss(loss)
        self._loss_metric = tf.keras.metrics.Mean(name="loss")

    def adapt(
        self, batch: TaskBatch, embeddings: tf.Tensor, *, steps: int, order: int = 2
    ) -> dict[str, tf.Tensor]:
        """Every task's fast weights after ``steps`` steps on its support samples.

        Args:
          batch: A task batch.
          embeddings: (samples, width): the network's input for all samples of the batch.
          steps: Inner gradient steps.
          order: 1 or 2; see `gmeta.meta.InnerLoop`.

        Returns:
          Name -> (tasks, ...) tensor.
        """
        return meta.adapt(
            self.support_loss(batch, embeddings),
            self.initial_weights(batch),
            steps=steps,
            learning_rate=self.inner.learning_rate,
            order=order,
        )

    def initial_weights(self, batch: TaskBatch) -> dict[str, tf.Tensor]:
        """Every task's fast weights before adaptation: (tasks, ...) copies of the shared ones."""
        return meta.per_task(self.network.fast_weights(), tf.shape(batch["task"])[0])

    def support_loss(
        self, batch: TaskBatch, embeddings: tf.Tensor
    ) -> Callable[[Mapping[str, tf.Tensor]], tf.Tensor]:
        """The tasks' mean support losses, (tasks,), as a function of the fast weights."""
        part = batch["support"]
        x = tf.gather(embeddings, part["index"])
        labels = tf.gather(batch["label"], part["index"])

        def loss(weights: Mapping[str, tf.Tensor]) -> tf.Tensor:
            return meta.task_means(self._loss_of(labels, self.network(x, weights)), part["mask"])

        return loss

    def predict_samples(
        self,
        embeddings: tf.Tensor,
        index: tf.Tensor,
        weights: Mapping[str, tf.Tensor] | None = None,
    ) -> tf.Tensor:
        """Predictions for the samples at ``index`` (tasks, samples), with the tasks' weights."""
        return tf.squeeze(self.network(tf.gather(embeddings, index), weights), axis=-1)

    def call(self, batch: TaskBatch, training: bool | None = None) -> tf.Tensor:
        """Query predictions (tasks, query samples) after ``inner.evaluation_steps`` steps."""
        embeddings = self.collection.concat(self.collection.lookup(batch["features"], insert=bool(training)))
        weights = self.adapt(batch, embeddings, steps=self._evaluation_steps, order=1)
        return self.predict_samples(embeddings, batch["query"]["index"], weights)

    # AutoGraph would rewrite 600 functions of Keras' own for the first step: 8 s for nothing.
    @tf.autograph.experimental.do_not_convert
    def train_step(self, batch: TaskBatch) -> dict[str, tf.Tensor]:
        """One outer step on one batch of tasks."""
        with rank_step(self, batch["label"]) as step, shapes_on_host():
            loss, lookup, dense_gradients, row_gradients = self.gradients(batch)
            samples = self._outer_samples(batch)
            logs = self._report(loss, samples)
            gradients = step.end_forward([*dense_gradients, *row_gradients])
        variables = self.network.trainable_variables
        self._joint_optimizer.apply_gradients(
            gradients[: len(variables)],
            variables,
            self.collection.recorded(lookup),
            gradients[len(variables) :],
            samples,
        )
        return logs

    def gradients(
        self, batch: TaskBatch
    ) -> tuple[tf.Tensor, CollectionLookup, list[tf.Tensor], list[tf.Tensor]]:
        """The outer loss and its gradients.

        Returns:
          The scalar loss; the lookup it was made from; the gradient of each of the network's trainable
          variables; the gradient of each tensor in ``lookup.rows``.
        """
        lookup = self.collection.lookup(batch["features"], insert=True)
        variables = self.network.trainable_variables
        with tf.GradientTape() as tape:
            tape.watch(lookup.rows)
            embeddings = self.collection.concat(lookup)
            weights = self.adapt(batch, embeddings, steps=self.inner.steps, order=self.inner.order)
            loss = self._outer_loss(batch, embeddings, weights)
            scaled = self._joint_optimizer.scaled(loss)
        gradients = self._joint_optimizer.unscaled(tape.gradient(scaled, [*variables, *lookup.rows]))
        dense, rows = gradients[: len(variables)], gradients[len(variables) :]
        return loss, lookup, dense, [tf.convert_to_tensor(g) for g in rows]

    @tf.autograph.experimental.do_not_convert
    def test_step(self, batch: TaskBatch) -> dict[str, tf.Tensor]:
        """Adapt on the support samples, then measure on the query samples; nothing is stored."""
        with rank_step(self, batch["label"]) as step, shapes_on_host():
            predictions = self(batch, training=False)
            labels = tf.gather(batch["label"], batch["query"]["index"])
            losses = self._loss_of(labels, predictions[..., tf.newaxis])
            mask = batch["query"]["mask"]
            self._update_metrics(labels, predictions, mask)
            return step.end_forward(self._report(meta.reduce_tasks(losses, mask), tf.reduce_sum(mask)))

    @tf.autograph.experimental.do_not_convert
    def predict_step(self, batch: TaskBatch) -> tf.Tensor:
        """Query predictions, as `call`."""
        with rank_step(self, batch["label"]) as step, shapes_on_host():
            return step.end_forward(self(batch, training=False))

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The loss and what `compile` was given; reset at each epoch."""
        own = [self._loss_metric] if hasattr(self, "_loss_metric") else []
        return own + (self.compiled_metrics.metrics if self.compiled_metrics is not None else [])

    @property
    def _evaluation_steps(self) -> int:
        steps = self.inner.evaluation_steps
        return self.inner.steps if steps is None else steps

    def _loss_of(self, labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
        """Labels (tasks, samples) and outputs (tasks, samples, 1) -> losses (tasks, samples)."""
        return self._sample_loss(labels[..., tf.newaxis], predictions)

    def _outer_loss(
        self, batch: TaskBatch, embeddings: tf.Tensor, weights: Mapping[str, tf.Tensor]
    ) -> tf.Tensor:
        index = tf.concat([batch[part]["index"] for part in self._outer_parts], axis=1)
        mask = tf.concat([batch[part]["mask"] for part in self._outer_parts], axis=1)
        predictions = self.predict_samples(embeddings, index, weights)
        labels = tf.gather(batch["label"], index)
        self._update_metrics(labels, predictions, mask)
        return meta.reduce_tasks(self._loss_of(labels, predictions[..., tf.newaxis]), mask)

    @property
    def _outer_parts(self) -> tuple[str, ...]:
        return ("support", "query") if self.outer_samples == "all" else ("query",)

    def _outer_samples(self, batch: TaskBatch) -> tf.Tensor:
        """How many samples the outer loss is a mean of."""
        return tf.add_n([tf.reduce_sum(batch[part]["mask"]) for part in self._outer_parts])

    def _update_metrics(self, labels: tf.Tensor, predictions: tf.Tensor, mask: tf.Tensor) -> None:
        real = mask > 0
        self.compiled_metrics.update_state(
            tf.boolean_mask(labels, real)[:, tf.newaxis], tf.boolean_mask(predictions, real)[:, tf.newaxis]
        )

    def _report(self, loss: tf.Tensor, samples: tf.Tensor) -> dict[str, tf.Tensor]:
        self._loss_metric.update_state(loss, sample_weight=samples)
        return {metric.name: metric.result() for metric in self.metrics}


def _sample_loss(loss: Any) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """A Keras loss, given as name, function or object, as a function that doesn't reduce over samples."""
    found = tf.keras.losses.get(loss)
    if isinstance(found, tf.keras.losses.Loss):
        return found.call
    if callable(found):
        return found
    raise ConfigError(f"loss must be a Keras loss, its name or a function, got {loss!r}")
