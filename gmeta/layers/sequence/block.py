"""The base classes of blocks over jagged sequences, and of stacks of such blocks.

A block maps tokens to tokens of the same width. Besides the tokens it needs the attention mask and the
tokens' times. They are the same for all blocks, so a stack computes them once and passes them on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import assert_first
from gmeta.layers.embedding.keras_config import from_config, to_config
from gmeta.layers.sequence.bias_tables import RelativeBiasTables
from gmeta.layers.sequence.reading import AppendedPlace, Kept, SequenceView, sequence_view
from gmeta.ops import AttentionMask, Jagged, jagged


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
        self.drop = tf.keras.layers.Dropout(dropout, seed=seed, name="dropout", dtype=self.dtype_policy)
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
