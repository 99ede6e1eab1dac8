"""What blocks over jagged sequences share, and stacks of such blocks.

A block maps tokens to tokens of the same width. What it knows of a batch besides its tokens (who sees whom,
and when) is the same for all blocks, so a stack computes it once and hands it down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.relative_bias import RelativeBiasTables
from gmeta.layers.sequence_view import SequenceView, sequence_view
from gmeta.layers.settings import from_config, to_config
from gmeta.ops import AttentionMask, Jagged


class SequenceLayer(tf.keras.layers.Layer):
    """A layer over jagged sequences: who sees whom is found when it is called."""

    def __init__(self, *, mask: AttentionMask | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mask = AttentionMask() if mask is None else mask

    def call(
        self,
        sequences: Jagged,
        contexts: Any = None,
        targets: Any = None,
        times: Any = None,
        view: SequenceView | None = None,
        training: bool | None = None,
    ) -> Jagged:
        """Transform the tokens.

        Args:
          sequences: Values (total, dim), each sequence ``[contexts | history | targets]``.
          contexts: (batch,) integers: how many contextual tokens each sequence has; None: none.
          targets: (batch,) integers: how many targets.
          times: (total,) integers: when each token was.
          view: What `sequence_view` made of those three, where that is known already.
          training: Whether to drop out.

        Returns:
          Jagged: values (total, dim), and the offsets as they came.

        Raises:
          ConfigError: Times are needed, for a bias or for a mask ``by_time``, and there are none.
        """
        sequences = Jagged(*sequences)
        if view is None:
            view = sequence_view(self.mask, sequences.offsets, contexts, targets, times)
        values = self.transform(sequences.values, sequences.offsets, SequenceView(*view), training)
        return Jagged(values, sequences.offsets)

    def transform(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tf.Tensor:
        """(total, dim) -> (total, dim)."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this layer again."""
        return {**super().get_config(), "mask": to_config(self.mask)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SequenceLayer:
        """The layer that `get_config` wrote down."""
        return cls(**{**config, "mask": from_config(config["mask"])})


class SequenceBlock(SequenceLayer):
    """A block of attention and what follows it, with a residual connection.

    Args:
      heads: How many.
      attention_dim: Numbers of a query and of a key, a head.
      value_dim: Numbers of a value, a head.
      max_length: n, the longest history that is provided for: attention is divided by it, and places up to it
        apart have a bias each. Longer sequences are taken too.
      dropout: The share of numbers that are dropped in training.
      bias_by_place: Whether there is a bias of places.
      bias_by_time: Whether there is a bias of times; calls then need ``times``.
      mask: Who sees whom; None: what came before.
      seed: Of the initial values and of dropout.
    """

    WEIGHTS = 16  # more than any block has: seeds of blocks don't meet
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
            name="relative_bias",
            dtype=self.dtype_policy,
        )

    def width(self, input_shape: Any) -> int:
        """The width of the tokens, of the shapes that `build` is given."""
        return int(tf.TensorShape(input_shape[0])[-1])

    def weight(self, name: str, shape: list[int], initializer: str | Callable[..., Any]) -> tf.Variable:
        """A weight; its seed is its own, as initialisers of one seed give one sequence."""
        if not isinstance(initializer, str):
            initializer = initializer(seed=self.WEIGHTS * self.seed + len(self.weights))
        return self.add_weight(name=name, shape=shape, initializer=initializer)

    def by_head(self, x: tf.Tensor) -> tf.Tensor:
        """(total, heads * d) -> (total, heads, d)."""
        return tf.reshape(x, [-1, self.heads, x.shape[-1] // self.heads])

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this layer again."""
        return {**super().get_config(), **{name: getattr(self, name) for name in self._SETTINGS}}
