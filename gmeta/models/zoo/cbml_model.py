"""CBML: each task starts from shared decision weights that its clusters have modulated.

Song et al., "CBML: A Cluster-based Meta-learning Model for Session-based Recommendation" (CIKM 2021). Its
clusters and gate are those of HSML: Yao et al., "Hierarchically Structured Meta-learning" (ICML 2019),
"Hierarchical Task Clustering" and "Knowledge Adaptation".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.models.meta.meta_model import MetaModel
from gmeta.models.meta.task_learner import OuterSamples, TaskLearner
from gmeta.models.meta.task_view import AdaptiveNetwork, TaskView, inputs_by_name
from gmeta.optimizers import SparseOptimizer

# Layers that compute a task's embedding and soft cluster assignment from its support set.
#
# Attention, means and clusters are computed for each task alone; other tasks and padding have no influence.


@tf.keras.saving.register_keras_serializable("gmeta")
class SelfAttention(tf.keras.layers.Layer):
    r"""One block of self-attention over a task's samples, then a mean over them.

    .. math:: A = X + \mathrm{softmax}\left(\frac{Q K^T}{\sqrt{d}}\right) V, \quad
       e = \frac{1}{|S|} \sum_s \mathrm{norm}\left(A'_s + \mathrm{ReLU}(A'_s W_1 + b_1) W_2 + b_2\right),
       \quad A' = \mathrm{norm}(A)

    Q, K and V are linear in X, which is linear in the samples; norm is layer normalization. Only real samples
    are attended to and averaged. The order of the samples has no influence.

    Vaswani et al. (2017), section 3.2.1, with one head.

    Args:
      dim: d.
      seed: The seed of the initial weights.

    Shapes:
      (tasks, samples, in), mask (tasks, samples) -> (tasks, d); a task without samples gets zeros.
    """

    def __init__(self, dim: int, seed: int = 0, name: str = "self_attention", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.dim, self.seed = dim, seed
        self._tokens = self._dense("tokens", 0)
        self._query, self._key, self._value = (
            self._dense(part, number, use_bias=False)
            for number, part in enumerate(("query", "key", "value"), 1)
        )
        self._hidden, self._out = self._dense("hidden", 4, activation="relu"), self._dense("out", 5)
        self._norms = [
            tf.keras.layers.LayerNormalization(name=f"norm{number}", dtype=self.dtype) for number in (1, 2)
        ]

    def call(self, x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        """Compute the tasks' embeddings."""
        real = mask > 0
        x = self._tokens(tf.where(real[..., tf.newaxis], x, 0))
        scores = tf.matmul(self._query(x), self._key(x), transpose_b=True) / self.dim**0.5
        # exp(min - max) is exactly 0, so the weight of padding is exactly 0.
        weights = tf.nn.softmax(tf.where(real[:, tf.newaxis], scores, scores.dtype.min))
        x = self._norms[0](x + tf.matmul(weights, self._value(x)))
        x = self._norms[1](x + self._out(self._hidden(x)))
        return tf.math.divide_no_nan(
            tf.reduce_sum(tf.where(real[..., tf.newaxis], x, 0), axis=1),
            tf.reduce_sum(tf.cast(real, x.dtype), axis=1, keepdims=True),
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), "dim": self.dim, "seed": self.seed}

    def _dense(self, name: str, number: int, **options: Any) -> tf.keras.layers.Dense:
        start = tf.keras.initializers.GlorotUniform(seed=1000 * self.seed + number)
        return tf.keras.layers.Dense(
            self.dim, kernel_initializer=start, name=name, dtype=self.dtype, **options
        )


@tf.keras.saving.register_keras_serializable("gmeta")
class SoftClusters(tf.keras.layers.Layer):
    r"""HSML's soft assignment p of task embeddings e to K centres, and the clusters' outputs h.

    .. math:: p_k = \frac{\exp(-\|e - c_k\|^2 / 2 \sigma^2)}{\sum_j \exp(-\|e - c_j\|^2 / 2 \sigma^2)}, \quad
       h = \sum_k p_k \tanh(W_k e + b_k)

    Args:
      clusters: K.
      scale: How far from a centre tasks still belong to it: :math:`\sigma` divided by the square root of dim,
        because distances grow with that root.
      seed: The seed of the initial weights.

    Shapes:
      (tasks, dim) -> p (tasks, K), h (tasks, dim).
    """

    def __init__(
        self, clusters: int, scale: float = 1.0, seed: int = 0, name: str = "clusters", **kwargs: Any
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.clusters, self.scale, self.seed = clusters, scale, seed

    def build(self, input_shape: tf.TensorShape) -> None:
        """Create the centres and the clusters' maps."""
        dim = int(input_shape[-1])
        normal = tf.keras.initializers.RandomNormal(seed=1000 * self.seed + 1, stddev=1.0)
        glorot = tf.keras.initializers.GlorotUniform(seed=1000 * self.seed + 2)
        self.centres = self.add_weight(name="centres", shape=[self.clusters, dim], initializer=normal)
        self.kernels = self.add_weight(name="kernels", shape=[self.clusters, dim, dim], initializer=glorot)
        self.biases = self.add_weight(name="biases", shape=[self.clusters, dim], initializer="zeros")
        super().build(input_shape)

    def call(self, e: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Compute the assignments p and the clusters' outputs h."""
        distances = tf.reduce_sum((e[:, tf.newaxis] - self.centres) ** 2, axis=-1)
        assigned = tf.nn.softmax(-distances / (2 * self.scale**2 * e.shape[-1]))
        told = tf.tanh(tf.einsum("td,kde->tke", e, self.kernels) + self.biases)
        return assigned, tf.einsum("tk,tke->te", assigned, told)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), "clusters": self.clusters, "scale": self.scale, "seed": self.seed}


class ParameterGate(tf.keras.layers.Layer):
    r"""Gates of each task for every number of the weights, :math:`\theta \circ \sigma(W [e; h] + b)`.

    Gates start at 0.88 and nearly equal for all tasks, so that training begins near the weights themselves.

    Args:
      seed: The seed of the initial weights.
    """

    def __init__(self, seed: int = 0, name: str = "gate", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self._seed = seed
        self._kernels: dict[str, tf.Variable] = {}
        self._biases: dict[str, tf.Variable] = {}

    def build_for(self, weights: Mapping[str, tf.Tensor], width: int) -> None:
        """Create gates for those weights, by name, that have none; ``width`` is the width of [e; h]."""
        start = tf.keras.initializers.RandomNormal(stddev=0.1 / width**0.5, seed=1000 * self._seed + 7)
        opened = tf.keras.initializers.Constant(2.0)
        for name, weight in weights.items():
            if name not in self._kernels:
                size = weight.shape.num_elements()
                self._kernels[name] = self.add_weight(f"{name}/kernel", [width, size], initializer=start)
                self._biases[name] = self.add_weight(f"{name}/bias", [size], initializer=opened)
        self.built = True

    def call(self, told: tf.Tensor, weights: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return name -> (tasks, ...): the start weights of each task."""
        return {
            name: weight * tf.reshape(self._gate(told, name), [-1, *weight.shape])
            for name, weight in weights.items()
        }

    def _gate(self, told: tf.Tensor, name: str) -> tf.Tensor:
        return tf.sigmoid(tf.matmul(told, self._kernels[name]) + self._biases[name])


def aspect_columns(widths: Sequence[tuple[str, int]], names: Sequence[str]) -> list[int]:
    """Return the columns of some features' vectors among all features' vectors side by side.

    Args:
      widths: The features' names and widths, in order.
      names: The features whose columns are returned.
    """
    found: list[int] = []
    first = 0
    for name, width in widths:
        found += range(first, first + width) if name in names else []
        first += width
    return found


# The learner of `CBML`, whose tasks start from shared weights that their clusters have modulated.


class ClusterLearner(TaskLearner):
    """A `TaskLearner` whose tasks have their own start weights; `CBML` has the equations.

    Args:
      collection: As for `CBML`.
      network: As for `CBML`.
      inner: The inner loop.
      items: As for `CBML`.
      clusters: As for `CBML`.
      dim: As for `CBML`.
      scale: As for `CBML`.
      seed: As for `CBML`.
      **options: As for `TaskLearner`.

    Raises:
      ConfigError: As `CBML`.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        network: Any,
        inner: meta.InnerLoop | None = None,
        *,
        items: Sequence[str],
        clusters: int,
        dim: int,
        scale: float,
        seed: int,
        **options: Any,
    ) -> None:
        widths = [(feature.name, feature.width) for feature in collection.in_order("CBML")]
        names = [name for name, _ in widths]
        if not set(items) <= set(names) or not 0 < len(set(items)) < len(names):
            raise ConfigError(
                f"CBML: items must name some of the features {', '.join(names)}, and leave others for the "
                f"second attention block, got {list(items)!r}"
            )
        if clusters < 1 or dim < 1:
            raise ConfigError(f"CBML: clusters={clusters} and dim={dim} must be at least 1")
        if inputs_by_name(network, collection) is not None:
            raise ConfigError("CBML: the network must take all vectors side by side, not inputs by name")
        self._columns = [
            aspect_columns(widths, items),
            aspect_columns(widths, [name for name in names if name not in items]),
        ]
        full = tf.keras.backend.floatx()  # under mixed precision too, so start weights aren't rounded
        self.attention = [
            SelfAttention(dim, seed=2 * seed + number, name=f"{aspect}_attention", dtype=full)
            for number, aspect in enumerate(("item", "feature"))
        ]
        self.soft_clusters = SoftClusters(clusters, scale, seed=seed, dtype=full)
        self.gate = ParameterGate(seed=seed, dtype=full)
        for block, columns in zip(self.attention, self._columns, strict=True):
            block(tf.zeros([1, 1, len(columns) + 1]), tf.ones([1, 1]))
        self.soft_clusters(tf.zeros([1, 2 * dim]))
        super().__init__(collection, network, inner, **options)

    def _adapt_by(self, inner: meta.InnerLoop) -> None:
        """Adapt by another inner loop from now on; newly adapted weights get gates.

        Raises:
          ConfigError: As in `TaskLearner.use`; or the algorithm is Reptile.
        """
        super()._adapt_by(inner)
        if inner.algorithm == "reptile":
            raise ConfigError(
                "CBML learns what tasks start from, which Reptile doesn't differentiate: choose maml, "
                "fomaml, anil, boil or meta-sgd"
            )
        self.gate.build_for(self.adapted_weights(), 4 * self.attention[0].dim)

    @property
    def layers(self) -> list[tf.keras.layers.Layer]:
        """The layers that hold the shared weights, in a fixed order."""
        return [*super().layers, *self.attention, self.soft_clusters, self.gate]

    def task_embeddings(self, view: TaskView) -> tf.Tensor:
        """Compute e from the tasks' support samples, (tasks, 2 dim)."""
        labels = view.labels("support")
        if labels.shape.rank != 2:
            raise ConfigError(f"CBML: a sample must have one label, got labels of shape {labels.shape}")
        vectors, mask = view.inputs("support"), view.mask("support")
        labels = tf.cast(labels, vectors.dtype)[..., tf.newaxis]
        return tf.concat(
            [
                block(tf.concat([tf.gather(vectors, columns, axis=-1), labels], axis=-1), mask)
                for block, columns in zip(self.attention, self._columns, strict=True)
            ],
            axis=-1,
        )

    def assignments(self, view: TaskView) -> tf.Tensor:
        """Compute p, how much each task belongs to each cluster, (tasks, clusters)."""
        return self.soft_clusters(self.task_embeddings(view))[0]

    def start_weights(self, view: TaskView) -> dict[str, tf.Tensor]:
        """Compute the start weights of tasks, (tasks, ...): the shared weights times the tasks' gates."""
        e = self.task_embeddings(view)
        _, h = self.soft_clusters(e)
        return self.gate(tf.concat([e, h], axis=-1), super().start_weights(view))


@tf.keras.saving.register_keras_serializable("gmeta")
class CBML(MetaModel):
    r"""A `MetaModel` in which each task has its own start weights.

    A task's start weights come from its support samples S; a sample is its embeddings and its label y:

    .. math:: e = [\mathrm{attention}_{items}(S); \mathrm{attention}_{features}(S)], \quad
       p_k \propto \exp\left(-\|e - c_k\|^2 / 2 \sigma^2\right), \quad
       h = \sum_k p_k \tanh(W_k e + b_k), \quad
       \theta_0 = \theta \circ \sigma(W_g [e; h] + b_g)

    The task takes its inner steps from :math:`\theta_0`; :math:`\theta` are the network's weights that adapt.
    The outer loop trains the attention blocks, centres and gates along with :math:`\theta` and the
    embeddings, through the inner steps. The parts are `SelfAttention`,
    `SoftClusters` and `ParameterGate`.

    The two attention blocks, over items and over their features, the soft clusters and the parameter gate are
    CBML's; p, h and the gate are HSML's equations with one level of clusters. This model differs from CBML:
    a task is a support set with labels, such as a user's ratings, and not a session of clicks. The blocks see
    labels and no positions, and the decision network scores single samples instead of ranking all items.
    Gates start open, at 0.88.

    Args:
      collection: The embeddings; the network gets their vectors side by side.
      network: As for `MetaModel`, but it can't take inputs by name.
      items: The features of the first attention block, such as the item's id; the second block gets the
        others.
      clusters: The number of clusters.
      dim: Width of each attention block.
      scale: :math:`\sigma`, in units of the square root of e's width.
      seed: The seed of the initial weights outside the network.
      **options: As for `MetaModel`.

    Raises:
      ConfigError: ``items`` names unknown features, no feature, or all features; the network takes its inputs
        by name; a sample has several labels; or the inner loop is Reptile, which doesn't differentiate a
        task's start weights.

    Example:
      >>> model = CBML(
      ...     EmbeddingCollection([FeatureConfig("item", dim=8), FeatureConfig("year", dim=4)]),
      ...     MLP({"fc": 16, "out": 1}),
      ...     items=["item"],
      ...     clusters=4,
      ... )
      >>> model.compile("adam", "mse", metrics=["mae"], inner=meta.InnerLoop(steps=1, learning_rate=0.01))
    """

    learner: ClusterLearner

    def __init__(
        self,
        collection: EmbeddingCollection,
        network: AdaptiveNetwork | tf.keras.layers.Layer,
        *,
        items: Sequence[str],
        clusters: int = 8,
        dim: int = 32,
        scale: float = 1.0,
        seed: int = 0,
        name: str = "cbml",
        **options: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "items": list(items),
            "clusters": clusters,
            "dim": dim,
            "scale": scale,
            "seed": seed,
        }
        learner = partial(ClusterLearner, **settings)
        super().__init__(collection, network, learner=learner, name=name, **options)
        self._settings, parts = settings, self.learner
        self.attention, self.soft_clusters, self.gate = parts.attention, parts.soft_clusters, parts.gate

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this model, in a form that JSON can hold."""
        config = super().get_config()
        del config["learner"]
        return {**config, **self._settings}

    @classmethod
    def of(
        cls,
        features: Sequence[FeatureConfig],
        *,
        items: Sequence[str],
        hidden: Sequence[int] = (64, 64),
        clusters: int = 8,
        dim: int = 32,
        scale: float = 1.0,
        inner: meta.InnerLoop | None = None,
        outer_samples: OuterSamples = "query",
        optimizer: SparseOptimizer | None = None,
        seed: int = 0,
    ) -> CBML:
        """Make a `CBML` with decision layers ``fc1``, ``fc2``, …, ``linear_out``, all gated and adapted.

        Args:
          features: The features.
          items: See `CBML`.
          hidden: Units of the hidden decision layers.
          clusters: See `CBML`.
          dim: See `CBML`.
          scale: See `CBML`.
          inner: The inner loop.
          outer_samples: See `MetaModel`.
          optimizer: The tables' sparse optimizer. None: tables follow the Keras optimizer.
          seed: The seed of the initial weights and rows.
        """
        units = {f"fc{number}": width for number, width in enumerate(hidden, 1)}
        return cls(
            EmbeddingCollection(features, optimizer=optimizer, seed=seed),
            MLP({**units, "linear_out": 1}, seed=seed, name="decision"),
            items=items,
            clusters=clusters,
            dim=dim,
            scale=scale,
            inner=inner,
            outer_samples=outer_samples,
            seed=seed,
        )
