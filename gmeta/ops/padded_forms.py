"""Attention over padded sequences in plain TensorFlow.

It builds every (length, length) matrix. It is used where the native op isn't available: in exported graphs,
in float64, and on devices without the op.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from gmeta.ops.attention_inputs import RelativeBias, time_bucket


def dense_mask(visible: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    """Build the mask of attention over padded sequences, pair by pair.

    Args:
      visible: (total, 3) int32, from `AttentionMask.visible`.
      offsets: (batch + 1,) int64.

    Returns:
      (batch, longest, longest) bool. Padding sees itself.
    """
    padded = tf.RaggedTensor.from_row_splits(visible, offsets).to_tensor()
    places = tf.range(tf.shape(padded)[1])
    return _sees(padded, places, places)


def _sees(visible: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Build a (batch, rows, columns) bool mask from (batch, rows, 3) ``visible`` and the rows' places."""
    first, begin, end = (visible[:, :, part, tf.newaxis] for part in range(3))
    return (columns < first) | ((columns >= begin) & (columns < end)) | (rows[:, tf.newaxis] == columns)


def padded_attention(
    q: tf.Tensor | None,
    k: tf.Tensor | None,
    v: tf.Tensor,
    offsets: tf.Tensor,
    visible: tf.Tensor,
    *,
    scale: float,
    alpha: float = 1.0,
    bias: RelativeBias | None = None,
    pairs: int | None = None,
) -> tf.Tensor:
    """Compute `gmeta.ops.hstu_attention`, or without q and k `bias_attention`, in plain TensorFlow.

    It takes memory for batch x heads x longest² numbers, several times over. With ``pairs`` it takes memory
    for heads x ``pairs`` numbers, because it then computes the outputs of one block of tokens after another.

    Args:
      q: As in `gmeta.ops.hstu_attention`.
      k: As in `gmeta.ops.hstu_attention`.
      v: As in `gmeta.ops.hstu_attention`.
      offsets: As in `gmeta.ops.hstu_attention`.
      visible: As in `gmeta.ops.hstu_attention`.
      scale: As in `gmeta.ops.hstu_attention`.
      alpha: As in `gmeta.ops.hstu_attention`.
      bias: As in `gmeta.ops.hstu_attention`.
      pairs: How many pairs of tokens, over all sequences, are in memory at once. A block has at least one
        token of each sequence, paired with all others. None: all pairs.
    """
    values = _pad(v, offsets)
    size = tf.shape(values)[1]
    keys = None if k is None else _pad(k, offsets)
    times: tuple[tf.Tensor | None, ...] = (None, None)
    if bias is not None and bias.time_buckets is not None:
        times = bias.row_times, bias.column_times
    looked_at = None if times[1] is None else _pad(times[1], offsets)
    # The inputs that have one entry per row, so that a block of rows is cut out of each in the same way.
    own = {"visible": visible, "q": q, "times": times[0]}
    of_rows = {name: _pad(each, offsets) for name, each in own.items() if each is not None}

    def look(begin: tf.Tensor, rows: dict[str, tf.Tensor]) -> tf.Tensor:
        """Compute the outputs of rows whose places start at ``begin``: (batch, rows, heads, dv)."""
        places = begin + tf.range(tf.shape(rows["visible"])[1])
        seen = _sees(rows["visible"], places, tf.range(size))
        added = _rab(bias, places, size, rows.get("times"), looked_at, v.dtype)
        if keys is None:
            weights = tf.where(seen, added, 0) * tf.constant(scale, v.dtype)
            return tf.einsum("bij,bjhd->bihd", weights, values)
        scores = alpha * tf.einsum("bihd,bjhd->bhij", rows["q"], keys) + added[:, tf.newaxis]
        weights = tf.where(seen[:, tf.newaxis], tf.nn.silu(scores), 0) * tf.constant(scale, v.dtype)
        return tf.einsum("bhij,bjhd->bihd", weights, values)

    outputs = look(tf.constant(0), of_rows) if pairs is None else _by_blocks(look, of_rows, values, pairs)
    lengths = offsets[1:] - offsets[:-1]
    return tf.ensure_shape(tf.RaggedTensor.from_tensor(outputs, lengths).values, [None, *v.shape[1:]])


def _by_blocks(
    look: Callable[[tf.Tensor, dict[str, tf.Tensor]], tf.Tensor],
    of_rows: dict[str, tf.Tensor],
    values: tf.Tensor,
    pairs: int,
) -> tf.Tensor:
    """Apply ``look`` to all rows, one block after another. The output has the shape of ``values``."""
    batch, size = tf.unstack(tf.shape(values)[:2])
    of_one = tf.maximum(tf.cast(batch, tf.int64) * tf.cast(size, tf.int64), 1)
    block = tf.cast(tf.clip_by_value(pairs // of_one, 1, tf.cast(tf.maximum(size, 1), tf.int64)), tf.int32)
    count = tf.maximum((size + block - 1) // block, 1)  # with 0 blocks, TensorFlow couldn't infer the shape

    def fill(rows: tf.Tensor) -> tf.Tensor:
        return tf.pad(rows, [[0, 0], [0, count * block - size], *[[0, 0]] * (rows.shape.rank - 2)])

    every = {name: fill(rows) for name, rows in of_rows.items()}

    def one(number: tf.Tensor) -> tf.Tensor:
        begin = number * block
        return look(begin, {name: rows[:, begin : begin + block] for name, rows in every.items()})

    form = tf.TensorSpec([None, None, *values.shape[2:]], values.dtype)
    parts = tf.map_fn(one, tf.range(count), fn_output_signature=form, parallel_iterations=1)
    wide = tf.transpose(parts, [1, 0, 2, 3, 4])
    return tf.reshape(wide, [batch, count * block, *values.shape[2:]])[:, :size]


def _pad(values: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    return tf.RaggedTensor.from_row_splits(values, offsets).to_tensor()


def _rab(
    bias: RelativeBias | None,
    rows: tf.Tensor,
    length: tf.Tensor,
    row_times: tf.Tensor | None,
    column_times: tf.Tensor | None,
    dtype: tf.DType,
) -> tf.Tensor:
    """Compute the bias of the scores: (batch or 1, rows or 1, length or 1)."""
    added = tf.zeros([1, 1, 1], dtype)
    if bias is None:
        return added
    if bias.positions is not None:
        n = (tf.size(bias.positions) + 1) // 2
        apart = tf.range(length) - rows[:, tf.newaxis]
        of_places = tf.cast(bias.positions, dtype)
        added += tf.gather(of_places, tf.clip_by_value(apart + n - 1, 0, 2 * n - 2))
    if row_times is not None and column_times is not None:
        of_times = tf.cast(bias.time_buckets, dtype)
        apart_in_time = row_times[:, :, tf.newaxis] - column_times[:, tf.newaxis]
        added += tf.gather(of_times, time_bucket(apart_in_time))
    return added
