"""Scaling of number columns and labels inside a network.

The scales are part of the network, so an exported model takes and returns numbers as they are in the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

FARTHEST = 5.0
"""The number of deviations from the mean at which numbers are clipped. Without the clipping, a price with a
misplaced decimal point could move a weight a hundred times as far as other prices do."""


@tf.keras.saving.register_keras_serializable("gmeta")
class ScaledNumbers(tf.keras.layers.Layer):
    r"""A network whose inputs are features' vectors and numbers scaled by :math:`(x - \mu) / \sigma`.

    Scaled numbers are clipped to -5 and 5. A number that isn't finite counts as the mean.

    Args:
      network: A `gmeta.layers.MLP`, which gets vectors and numbers side by side, or a network that
        takes columns by name (``takes_by_name``), such as `gmeta.models.zoo.dlrm_model.DLRMNetwork`.
      features: The names of the features.
      widths: The width of each feature's vectors.
      scales: Column -> (mean, deviation).
      answer: (mean, deviation) of the labels: outputs y become :math:`\mu + \sigma y`. None: outputs stay y.

    Shapes:
      {feature: (..., samples, width), column: (..., samples)} -> the network's outputs.

    Example:
      >>> from gmeta.layers import MLP
      >>> network = ScaledNumbers(MLP({"out": 1}), ["item"], [4], {"price": (10.0, 2.0)})
      >>> network({"item": tf.zeros([2, 3, 4]), "price": tf.fill([2, 3], 12.0)}).shape
      TensorShape([2, 3, 1])
    """

    def __init__(
        self,
        network: tf.keras.layers.Layer,
        features: Sequence[str],
        widths: Sequence[int],
        scales: Mapping[str, Sequence[float]],
        answer: Sequence[float] | None = None,
        name: str = "scaled_numbers",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.network = network
        self._features, self._widths = tuple(features), tuple(widths)
        self._scales = {name: (float(mean), float(deviation)) for name, (mean, deviation) in scales.items()}
        self._answer = (0.0, 1.0) if answer is None else (float(answer[0]), float(answer[1]))
        vectors = {name: tf.zeros([1, 1, width]) for name, width in zip(features, widths, strict=True)}
        self({**vectors, **{name: tf.zeros([1, 1]) for name in self._scales}})  # creates the weights

    @property
    def takes_by_name(self) -> list[str]:
        """The features and columns that the network takes by name; see `AdaptiveNetwork`."""
        return [*self._features, *self._scales]

    def task_weights(self) -> dict[str, tf.Variable]:
        """Return the task weights of the inner network."""
        return dict(self.network.task_weights())

    def fast_weights(self) -> dict[str, tf.Variable]:
        """Return the fast weights of the inner network."""
        return dict(self.network.fast_weights())

    def call(
        self,
        x: Mapping[str, tf.Tensor],
        weights: Mapping[str, tf.Tensor] | None = None,
        training: bool | None = None,
    ) -> tf.Tensor:
        """Run the network.

        Args:
          x: Vectors and numbers, by name.
          weights: Weights by name, as the inner network takes them.
          training: As in Keras.
        """
        numbers = {name: _scale(x[name], *scale) for name, scale in self._scales.items()}
        vectors = {name: x[name] for name in self._features}
        if hasattr(self.network, "takes_by_name"):
            given: Any = {**vectors, **numbers}
        else:
            columns = [number[..., tf.newaxis] for number in numbers.values()]
            given = tf.concat([*vectors.values(), *columns], axis=-1)
        mean, deviation = self._answer
        return mean + deviation * self.network(given, weights, training=training)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {
            **super().get_config(),
            "network": tf.keras.saving.serialize_keras_object(self.network),
            "features": list(self._features),
            "widths": list(self._widths),
            "scales": {name: list(scale) for name, scale in self._scales.items()},
            "answer": list(self._answer),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ScaledNumbers:
        """Create the layer that a config from `get_config` describes."""
        return cls(**{**config, "network": tf.keras.saving.deserialize_keras_object(config["network"])})


def _scale(x: tf.Tensor, mean: float, deviation: float) -> tf.Tensor:
    finite = tf.where(tf.math.is_finite(x), x, np.float32(mean))
    return tf.clip_by_value((finite - mean) / deviation, -FARTHEST, FARTHEST)
