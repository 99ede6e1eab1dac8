"""What a rank notes down while it trains: how many samples it saw, and who wants to stop."""

from __future__ import annotations

import tensorflow as tf


class RankNotes:
    """Three variables of a rank, which belong to no checkpoint.

    Attributes:
      seen: () int64: on several ranks, how many samples this one trained on since somebody set it to 0
        (`gmeta.models.training.ranks.averages`).
      stop_asked: () bool: whether this rank wants all to stop (`gmeta.models.training.ranks.stopping`).
      stop_agreed: () bool: whether all do.
    """

    # Not a Trackable on purpose: checkpoints don't hold it.

    def __init__(self) -> None:
        self.seen = tf.Variable(0, dtype=tf.int64, trainable=False, name="samples_seen")
        self.stop_asked = tf.Variable(False, trainable=False, name="stop_asked")
        self.stop_agreed = tf.Variable(False, trainable=False, name="stop_agreed")
