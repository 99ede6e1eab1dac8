"""Meta-learning over GRM: the heads of a model of sequences adapt to each user.

A user's earlier exposures are its support and its later ones its query. All of them are targets of one
sequence, so the trunk, nearly all of the work, is computed once; the inner loop's steps are of experts, gates
and towers alone, on what the trunk made of the exposures. The outer loss goes through the steps into these
and into the trunk and the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tf_keras.src.saving.serialization_lib import Config

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.core.settings import from_mapping
from gmeta.meta.reduction import Reduction
from gmeta.metrics import GAUC
from gmeta.models.meta.learner.task_learner import OuterSamples
from gmeta.models.meta.learner.task_view import Part, TaskView
from gmeta.models.meta.task_model import TaskModel
from gmeta.models.sequence.exposure_learner import ExposureLearner
from gmeta.models.sequence.grm_model import GRM


@tf.keras.saving.register_keras_serializable("gmeta")
class MetaGRM(TaskModel):
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
        self._gauc = {task: GAUC(name=f"gauc_{task}") for task in learner.labels}

    def compile(  # type: ignore[override]
        self, optimizer: Any = "adam", loss: Any = None, metrics: Any = None, **kwargs: Any
    ) -> None:
        """As `gmeta.models.MetaModel.compile`, but for the loss and the metrics, which are the ranker's.

        Args:
          optimizer: As in Keras.
          loss: None.
          metrics: None.
          **kwargs: As for `gmeta.models.MetaModel.compile`.

        Raises:
          ConfigError: As there; or a loss or metrics.
        """
        if loss is not None or metrics is not None:
            raise ConfigError(f"{self.name}: loss and metrics are those of the ranker: leave them out")
        super().compile(optimizer, self.learner.exposure_losses, **kwargs)
        elsewhere = ("inner", "accumulate_steps", "nan")  # in the model's config, and added to this one
        kept = {name: value for name, value in kwargs.items() if name not in elsewhere}
        self._compile_config = Config(optimizer=optimizer, **kept)

    def by_label(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """Compute the labels' logits of the towers': (..., towers) -> label -> (...)."""
        return self.learner.by_label(logits)

    def _measure(self, view: TaskView, part: Part, outputs: tf.Tensor) -> None:
        labels, mask = view.labels(part), view.mask(part)
        for number, (task, logits) in enumerate(self.by_label(outputs).items()):
            self._gauc[task].update_state(labels[..., number], logits, mask)
        super()._measure(view, part, outputs)

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The loss and the labels' GAUC; reset at each epoch."""
        return [*super().metrics, *getattr(self, "_gauc", {}).values()]

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
            "query": self.learner.query,
            **self.learner.get_config(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MetaGRM:
        """The model that `get_config` described."""
        ranker = tf.keras.saving.deserialize_keras_object(config["ranker"], custom_objects)
        inner = from_mapping(meta.InnerLoop, config["inner"], "inner")
        return cls(**{**config, "ranker": ranker, "inner": inner})
