"""Concatenated sequences of different lengths, without padding.

A batch of sequences is a tensor ``values`` of all tokens and a tensor ``offsets`` of where each sequence
begins, like a `tf.RaggedTensor` of one ragged dimension, but the values are a plain tensor, which dense
layers accept directly. Each operation on sequences is one gather: `_stretches` computes the indices of
tokens, `take` gathers them, and its gradient scatters them back. No tensor is as large as (batch, longest),
except in `to_padded`.

Offsets are in host memory, and so is the arithmetic on them, whose results are sizes of tensors and
conditions: a GPU would have to finish all earlier work before the host could read one. Numbers for each token
are computed where TensorFlow places them, on a GPU if there is one.

Functions have short names: ``from gmeta.ops import jagged``, then use them as ``jagged.concat``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import assert_first


class Jagged(NamedTuple):
    """Concatenated sequences of different lengths.

    Attributes:
      values: (total, ...) of any dtype, the tokens of all sequences.
      offsets: (batch + 1,) int64: sequence i is ``values[offsets[i]:offsets[i + 1]]``. The first offset is 0,
        the last is total, and they don't decrease.

    Example:
      >>> histories = Jagged(tf.constant([5, 6, 7]), tf.constant([0, 2, 2, 3], tf.int64))
      >>> jagged.to_ragged(histories).to_list()
      [[5, 6], [], [7]]
    """

    values: tf.Tensor
    offsets: tf.Tensor


def lengths(sequences: Jagged) -> tf.Tensor:
    """Count the tokens of each sequence, (batch,) int64."""
    with tf.device("CPU:0"):
        return sequences.offsets[1:] - sequences.offsets[:-1]


def row_ids(sequences: Jagged) -> tf.Tensor:
    """Compute the number of each token's sequence, counted from 0: (total,) int64.

    Example:
      >>> jagged.row_ids(Jagged(tf.zeros([3]), tf.constant([0, 2, 2, 3], tf.int64))).numpy().tolist()
      [0, 0, 2]
    """
    places = tf.range(_total(sequences), dtype=tf.int64)
    return tf.searchsorted(sequences.offsets, places, side="right", out_type=tf.int64) - 1


def positions(sequences: Jagged) -> tf.Tensor:
    """Compute each token's place in its own sequence, counted from 0: (total,) int64."""
    return tf.range(_total(sequences), dtype=tf.int64) - tf.gather(sequences.offsets, row_ids(sequences))


def from_ragged(ragged: tf.RaggedTensor) -> Jagged:
    """Convert a ragged tensor to jagged sequences, without a copy.

    Args:
      ragged: (batch, None, ...); only the second dimension is ragged.

    Raises:
      ConfigError: ``ragged`` has further ragged dimensions.
    """
    if ragged.ragged_rank != 1:
        raise ConfigError(
            f"jagged.from_ragged: one ragged dimension expected, got {ragged.ragged_rank} "
            f"(shape {ragged.shape}): merge the inner ones by merge_dims, or pad them"
        )
    with tf.device("CPU:0"):
        return Jagged(ragged.values, tf.cast(ragged.row_splits, tf.int64))


def as_jagged(column: Any) -> Jagged | None:
    """Convert sequences of either form to `Jagged`; return None for anything else.

    Args:
      column: A `Jagged`, or a ragged tensor of one ragged dimension. Empty offsets, as in an empty batch,
        mean no sequences.
    """
    if isinstance(column, tf.RaggedTensor):
        return from_ragged(column)
    if not isinstance(column, Jagged):
        return None
    values, offsets = map(tf.convert_to_tensor, column)
    with tf.device("CPU:0"):
        missing = tf.zeros([tf.maximum(1 - tf.size(offsets), 0)], tf.int64)
        return Jagged(values, tf.concat([tf.cast(offsets, tf.int64), missing], axis=0))


def to_ragged(sequences: Jagged) -> tf.RaggedTensor:
    """Convert sequences to a ragged tensor, (batch, None, ...), without a copy."""
    return tf.RaggedTensor.from_row_splits(sequences.values, sequences.offsets, validate=False)


def from_padded(padded: tf.Tensor, lengths: tf.Tensor) -> Jagged:
    """Extract the sequences at the beginning of padded rows.

    Args:
      padded: (batch, longest, ...).
      lengths: (batch,) integers, the number of tokens of each row without padding.

    Raises:
      ConfigError: ``padded`` has fewer than 2 dimensions.
      InvalidArgumentError: A length is negative or exceeds the row's.

    Example:
      >>> jagged.from_padded(tf.constant([[5, 6, 0], [7, 0, 0]]), [2, 1]).values.numpy().tolist()
      [5, 6, 7]
    """
    padded = tf.convert_to_tensor(padded)
    if padded.shape.rank is not None and padded.shape.rank < 2:
        raise ConfigError(f"jagged.from_padded: expected (batch, longest, ...), got shape {padded.shape}")
    shape = tf.shape(padded, tf.int64)
    with tf.device("CPU:0"):
        batch, longest = tf.unstack(shape[:2])
        lengths = _per_sequence(lengths, batch)
        good = (lengths >= 0) & (lengths <= longest)
        lengths = _check(lengths, good, "from_padded: a length of", lengths, "in a row of", longest)
        starts, flat_shape = longest * tf.range(batch), tf.concat([[batch * longest], shape[2:]], 0)
    tokens, offsets = _stretches(starts, lengths)
    flat = tf.reshape(padded, flat_shape)
    return Jagged(take(tf.ensure_shape(flat, [None, *_inner(padded, 2)]), tokens), offsets)


def to_padded(sequences: Jagged, length: int | tf.Tensor | None = None, fill: Any = 0) -> tf.Tensor:
    """Pad sequences to rows of equal length.

    Args:
      sequences: Jagged.
      length: Length of the rows; None: the length of the longest sequence.
      fill: The value of the padding after a sequence.

    Returns:
      (batch, length, ...).

    Raises:
      InvalidArgumentError: A sequence is longer than ``length``. Truncate sequences first with `slice_`.
    """
    values, own = sequences.values, lengths(sequences)
    with tf.device("CPU:0"):
        longest = tf.reduce_max(tf.concat([own, [0]], 0)) if length is None else tf.cast(length, tf.int64)
        own = _check(own, own <= longest, "to_padded: a sequence of", own, "tokens, for rows of", longest)
    places = tf.range(longest, dtype=tf.int64)
    # Padding refers to one additional token.
    tokens = tf.where(
        places < own[:, tf.newaxis], sequences.offsets[:-1, tf.newaxis] + places, _total(sequences)
    )
    return take(_and_one_more(values, fill), tokens)


def concat(first: Jagged, *others: Jagged) -> Jagged:
    """Append to each sequence of ``first`` the corresponding sequences of the others, in their order.

    Args:
      first: (total1, ...), batch sequences.
      *others: (total2, ...) and so on, of the same dtype and inner shape, as many sequences each.

    Returns:
      (total1 + total2 + ..., ...), batch sequences.

    Raises:
      InvalidArgumentError: The batches have different sizes.

    Example:
      >>> history = jagged.from_ragged(tf.ragged.constant([[1, 2], [3]]))
      >>> target = jagged.from_ragged(tf.ragged.constant([[8], [9]]))
      >>> jagged.to_ragged(jagged.concat(history, target)).to_list()
      [[1, 2, 8], [3, 9]]
    """
    parts = [first, *others]
    totals = [_total(each) for each in parts]
    with tf.device("CPU:0"):
        sizes = [tf.size(each.offsets) - 1 for each in parts]
        alike = tf.stack([size == sizes[0] for size in sizes])
        told = ["jagged", "concat: batches of", *sizes, "sequences"]
        given = assert_first([each.offsets for each in parts], alike, told)
        begins, ends = [each[:-1] for each in given], [each[1:] for each in given]
        before = [tf.add_n([tf.zeros([], tf.int64), *totals[:number]]) for number in range(len(parts))]
        starts = tf.stack([begin + moved for begin, moved in zip(begins, before, strict=True)], axis=1)
        counts = tf.stack([end - begin for end, begin in zip(ends, begins, strict=True)], axis=1)
        total, offsets = tf.add_n(totals), tf.add_n(given)
        # Token t of part k goes to t + moves[k] of its sequence: past the parts before it, up to its own
        # sequence's end, and past those after it, up to its sequence's beginning.
        moves = [
            tf.add_n([tf.zeros_like(begins[0]), *ends[:number], *begins[number + 1 :]])
            for number in range(len(parts))
        ]
        starts, counts = tf.reshape(starts, [-1]), tf.reshape(counts, [-1])
    tokens, _ = _stretches(starts, counts, total)

    def places() -> tf.Tensor:
        """Compute where each token goes, part by part."""
        return tf.concat(
            [
                tf.range(size, dtype=tf.int64) + tf.gather(move, row_ids(each))
                for each, size, move in zip(parts, totals, moves, strict=True)
            ],
            axis=0,
        )

    values = take(tf.concat([each.values for each in parts], axis=0), tokens, inverse=places)
    return Jagged(values, offsets)


def split(sequences: Jagged, lengths: tf.Tensor) -> tuple[Jagged, Jagged]:
    """Split each sequence in two: the reverse of `concat`.

    Args:
      sequences: Jagged.
      lengths: (batch,) integers, or one for all: the number of tokens of the head.

    Returns:
      (heads, tails).

    Raises:
      InvalidArgumentError: A length is negative or exceeds that of its sequence.
    """
    with tf.device("CPU:0"):
        own = sequences.offsets[1:] - sequences.offsets[:-1]
        heads = _per_sequence(lengths, tf.size(own, tf.int64))
        good = (heads >= 0) & (heads <= own)
        heads = _check(heads, good, "split: a head of", heads, "tokens of a sequence of", own)
        tails = own - heads
    return _part(sequences, 0, heads), _part(sequences, heads, tails)


def slice_(sequences: Jagged, begin: int | tf.Tensor, size: int | tf.Tensor | None = None) -> Jagged:
    """Slice each sequence, like `tf.slice`.

    Args:
      sequences: Jagged.
      begin: (batch,) integers, or one for all: the first place of the slice.
      size: (batch,) integers, or one for all: the number of tokens; None: up to the sequence's end.

    Raises:
      InvalidArgumentError: A slice isn't within its sequence.

    Example:
      >>> history = jagged.from_ragged(tf.ragged.constant([[1, 2, 3], [4]]))
      >>> of_last_two = tf.maximum(jagged.lengths(history) - 2, 0)
      >>> jagged.to_ragged(jagged.slice_(history, of_last_two)).to_list()
      [[2, 3], [4]]
    """
    own = lengths(sequences)
    with tf.device("CPU:0"):
        starts = _per_sequence(begin, tf.size(own, tf.int64))
        sizes = own - starts if size is None else _per_sequence(size, tf.size(own, tf.int64))
        good = (starts >= 0) & (sizes >= 0) & (starts + sizes <= own)
        sizes = _check(sizes, good, "slice_: begin", starts, "and size", sizes, "of a sequence of", own)
    return _part(sequences, starts, sizes)


def reverse(sequences: Jagged) -> Jagged:
    """Reverse the order of the tokens in each sequence."""
    rows = row_ids(sequences)
    with tf.device("CPU:0"):
        both = sequences.offsets[:-1] + sequences.offsets[1:]
    from_end = tf.range(_total(sequences), dtype=tf.int64) + 1
    return Jagged(take(sequences.values, tf.gather(both, rows) - from_end), sequences.offsets)


def last(sequences: Jagged) -> tf.Tensor:
    """Return the last token of each sequence, (batch, ...); zeros for an empty sequence."""
    total = _total(sequences)
    with tf.device("CPU:0"):
        tokens = tf.where(lengths(sequences) > 0, sequences.offsets[1:] - 1, total)
    return take(_and_one_more(sequences.values, 0), tokens)


def sums(sequences: Jagged) -> tf.Tensor:
    """Return the sum of each sequence's values, (batch, ...); 0 for an empty sequence."""
    return tf.math.unsorted_segment_sum(
        sequences.values, row_ids(sequences), tf.size(sequences.offsets, tf.int64) - 1
    )


def mask(sequences: Jagged, chosen: tf.Tensor) -> Jagged:
    """Keep the values of each sequence where (n,) bool is true."""
    kept = sums(sequences._replace(values=tf.cast(chosen, tf.int64)))
    with tf.device("CPU:0"):
        offsets = tf.concat([[tf.constant(0, tf.int64)], tf.cumsum(kept)], axis=0)
    return Jagged(tf.boolean_mask(sequences.values, chosen), offsets)


def take(
    values: tf.Tensor, tokens: tf.Tensor, *, inverse: Callable[[], tf.Tensor] | None = None
) -> tf.Tensor:
    """Gather rows with a dense gradient; that of `tf.gather` is slices, about which TensorFlow warns.

    The gradients of a row are summed in at least float32. In bfloat16, a sum would stop growing at 256 times
    its terms, and a GPU would add each term in a compare-and-swap loop.

    Args:
      values: (rows, ...).
      tokens: The numbers of the rows, integers of any shape.
      inverse: If ``tokens`` is a permutation of all rows: a function that returns its inverse, by which the
        gradient is a gather too.

    Returns:
      A tensor with the shape of ``tokens``, followed by that of a row.
    """
    if not (values.dtype.is_floating or values.dtype.is_complex):
        return tf.gather(values, tokens)

    @tf.custom_gradient
    def gather(values: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            if inverse is not None:
                return take(tf.convert_to_tensor(upstream), inverse(), inverse=lambda: tokens)
            wide = tf.float32 if upstream.dtype.size < 4 else upstream.dtype
            sums = tf.math.unsorted_segment_sum(tf.cast(upstream, wide), tokens, tf.shape(values)[0])
            return tf.cast(sums, upstream.dtype)

        return tf.gather(values, tokens), gradient

    return gather(values)


def _total(sequences: Jagged) -> tf.Tensor:
    shape = tf.shape(sequences.values, tf.int64)  # where the values are, which needn't move for it
    with tf.device("CPU:0"):
        return shape[0]


def _inner(values: tf.Tensor, outer: int = 1) -> list[int | None]:
    """Return the static shape of a token."""
    return list(values.shape[outer:])


def _per_sequence(numbers: Any, batch: tf.Tensor) -> tf.Tensor:
    """Broadcast one number, or one for each sequence, to (batch,) int64."""
    return tf.broadcast_to(tf.cast(numbers, tf.int64), tf.reshape(tf.cast(batch, tf.int64), [1]))


def _part(sequences: Jagged, begin: int | tf.Tensor, sizes: tf.Tensor) -> Jagged:
    with tf.device("CPU:0"):
        starts = sequences.offsets[:-1] + begin
    tokens, offsets = _stretches(starts, sizes)
    return Jagged(take(sequences.values, tokens), offsets)


def _stretches(
    starts: tf.Tensor, sizes: tf.Tensor, total: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute the token indices of stretches of ``sizes[i]`` tokens that start at ``starts[i]``.

    Args:
      starts: (stretches,) int64.
      sizes: (stretches,) int64.
      total: Their sum, if it is known.

    Returns:
      The indices of the tokens, and the offsets of the stretches.
    """
    with tf.device("CPU:0"):
        offsets = tf.concat([tf.zeros([1], tf.int64), tf.cumsum(sizes)], axis=0)
        total, moved = offsets[-1] if total is None else total, starts - offsets[:-1]
    places = tf.range(total, dtype=tf.int64)
    stretch = tf.searchsorted(offsets, places, side="right", out_type=tf.int64) - 1
    return places + tf.gather(moved, stretch), offsets


def _and_one_more(values: tf.Tensor, fill: Any) -> tf.Tensor:
    """Append one token to the tokens, filled with ``fill``."""
    shape = tf.concat([[1], tf.shape(values)[1:]], axis=0)
    return tf.concat([values, tf.fill(shape, tf.cast(fill, values.dtype))], axis=0)


def _check(numbers: tf.Tensor, good: tf.Tensor, *told: Any) -> tf.Tensor:
    """Return ``numbers`` if all are good; otherwise, raise an error about the first bad sequence."""
    bad = tf.argmin(tf.cast(tf.concat([good, [False]], 0), tf.int32))  # the batch size if no sequence is bad
    shown = [
        tf.gather(tf.concat([each, [0]], 0), bad) if tf.is_tensor(each) and each.shape.rank == 1 else each
        for each in told
    ]
    return assert_first(numbers, bad == tf.size(good, tf.int64), ["jagged", "sequence", bad, *shown])
