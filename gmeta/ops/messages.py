"""What happens before and after the all-to-alls of a step: keys one way, rows the other, gradients back.

The exchanges themselves are in `gmeta.core.collectives`; these ops make what they send and read what they
receive, for all tables of a step together. How they work, and why they are fast, is in
``ops/exchange/key_exchange.h`` and ``row_exchange.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.logical_shards import LOGICAL_SHARDS
from gmeta.core.native import load_op_library
from gmeta.ops.inputs import keys_vector

_native = load_op_library("ops")
for _name in ("RouteKeys", "ReceiveKeys", "PackRows", "UnpackRows"):
    tf.no_gradient(f"Gmeta{_name}")

WIRE_DTYPES = (tf.float32, tf.float16, tf.bfloat16)
"""What rows may travel as."""


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


def route_keys(keys: Sequence[Any], *, note: Any = (), world_size: int, dedup: bool = True) -> RoutedKeys:
    """Stage 1 of deduplication: each table's distinct keys, by owner, as one message to each rank.

    The owner of a key is the rank ``s * world_size // 1024`` of its logical shard s, the top ten bits of its
    MurmurHash3, as in `gmeta.core.logical_shards.owned_shards`. The message to a rank is::

        note | how many keys of each table | keys of table 0 | keys of table 1 | ...

    Deterministic: the result is a function of the arguments alone, whatever the number of threads. All tables
    and owners are worked on in parallel. The support and query of all tasks of a step belong into one call.

    Args:
      keys: For each table a vector of integers, which may be empty; any int64 is a key. Every rank gives the
        same tables in the same order. At most 2^31 - 1 keys in all.
      note: (m,) integers that every rank is to know of this one, such as the samples of its batch.
      world_size: How many ranks there are, 1 up to 1024.
      dedup: Whether keys are made distinct. False orders all ``n_t`` of them by owner only: to measure what
        deduplication saves.

    Returns:
      A `RoutedKeys`.

    Raises:
      ConfigError: No tables, keys that aren't vectors of integers, or a ``world_size`` out of range.
      tf.errors.InvalidArgumentError: More keys than can be sent.

    Example:
      >>> routed = route_keys([[1, 0, 1], [1]], note=[9], world_size=2)  # rank 0 owns key 0, rank 1 key 1
      >>> routed.message.numpy(), routed.splits.numpy()
      (array([9, 1, 0, 0, 9, 1, 1, 1, 1]), array([4, 5], dtype=int32))
      >>> [keys.numpy().tolist() for keys in routed.keys]
      [[0, 1], [1]]
      >>> [inverse.numpy().tolist() for inverse in routed.inverse]
      [[1, 0, 1], [0]]

    References:
      MTGenRec, section 3.3; G-Meta, algorithm 1, lines 3 to 6.
    """
    if not 1 <= world_size <= LOGICAL_SHARDS:
        raise ConfigError(f"route_keys: world_size must lie in [1, {LOGICAL_SHARDS}], got {world_size}")
    batches = [keys_vector(batch, f"route_keys: table {table}") for table, batch in enumerate(keys)]
    _require(batches, "route_keys")
    note = keys_vector(note, "route_keys: note")
    message, splits, found, counts, inverse = _native.gmeta_route_keys(
        batches=batches, note=note, world_size=world_size, dedup=dedup
    )
    return RoutedKeys(message, splits, tuple(found), counts, tuple(inverse))


def receive_keys(
    message: Any, splits: Any, *, tables: int, note_size: int = 0, dedup: bool = True
) -> OwnedKeys:
    """Stage 2 of deduplication: what the ranks' messages ask for, each key once.

    Different ranks ask for the same popular keys. Their owner reads each row once, and sends it as often as
    it was asked for: ``pack_rows(rows of keys, positions, counts)``. Deterministic and parallel, as is
    `route_keys`.

    Args:
      message: int64, the messages of rank 0, 1, …, one after another, each made by `route_keys`.
      splits: (W,) int32, their lengths.
      tables: How many tables there are, T.
      note_size: How many numbers a note has, m.
      dedup: Whether keys are made distinct. False gives all keys that came, in wire order: for measurements.

    Returns:
      An `OwnedKeys`.

    Raises:
      ConfigError: ``tables`` or ``note_size`` out of range.
      tf.errors.InvalidArgumentError: A message isn't one of ``tables`` tables and a note of ``note_size``
        numbers. It names the rank that sent it.

    Example:
      >>> owned = receive_keys([2, 1, 1, 3, 3, 1, 2, 0, 0, 3], [5, 5], tables=2, note_size=1)
      >>> [keys.numpy().tolist() for keys in owned.keys]
      [[3, 0], [3]]
      >>> [positions.numpy().tolist() for positions in owned.positions]
      [[0, 1, 0], [0]]
      >>> owned.notes.numpy().tolist()
      [[2], [1]]

    References:
      MTGenRec, section 3.3.
    """
    if tables < 1 or note_size < 0:
        raise ConfigError(
            f"receive_keys: at least one table and a note_size of at least 0 are needed, "
            f"got {tables} and {note_size}"
        )
    keys, positions, counts, notes, wire_keys = _native.gmeta_receive_keys(
        message=keys_vector(message, "receive_keys: message"),
        splits=tf.convert_to_tensor(splits, tf.int32),
        tables=tables,
        note_size=note_size,
        dedup=dedup,
    )
    return OwnedKeys(tuple(keys), tuple(positions), counts, notes, tuple(wire_keys))


def pack_rows(
    rows: Sequence[Any],
    positions: Sequence[Any] | None,
    counts: Any,
    *,
    wire_dtype: tf.DType = tf.float32,
) -> PackedRows:
    """The rows of all tables, of whatever widths, in one buffer for one all-to-all.

    For rank r, table by table: rows ``rows[t][positions[t][i]]`` for the places i in wire order that are r's,
    of dim_t numbers each, and one more as float16.
    An owner packs values with the ``positions`` and ``counts`` of its `OwnedKeys`; a sender packs gradients,
    one for each of ``RoutedKeys.keys``, without positions and with the ``counts`` of its `RoutedKeys`.

    Args:
      rows: For each table (v_t, dim_t) float32.
      positions: For each table (w_t,) int32, w_t being the sum of its counts; None where the rows
        themselves are in wire order.
      counts: (W, T) int32, how many rows of a table a rank gets.
      wire_dtype: What the numbers travel as. As float16 a row begins with a power of two of its own, one more
        number, so that rows of any magnitude keep their precision: a number has a relative error of at most
        2^-11, or an absolute one of at most 2^-40 of the row's largest number where that is more, and below
        2^-126 becomes zero. A bfloat16 has a relative error of at most 2^-8 at any magnitude. Infinities and
        NaNs stay what they are.

    Returns:
      A `PackedRows`.

    Raises:
      ConfigError: Numbers of arguments that don't match, or dtypes other than these.
      tf.errors.InvalidArgumentError: Counts, shapes or positions that don't match, or more than 2^31 - 1
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
    return PackedRows(
        *_native.gmeta_pack_rows(
            rows=matrices,
            positions=[tf.convert_to_tensor(vector, tf.int32) for vector in positions or ()],
            counts=tf.convert_to_tensor(counts, tf.int32),
            wire_dtype=wire_dtype,
        )
    )


def unpack_rows(buffer: Any, counts: Any, *, dims: Sequence[int]) -> tuple[tf.Tensor, ...]:
    """The rows of each table out of the buffers that came: the inverse of `pack_rows`, in wire order.

    Row number i of table t is that of ``RoutedKeys.keys[t][i]`` where values have come to a sender, and of
    ``OwnedKeys.wire_keys[t][i]`` where gradients have come to an owner.

    Args:
      buffer: A vector of float32, float16 or bfloat16: what rank 0, 1, … have packed for this one. Its dtype
        says how to read it.
      counts: (W, T) int32, how many rows of a table came from a rank: those of this rank's `RoutedKeys` for
        values, of its `OwnedKeys` for gradients.
      dims: The widths of the T tables.

    Returns:
      For each table (w_t, dim_t) float32, w_t being the sum of its counts.

    Raises:
      ConfigError: No tables, a width below 1, or a buffer of another dtype.
      tf.errors.InvalidArgumentError: The buffer hasn't as many numbers as ``counts`` and ``dims`` say.

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
    return tuple(_native.gmeta_unpack_rows(buffer=buffer, counts=counts, dims=list(dims), tables=len(dims)))


def _require(tables: Sequence[Any], op: str) -> None:
    if len(tables) == 0:
        raise ConfigError(f"{op}: at least one table is needed")


def _rows(matrix: Any, table: int) -> tf.Tensor:
    tensor = tf.convert_to_tensor(matrix, dtype_hint=tf.float32)
    if tensor.dtype != tf.float32:
        raise ConfigError(f"pack_rows: rows of table {table} must be float32, got dtype {tensor.dtype.name}")
    return tensor
