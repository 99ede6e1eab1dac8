"""Packs rows into the buffers of an all-to-all, and unpacks them, for all tables of a step together.

``ops/exchange/row_exchange.h`` describes how it works and why it is fast. On a GPU, TensorFlow ops build the
same buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.ops.device import DeviceKind
from gmeta.ops.key_messages import PackedRows

# Packs and unpacks the rows of an exchange on a GPU by TensorFlow ops, without the copies to the host and
# back that the native ops would need. With one table, nothing is split or copied.

DTYPES = (tf.float32, tf.bfloat16)
"""The dtypes in which rows can be exchanged here."""


def pack(
    rows: Sequence[tf.Tensor],
    positions: Sequence[tf.Tensor] | None,
    counts: tf.Tensor,
    *,
    wire_dtype: tf.DType = tf.float32,
) -> PackedRows:
    """Pack rows like `pack_rows`.

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
    """Unpack rows like `unpack_rows`.

    Args:
      buffer: A vector of one of `DTYPES`: the buffers that ranks 0, 1, … packed for this rank.
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
    """Compute the number of values in the rows of each rank and table, (W, T) int32."""
    with tf.device("CPU:0"):  # the counts are in host memory, and `tf.split` needs them there
        return counts * tf.constant(dims, tf.int32)


_native = load_op_library("ops")
for _name in ("PackRows", "UnpackRows"):
    tf.no_gradient(f"Gmeta{_name}")

WIRE_DTYPES = (tf.float32, tf.float16, tf.bfloat16)
"""The dtypes in which rows can be exchanged."""


def pack_rows(
    rows: Sequence[Any],
    positions: Sequence[Any] | None,
    counts: Any,
    *,
    wire_dtype: tf.DType = tf.float32,
    device: DeviceKind = "cpu",
) -> PackedRows:
    """Pack the rows of all tables, of any widths, into one buffer for one all-to-all.

    For each rank r, the buffer contains, table by table, the rows ``rows[t][positions[t][i]]`` for r's places
    i in wire order. A row has dim_t numbers, plus one in float16. An owner packs values with the
    ``positions`` and ``counts`` of its `OwnedKeys`. A sender packs gradients, one for each of
    ``RoutedKeys.keys``, without positions and with the ``counts`` of its `RoutedKeys`.

    Args:
      rows: For each table (v_t, dim_t) float32.
      positions: For each table, (w_t,) int32, where w_t is the sum of its counts; None if the rows are
        already in wire order.
      counts: (W, T) int32, how many rows of a table a rank gets.
      wire_dtype: The dtype of the numbers in the buffer. In float16, each row starts with an additional
        number, a power of two that scales the row, so that rows of any magnitude keep their precision. A
        number then has a relative error of at most 2^-11, or an absolute error of at most 2^-40 of the row's
        largest number, whichever is larger; numbers below 2^-126 become zero. A bfloat16 has a relative error
        of at most 2^-8 at any magnitude. Infinities and NaNs are preserved.
      device: Where the rows are. With ``"gpu"``, the GPU packs them, except in float16, which the host packs.

    Returns:
      A `PackedRows`.

    Raises:
      ConfigError: The numbers of arguments don't match, or a dtype isn't supported.
      tf.errors.InvalidArgumentError: Counts, shapes or positions don't match, or there are more than 2^31 - 1
        numbers for one rank.

    Example:
      >>> packed = pack_rows([[[1.0, 2.0], [3.0, 4.0]], [[5.0]]], [[0, 1, 0], [0]], [[2, 0], [1, 1]])
      >>> packed.buffer.numpy(), packed.splits.numpy()
      (array([1., 2., 3., 4., 1., 2., 5.], dtype=float32), array([4, 3], dtype=int32))

    References:
      G-Meta, algorithm 1, and MTGenRec, section 3.3: the exchange of embeddings, and of gradients in reverse.
    """
    if wire_dtype not in WIRE_DTYPES:
        names = ", ".join(dtype.name for dtype in WIRE_DTYPES)
        raise ConfigError(f"pack_rows: wire_dtype must be one of {names}, got {tf.as_dtype(wire_dtype).name}")
    matrices = [_rows(matrix, table) for table, matrix in enumerate(rows)]
    _require(matrices, "pack_rows")
    if positions is not None and len(positions) != len(matrices):
        raise ConfigError(
            f"pack_rows: {len(matrices)} tables of rows, but positions of {len(positions)}: give each its own"
        )
    counts = tf.convert_to_tensor(counts, tf.int32)
    places = None if positions is None else [tf.convert_to_tensor(each, tf.int32) for each in positions]
    if device == "gpu" and wire_dtype in DTYPES:
        return pack(matrices, places, counts, wire_dtype=wire_dtype)
    return PackedRows(
        *_native.gmeta_pack_rows(rows=matrices, positions=places or (), counts=counts, wire_dtype=wire_dtype)
    )


def unpack_rows(
    buffer: Any, counts: Any, *, dims: Sequence[int], device: DeviceKind = "cpu"
) -> tuple[tf.Tensor, ...]:
    """Unpack the rows of each table from the received buffers, in wire order: the inverse of `pack_rows`.

    Row i of table t belongs to ``RoutedKeys.keys[t][i]`` if a sender received values, and to
    ``OwnedKeys.wire_keys[t][i]`` if an owner received gradients.

    Args:
      buffer: A vector of float32, float16 or bfloat16: the buffers that ranks 0, 1, … packed for this rank.
        Its dtype determines its format.
      counts: (W, T) int32, how many rows of a table came from a rank: the counts of this rank's `RoutedKeys`
        for values, those of its `OwnedKeys` for gradients.
      dims: The widths of the T tables.
      device: Where the rows are unpacked, as in `pack_rows`.

    Returns:
      For each table, (w_t, dim_t) float32, where w_t is the sum of its counts.

    Raises:
      ConfigError: There are no tables, a width is below 1, or the buffer has another dtype.
      tf.errors.InvalidArgumentError: The buffer's size doesn't match ``counts`` and ``dims``.

    Example:
      >>> first, second = unpack_rows([1.0, 2.0, 3.0, 4.0, 5.0], [[1, 0], [1, 1]], dims=[2, 1])
      >>> first.numpy().tolist(), second.numpy().tolist()
      ([[1.0, 2.0], [3.0, 4.0]], [[5.0]])

    References:
      G-Meta, algorithm 1, and MTGenRec, section 3.3.
    """
    _require(dims, "unpack_rows")
    if min(dims) < 1:
        raise ConfigError(f"unpack_rows: dims must be at least 1, got {list(dims)}")
    buffer = tf.convert_to_tensor(buffer)
    if buffer.dtype not in WIRE_DTYPES:
        names = ", ".join(dtype.name for dtype in WIRE_DTYPES)
        raise ConfigError(f"unpack_rows: buffer must be one of {names}, got dtype {buffer.dtype.name}")
    counts = tf.convert_to_tensor(counts, tf.int32)
    if device == "gpu" and buffer.dtype in DTYPES:
        return unpack(buffer, counts, dims=dims)
    return tuple(_native.gmeta_unpack_rows(buffer=buffer, counts=counts, dims=list(dims), tables=len(dims)))


def row_place(wire_dtype: tf.DType, device: DeviceKind) -> DeviceKind:
    """Return where rows of a dtype are packed and unpacked if ``device`` is requested."""
    return device if wire_dtype in DTYPES else "cpu"


def count_numbers(counts: Any, dims: Sequence[int], wire_dtype: tf.DType) -> tf.Tensor:
    """Compute how many numbers a buffer has from each rank, like the splits that `pack_rows` returns.

    Args:
      counts: (W, T) int32, as in `unpack_rows`.
      dims: The widths of the T tables.
      wire_dtype: The buffer's dtype.

    Returns:
      (W,) int32.

    Example:
      >>> count_numbers([[1, 0], [2, 1]], [4, 3], tf.float16).numpy()
      array([ 5, 14], dtype=int32)
    """
    widths = [dim + 1 if wire_dtype == tf.float16 else dim for dim in dims]  # a scale before each row
    with tf.device("CPU:0"):
        return tf.reduce_sum(tf.convert_to_tensor(counts, tf.int32) * tf.constant(widths), axis=1)


def _require(tables: Sequence[Any], op: str) -> None:
    if len(tables) == 0:
        raise ConfigError(f"{op}: at least one table is needed")


def _rows(matrix: Any, table: int) -> tf.Tensor:
    tensor = tf.convert_to_tensor(matrix, dtype_hint=tf.float32)
    if tensor.dtype != tf.float32:
        raise ConfigError(f"pack_rows: rows of table {table} must be float32, got dtype {tensor.dtype.name}")
    return tensor
