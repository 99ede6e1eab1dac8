"""The base classes of blocks over jagged sequences and of stacks of such blocks, and their trained biases.

A block maps tokens to tokens of the same width. Besides the tokens it needs the attention mask and the
tokens' times. They are the same for all blocks, so a stack computes them once and passes them on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import assert_first
from gmeta.layers.embedding.feature_config import from_config, to_config
from gmeta.layers.sequence.reading import AppendedPlace, Kept, SequenceView, sequence_view
from gmeta.ops import AttentionMask, Jagged, RelativeBias, jagged
from gmeta.ops.attention_inputs import BUCKETS, WIDTH


class SequenceLayer(tf.keras.layers.Layer):
    """A layer over jagged sequences, which computes in each call which tokens see which."""

    def __init__(self, *, mask: AttentionMask | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mask = AttentionMask() if mask is None else mask

    @property
    def needs_times(self) -> bool:
        """Whether calls need ``times``: for a bias of times, or for a mask ``by_time``."""
        return self.mask.by_time

    def call(
        self,
        sequences: Jagged | tf.RaggedTensor,
        contexts: Any = None,
        targets: Any = None,
        times: Any = None,
        view: SequenceView | None = None,
        training: bool | None = None,
    ) -> Jagged | tf.RaggedTensor:
        """Transform the tokens.

        Args:
          sequences: Values (total, dim), each sequence ``[contexts | history | targets]``; or the same as a
            ragged tensor (batch, None, dim).
          contexts: (batch,) integers: each sequence's number of contextual tokens. None: no such tokens.
          targets: (batch,) integers: each sequence's number of targets. None: no targets.
          times: (total,) integers: each token's time; or ragged (batch, None).
          view: The result of `sequence_view` for those three, if it is already known.
          training: Whether to apply dropout.

        Returns:
          Values (total, dim) with the given offsets; ragged if the input was ragged.

        Raises:
          ConfigError: A bias or a mask ``by_time`` needs times, but none are given; or ``sequences`` isn't in
            one of the two forms.
          InvalidArgumentError: Ragged times have other lengths than the sequences.
        """
        tokens = as_jagged(self.name, sequences)
        if view is None:
            times = _flat_times(self.name, times, tokens)
            if times is None and self.needs_times:
                raise ConfigError(
                    f"{self.name} needs times: pass times=, when each token was, or make it with "
                    "bias_by_time=False and a mask that isn't by_time"
                )
            view = sequence_view(self.mask, tokens.offsets, contexts, targets, times)
        values = self.transform(tokens.values, tokens.offsets, SequenceView(*view), training)
        if isinstance(sequences, tf.RaggedTensor):
            return sequences.with_values(values)
        return Jagged(values, tokens.offsets)

    def transform(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tf.Tensor:
        """Transform the tokens, (total, dim) -> (total, dim)."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), "mask": to_config(self.mask)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SequenceLayer:
        """Recreate the layer from what `get_config` returned."""
        return cls(**{**config, "mask": from_config(config["mask"])})


class SeededDropout(tf.keras.layers.Dropout):
    """Keras' dropout, which within `seeded` depends on a seed alone, so that it can be repeated."""

    _seed_of_calls: tf.Tensor | None = None
    _calls = 0

    def draw_seed(self) -> tf.Tensor:
        """Draw a seed for some calls, (2,) int32."""
        with tf.device("CPU:0"):
            return tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int32, seed=self.seed)

    @contextmanager
    def seeded(self, seed: tf.Tensor) -> Iterator[None]:
        """Derive the dropout of each call in a ``with`` block from a seed and the call's number there."""
        self._seed_of_calls, self._calls = seed, 0
        try:
            yield
        finally:
            self._seed_of_calls = None

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Drop numbers in training."""
        if self._seed_of_calls is None or not training or not self.rate:
            return super().call(inputs, training=training)
        self._calls += 1
        seed = tf.random.fold_in(self._seed_of_calls, self._calls)
        return tf.nn.experimental.stateless_dropout(inputs, self.rate, seed=seed)


class SequenceBlock(SequenceLayer):
    """A block of attention and the layers that follow it, with a residual connection.

    Args:
      heads: Number of heads.
      attention_dim: Width of a query and of a key, per head.
      value_dim: Width of a value, per head.
      max_length: n, the longest history to provide for. Attention is divided by n, and each distance in
        position up to n has its own bias. The block accepts longer sequences too.
      dropout: The share of numbers that are dropped in training.
      bias_by_place: Whether there is a bias for distances in position.
      bias_by_time: Whether there is a bias for distances in time; calls then need ``times``.
      mask: Which tokens see which. None: a token sees those before it.
      seed: Seed of the initial values and of dropout.
      horizon: As for `RelativeBiasTables`, for blocks that add the table to scores.
    """

    READS_ON: ClassVar[bool] = False
    """Whether the block has `read` and `read_on`, so that tokens can be appended to what it has read."""
    EXTENDS: ClassVar[bool] = False
    """Whether the block has `extend` too, so that histories can grow."""
    WEIGHTS = 16  # more than any block has, so that blocks never share a seed
    _SETTINGS: ClassVar[tuple[str, ...]] = (
        "heads",
        "attention_dim",
        "value_dim",
        "max_length",
        "dropout",
        "bias_by_place",
        "bias_by_time",
        "seed",
    )

    def __init__(
        self,
        *,
        heads: int,
        attention_dim: int,
        value_dim: int,
        max_length: int,
        dropout: float = 0.0,
        bias_by_place: bool = True,
        bias_by_time: bool = True,
        mask: AttentionMask | None = None,
        seed: int = 0,
        horizon: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(mask=mask, **kwargs)
        for name, value in (("heads", heads), ("attention_dim", attention_dim), ("value_dim", value_dim)):
            if value < 1:
                raise ConfigError(f"{self.name}: {name} must be at least 1, got {value}")
        if not 0 <= dropout < 1:
            raise ConfigError(f"{self.name}: dropout must be in [0, 1), got {dropout}")
        self.heads, self.attention_dim, self.value_dim = heads, attention_dim, value_dim
        self.max_length, self.dropout, self.seed = max_length, dropout, seed
        self.bias_by_place, self.bias_by_time = bias_by_place, bias_by_time
        self.drop = SeededDropout(dropout, seed=seed, name="dropout", dtype=self.dtype_policy)
        self.bias_tables = RelativeBiasTables(
            max_length,
            by_place=bias_by_place,
            by_time=bias_by_time,
            seed=(self.WEIGHTS * seed + self.WEIGHTS - 2) // 2,  # its two tables take two seeds
            horizon=horizon,
            name="relative_bias",
            dtype=self.dtype_policy,
        )

    @property
    def needs_times(self) -> bool:
        """Whether calls need ``times``."""
        return self.bias_by_time or super().needs_times

    def read(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Transform the tokens as `transform` does, and return their keys and values too.

        A block that has this and `read_on` sets ``READS_ON``; `SequenceStack.read` calls it.

        Returns:
          (total, dim), (total, heads, d) and (total, heads, dv).
        """
        raise NotImplementedError

    def read_on(
        self, values: tf.Tensor, kept: Kept, place: AppendedPlace, training: bool | None
    ) -> tuple[tf.Tensor, Kept]:
        """Transform one token of each beam that is appended to what was read, without reading that again.

        Args:
          values: (batch, beams, dim).
          kept: Keys and values of the tokens before, whose beams are those of the values.
          place: Which of these tokens are seen, and how far away they are.
          training: Whether to apply dropout.

        Returns:
          (batch, beams, dim), and ``kept`` with the keys and values of these tokens.
        """
        raise NotImplementedError

    def extend(
        self, values: tf.Tensor, kept: Kept, place: AppendedPlace
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Transform a stretch of tokens that is appended to each sequence, without dropout.

        Args:
          values: (batch, n, dim).
          kept: Keys and values of the sequences.
          place: Where the tokens stand.

        Returns:
          (batch, n, dim), and the tokens' keys and values, (batch, heads, n, d) and (batch, heads, n, dv).
        """
        raise NotImplementedError

    def _dropped(self, x: tf.Tensor, training: bool | None) -> tf.Tensor:
        """Apply dropout outside of a call, where nothing casts to the layer's dtype."""
        return tf.cast(self.drop(x, training=training), x.dtype)

    def width(self, input_shape: Any) -> int:
        """Return the width of the tokens, from the shapes that `build` receives."""
        ragged = isinstance(input_shape, tf.TensorShape)
        shape = tf.TensorShape(input_shape if ragged else input_shape[0])
        if shape.rank != (3 if ragged else 2) or shape[-1] is None:
            raise ConfigError(
                f"{self.name} takes a tf.RaggedTensor of shape (batch, None, dim), or a gmeta.ops.Jagged of "
                f"values (total, dim), dim known, got {shape}"
            )
        return int(shape[-1])

    def weight(self, name: str, shape: list[int], initializer: str | Callable[..., Any]) -> tf.Variable:
        """Create a weight with its own seed, because initialisers with equal seeds draw equal numbers."""
        if not isinstance(initializer, str):
            initializer = initializer(seed=self.WEIGHTS * self.seed + len(self.weights))
        return self.add_weight(name=name, shape=shape, initializer=initializer)

    def by_head(self, x: tf.Tensor) -> tf.Tensor:
        """Split into heads, (total, heads * d) -> (total, heads, d)."""
        return tf.reshape(x, [-1, self.heads, x.shape[-1] // self.heads])

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), **{name: getattr(self, name) for name in self._SETTINGS}}


def as_jagged(name: str, sequences: Any) -> Jagged:
    """Convert sequences to `Jagged`.

    Args:
      name: The layer's name.
      sequences: Jagged, or ragged (batch, None, dim).

    Raises:
      ConfigError: The sequences have neither form.
    """
    if isinstance(sequences, tf.RaggedTensor):
        if sequences.shape.rank != 3:
            raise ConfigError(
                f"{name} takes a tf.RaggedTensor of shape (batch, None, dim), got {sequences.shape}"
            )
        return jagged.from_ragged(sequences)
    if not isinstance(sequences, tuple | list) or len(sequences) != len(Jagged._fields):
        raise ConfigError(
            f"{name} takes a tf.RaggedTensor of shape (batch, None, dim) or a gmeta.ops.Jagged, got "
            f"{type(sequences).__name__}; jagged.from_padded makes sequences of a padded tensor"
        )
    return Jagged(*sequences)


def _flat_times(name: str, times: Any, tokens: Jagged) -> Any:
    """Return times as a vector, after checking that ragged times are as long as their sequences."""
    if not isinstance(times, tf.RaggedTensor):
        return times
    own = jagged.from_ragged(times)
    same = tf.size(own.offsets) == tf.size(tokens.offsets)
    least = tf.minimum(tf.size(own.offsets), tf.size(tokens.offsets))
    same &= tf.reduce_all(own.offsets[:least] == tokens.offsets[:least])
    return assert_first(own.values, same, [f"{name}: rows of times= have other lengths than the sequences"])


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
