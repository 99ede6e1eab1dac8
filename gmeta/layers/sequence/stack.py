"""Stacks of blocks over jagged sequences."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.sequence.block import SequenceBlock, SequenceLayer
from gmeta.layers.sequence.view import SequenceView
from gmeta.ops import AttentionMask, Jagged


class SequenceStack(SequenceLayer):
    """A stack of blocks of one kind and with the same settings. It computes the attention mask once for all.

    Args:
      blocks: Number of blocks.
      mask: Which tokens see which. None: a token sees those before it.
      seed: Seed of the initial values and of dropout; each block derives its own seed from it.
      name: Name of the layer.
      dtype: Dtype, or dtype policy, of the layer and its blocks.
      trainable: Whether the layer's weights are trained.
      **settings: A block's settings.
    """

    BLOCK: ClassVar[type[SequenceBlock]]

    def __init__(
        self,
        *,
        blocks: int,
        mask: AttentionMask | None = None,
        seed: int = 0,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(mask=mask, name=name, dtype=dtype, trainable=trainable)
        if blocks < 1:
            raise ConfigError(f"{self.name}: blocks must be at least 1, got {blocks}")
        self.settings, self.seed = settings, seed
        self.blocks = [
            self.BLOCK(
                mask=self.mask,
                seed=blocks * seed + number,
                name=f"block{number}",
                dtype=self.dtype_policy,
                **settings,
            )
            for number in range(blocks)
        ]

    @property
    def needs_times(self) -> bool:
        """Whether calls need ``times``."""
        return self.blocks[0].needs_times

    def transform(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tf.Tensor:
        """Run the blocks one after another, (total, dim) -> (total, dim)."""
        for block in self.blocks:
            values = block(Jagged(values, offsets), view=view, training=training).values
        return values

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        own = {**self.settings, "blocks": len(self.blocks), "seed": self.seed}
        return {**super().get_config(), **own}
