"""Beams whose digits are tokens after a history, whose keys and values are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gmeta.models.generative.code_tables import CodeTables

Append = Callable[[int, tf.Tensor, Any], tf.Tensor]
"""A level, its digits (users, beams), and the beams that they go on, None: histories -> (users, beams, d)."""


class FlatWalk:
    """A `Walk` whose digits a backbone reads.

    Args:
      tables: The codes.
      h: (users, d), what the backbone tells after the histories.
      append: Reads one more digit of each beam.
      logits: The logits of a level, of queries (n, d).
    """

    def __init__(
        self,
        tables: CodeTables,
        h: tf.Tensor,
        append: Append,
        logits: Callable[[int, tf.Tensor], tf.Tensor],
    ) -> None:
        self.tables, self.h, self._append, self._logits = tables, h, append, logits
        self.level, self.users, self.levels = 0, tf.shape(h)[0], tables.levels

    def logits(self, nodes: tf.Tensor, beams: Any = None, digits: Any = None) -> tf.Tensor:
        """Compute the logits of the children of nodes, as of `Walk`."""
        level, many = self.level, tf.shape(nodes)[1]
        self.level += 1
        if beams is None:
            found = self._logits(level, self.h)[:, tf.newaxis]
            return tf.repeat(found, many, axis=1)
        digits = self.tables.digits_at(level, nodes) if digits is None else digits
        # A beam of the first digit goes on from the history, whichever of several equal roots it had.
        queries = self._append(level - 1, digits, tf.maximum(beams, 0) if level > 1 else None)
        found = self._logits(level, tf.reshape(queries, [-1, self.h.shape[-1]]))
        return tf.reshape(found, [self.users, many, self.tables.sizes[level]])
