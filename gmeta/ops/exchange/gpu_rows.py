"""Packs and unpacks the rows of an exchange on a GPU, in TensorFlow's own ops.

The native ops that pack and unpack rows (`gmeta.ops.exchange.row_buffers`) work in host memory, where most
tables are. On a machine with a GPU, however, the buffers of a collective are on the GPU, as are a model's
rows and their gradients. The functions here do the same work on the GPU: they split what a rank receives and
join the pieces of each table, without copies to the host and back. With one table there is nothing to split,
and no byte moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from gmeta.ops.exchange.messages import PackedRows

DTYPES = (tf.float32, tf.bfloat16)
"""The dtypes in which rows can be exchanged here."""


def pack(
    rows: Sequence[tf.Tensor],
    positions: Sequence[tf.Tensor] | None,
    counts: tf.Tensor,
    *,
    wire_dtype: tf.DType = tf.float32,
) -> PackedRows:
    """Pack rows as `gmeta.ops.pack_rows` does.

    Args:
      rows: For each table (v_t, dim_t) float32.
      positions: For each table (w_t,) int32; None if the rows are already in wire order.
      counts: (W, T) int32, how many rows of a table a rank gets.
      wire_dtype: One of `DTYPES`.
    """
    if positions is not None:
        rows = [tf.gather(matrix, of) for matrix, of in zip(rows, positions, strict=True)]
    ranks, dims = counts.shape[0], [matrix.shape[1] for matrix in rows]
    if len(rows) == 1:
        buffer = tf.reshape(rows[0], [-1])
    else:
        pieces = [tf.split(matrix, counts[:, table], num=ranks) for table, matrix in enumerate(rows)]
        ordered = [of_table[rank] for rank in range(ranks) for of_table in pieces]
        buffer = tf.concat([tf.reshape(piece, [-1]) for piece in ordered], axis=0)
    return PackedRows(tf.cast(buffer, wire_dtype), tf.reduce_sum(_numbers(counts, dims), axis=1))


def unpack(buffer: tf.Tensor, counts: tf.Tensor, *, dims: Sequence[int]) -> tuple[tf.Tensor, ...]:
    """Unpack rows as `gmeta.ops.unpack_rows` does.

    Args:
      buffer: A vector of one of `DTYPES`: what rank 0, 1, … have packed for this rank.
      counts: (W, T) int32, how many rows of a table came from a rank.
      dims: The widths of the T tables.
    """
    tables = len(dims)
    if tables == 1:
        pieces = [buffer]
    else:
        sizes = tf.reshape(_numbers(counts, dims), [-1])
        pieces = tf.split(buffer, sizes, num=counts.shape[0] * tables)
    return tuple(
        tf.cast(tf.reshape(tf.concat(pieces[table::tables], axis=0), [-1, dim]), tf.float32)
        for table, dim in enumerate(dims)
    )


def _numbers(counts: tf.Tensor, dims: Sequence[int]) -> tf.Tensor:
    """Compute how many numbers the rows of each rank and table have, (W, T) int32."""
    with tf.device("CPU:0"):  # the counts are in host memory, and `tf.split` needs them there
        return counts * tf.constant(dims, tf.int32)
