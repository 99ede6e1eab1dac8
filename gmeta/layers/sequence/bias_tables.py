"""The trained tables of `gmeta.ops.RelativeBias`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.sequence.view import SequenceView
from gmeta.ops import RelativeBias
from gmeta.ops.attention.relative_bias import BUCKETS


@tf.keras.saving.register_keras_serializable("gmeta")
class RelativeBiasTables(tf.keras.layers.Layer):
    """Learned attention biases for distances in position and in time, one number for all heads.

    Both tables start at N(0, 0.02²), as in the published code of HSTU (Zhai et al., ICML 2024) and of FuXi-α
    (Ye et al., WWW 2025). They are float32, also under mixed precision.

    Args:
      max_length: n: distances beyond n - 1 count as n - 1.
      by_place: Whether there is a table of 2n - 1 distances in position.
      by_time: Whether there is a table of 129 logarithmic buckets of time.
      seed: Seed of the initial values.

    Example:
      >>> tables = RelativeBiasTables(max_length=50)
      >>> bias = tables(sequence_view(AttentionMask(), tf.constant([0, 2], tf.int64), times=[3, 9]))
      >>> bias.positions.shape, bias.time_buckets.shape
      (TensorShape([99]), TensorShape([129]))
    """

    def __init__(
        self, max_length: int, *, by_place: bool = True, by_time: bool = True, seed: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if max_length < 1:
            raise ConfigError(f"{self.name}: max_length must be at least 1, got {max_length}")
        self.max_length, self.by_place, self.by_time, self.seed = max_length, by_place, by_time, seed
        self.positions: tf.Variable | None = None
        self.time_buckets: tf.Variable | None = None

    def build(self, input_shape: Any) -> None:
        """Create the tables. The input shapes have no effect."""
        if self.by_place:
            self.positions = self._table("positions", 2 * self.max_length - 1, 2 * self.seed)
        if self.by_time:
            self.time_buckets = self._table("time_buckets", BUCKETS, 2 * self.seed + 1)
        super().build(input_shape)

    def _table(self, name: str, size: int, seed: int) -> tf.Variable:
        initializer = tf.keras.initializers.RandomNormal(stddev=0.02, seed=seed)
        # Attention adds them in float32, whatever dtype it multiplies in.
        return self.add_weight(name=name, shape=[size], initializer=initializer, experimental_autocast=False)

    def call(self, view: SequenceView) -> RelativeBias:
        """Return the bias for the sequences of a view.

        Raises:
          ConfigError: There is a table of times, but the view has no times.
        """
        view = SequenceView(*view)
        if self.by_time and view.row_times is None:
            raise ConfigError(
                f"{self.name}: there is a table of times, but no times were given: pass times=, when each "
                "token was, or make the layer without the table (by_time=False)"
            )
        times = view[1:] if self.by_time else (None, None)
        return RelativeBias(_read(self.positions), _read(self.time_buckets), *times)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        own = {name: getattr(self, name) for name in ("max_length", "by_place", "by_time", "seed")}
        return {**super().get_config(), **own}


def _read(table: tf.Variable | None) -> tf.Tensor | None:
    return None if table is None else tf.convert_to_tensor(table)
