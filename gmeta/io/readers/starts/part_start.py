"""A start at any run of groups, set before an iteration: one dataset reads part after part."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.io.readers.starts.epoch import Span


class PartStart:
    """A run of positions of epoch 0's order, which each iteration reads alone.

    It costs tf.data a second or so to make a dataset and trace its functions, and nothing to iterate again.

    Attributes:
      epoch: 0.
      readers: The options of each dataset that begins here.

    Example:
      >>> part = PartStart()
      >>> dataset = groups("data/test", start=part, options=ReadOptions(shuffle=False, shard=(0, 1)))
      >>> part.move_to((128, 256))
      >>> elements = list(dataset)
    """

    epoch = 0

    def __init__(self) -> None:
        self.readers: list[Any] = []
        with tf.init_scope(), tf.device("CPU:0"):
            self._span = tf.Variable([0, 0], dtype=tf.int64, trainable=False, name="part")

    def move_to(self, span: Span) -> None:
        """Let the next iteration read the positions from ``span[0]`` up to ``span[1] - 1``."""
        self._span.assign(span)

    def read(self, options: Any) -> tf.data.Dataset:
        """Return a dataset of one element, (begin, end), read when an iteration begins.

        Args:
          options: The `ReadOptions` of the dataset that is made of it.
        """
        self.readers.append(options)
        return tf.data.Dataset.range(1).map(lambda _: tuple(tf.unstack(self._span.read_value())))
