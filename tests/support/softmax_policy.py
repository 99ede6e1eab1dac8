"""A policy whose every probability is known: a softmax over a small catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.layers import EmbeddingCollection
from gmeta.models import Model


class SoftmaxPolicy(Model):
    """A softmax over items, linear in a user's row, with the interface of a
    `gmeta.reinforcement.rollouts.Policy`.

    An item's code is its number's two digits to the base ``codes``.

    Args:
      collection: The embedding of ``user``.
      codes: The number of values of a digit; the catalogue has the square of that many items.
      seed: The seed of the kernel.
      scale: The deviation of the kernel's initial values.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        *,
        codes: int = 3,
        seed: int = 0,
        scale: float = 0.5,
        name: str = "softmax",
    ) -> None:
        super().__init__(name=name)
        self.collection, self.codes, self.items = collection, codes, codes * codes
        self._settings: dict[str, Any] = {"codes": codes, "seed": seed, "scale": scale}
        initializer = tf.keras.initializers.RandomNormal(stddev=scale, seed=seed)
        width = collection.features[0].width
        self.kernel = self.add_weight(name="kernel", shape=(width, self.items), initializer=initializer)
        self.bias = self.add_weight(name="bias", shape=(self.items,), initializer="zeros")
        self.built = True

    def call(self, x: Mapping[str, Any], training: bool | None = None, allow: Any = None) -> tf.Tensor:
        """Compute the logs of the probabilities of all items, (users, V); near -1e9 where not allowed."""
        rows = self.collection({"user": x["user"]}, training=training)["user"]
        logits = tf.matmul(rows, self.kernel) + self.bias
        return tf.nn.log_softmax(logits if allow is None else tf.where(allow, logits, -1e9))

    def sample(
        self,
        x: Mapping[str, Any],
        group: int,
        *,
        seed: Any,
        step: Any,
        method: str = "sample",
        keys: Any = None,
        allow: Any = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Draw items, int64 (users, group), and the logs of their probabilities; keys default to users."""
        logits = self(x, training=False, allow=allow)
        draws = group if method == "sample" else 1
        first = seed + 1_000_003 * tf.cast(step, tf.int64)

        users = tf.cast(x["user"] if keys is None else keys, tf.int64)
        scores = logits[:, tf.newaxis]
        if method != "beam":
            scores += _noise(first, users, draws, self.items)
        if method == "sample":
            items = tf.argmax(scores, axis=-1)
        else:
            items = tf.cast(tf.math.top_k(scores[:, 0], group).indices, tf.int64)
        return items, tf.gather(logits, items, batch_dims=1)

    def digit_log_probs(
        self, x: Mapping[str, Any], items: Any, training: bool = False, *, allow: Any = None
    ) -> tf.Tensor:
        """Compute the logs of the digits' probabilities, (users, group, 2); -inf if not allowed."""
        every = self(x, training=training, allow=allow)
        blocks = tf.reduce_logsumexp(tf.reshape(every, [-1, self.codes, self.codes]), axis=-1)
        items = tf.convert_to_tensor(items)
        first = tf.gather(blocks, items // self.codes, batch_dims=1)
        found = tf.stack([first, tf.gather(every, items, batch_dims=1) - first], axis=-1)
        may = tf.ones_like(items, tf.bool) if allow is None else tf.gather(allow, items)
        return tf.where(may[..., tf.newaxis], found, -np.inf)

    def retrieve(
        self, x: Mapping[str, Any], k: int, *, beam: int | None = None, allow: Any = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Find the k likeliest items; any ``beam`` is as good."""
        del beam
        found = tf.math.top_k(self(x, training=False, allow=allow), k)
        return tf.cast(found.indices, tf.int64), found.values

    def copy_dense(self, name: str) -> SoftmaxPolicy:
        """Make a policy of the same table and a copy of the kernel."""
        copy = SoftmaxPolicy(self.collection, name=name, **self._settings)
        copy.kernel.assign(self.kernel)
        copy.bias.assign(self.bias)
        return copy


@tf.function(reduce_retracing=True, autograph=False)
def _noise(seed: tf.Tensor, keys: tf.Tensor, draws: int, items: int) -> tf.Tensor:
    """Draw standard Gumbel noise, (keys, draws, items), each key's by itself; a graph, as there are many."""

    def of_key(key: tf.Tensor) -> tf.Tensor:
        uniform = tf.random.stateless_uniform([draws, items], tf.stack([seed, key]), minval=1e-30)
        return -tf.math.log(-tf.math.log(uniform))

    return tf.map_fn(of_key, keys, fn_output_signature=tf.TensorSpec([draws, items], tf.float32))
