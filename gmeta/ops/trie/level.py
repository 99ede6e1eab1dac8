"""A level of a trie, as ops take it."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class Level(NamedTuple):
    """A level of a trie, as `gmeta.core.data.code_trie.CodeTrie` has it.

    Attributes:
      starts: int64 (nodes + 1,).
      digits: int32 (children,).
      allowed: bool (children,), or None.
    """

    starts: tf.Tensor
    digits: tf.Tensor
    allowed: tf.Tensor | None

    @classmethod
    def of(cls, starts: Any, digits: Any, allowed: Any) -> Level:
        """Make a level of anything that converts to tensors of these dtypes."""
        return cls(
            tf.convert_to_tensor(starts, tf.int64),
            tf.convert_to_tensor(digits, tf.int32),
            None if allowed is None else tf.convert_to_tensor(allowed, tf.bool),
        )

    def inputs(self) -> dict[str, tf.Tensor]:
        """Return the inputs of a native op, where no mask is an empty one."""
        allowed = tf.zeros([0], tf.bool) if self.allowed is None else self.allowed
        return {"starts": self.starts, "digits": self.digits, "allowed": allowed}
