"""DLRM that adapts to tasks: embeddings, dot products between them, and two multilayer perceptrons.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019),
sections 2.1 and 2.2, inside MAML's two loops, as the Meta-DLRM that G-Meta measures (section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.meta import InnerLoop
from gmeta.models.meta_model import MetaModel
from gmeta.ops.optimizers import SparseOptimizer

Head = Literal["ctr", "rating"]


@tf.keras.saving.register_keras_serializable("gmeta")
class DotInteraction(tf.keras.layers.Layer):
    r"""The dot product of each pair of a sample's vectors, :math:`v_i \cdot v_j` for :math:`j < i`.

    Shapes:
      (samples, n, dim) -> (samples, n (n - 1) / 2), in the order (1, 0), (2, 0), (2, 1), (3, 0), …

    Example:
      >>> DotInteraction()(tf.constant([[[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]]])).numpy().tolist()
      [[2.0, 0.0, 3.0]]
    """

    def call(self, vectors: tf.Tensor) -> tf.Tensor:
        """The products."""
        size = int(vectors.shape[1])
        products = tf.matmul(vectors, vectors, transpose_b=True)
        row, column = np.tril_indices(size, -1)
        return tf.gather(tf.reshape(products, [-1, size * size]), row * size + column, axis=1)


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
    r"""MAML-DLRM as a `MetaModel`.

    With the embeddings :math:`e_1, \dots, e_n` of a sample's features, all of width d, and its floats x,

    .. math:: z_0 = \mathrm{MLP}_{bottom}(x), \quad
       p = (z_0 \cdot e_1,\ z_0 \cdot e_2,\ e_1 \cdot e_2, \dots), \quad
       \hat y = \sigma(\mathrm{MLP}_{top}([z_0; p]))

    with ReLU inside both perceptrons and after the bottom one. Layers are named ``bottom1``, …, ``top1``, …,
    ``head``; all of them adapt, unless ``inner`` says otherwise, such as ``adapt=["top1", "top2", "head"]``,
    or ``adapt="all"``, which adapts the embedding rows too, as G-Meta's Meta-DLRM does.

    It differs from the paper in that rows start as their `FeatureConfig` says and not by the size of their
    table, which is open; and where there are no floats, the embeddings side by side take the place of
    :math:`z_0` in the top perceptron's input, or nothing but products would reach it.

    Args:
      features: The categorical features, all of one width; one of several ids needs a pooling.
      floats: The names of float columns, one number a sample; scale them to about one (the log of counts).
      bottom: Units of the bottom perceptron's hidden layers; its last layer has d.
      top: Units of the top perceptron's hidden layers.
      head: ``"ctr"``: outputs are probabilities, for ``loss="binary_crossentropy"``. ``"rating"``: they are
        any numbers, and :math:`\sigma` above is left out.
      outputs: How many, such as 2 for clicks and conversions, with labels (samples, 2).
      inner: The inner loop.
      outer_samples: See `MetaModel`.
      optimizer: The tables' sparse optimizer; Adam at the Keras optimizer's rate where it isn't said.
      seed: Of the initial weights and rows.
      name: The model's name.

    Raises:
      ConfigError: Features of several widths, fewer than two vectors to multiply, or an unknown head.

    Example:
      >>> features = [FeatureConfig("user", 8), FeatureConfig("item", 8)]
      >>> model = dlrm(features, floats=["price"], inner=InnerLoop(steps=1, learning_rate=0.05))
      >>> model.compile("adam", "binary_crossentropy", metrics=["AUC"])
      >>> list(model.adapted_weights())[-2:]
      ['head/kernel', 'head/bias']
    """
    if head not in get_args(Head):
        raise ConfigError(f"dlrm: head must be 'ctr' or 'rating', got {head!r}")
    network = dlrm_network(
        features, floats=floats, bottom=bottom, top=top, head=head, outputs=outputs, seed=seed
    )
    return MetaModel(
        EmbeddingCollection(features, optimizer=optimizer, seed=seed),
        network,
        inner=inner,
        outer_samples=outer_samples,
        name=name,
    )


def dlrm_network(
    features: Sequence[FeatureConfig],
    *,
    floats: Sequence[str] = (),
    bottom: Sequence[int] = (64,),
    top: Sequence[int] = (64, 32),
    head: Head = "ctr",
    outputs: int = 1,
    seed: int = 0,
) -> tf.keras.Model:
    """What `dlrm` does with the vectors: a functional model of {feature: vectors, column: floats}.

    The arguments are those of `dlrm`.
    """
    widths = sorted({feature.dim for feature in features})
    if len(widths) != 1:
        raise ConfigError(f"dlrm: dot products need vectors of one width, got features of {widths}")
    if len(features) + bool(floats) < 2:
        raise ConfigError("dlrm: there is no pair of vectors to multiply: give it two features, or floats")
    (width,) = widths
    inputs: dict[str, Any] = {each.name: tf.keras.Input([width], name=each.name) for each in features}
    columns = {column: tf.keras.Input([], name=column) for column in floats}
    layers = _Layers(seed)
    vectors = list(inputs.values())
    first = list(inputs.values())
    if floats:
        x = tf.stack(list(columns.values()), axis=1)
        for number, units in enumerate([*bottom, width], 1):
            x = layers.dense(x, units, f"bottom{number}")
        vectors, first = [x, *vectors], [x]
    products = DotInteraction(name="products")(tf.stack(vectors, axis=1))
    x = tf.concat([*first, products], axis=1)
    for number, units in enumerate(top, 1):
        x = layers.dense(x, units, f"top{number}")
    x = layers.dense(x, outputs, "head", "sigmoid" if head == "ctr" else None)
    return tf.keras.Model({**inputs, **columns}, x, name="dlrm")


class _Layers:
    """Makes dense layers, each with initial weights of its own."""

    def __init__(self, seed: int) -> None:
        self._seed, self._made = seed, 0

    def dense(self, x: Any, units: int, name: str, activation: str | None = "relu") -> Any:
        self._made += 1
        start = tf.keras.initializers.GlorotNormal(seed=1000 * self._seed + self._made)
        return tf.keras.layers.Dense(units, activation, kernel_initializer=start, name=name)(x)
