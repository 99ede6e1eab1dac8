"""Meta-learning over GRM: the heads of a sequence model adapt to each user.

A user's earlier exposures are its support and its later ones its query. All of them are targets of one
sequence, so the trunk, which is nearly all of the work, is computed once. The inner steps change only
experts, gates and towers, with the trunk's outputs as inputs. The outer gradient goes through the steps to
these layers, to the trunk and to the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError, finite_number, whole_number
from gmeta.core.settings import from_mapping
from gmeta.layers import MMoE
from gmeta.layers.embedding.collection import CollectionLookup
from gmeta.layers.task_heads import TaskHeads, product_logits
from gmeta.losses.multi_task import product_cross_entropy
from gmeta.meta.inner_loop import Reduction
from gmeta.metrics import GAUC
from gmeta.models.meta.task_learner import OuterSamples, TaskLearner
from gmeta.models.meta.task_losses import SampleLoss
from gmeta.models.meta.task_model import TaskModel
from gmeta.models.meta.task_view import Part, TaskBatch, TaskView
from gmeta.models.sequence.grm_model import GRM
from gmeta.ops import Jagged, jagged

# The learner of `MetaGRM`: users are tasks, and the heads of a `GRM` adapt to them.


class ExposureHeads(tf.keras.layers.Layer):
    """The last layers of a `GRM` as one network: (samples, dim) -> (samples, towers), logits.

    Args:
      mixture: The experts.
      heads: The towers; products of their probabilities are computed from the logits elsewhere.
    """

    def __init__(self, mixture: MMoE, heads: TaskHeads, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mixture, self.heads = mixture, heads

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Compute the logits."""
        logits = self.heads(self.mixture(x))
        return tf.stack([logits[task] for task in self.heads.tasks], axis=-1)


class ExposureLearner(TaskLearner):
    """A `TaskLearner` over a `GRM`; `MetaGRM` has the equations.

    Args:
      ranker: As for `MetaGRM`.
      inner: The inner loop.
      query: As for `MetaGRM`.
      name: The model's name.
      **options: As for `TaskLearner`.

    Raises:
      ConfigError: As `MetaGRM`.
    """

    def __init__(
        self,
        ranker: GRM,
        inner: meta.InnerLoop | None = None,
        *,
        query: int | float,
        name: str,
        **options: Any,
    ) -> None:
        if not isinstance(ranker, GRM):
            raise ConfigError(f"{name}: ranker must be a GRM, got {type(ranker).__name__}")
        if ranker.mixture.report is not None or ranker.mixture.balance_loss:
            raise ConfigError(
                f"{name}: the mixture {ranker.mixture.name!r} has metrics or a balance loss, which a graph "
                "that is mapped over users doesn't support: make it with report=None and balance_loss=0"
            )
        if ranker.mixture.sparse is True:
            raise ConfigError(
                f"{name}: the mixture {ranker.mixture.name!r} has sparse=True, which a graph that is mapped "
                "over users doesn't support: make it with sparse='auto'"
            )
        self.query = _check(name, query)
        self.ranker, self.columns = ranker, ranker.columns
        self.labels = list(ranker.labels)
        self._factors = {task: ranker.loss_of.tasks[task] for task in self.labels}
        self._weights_of_labels = dict(ranker.loss_of.weights)
        heads = ExposureHeads(ranker.mixture, ranker.heads, name="exposure_heads")
        heads(tf.zeros([0, ranker.trunk.leave.gamma.shape[-1]]))
        super().__init__(ranker.collection, heads, inner, self.exposure_losses, name=name, **options)

    def _build(self, network: Any) -> None:
        return None  # the heads have their weights, and their input is the trunk's output

    def _adapt_by(self, inner: meta.InnerLoop) -> None:
        """Replace the inner loop.

        Raises:
          ConfigError: As in `TaskLearner.use`; or the inner loop adapts rows, or is Reptile or ridge.
        """
        refused = ("reptile", "ridge")
        if isinstance(inner, meta.InnerLoop) and (inner.adapts_embeddings or inner.algorithm in refused):
            raise ConfigError(
                f"{self.name}: embedding rows can't adapt, because the trunk is computed once, before the "
                "heads; Reptile doesn't differentiate the trunk, and ridge needs outputs whose losses don't "
                f"mix. Name layers in adapt, and take another algorithm, in {inner}"
            )
        super()._adapt_by(inner)

    @property
    def layers(self) -> list[tf.keras.layers.Layer]:
        """The layers that hold the shared weights, in a fixed order."""
        return [*super().layers, self.ranker, self.ranker.trunk]

    def tasks_of(self, batch: Any) -> TaskBatch:
        """Make tasks from the users in a batch of the ranker's kind."""
        if "support" in batch:
            return super().tasks_of(batch)
        layout = self.columns.layout(batch)
        exposures = Jagged(tf.range(layout.exposures), layout.targets)
        parts = jagged.split(exposures, self._support_sizes(jagged.lengths(exposures)))
        labels = self.columns.labels(batch, self.ranker.labels)
        return {
            "features": self.ranker.ids(batch),
            "label": tf.stack([labels[task] for task in self.labels], axis=-1),
            "task": batch["task"],
            **{name: _pad(part) for name, part in zip(("support", "query"), parts, strict=True)},
            "layout": layout,
        }

    def view(self, batch: TaskBatch, lookup: CollectionLookup, training: bool = False) -> TaskView:
        """Arrange the batch, with the trunk's outputs for the exposures as the network's inputs."""
        exposures = batch.get("exposures")  # of one user whose history was read before (`UserStates.hidden`)
        if exposures is None:
            vectors = self.collection.embed(lookup)
            exposures = self.ranker.trunk(vectors, batch["layout"], training=training)
        return super().view(batch, lookup, training).with_samples(exposures)

    def exposure_losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """Compute the weighted sum of each exposure's losses: (..., labels) and (..., towers) -> (...)."""
        by_tower = self._by_tower(logits)
        losses = []
        for number, (task, factors) in enumerate(self._factors.items()):
            of_label = product_cross_entropy(labels[..., number], [by_tower[tower] for tower in factors])
            losses.append(self._weights_of_labels[task] * of_label)
        return tf.add_n(losses)

    def by_label(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """Compute the labels' logits from the towers' logits: (..., towers) -> label -> (...)."""
        by_tower = self._by_tower(logits)
        return {
            task: product_logits(*(by_tower[tower] for tower in factors))
            for task, factors in self._factors.items()
        }

    def by_task(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """Compute the ranker's logits from the towers' logits: (..., towers) -> task or product -> (...)."""
        by_tower = self._by_tower(logits)
        products = self.ranker.heads.products.items()
        made = {name: product_logits(*(by_tower[task] for task in factors)) for name, factors in products}
        return {**by_tower, **made}

    def _by_tower(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        return dict(zip(self.ranker.heads.tasks, tf.unstack(logits, axis=-1), strict=True))

    def _support_sizes(self, lengths: tf.Tensor) -> tf.Tensor:
        if isinstance(self.query, int):
            return tf.maximum(lengths - self.query, 0)
        nearest = tf.cast(tf.floor(tf.cast(lengths, tf.float64) * self.query + 0.5), tf.int64)
        return lengths - tf.clip_by_value(nearest, tf.minimum(lengths, 1), tf.maximum(lengths - 1, 1))


def _check(name: str, query: Any) -> int | float:
    if isinstance(query, float):
        if not 0 < finite_number(f"{name}: query", query) < 1:
            raise ConfigError(f"{name}: query must be a share above 0 and below 1, or a number, got {query}")
        return query
    return whole_number(f"{name}: query", query, least=1)


def _pad(part: Jagged) -> dict[str, tf.Tensor]:
    """Return the indices of exposures, (users, most), and a mask that is 0 for padding."""
    index = jagged.to_padded(part)
    mask = tf.sequence_mask(jagged.lengths(part), tf.shape(index)[1], tf.float32)
    return {"index": index, "mask": mask}


@tf.keras.saving.register_keras_serializable("gmeta")
class MetaGRM(TaskModel):
    r"""A `GRM` that is trained so that its heads adapt well to a user.

    .. math::
       H_u = \mathrm{trunk}(u), \quad
       \theta_u = \theta - \alpha \nabla_\theta \frac{1}{|S_u|} \sum_{s \in S_u} \ell(f(H_{us}; \theta), y_s),
       \quad L = \frac{1}{n} \sum_u \sum_{q \in Q_u} \ell(f(H_{uq}; \theta_u), y_q)

    f are the experts and towers, ℓ is the sum of the labels' cross-entropies as in `GRM`, and H comes from
    one pass over the user's sequence. Everything else is as in `MetaModel`: algorithms, orders, learned
    rates, reductions, ranks, and the choice of adapted layers by name (``adapt=["mixture"]``,
    ``["heads/ctr"]``).

    The model takes the same batches as `GRM`. Its metrics are the loss, and ``gauc_{label}`` of the users'
    query exposures after ``inner.evaluation_steps`` steps. Predictions are (users, query exposures, towers)
    logits; `by_label` converts them to the labels' logits.

    Args:
      ranker: The model, trained before or not. Its mixture must have no metrics (``report=None``), no
        balance loss and not ``sparse=True``, because a graph that is mapped over users supports none of them.
      query: How many of a user's latest exposures are the query: a number, or a share, which is rounded. With
        a share, at least one exposure is query, and of two or more exposures at least one is support.
      inner: The inner loop. Embedding rows can't adapt: each step would have to compute the trunk again.
      outer_samples: As for `MetaModel`.
      reduction: As for `MetaModel`.
      name: The model's name.

    Raises:
      ConfigError: The model doesn't support the ranker or the inner loop.

    Example:
      ::

        base = GRM.of(features, ..., report=None)
        model = MetaGRM(base, inner=InnerLoop(steps=3, learning_rate=0.1, adapt=["mixture", "heads"]))
        model.compile("adam")
        model.fit(gmeta.io.sequences("data/warm", ...))
        model.predict_after(batch, [0, 1, 3])
    """

    refused_settings: ClassVar[Mapping[str, str]] = {
        **TaskModel.refused_settings,
        **dict.fromkeys(("loss", "metrics", "weighted_metrics"), "loss and metrics are those of the ranker"),
    }
    learner: ExposureLearner

    def __init__(
        self,
        ranker: GRM,
        *,
        query: int | float = 0.5,
        inner: meta.InnerLoop | None = None,
        outer_samples: OuterSamples = "query",
        reduction: Reduction = "sample",
        name: str = "meta_grm",
    ) -> None:
        learner = ExposureLearner(
            ranker, inner, query=query, name=name, outer_samples=outer_samples, reduction=reduction
        )
        super().__init__(learner, name=name)
        self.ranker, self.trunk = ranker, ranker.trunk
        self._gauc = {task: GAUC(0.5, name=f"gauc_{task}") for task in learner.labels}

    def compile(  # type: ignore[override]
        self, optimizer: Any = "adam", loss: Any = None, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Compile as `gmeta.models.MetaModel.compile` does, but with the ranker's loss and metrics.

        Args:
          optimizer: As in Keras.
          loss: None; see ``refused_settings``.
          metrics: None.
          **kwargs: As for `gmeta.models.MetaModel.compile`.

        Raises:
          ConfigError: As `gmeta.models.MetaModel.compile`; or a loss or metrics are given.
        """
        super().compile(optimizer, loss, metrics, **kwargs)

    def _sample_loss(self, loss: Any) -> SampleLoss:
        return SampleLoss(self.learner.exposure_losses)

    def by_label(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """Compute the labels' logits from the towers' logits: (..., towers) -> label -> (...)."""
        return self.learner.by_label(logits)

    def _measure(self, view: TaskView, part: Part, outputs: tf.Tensor) -> None:
        labels, mask = view.labels(part), view.mask(part)
        for number, (task, logits) in enumerate(self.by_label(outputs).items()):
            self._gauc[task].update_state(labels[..., number], logits, mask)
        super()._measure(view, part, outputs)

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The loss and the labels' GAUC, reset at each epoch."""
        return [*super().metrics, *getattr(self, "_gauc", {}).values()]

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict batches that the ranker takes, as `tf.keras.Model.predict` does.

        Raises:
          ConfigError: ``x`` is a single batch instead of a data set.
        """
        if isinstance(x, Mapping):
            raise ConfigError(
                f"{self.name}: predict takes a data set of batches; predict_after(batch, steps) takes one"
            )
        return super().predict(x, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this model, in a form that JSON can hold."""
        return {
            "ranker": tf.keras.saving.serialize_keras_object(self.ranker),
            "query": self.learner.query,
            **self.learner.get_config(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MetaGRM:
        """Create the model that a config from `get_config` describes."""
        ranker = tf.keras.saving.deserialize_keras_object(config["ranker"], custom_objects)
        inner = from_mapping(meta.InnerLoop, config["inner"], "inner")
        return cls(**{**config, "ranker": ranker, "inner": inner})
