"""What travels in the all-to-alls of a step: keys one way, rows the other, gradients back."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class RoutedKeys(NamedTuple):
    """What a rank asks the others for. T tables, W ranks.

    Attributes:
      message: int64, the messages to rank 0, 1, …, one after another: what is to be exchanged.
      splits: (W,) int32, their lengths.
      keys: For each table (u_t,) int64: its distinct keys by owner, and of an owner in the order of their
        first appearance, or where they are many, part by part of their hash and so in each part. This is the
        wire order, in which `unpack_rows` gives their rows.
      counts: (W, T) int32, how many of a table's keys a rank owns.
      inverse: For each table (n_t,) int32: ``tf.gather(keys[t], inverse[t])`` are the keys that were given.
    """

    message: tf.Tensor
    splits: tf.Tensor
    keys: tuple[tf.Tensor, ...]
    counts: tf.Tensor
    inverse: tuple[tf.Tensor, ...]


class OwnedKeys(NamedTuple):
    """What the ranks ask this one for. T tables, W ranks, notes of m numbers.

    Attributes:
      keys: For each table (v_t,) int64: the distinct keys that came, in an order that depends on them alone.
      positions: For each table (w_t,) int32: ``tf.gather(keys[t], positions[t])`` are ``wire_keys[t]``.
      counts: (W, T) int32, how many keys of a table a rank has sent.
      notes: (W, m) int64, the note of each rank.
      wire_keys: For each table (w_t,) int64: the keys that came, by sender, then as sent. Rows go back, and
        gradients come, in this wire order.
    """

    keys: tuple[tf.Tensor, ...]
    positions: tuple[tf.Tensor, ...]
    counts: tf.Tensor
    notes: tf.Tensor
    wire_keys: tuple[tf.Tensor, ...]


class PackedRows(NamedTuple):
    """Rows to be exchanged.

    Attributes:
      buffer: Of the wire's dtype: the rows for rank 0, 1, …, and of a rank those of table 0, 1, …
      splits: (W,) int32, how many numbers each rank gets, scales included.
    """

    buffer: tf.Tensor
    splits: tf.Tensor
