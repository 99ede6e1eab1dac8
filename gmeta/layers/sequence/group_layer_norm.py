"""Layer norm with the weights of a token's domain."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph.conditions import assert_first
from gmeta.ops.layer.norms import layer_norm


def _of_each(weight: tf.Tensor, domains: tf.Tensor) -> tf.Tensor:
    """Gather a domain's row for each token: (domains, dim) -> (total, dim).

    Thousands of tokens share a row. Its gradient is their sum, taken as a matrix product: a sum by segments
    would make a GPU's threads wait for each other, and add in another order in each run.
    """

    @tf.custom_gradient
    def gather(weight: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            chosen = tf.one_hot(domains, tf.shape(weight)[0], dtype=upstream.dtype)
            return tf.matmul(chosen, upstream, transpose_a=True)

        return tf.gather(weight, domains), gradient

    return gather(weight)


@tf.keras.saving.register_keras_serializable("gmeta")
class GroupLayerNorm(tf.keras.layers.Layer):
    r"""Layer norm for tokens of several domains, such as contexts, clicks, purchases and targets.

    .. math::
       y_i = \gamma_{g(i)} \odot \frac{x_i - \bar{x_i}}{\sqrt{\mathrm{var}(x_i) + \epsilon}} + \beta_{g(i)}

    Tokens of different domains differ in scale. With each domain's own weights they become alike in scale,
    and attention can compare them (MTGR, Han et al., arXiv 2505.18654, 2025; MTGenRec, section 2). The
    statistics cover only the token's own numbers, so no token depends on other tokens.

    Args:
      domains: Number of domains.
      eps: ε.

    Shapes:
      Values (total, dim) and domains (total,) integers in [0, domains) -> (total, dim). A call takes them as
      one pair or as two arguments.

    Raises:
      ConfigError: There is less than one domain, or the call lacks the domains.
      InvalidArgumentError: A token's domain isn't in [0, domains).

    Example:
      >>> norm = GroupLayerNorm(domains=3)
      >>> norm(tf.random.normal([5, 8]), tf.constant([0, 1, 1, 1, 2])).shape
      TensorShape([5, 8])
    """

    def __init__(self, domains: int, *, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if domains < 1:
            raise ConfigError(f"{self.name}: domains must be at least 1, got {domains}")
        self.domains, self.eps = domains, eps

    def build(self, input_shape: Any) -> None:
        """Create γ and β for tokens of the given width."""
        shape = [self.domains, int(tf.TensorShape(input_shape)[-1])]
        self.gamma = self.add_weight(name="gamma", shape=shape, initializer="ones")
        self.beta = self.add_weight(name="beta", shape=shape, initializer="zeros")
        super().build(input_shape)

    def call(self, values: tf.Tensor, domains: tf.Tensor) -> tf.Tensor:
        """Normalise each token.

        Args:
          values: (total, dim) float.
          domains: (total,) integers, each token's domain.
        """
        domains = tf.convert_to_tensor(domains)
        # On a GPU, gather silently returns zeros for indices that are out of range.
        domains = assert_first(
            domains,
            (domains >= 0) & (domains < self.domains),
            [f"{self.name}: domains must be in [0, {self.domains}), got", domains],
        )
        scale, offset = (
            _of_each(tf.convert_to_tensor(weight), domains) for weight in (self.gamma, self.beta)
        )
        return layer_norm(values, scale, offset, self.eps)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), "domains": self.domains, "eps": self.eps}
