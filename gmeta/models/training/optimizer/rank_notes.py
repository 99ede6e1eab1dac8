"""A rank's notes during training: how many samples it saw, and whether it or all ranks want to stop."""

from __future__ import annotations

import tensorflow as tf


class RankNotes:
    """Three variables of a rank, which belong in no checkpoint.

    Attributes:
      seen: () int64: on several ranks, the number of samples that this rank trained on since the variable was
        last reset to 0 (`gmeta.models.training.ranks.averages`).
      stop_asked: () bool: whether this rank wants all to stop (`gmeta.models.training.ranks.stopping`).
      stop_agreed: () bool: whether all ranks have agreed to stop.
    """

    # Not a Trackable on purpose: checkpoints don't hold it.

    def __init__(self) -> None:
        with tf.device("CPU:0"):  # read between two steps, which needn't wait for a GPU
            self.seen = tf.Variable(0, dtype=tf.int64, trainable=False, name="samples_seen")
            self.stop_asked = tf.Variable(False, trainable=False, name="stop_asked")
            self.stop_agreed = tf.Variable(False, trainable=False, name="stop_agreed")
