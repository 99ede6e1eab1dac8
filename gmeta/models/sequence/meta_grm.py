"""Meta-learning over GRM: the heads of a model of sequences adapt to each user.

A user's earlier exposures are its support and its later ones its query. All of them are targets of one
sequence, so the trunk, nearly all of the work, is computed once; the inner loop's steps are of experts, gates
and towers alone, on what the trunk made of the exposures. The outer loss goes through the steps into these
and into the trunk and the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import tensorflow as tf
from tf_keras.src.saving.serialization_lib import Config

from gmeta import meta
from gmeta.core.arguments import finite_number, whole_number
from gmeta.core.errors import ConfigError
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.layers import CollectionLookup, MMoE, TaskHeads, product_logits
from gmeta.losses import product_cross_entropy
from gmeta.meta.reduction import Reduction
from gmeta.metrics import GAUC
from gmeta.models.meta.learner.task_view import Part, TaskBatch, TaskView
from gmeta.models.meta.meta_model import MetaModel
from gmeta.models.sequence.grm_model import GRM
from gmeta.ops import Jagged, jagged


class ExposureHeads(tf.keras.layers.Layer):
    """The end of a `GRM` as one network: (samples, dim) -> (samples, towers), logits.

    Args:
      mixture: The experts.
      heads: The towers; products of their probabilities are made of the logits elsewhere.
    """

    def __init__(self, mixture: MMoE, heads: TaskHeads, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mixture, self.heads = mixture, heads

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Run it."""
        logits = self.heads(self.mixture(x))
        return tf.stack([logits[task] for task in self.heads.tasks], axis=-1)


@tf.keras.saving.register_keras_serializable("gmeta")
class MetaGRM(MetaModel):
    r"""A `GRM` that is trained for how well its heads adapt to a user.

    .. math::
       H_u = \mathrm{trunk}(u), \quad
       \theta_u = \theta - \alpha \nabla_\theta \frac{1}{|S_u|} \sum_{s \in S_u} \ell(f(H_{us}; \theta), y_s),
       \quad L = \frac{1}{n} \sum_u \sum_{q \in Q_u} \ell(f(H_{uq}; \theta_u), y_q)

    with f the experts and towers, ℓ the sum of the labels' cross-entropies as in `GRM`, and H from one pass
    over the user's sequence. Everything else is `MetaModel`'s: algorithms, orders, learned rates, what adapts
    by the names of layers (``adapt=["mixture"]``, ``["heads/ctr"]``), reductions, ranks.

    It takes the batches that the `GRM` takes. Measured are the loss, and ``gauc_{label}`` of the users' query
    exposures after ``inner.evaluation_steps`` steps. Predictions are (users, query exposures, towers) logits;
    `by_label` makes those of the labels.

    Args:
      ranker: The model; trained before, or not at all. Its mixture has neither metrics (``report=None``) nor
        a loss of balance, which can't be where a graph is mapped over users.
      query: A user's query exposures, the latest: how many, or a share of them, rounded, of which at least
        one is query, and one support where there are two.
      inner: The inner loop. Embedding rows don't adapt: each step would have to compute the trunk anew.
      outer_samples: As for `MetaModel`.
      reduction: As for `MetaModel`.
      name: The model's name.

    Raises:
      ConfigError: A ranker or an inner loop that this isn't for.

    Example:
      ::

        base = grm(features, ..., report=None)
        model = MetaGRM(base, inner=InnerLoop(steps=3, learning_rate=0.1, adapt=["mixture", "heads"]))
        model.compile("adam")
        model.fit(gmeta.io.sequences("data/warm", ...))
        model.predict_after(batch, [0, 1, 3])
    """

    def __init__(
        self,
        ranker: GRM,
        *,
        query: int | float = 0.5,
        inner: meta.InnerLoop | None = None,
        outer_samples: Literal["query", "all"] = "query",
        reduction: Reduction = "sample",
        name: str = "meta_grm",
    ) -> None:
        if not isinstance(ranker, GRM):
            raise ConfigError(f"{name}: ranker must be a GRM, got {type(ranker).__name__}")
        if ranker.mixture.report is not None or ranker.mixture.balance_loss:
            raise ConfigError(
                f"{name}: the mixture {ranker.mixture.name!r} has metrics or a loss of balance, which can't "
                "be where a graph is mapped over users: make it with report=None and balance_loss=0"
            )
        heads = ExposureHeads(ranker.mixture, ranker.heads, name="exposure_heads")
        heads(tf.zeros([0, ranker.trunk.leave.gamma.shape[-1]]))
        self._query = _check(name, query)
        super().__init__(
            ranker.collection,
            heads,
            inner=inner,
            outer_samples=outer_samples,
            reduction=reduction,
            name=name,
        )
        self.ranker, self.trunk, self.columns = ranker, ranker.trunk, ranker.columns
        self.labels = list(ranker.labels)
        self._factors = {task: ranker.loss_of.tasks[task] for task in self.labels}
        self._weights_of_labels = dict(ranker.loss_of.weights)
        self._gauc = {task: GAUC(name=f"gauc_{task}") for task in self.labels}

    def _built_for(self, network: Any) -> None:
        return None  # it has its weights, and takes what the trunk makes

    def _set_inner(self, inner: meta.InnerLoop) -> None:
        if isinstance(inner, meta.InnerLoop) and (inner.adapts_embeddings or inner.algorithm == "reptile"):
            raise ConfigError(
                f"{self.name}: embedding rows can't adapt, as the trunk is computed once and before; nor "
                "does Reptile differentiate what came before the heads. Name layers in adapt, by another "
                f"algorithm, in {inner}"
            )
        super()._set_inner(inner)

    def compile(self, optimizer: Any = "adam", loss: Any = None, metrics: Any = None, **kwargs: Any) -> None:
        """As `MetaModel.compile`, but for the loss and the metrics, which are the ranker's.

        Args:
          optimizer: As in Keras.
          loss: None.
          metrics: None.
          **kwargs: As for `MetaModel.compile`.

        Raises:
          ConfigError: As there; or a loss or metrics.
        """
        if loss is not None or metrics is not None:
            raise ConfigError(f"{self.name}: loss and metrics are those of the ranker: leave them out")
        super().compile(optimizer, self.exposure_losses, **kwargs)
        self._compile_config = Config(optimizer=optimizer, **kwargs)

    def exposure_losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """(..., labels) and (..., towers) -> (...): the weighted sum of each exposure's losses."""
        by_tower = self._by_tower(logits)
        losses = []
        for number, (task, factors) in enumerate(self._factors.items()):
            of_label = product_cross_entropy(labels[..., number], [by_tower[tower] for tower in factors])
            losses.append(self._weights_of_labels[task] * of_label)
        return tf.add_n(losses)

    def by_label(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """(..., towers) -> label -> (...), logits."""
        by_tower = self._by_tower(logits)
        return {
            task: product_logits(*(by_tower[tower] for tower in factors))
            for task, factors in self._factors.items()
        }

    def by_task(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """(..., towers) -> task or product, as the ranker predicts them -> (...), logits."""
        by_tower = self._by_tower(logits)
        products = self.ranker.heads.products.items()
        made = {name: product_logits(*(by_tower[task] for task in factors)) for name, factors in products}
        return {**by_tower, **made}

    def _by_tower(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        return dict(zip(self.ranker.heads.tasks, tf.unstack(logits, axis=-1), strict=True))

    def tasks_of(self, batch: Any) -> TaskBatch:
        """Users as tasks, of a batch as the ranker takes it."""
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
        """The batch, with what the trunk made of its exposures as the network's inputs."""
        vectors = self.collection.embed(lookup)
        exposures = self.trunk(vectors, batch["layout"], training=training)
        return super().view(batch, lookup, training).with_samples(exposures)

    def measured_loss(self, view: TaskView, part: Part, outputs: tf.Tensor) -> tf.Tensor:
        """The mean loss of outputs; metrics see them."""
        labels, mask = view.labels(part), view.mask(part)
        for number, (task, logits) in enumerate(self.by_label(outputs).items()):
            self._gauc[task].update_state(labels[..., number], logits, mask)
        return super().measured_loss(view, part, outputs)

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The loss and the labels' GAUC; reset at each epoch."""
        return [*super().metrics, *getattr(self, "_gauc", {}).values()]

    def adapt_many(self, tasks: Any, steps: int | None = None) -> Any:
        """Not for this model, nor is `adapt`: `predict_after` adapts to a batch's users, and predicts.

        Raises:
          ConfigError: Always.
        """
        raise ConfigError(
            f"{self.name}: what a user's support exposures are made of is its sequence, and no samples by "
            "themselves: predict_after(batch, steps) adapts to the users of a batch and predicts their query"
        )

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """As `tf.keras.Model.predict`, of batches as the ranker takes them.

        Raises:
          ConfigError: A single batch in place of a data set.
        """
        if isinstance(x, Mapping):
            raise ConfigError(
                f"{self.name}: predict takes a data set of batches; of one batch, predict_after(batch, steps)"
            )
        return super().predict(x, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this model again, as JSON can hold them."""
        return {
            "ranker": tf.keras.saving.serialize_keras_object(self.ranker),
            "query": self._query,
            "inner": to_mapping(self.inner),
            "outer_samples": self.outer_samples,
            "reduction": self.reduction,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MetaGRM:
        """The model that `get_config` described."""
        ranker = tf.keras.saving.deserialize_keras_object(config["ranker"], custom_objects)
        inner = from_mapping(meta.InnerLoop, config["inner"], "inner")
        return cls(**{**config, "ranker": ranker, "inner": inner})

    def _support_sizes(self, lengths: tf.Tensor) -> tf.Tensor:
        if isinstance(self._query, int):
            return tf.maximum(lengths - self._query, 0)
        nearest = tf.cast(tf.floor(tf.cast(lengths, tf.float64) * self._query + 0.5), tf.int64)
        return lengths - tf.clip_by_value(nearest, tf.minimum(lengths, 1), tf.maximum(lengths - 1, 1))


def _check(name: str, query: Any) -> int | float:
    if isinstance(query, float):
        if not 0 < finite_number(f"{name}: query", query) < 1:
            raise ConfigError(f"{name}: query must be a share above 0 and below 1, or a number, got {query}")
        return query
    return whole_number(f"{name}: query", query, least=1)


def _pad(part: Jagged) -> dict[str, tf.Tensor]:
    """Which exposures, (users, most), and where those are no padding."""
    index = jagged.to_padded(part)
    mask = tf.sequence_mask(jagged.lengths(part), tf.shape(index)[1], tf.float32)
    return {"index": index, "mask": mask}
