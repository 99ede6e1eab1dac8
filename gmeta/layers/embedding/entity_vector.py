"""A layer that makes the vector of an item or a user from its own row and the rows of its attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError


@tf.keras.saving.register_keras_serializable("gmeta")
class EntityVector(tf.keras.layers.Layer):
    r"""The vector of an entity: its own row plus its attributes' vectors.

    .. math:: v = m\, e_{own} + \sum_{a} e_a, \quad
       m \sim \mathrm{Bernoulli}(1 - p) \text{ in training, else } 1

    An entity with many samples is told apart by its own row. A new one has none yet, and its attributes must
    say all; so training drops own rows at random, and attributes learn to stand alone. Unlike
    ``tf.keras.layers.Dropout``, the rows that stay aren't scaled up: they add what they will add in serving.
    Start own rows at or near 0 (``Normal(0.0, 0.01)``), so that an entity which was never trained adds
    nothing, and pool lists of attributes by ``"sqrtn"``, so that a sum of n rows varies as much as one.

    Args:
      own: The feature of the entity's id; None: it has only attributes.
      attributes: The features of its attributes; all features have one width.
      dropout: p, the probability that training leaves out a sample's own row, in [0, 1).
      seed: The seed of what is dropped.

    Shapes:
      {feature: (..., samples, width)} -> (..., samples, width).

    Raises:
      ConfigError: Nothing is named, a feature is named twice, or the probability isn't in [0, 1).

    Example:
      >>> layer = EntityVector("film", ["genre", "director"], dropout=0.2)
      >>> vectors = {"film": tf.ones([2, 3]), "genre": tf.ones([2, 3]), "director": tf.ones([2, 3])}
      >>> layer(vectors).numpy().tolist()
      [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    """

    def __init__(
        self,
        own: str | None,
        attributes: Sequence[str] = (),
        *,
        dropout: float = 0.2,
        seed: int = 0,
        name: str = "entity_vector",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.names = [*([] if own is None else [own]), *attributes]
        if not self.names or len(set(self.names)) != len(self.names):
            raise ConfigError(f"{name}: own and attributes must name features, each once, got {self.names}")
        if isinstance(dropout, bool) or not 0.0 <= dropout < 1.0:
            raise ConfigError(f"{name}: dropout must lie in [0, 1), got {dropout!r}")
        self.own, self.attributes, self.seed = own, tuple(attributes), seed
        self.drop = tf.keras.layers.Dropout(dropout, seed=seed)

    def call(self, vectors: Mapping[str, tf.Tensor], training: bool | None = None) -> tf.Tensor:
        """Add up the vectors.

        Args:
          vectors: The features' vectors, as `EmbeddingCollection` gives them; others are left out.
          training: Whether to drop own rows.
        """
        missing = [name for name in self.names if name not in vectors]
        if missing:
            raise ConfigError(
                f"{self.name}: no vectors of {', '.join(missing)}; there are {', '.join(vectors)}"
            )
        parts = [vectors[name] for name in self.attributes]
        if self.own is not None:
            own = vectors[self.own]
            kept = self.drop(tf.ones_like(own[..., :1]), training=training)
            parts.append(own * tf.sign(kept))
        return tf.add_n(parts)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        own = {"own": self.own, "attributes": list(self.attributes)}
        return {**super().get_config(), **own, "dropout": self.drop.rate, "seed": self.seed}
