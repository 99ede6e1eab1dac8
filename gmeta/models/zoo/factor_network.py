"""A factor model's network: items are vectors, and what a user thinks of them is linear in these vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.layers.embedding.entity_vector import EntityVector

_HEAD, _CENTRE, _FLOATS = "head/kernel", "item/centre", "item/floats"


@tf.keras.saving.register_keras_serializable("gmeta")
class FactorNetwork(tf.keras.layers.Layer):
    r"""The network of `factor_ridge` after the embeddings, with one head or one for each task.

    An item's vector :math:`(b, l, f)` is a centre plus `EntityVector`, plus a learned vector times each
    float: a bias, a loading of the user's bias, and ``dim`` factors. A user's vector u, the sum of the
    user's attributes, and the head h see its features:

    .. math:: \hat y = \mu + s \left(b + \phi^T (u + h)\right), \quad \phi = (1 + l,\ f)

    Tasks adapt h, ``head/kernel``; what the outer loop learns is the head of a user without ratings.

    Args:
      item: The feature of the item's id; None: items have only attributes.
      attributes: The features of the item's attributes; all of the item are ``dim + 2`` wide.
      user: The features of the user's attributes, ``dim + 1`` wide.
      floats: Float columns of the item, one number a sample.
      dim: The number of factors.
      mean: :math:`\mu`, what is predicted of an average item.
      deviation: s, the unit of labels.
      dropout: See `EntityVector`.
      seed: The seed of what is dropped.

    Shapes:
      {feature: (..., samples, width), column: (..., samples)} -> (..., samples, 1).

    Example:
      >>> network = FactorNetwork("film", ["genre"], ["age"], dim=2, mean=3.6)
      >>> vectors = {"film": tf.zeros([5, 7, 4]), "genre": tf.zeros([5, 7, 4]), "age": tf.zeros([5, 7, 3])}
      >>> network(vectors).shape
      TensorShape([5, 7, 1])
    """

    def __init__(
        self,
        item: str | None,
        attributes: Sequence[str] = (),
        user: Sequence[str] = (),
        *,
        floats: Sequence[str] = (),
        dim: int = 8,
        mean: float = 0.0,
        deviation: float = 1.0,
        dropout: float = 0.2,
        seed: int = 0,
        name: str = "factor_network",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.vector = EntityVector(item, attributes, dropout=dropout, seed=seed, name="item")
        self.user, self.floats, self.seed = tuple(user), tuple(floats), seed
        self.dim = whole_number(f"{name}: dim", dim, least=1)
        self.mean, self.deviation = float(mean), float(deviation)
        self._weights_of = {
            _CENTRE: self.add_weight(_CENTRE, [dim + 2], initializer="zeros"),
            **({_FLOATS: self._of_floats(len(floats), dim + 2, seed)} if floats else {}),
            _HEAD: self.add_weight(_HEAD, [dim + 1, 1], initializer="zeros"),
        }
        self.built = True

    def _of_floats(self, columns: int, width: int, seed: int) -> tf.Variable:
        start = tf.keras.initializers.RandomNormal(stddev=0.05, seed=seed)
        return self.add_weight(_FLOATS, [columns, width], initializer=start)

    @property
    def takes_by_name(self) -> list[str]:
        """The features and columns that the network takes by name; see `AdaptiveNetwork`."""
        return [*self.vector.names, *self.user, *self.floats]

    def task_weights(self) -> dict[str, tf.Variable]:
        """Return the items' centre, the floats' vectors and the head."""
        return dict(self._weights_of)

    def fast_weights(self) -> dict[str, tf.Variable]:
        """Return the head."""
        return {_HEAD: self._weights_of[_HEAD]}

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
          training: Whether to drop items' own rows.
        """
        used = {**self._weights_of, **(weights or {})}
        centre = used[_CENTRE]
        if centre.shape.rank > 1:  # one for each task
            centre = centre[:, tf.newaxis]
        item = self.vector(x, training=training) + centre
        if self.floats:
            item += tf.matmul(tf.stack([x[name] for name in self.floats], axis=-1), used[_FLOATS])
        features = tf.concat([1.0 + item[..., 1:2], item[..., 2:]], axis=-1)
        answer = item[..., :1] + tf.matmul(features, used[_HEAD])
        if self.user:
            user = tf.add_n([x[name] for name in self.user])
            answer += tf.reduce_sum(features * user, axis=-1, keepdims=True)
        return self.mean + self.deviation * answer

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {
            **super().get_config(),
            "item": self.vector.own,
            "attributes": list(self.vector.attributes),
            "user": list(self.user),
            "floats": list(self.floats),
            "dropout": self.vector.drop.rate,
            **{name: getattr(self, name) for name in ("dim", "mean", "deviation", "seed")},
        }
