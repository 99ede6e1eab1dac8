"""A DLRM that adapts to tasks: embeddings, dot products between them, and two multilayer perceptrons.

The network is from Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems" (2019), sections 2.1 and 2.2. MAML's two loops around it make the Meta-DLRM that G-Meta measures
(section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.layers.networks import dense
from gmeta.meta import InnerLoop
from gmeta.models.meta.meta_model import MetaModel
from gmeta.optimizers import SparseOptimizer

Head = Literal["ctr", "rating"]


@tf.keras.saving.register_keras_serializable("gmeta")
class DLRMNetwork(tf.keras.layers.Layer):
    """The network of `dlrm` after the embeddings, with one set of weights or one for each task.

    Args:
      features: The names of the features.
      width: The width of each feature's vectors.
      floats: As for `dlrm`; so are the other arguments.

    Shapes:
      {feature: (..., samples, width), column: (..., samples)} -> (..., samples, outputs).

    Example:
      >>> network = DLRMNetwork(["user", "item"], 4, floats=["price"])
      >>> x = {"user": tf.zeros([2, 3, 4]), "item": tf.zeros([2, 3, 4]), "price": tf.zeros([2, 3])}
      >>> network(x).shape
      TensorShape([2, 3, 1])
    """

    def __init__(
        self,
        features: Sequence[str],
        width: int,
        *,
        floats: Sequence[str] = (),
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
        head: Head = "ctr",
        outputs: int = 1,
        seed: int = 0,
        name: str = "dlrm_network",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        if head not in get_args(Head):
            raise ConfigError(f"dlrm: head must be 'ctr' or 'rating', got {head!r}")
        both = [name for name in floats if name in features]
        if both:
            raise ConfigError(f"dlrm: {', '.join(both)} can't be a feature and a float column: leave one out")
        vectors = len(features) + bool(floats)
        if vectors < 2:
            raise ConfigError(
                "dlrm: there is no pair of vectors to multiply: give it two features, or floats"
            )
        self._settings: dict[str, Any] = {
            "features": list(features),
            "width": width,
            "floats": list(floats),
            "bottom": list(bottom),
            "top": list(top),
            "head": head,
            "outputs": outputs,
            "seed": seed,
        }
        self._features, self._floats, self._head = tuple(features), tuple(floats), head
        self._bottom = [f"bottom{number}" for number in range(1, len(bottom) + 2)] if floats else []
        self._top = [*(f"top{number}" for number in range(1, len(top) + 1)), "head"]
        self._weights_of: dict[str, tf.Variable] = {}
        self._add_layers(self._bottom, len(floats), [*bottom, width])
        products = vectors * (vectors - 1) // 2
        self._add_layers(self._top, width * (1 if floats else vectors) + products, [*top, outputs])
        self.built = True

    def _add_layers(self, names: Sequence[str], inputs: int, units: Sequence[int]) -> None:
        for name, size in zip(names, units if names else (), strict=True):
            seed = 1000 * self._settings["seed"] + len(self._weights_of)
            start = tf.keras.initializers.GlorotNormal(seed=seed)
            kernel, bias = f"{name}/kernel", f"{name}/bias"
            self._weights_of[kernel] = self.add_weight(kernel, [inputs, size], initializer=start)
            self._weights_of[bias] = self.add_weight(bias, [size], initializer="zeros")
            inputs = size

    @property
    def takes_by_name(self) -> list[str]:
        """The features and columns that the network takes by name; see `AdaptiveNetwork`."""
        return [*self._features, *self._floats]

    def task_weights(self) -> dict[str, tf.Variable]:
        """Return all weights, ``"layer/kernel"`` and ``"layer/bias"`` -> variable."""
        return dict(self._weights_of)

    def fast_weights(self) -> dict[str, tf.Variable]:
        """Return the weights that a task adapts by default: all weights."""
        return self.task_weights()

    def call(
        self,
        x: Mapping[str, tf.Tensor],
        weights: Mapping[str, tf.Tensor] | None = None,
        training: bool | None = None,
    ) -> tf.Tensor:
        """Run the network.

        Args:
          x: Vectors and floats, by name.
          weights: Replacements by name, of the variable's shape or with a leading task dimension.
          training: Has no effect.
        """
        used = {**self._weights_of, **(weights or {})}
        vectors = [x[name] for name in self._features]
        first = vectors
        if self._floats:
            floats = tf.stack([x[name] for name in self._floats], axis=-1)
            hidden = tf.nn.relu(_perceptron(floats, self._bottom, used))
            vectors, first = [hidden, *vectors], [hidden]
        joined = tf.concat([*first, products_of_pairs(tf.stack(vectors, axis=-2))], axis=-1)
        outputs = _perceptron(joined, self._top, used)
        return tf.sigmoid(outputs) if self._head == "ctr" else outputs

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), **self._settings}


def products_of_pairs(vectors: tf.Tensor) -> tf.Tensor:
    r"""Compute the dot product of each pair of a sample's vectors, :math:`v_i \cdot v_j` for :math:`j < i`.

    Args:
      vectors: (..., n, width).

    Returns:
      (..., n (n - 1) / 2), in the order (1, 0), (2, 0), (2, 1), (3, 0), ….

    Example:
      >>> products_of_pairs(tf.constant([[[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]]])).numpy().tolist()
      [[2.0, 0.0, 3.0]]
    """
    size = int(vectors.shape[-2])
    products = tf.matmul(vectors, vectors, transpose_b=True)
    row, column = np.tril_indices(size, -1)
    flat = tf.reshape(products, tf.concat([tf.shape(products)[:-2], [size * size]], axis=0))
    return tf.gather(tf.ensure_shape(flat, [*products.shape[:-2], size * size]), row * size + column, axis=-1)


def _perceptron(x: tf.Tensor, layers: Sequence[str], weights: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Apply dense layers with ReLU between them, but not after the last."""
    for number, layer in enumerate(layers):
        x = dense(tf.nn.relu(x) if number else x, weights[f"{layer}/kernel"], weights[f"{layer}/bias"])
    return x


def dlrm(
    features: Sequence[FeatureConfig],
    *,
    floats: Sequence[str] = (),
    bottom: Sequence[int] = (64,),
    top: Sequence[int] = (64, 32),
    head: Head = "ctr",
    outputs: int = 1,
    inner: InnerLoop | None = None,
    outer_samples: Literal["query", "all"] = "query",
    optimizer: SparseOptimizer | None = None,
    seed: int = 0,
    name: str = "dlrm",
) -> MetaModel:
    r"""Make MAML-DLRM as a `MetaModel`.

    For a sample with the embeddings :math:`e_1, \dots, e_n` of its features, all of width d, and floats x:

    .. math:: z_0 = \mathrm{MLP}_{bottom}(x), \quad
       p = (z_0 \cdot e_1,\ z_0 \cdot e_2,\ e_1 \cdot e_2, \dots), \quad
       \hat y = \sigma(\mathrm{MLP}_{top}([z_0; p]))

    ReLU follows the hidden layers of both perceptrons and the bottom one's last layer. Layers are named
    ``bottom1``, …, ``top1``, …, ``head``. All of them adapt unless ``inner`` says otherwise, for example
    ``adapt=["top1", "top2", "head"]``; ``adapt="all"`` adapts the embedding rows too, as G-Meta's Meta-DLRM
    does.

    The model differs from the paper: a row's initial values follow its `FeatureConfig` and not the size of
    its table, which isn't fixed. Without floats, the embeddings side by side replace :math:`z_0` in the top
    perceptron's input; otherwise only products would reach it.

    Args:
      features: The categorical features, all of one width; one with several ids per sample needs a combiner.
      floats: The names of float columns, one number per sample; scale them to about one (the log of counts).
      bottom: Units of the bottom perceptron's hidden layers; its last layer has d units.
      top: Units of the top perceptron's hidden layers.
      head: ``"ctr"``: outputs are probabilities, for ``loss="binary_crossentropy"``. ``"rating"``: they are
        any numbers, and :math:`\sigma` above is left out.
      outputs: The number of outputs, such as 2 for clicks and conversions, with labels (samples, 2).
      inner: The inner loop.
      outer_samples: See `MetaModel`.
      optimizer: The tables' sparse optimizer. None: tables follow the Keras optimizer.
      seed: The seed of the initial weights and rows.
      name: The model's name.

    Raises:
      ConfigError: Features have several widths, there are fewer than two vectors to multiply, or the head is
        unknown.

    Example:
      >>> features = [FeatureConfig("user", dim=8), FeatureConfig("item", dim=8)]
      >>> model = dlrm(features, floats=["price"], inner=InnerLoop(steps=1, learning_rate=0.05))
      >>> model.compile("adam", "binary_crossentropy", metrics=["AUC"])
      >>> list(model.learner.adapted_weights())[-2:]
      ['head/kernel', 'head/bias']
    """
    widths = sorted({feature.width for feature in features})
    if len(widths) != 1:
        raise ConfigError(f"dlrm: dot products need vectors of one width, got features of {widths}")
    network = DLRMNetwork(
        [feature.name for feature in features],
        *widths,
        floats=floats,
        bottom=bottom,
        top=top,
        head=head,
        outputs=outputs,
        seed=seed,
    )
    collection = EmbeddingCollection(features, optimizer=optimizer, seed=seed)
    collection.in_order(name)  # which is that of the network's products
    return MetaModel(
        collection,
        network,
        inner=inner,
        outer_samples=outer_samples,
        name=name,
    )
