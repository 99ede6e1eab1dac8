"""Histories without their first or last item: what is to be told, and from what."""

from __future__ import annotations

import tensorflow as tf

from gmeta.ops import Jagged, jagged


def but_first(sequences: Jagged) -> Jagged:
    """Leave out the first token of each sequence that has one."""
    return jagged.slice_(sequences, tf.minimum(jagged.lengths(sequences), 1))


def but_last(sequences: Jagged) -> Jagged:
    """Leave out the last token of each sequence that has one."""
    return jagged.split(sequences, tf.maximum(jagged.lengths(sequences) - 1, 0))[0]
