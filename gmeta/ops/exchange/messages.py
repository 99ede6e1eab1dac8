"""Content of a step's all-to-alls: keys travel to their owners, rows back, gradients to the owners again."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class RoutedKeys(NamedTuple):
    """Keys that a rank requests from the others, for T tables and W ranks.

    Attributes:
      message: int64, the messages to rank 0, 1, …, one after another, ready to be exchanged.
      splits: (W,) int32, their lengths.
      keys: For each table (u_t,) int64: its distinct keys, by owner. The keys of one owner are in the order
        of their first appearance; if there are many, they are first divided into parts by their hash, and
        are in that order within each part. This is the wire order, in which `unpack_rows` returns their rows.
      counts: (W, T) int32, how many of a table's keys a rank owns.
      inverse: For each table (n_t,) int32: ``tf.gather(keys[t], inverse[t])`` are the keys that were passed.
    """

    message: tf.Tensor
    splits: tf.Tensor
    keys: tuple[tf.Tensor, ...]
    counts: tf.Tensor
    inverse: tuple[tf.Tensor, ...]


class OwnedKeys(NamedTuple):
    """Keys that the ranks request from this one, for T tables, W ranks and notes of m numbers.

    Attributes:
      keys: For each table (v_t,) int64: the distinct received keys, in an order that depends on them alone.
      positions: For each table (w_t,) int32: ``tf.gather(keys[t], positions[t])`` are ``wire_keys[t]``.
      counts: (W, T) int32, how many keys of a table a rank has sent.
      notes: (W, m) int64, the note of each rank.
      wire_keys: For each table (w_t,) int64: the received keys, by sender, then in the order of sending. Rows
        are sent back, and gradients arrive, in this wire order.
    """

    keys: tuple[tf.Tensor, ...]
    positions: tuple[tf.Tensor, ...]
    counts: tf.Tensor
    notes: tf.Tensor
    wire_keys: tuple[tf.Tensor, ...]


class PackedRows(NamedTuple):
    """Rows to be exchanged.

    Attributes:
      buffer: The rows for rank 0, 1, …, in the wire's dtype; for each rank, the rows of table 0, 1, …
      splits: (W,) int32, how many numbers each rank gets, scales included.
    """

    buffer: tf.Tensor
    splits: tf.Tensor
