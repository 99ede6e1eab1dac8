"""Meta-learning over GRM: the heads of a sequence model adapt to each user.

A user's earlier exposures are its support and its later ones its query. All of them are targets of one
sequence, so the trunk, which is nearly all of the work, is computed once. The inner steps change only
experts, gates and towers, with the trunk's outputs as inputs. The outer gradient goes through the steps to
these layers, to the trunk and to the tables.
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
        self._gauc = {task: GAUC(0.5, name=f"gauc_{task}") for task in learner.labels}

    def compile(  # type: ignore[override]
        self, optimizer: Any = "adam", loss: Any = None, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Compile as `gmeta.models.MetaModel.compile` does, but with the ranker's loss and metrics.

        Args:
          optimizer: As in Keras.
          loss: None.
          metrics: None.
          **kwargs: As for `gmeta.models.MetaModel.compile`.

        Raises:
          ConfigError: As `gmeta.models.MetaModel.compile`; or a loss or metrics are given.
        """
        if loss is not None or metrics is not None:
            raise ConfigError(f"{self.name}: loss and metrics are those of the ranker: leave them out")
        super().compile(optimizer, self.learner.exposure_losses, **kwargs)
        elsewhere = ("inner", "accumulate_steps", "nan")  # saved by get_config and get_compile_config
        kept = {name: value for name, value in kwargs.items() if name not in elsewhere}
        self._compile_config = Config(optimizer=optimizer, **kept)

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
