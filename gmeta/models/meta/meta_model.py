"""A Keras model that is trained to adapt well to new tasks, and MeLU, a published model of this form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.core.settings import from_mapping
from gmeta.initializers import Normal, Uniform
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.meta.inner_loop import Reduction
from gmeta.models.meta.adapter import Adapter, Samples
from gmeta.models.meta.fast_weights import FastWeights
from gmeta.models.meta.sample_columns import names_columns
from gmeta.models.meta.task_learner import OuterSamples, TaskLearner
from gmeta.models.meta.task_model import TaskModel
from gmeta.models.meta.task_view import AdaptiveNetwork, TaskBatch, given_network
from gmeta.optimizers import SparseOptimizer


@tf.keras.saving.register_keras_serializable("gmeta")
class MetaModel(TaskModel):
    r"""A model of embeddings and a network, trained by an inner and an outer loop.

    The outer loss of a step is

    .. math:: \frac{1}{n} \sum_t \sum_{q \in Q_t} \ell(f(x_q; \theta_t), y_q), \quad
       \theta_t = \theta - \alpha \nabla_\theta \frac{1}{|S_t|} \sum_{s \in S_t} \ell(f(x_s; \theta), y_s)

    with the inner step repeated ``inner.steps`` times. The loss is a mean over all n query samples of the
    batch, or with ``reduction="task"`` the mean over tasks of each task's mean. `gmeta.meta.InnerLoop` sets
    the algorithm: what adapts, by which optimizer and rates, and what the outer gradient is.

    Args:
      collection: The embeddings.
      network: Any Keras layer or model, functional or subclassed, that maps (samples, ...) inputs to
        (samples, outputs), or a `gmeta.layers.MLP`. A functional model with named inputs gets the
        vectors of the features with these names, and data columns that the collection doesn't embed, such as
        floats; so does a network with an attribute ``takes_by_name``, a list of names. Any other network gets
        all vectors side by side, (samples, sum of dims).
      inner: The inner loop; `compile` takes it too.
      outer_samples: ``"query"``: the outer loss is over the query samples. ``"all"``: over support and query
        alike; with ``inner.steps=0`` this is ordinary joint training, the baseline to compare any
        meta-learner with.
      reduction: ``"sample"``: all query samples of a step count alike. ``"task"``: all its tasks count alike.
      learner: The class of the learner: `TaskLearner`, or a class derived from it with its own start
        weights, loss or inputs.
      name: The model's name.

    Raises:
      ConfigError: The collection, network and inner loop don't go together.

    On several ranks n is the number of query samples, or of tasks, on all ranks; see
    `gmeta.models.meta.task_model.TaskModel`.

    Compile with any Keras optimizer and loss. The tables follow that optimizer, or they use their own fused
    optimizer, at its stated rate or else at the Keras optimizer's current rate. Metrics see only the real
    query samples, as (samples, outputs); a `gmeta.metrics.ranking.TaskMetric` sees them task by task.

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
        outer_samples: OuterSamples = "query",
        reduction: Reduction = "sample",
        learner: Callable[..., TaskLearner] = TaskLearner,
        name: str = "meta_model",
    ) -> None:
        made = learner(
            collection, network, inner, outer_samples=outer_samples, reduction=reduction, name=name
        )
        super().__init__(made, name=name)
        self.adapter = Adapter(made)

    def adapt(self, support_x: Samples, support_y: Any, steps: int | None = None) -> FastWeights:
        r"""Adapt to a task by inner steps on its support, and return the deltas :math:`\theta_t - \theta`.

        The model doesn't change. An id that it has never seen gets no row; it is read as its initial row. The
        first call traces a graph, which later calls reuse for any number of samples.

        Args:
          support_x: The samples' features. There may be no samples; then nothing adapts.
          support_y: (samples,), or (samples, labels).
          steps: The number of inner steps. None: ``inner.steps_in("serving")``.

        Raises:
          ConfigError: The model isn't compiled, or columns are missing or don't go together.
          NotFiniteError: The inner steps diverge on the samples; the message shows the range of the labels.

        Example:
          ::

            fast = model.adapt({"item": [31, 7, 99]}, [5, 3, 4])
            model.predict({"item": candidates}, weights=fast)
        """
        return self.adapter.adapt(support_x, support_y, steps)

    def adapt_many(
        self, tasks: Iterable[tuple[Samples, Any]] | TaskBatch, steps: int | None = None
    ) -> list[FastWeights]:
        """Adapt to many tasks in one vectorised graph; results equal those of `adapt`, up to rounding.

        Args:
          tasks: Pairs of samples and labels; or an element of `gmeta.io.tasks`, whose support sets are used.
            Memory grows with the number of tasks: split thousands into several calls.
          steps: As in `adapt`.

        Returns:
          Fast weights for each task, in the order of the tasks.

        Raises:
          ConfigError: As `adapt`.
        """
        return self.adapter.adapt_many(tasks, steps)

    def predict(self, x: Any, *args: Any, weights: FastWeights | None = None, **kwargs: Any) -> Any:
        """Predict samples, with or without adaptation; or task batches, as `tf.keras.Model.predict` does.

        Args:
          x: Samples of one task, as a mapping of features; or a data set of task batches, whose tasks adapt
            on their support samples and predict their query samples.
          *args: As in Keras, for task batches.
          weights: The result of `adapt` for the task. None: the shared weights, which adaptation starts from.
          **kwargs: As in Keras, for task batches; ``verbose`` makes no difference to samples.

        Returns:
          (samples,), or (samples, outputs) if there are several outputs. For task batches, query predictions.

        Raises:
          ConfigError: The weights belong to another network, or the model was trained since they were made;
            or the samples of one task come with arguments that are for task batches.
          NotFiniteError: The weights hold NaN or infinity.
        """
        if not names_columns(x) or {"features", "support"} <= set(x):
            if weights is not None:
                raise ConfigError(
                    "predict: weights= goes with the samples of one task, {feature: ids}; task batches "
                    "adapt by themselves"
                )
            return super().predict(x, *args, **kwargs)
        beside = [type(each).__name__ for each in args] + sorted(set(kwargs) - {"verbose"})
        if beside:
            raise ConfigError(
                f"predict: the samples of one task are predicted at once and take weights= alone, got "
                f"{', '.join(beside)} beside them"
            )
        return self.adapter.predict(x, weights)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this model, in a form that JSON can hold."""
        serialize = tf.keras.saving.serialize_keras_object
        kind = type(self.learner)
        return {
            "collection": serialize(self.collection),
            "network": serialize(given_network(self.network)),
            **self.learner.get_config(),
            **({} if kind is TaskLearner else {"learner": tf.keras.saving.get_registered_name(kind)}),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MetaModel:
        """Create the model that a config from `get_config` describes.

        Raises:
          ConfigError: The learner isn't registered with Keras.
        """
        made: dict[str, Any] = {
            part: tf.keras.saving.deserialize_keras_object(config[part], custom_objects)
            for part in ("collection", "network")
        }
        made["inner"] = from_mapping(meta.InnerLoop, config["inner"], "inner")
        if "learner" in config:
            made["learner"] = tf.keras.saving.get_registered_object(config["learner"], custom_objects)
            if made["learner"] is None:
                raise ConfigError(
                    f"{config['name']}: the learner {config['learner']!r} isn't known here: put "
                    "@tf.keras.saving.register_keras_serializable() before its class, and import it"
                )
        return cls(**{**config, **made})


def melu_features(dim: int = 32) -> tuple[FeatureConfig, ...]:
    """Return MovieLens' attributes: the item's year and genres; the user's gender, age, occupation and area.

    Args:
      dim: Width of every embedding; because widths are equal, all share one physical table.
    """
    start = Normal(0.0, 1.0)
    return (
        FeatureConfig("year", TableConfig("year", dim, initializer=start)),
        FeatureConfig("genre", TableConfig("genre", dim, initializer=start), combiner="mean"),
        FeatureConfig("gender", TableConfig("gender", dim, initializer=start)),
        FeatureConfig("age", TableConfig("age", dim, initializer=start)),
        FeatureConfig("occupation", TableConfig("occupation", dim, initializer=start)),
        FeatureConfig("area", TableConfig("area", dim, initializer=start)),
    )


def melu(
    features: Sequence[FeatureConfig] | None = None,
    *,
    hidden: Sequence[int] = (64, 64),
    inner: InnerLoop | None = None,
    outer_samples: Literal["query", "all"] = "query",
    optimizer: SparseOptimizer | None = None,
    seed: int = 0,
) -> MetaModel:
    """Make MeLU: cold-start recommendation by adapting the decision layers to a user.

    Lee et al., "MeLU: Meta-Learned User Preference Estimator for Cold-Start Recommendation" (KDD 2019),
    section 3.2: the model embeds categorical attributes of user and item, and predicts by two hidden layers
    and an output layer, here ``fc1``, ``fc2`` and ``linear_out``. The inner loop adapts those layers, but not
    the embeddings, to a user's few ratings.

    This implementation differs: the output has no activation (ratings are regressed), the embeddings are rows
    of dynamic hash tables and start N(0, 1), and all tasks of a step adapt in one graph.

    Args:
      features: The attributes. None: those of `melu_features`.
      hidden: Units of the hidden layers.
      inner: The inner loop.
      outer_samples: See `MetaModel`.
      optimizer: The tables' sparse optimizer. None: tables follow the Keras optimizer.
      seed: The seed of the initial weights and rows.

    Example:
      >>> model = melu(inner=InnerLoop(steps=1, learning_rate=5e-3))
      >>> sorted(model.network.fast_weights())[:2]
      ['fc1/bias', 'fc1/kernel']
    """
    units = {f"fc{index + 1}": width for index, width in enumerate(hidden)}
    return MetaModel(
        EmbeddingCollection(features or melu_features(), optimizer=optimizer, seed=seed),
        MLP({**units, "linear_out": 1}, seed=seed, name="decision"),
        inner=inner,
        outer_samples=outer_samples,
        name="melu",
    )


# The attributes that MeLU published for MovieLens-1M, with the initial values of their embeddings.
#
# They are from Lee et al. (KDD 2019), section 4.1, and the authors' code. A movie has its rating (G, PG, R,
# and so on), genres, directors and actors; a user has gender, age, occupation and postal code; each is 32
# wide. If a movie has several values of an attribute, their embeddings are averaged.

_LIST_SIZES = {"genre": 25, "director": 2186, "actor": 8030}


def published_features(dim: int = 32) -> tuple[FeatureConfig, ...]:
    r"""Return MeLU's attributes of MovieLens-1M, as `gmeta prepare` stores them.

    Embeddings of single attributes start N(0, 1), as PyTorch's embeddings do. Those of lists start
    :math:`U(-1/\sqrt{n}, 1/\sqrt{n})` for n names, because the authors compute them by a linear layer over n
    flags.

    Args:
      dim: Width of every embedding.

    Example:
      >>> [feature.name for feature in published_features()][:4]
      ['rate', 'genre', 'director', 'actor']
    """

    def single(name: str) -> FeatureConfig:
        return FeatureConfig(name, TableConfig(name, dim, initializer=Normal(0.0, 1.0)))

    def several(name: str) -> FeatureConfig:
        limit = 1 / math.sqrt(_LIST_SIZES[name])
        return FeatureConfig(
            name, TableConfig(name, dim, initializer=Uniform(-limit, limit)), combiner="mean"
        )

    users = (single(name) for name in ("gender", "age", "occupation", "zipcode"))
    return (single("rate"), *(several(name) for name in _LIST_SIZES), *users)
