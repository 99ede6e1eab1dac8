"""The trained tables of `gmeta.ops.RelativeBias`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.sequence.reading import SequenceView
from gmeta.ops import RelativeBias
from gmeta.ops.attention_inputs import BUCKETS, WIDTH

_LOWEST = -8.0  # SiLU(-8) is -0.003, so thousands of old events weigh less than a few recent ones
_TIMELESS = 1.0  # of the last bucket, which only tokens without a time reach, such as a user's contexts


def decaying_scores(horizon: float) -> npt.NDArray[np.float32]:
    r"""Compute scores that fall with the time between two tokens, a start for a table of times.

    .. math:: t_b = \max(\ln h - 0.301\, b, -8), \quad t_{128} = 1

    0.301 b is the logarithm of the shortest time of bucket b, so the score of two tokens that are Δ apart is
    about ln(h / Δ). Under SiLU, the weight of what is older than h falls about as 1 / Δ, with the opposite
    sign; of times a thousand times h and more, nearly nothing is left. The last bucket is that of tokens
    without a time.

    Args:
      horizon: h, above 0, in the unit of the times.

    Returns:
      (129,) float32.

    Raises:
      ConfigError: ``horizon`` isn't a finite number above 0.

    Example:
      >>> [f"{score:.1f}" for score in decaying_scores(150.0)[[0, 16, 33, 71, 128]]]
      ['5.0', '0.2', '-4.9', '-8.0', '1.0']
    """
    if not (horizon > 0 and math.isfinite(horizon)):
        raise ConfigError(f"the horizon of times must be a finite number above 0, got {horizon!r}")
    scores = np.maximum(math.log(horizon) - WIDTH * np.arange(BUCKETS), _LOWEST)
    scores[-1] = _TIMELESS
    return scores.astype(np.float32)


@tf.keras.saving.register_keras_serializable("gmeta")
class RelativeBiasTables(tf.keras.layers.Layer):
    """Learned attention biases for distances in position and in time, one number for all heads.

    Both tables start at N(0, 0.02²), as in the published code of HSTU (Zhai et al., ICML 2024) and of FuXi-α
    (Ye et al., WWW 2025); with a ``horizon``, `decaying_scores` are added to the table of times at the start,
    so that recent tokens weigh more until something else is learned. Both are float32, also under mixed
    precision.

    Args:
      max_length: n: distances beyond n - 1 count as n - 1.
      by_place: Whether there is a table of 2n - 1 distances in position.
      by_time: Whether there is a table of 129 logarithmic buckets of time.
      seed: Seed of the initial values.
      horizon: h of `decaying_scores`. None: no token weighs more than others at the start.

    Raises:
      ConfigError: ``max_length`` is below 1; a horizon isn't above 0, or there is no table of times for it.

    Example:
      >>> tables = RelativeBiasTables(max_length=50)
      >>> from gmeta.layers.sequence.reading import sequence_view
      >>> bias = tables(sequence_view(AttentionMask(), tf.constant([0, 2], tf.int64), times=[3, 9]))
      >>> bias.positions.shape, bias.time_buckets.shape
      (TensorShape([99]), TensorShape([129]))
    """

    def __init__(
        self,
        max_length: int,
        *,
        by_place: bool = True,
        by_time: bool = True,
        seed: int = 0,
        horizon: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if max_length < 1:
            raise ConfigError(f"{self.name}: max_length must be at least 1, got {max_length}")
        if horizon is not None and not by_time:
            raise ConfigError(
                f"{self.name}: horizon={horizon} is of a table of times, and there is none: leave it out, or "
                "make the layer with times"
            )
        self.max_length, self.by_place, self.by_time, self.seed = max_length, by_place, by_time, seed
        self.horizon = horizon
        self._start = 0.0 if horizon is None else decaying_scores(horizon)
        self.positions: tf.Variable | None = None
        self.time_buckets: tf.Variable | None = None

    def build(self, input_shape: Any) -> None:
        """Create the tables. The input shapes have no effect."""
        if self.by_place:
            self.positions = self._table("positions", 2 * self.max_length - 1, 2 * self.seed, 0.0)
        if self.by_time:
            self.time_buckets = self._table("time_buckets", BUCKETS, 2 * self.seed + 1, self._start)
        super().build(input_shape)

    def _table(self, name: str, size: int, seed: int, mean: Any) -> tf.Variable:
        normal = tf.keras.initializers.RandomNormal(stddev=0.02, seed=seed)

        def start(shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
            return normal(shape, dtype, **kwargs) + mean

        # Attention adds them in float32, whatever dtype it multiplies in.
        return self.add_weight(name=name, shape=[size], initializer=start, experimental_autocast=False)

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
        own = {name: getattr(self, name) for name in _ARGUMENTS}
        return {**super().get_config(), **own}


_ARGUMENTS = ("max_length", "by_place", "by_time", "seed", "horizon")


def _read(table: tf.Variable | None) -> tf.Tensor | None:
    return None if table is None else tf.convert_to_tensor(table)
