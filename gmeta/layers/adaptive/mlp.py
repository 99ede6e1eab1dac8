"""Dense layers that run either with their own weights or with weights passed by the caller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError


def dense(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Compute ``x @ kernel + bias``, with one kernel for all tasks or one per task.

    Args:
      x: (..., samples, in).
      kernel: (in, out), or (tasks, in, out) for x of shape (tasks, samples, in).
      bias: (out,), or (tasks, out) if the kernel has a task dimension.

    Returns:
      (..., samples, out).
    """
    return tf.matmul(x, kernel) + tf.expand_dims(bias, -2)


@tf.keras.saving.register_keras_serializable("gmeta")
class MLP(tf.keras.layers.Layer):
    r"""A multilayer perceptron: ReLU between the layers, none after the last.

    A layer's kernel and bias start at :math:`U(-1/\sqrt{in}, 1/\sqrt{in})`, the convention behind the
    published results of MAML and MeLU. Keras' default (Glorot kernels, zero biases) starts wider networks
    from different values and shifts the results.

    Args:
      layers: Layer name -> number of units, in order from the input, e.g.
        ``{"fc1": 64, "fc2": 64, "out": 1}``.
      adapt: The layers whose weights a task adapts. None: all layers.
      seed: Seed of the initial values.

    Shapes:
      (..., samples, in) -> (..., samples, units of the last layer).

    Example:
      >>> stack = MLP({"fc1": 8, "out": 1}, adapt=["out"])
      >>> stack(tf.zeros([3, 5])).shape
      TensorShape([3, 1])
      >>> sorted(stack.fast_weights())
      ['out/bias', 'out/kernel']
    """

    def __init__(
        self,
        layers: Mapping[str, int],
        *,
        adapt: Sequence[str] | None = None,
        seed: int = 0,
        name: str = "mlp",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        unknown = sorted(set(adapt or ()) - set(layers))
        if unknown:
            raise ConfigError(f"adapt names {', '.join(unknown)}, but the layers are {', '.join(layers)}")
        self.units = dict(layers)
        self.adapt = list(layers) if adapt is None else list(adapt)
        self.seed = seed
        self._weights_of: dict[str, tf.Variable] = {}

    def build(self, input_shape: tf.TensorShape) -> None:
        """Create the weights for inputs of the given last dimension."""
        fan_in = int(tf.TensorShape(input_shape)[-1])
        for index, (layer, units) in enumerate(self.units.items()):
            limit = 1 / math.sqrt(fan_in)
            for part, (kind, shape) in enumerate((("kernel", (fan_in, units)), ("bias", (units,)))):
                # Each weight has its own seed, because initialisers with equal seeds draw equal numbers.
                initializer = tf.keras.initializers.RandomUniform(
                    -limit, limit, seed=1000 * self.seed + 2 * index + part
                )
                self._weights_of[f"{layer}/{kind}"] = self.add_weight(
                    name=f"{layer}/{kind}", shape=shape, initializer=initializer
                )
            fan_in = units
        super().build(input_shape)

    def task_weights(self) -> dict[str, tf.Variable]:
        """Return all weights: ``"layer/kernel"`` and ``"layer/bias"`` -> variable."""
        return dict(self._weights_of)

    def fast_weights(self) -> dict[str, tf.Variable]:
        """Return the weights that a task adapts: ``"layer/kernel"`` and ``"layer/bias"`` -> variable."""
        return {name: self._weights_of[name] for name in self._weights_of if name.split("/")[0] in self.adapt}

    def call(
        self, x: tf.Tensor, weights: Mapping[str, tf.Tensor] | None = None, training: bool | None = None
    ) -> tf.Tensor:
        """Run the layers.

        Args:
          x: (..., samples, in).
          weights: Weight name -> replacement, of the variable's shape or with a leading task dimension.
            Weights that aren't named keep their own values.
          training: Has no effect.
        """
        return self.beyond_first(self._dense(self.first, x, weights), weights)

    @property
    def first(self) -> str:
        """The name of the first layer."""
        return next(iter(self.units))

    def beyond_first(self, x: tf.Tensor, weights: Mapping[str, tf.Tensor] | None = None) -> tf.Tensor:
        """Run the layers after the first.

        Args:
          x: (..., samples, units), the first layer's output before its activation.
          weights: As in `call`.
        """
        for layer in list(self.units)[1:]:
            x = self._dense(layer, tf.nn.relu(x), weights)
        return x

    def _dense(self, layer: str, x: tf.Tensor, weights: Mapping[str, tf.Tensor] | None) -> tf.Tensor:
        used = (
            (weights or {}).get(name, self._weights_of[name]) for name in (f"{layer}/kernel", f"{layer}/bias")
        )
        # Under mixed precision x has the layer's compute dtype, while a task's own weights are float32.
        return dense(x, *(tf.cast(value, x.dtype) for value in used))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), "layers": self.units, "adapt": self.adapt, "seed": self.seed}


# Loads models that were saved when this layer was still called DenseStack.
tf.keras.saving.get_custom_objects()["gmeta>DenseStack"] = MLP
