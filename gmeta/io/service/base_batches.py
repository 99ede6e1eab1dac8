"""Large batches of small ones: each row once, shuffled over a block of base batches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError


def rebatch(
    dataset: tf.data.Dataset, batches: int, *, shuffle: int | None = None, seed: int = 0
) -> tf.data.Dataset:
    """Make large batches of small ones, with each row exactly once.

    Workers make small base batches, which need little memory and arrive early. Training takes larger ones.
    The rows of ``shuffle`` base batches, a block, are permuted together and cut into batches of as many rows,
    one for each ``batches`` base batches; their sizes differ by one row at most. The permutation is a pure
    function of (``seed``, the block's number). With `gmeta.io.distribute` use its arguments of these names
    instead, so that training resumes inside a block.

    Args:
      dataset: Batches of rows: a nested structure of dense or ragged tensors that all have the rows in their
        first dimension, such as those of `gmeta.io.rows`, `gmeta.io.sequences` and `gmeta.io.late`. (Tasks of
        `gmeta.io.tasks` address their rows by number, so they can't be joined.)
      batches: How many base batches make one batch; the last batch of a block may have fewer.
      shuffle: How many base batches are permuted together, and held in memory. None: nothing is permuted, and
        rows keep their order.
      seed: The seed of the permutations.

    Returns:
      A dataset of the same structure. It reads a block at its first batch, so put a ``prefetch`` behind it.

    Raises:
      ConfigError: A number is out of its range, or a part of an element has no rows.
      tf.errors.InvalidArgumentError: While iterating: parts of an element differ in their number of rows.

    Example:
      >>> base = tf.data.Dataset.from_tensor_slices(tf.range(6)).batch(2)
      >>> sorted(len(batch) for batch in rebatch(base, 2, shuffle=2))
      [2, 4]
    """
    numbered = dataset.enumerate().map(lambda number, *element: (number, number, _one(element)))
    joined = join_base_batches(numbered, batches, shuffle, seed)
    return joined.map(lambda _, __, ___, element: element)


def join_base_batches(
    dataset: tf.data.Dataset, batches: int, shuffle: int | None, seed: int
) -> tf.data.Dataset:
    """Make large batches of elements (salt, cursor, base batch).

    Args:
      dataset: Elements of a number () int64 that the block's permutation depends on, a tensor that says where
        reading is behind the base batch, and a base batch.
      batches: As for `rebatch`.
      shuffle: As for `rebatch`.
      seed: As for `rebatch`.

    Returns:
      Elements of (cursor of the block's last base batch, number of the batch in its block, batches in the
      block, batch), the numbers () int64.
    """
    whole_number("rebatch: batches", batches, least=1)
    block = batches if shuffle is None else whole_number("rebatch: shuffle", shuffle, least=batches)
    spec = dataset.element_spec[2]
    flat = tf.nest.flatten(spec)
    for part in flat:
        if not isinstance(part, tf.TensorSpec | tf.RaggedTensorSpec) or part.shape.rank in (None, 0):
            raise ConfigError(
                f"rebatch: {part} of an element has no rows, and each part must have them in its first "
                "dimension: leave it out by a map before"
            )

    @tf.autograph.experimental.do_not_convert
    def cut(salts: Any, cursors: Any, blocks: Any) -> tf.data.Dataset:
        rows = tf.nest.map_structure(_join, blocks)
        sizes = [_rows(part) for part in tf.nest.flatten(rows)]
        equal = [
            tf.debugging.assert_equal(
                size, sizes[0], f"rebatch: parts of {spec} differ in their number of rows"
            )
            for size in sizes[1:]
        ]
        with tf.control_dependencies(equal):
            size = tf.identity(sizes[0])
        given = _rows(salts)
        count = -(-given // batches)
        order = tf.range(size)
        if shuffle is not None:
            order = tf.random.experimental.stateless_shuffle(order, [tf.constant(seed, tf.int64), salts[-1]])

        def batch(number: tf.Tensor) -> tuple[Any, ...]:
            first, end = number * batches, tf.minimum((number + 1) * batches, given)
            own = order[first * size // given : end * size // given]
            return cursors[-1], number, count, tf.nest.map_structure(lambda part: tf.gather(part, own), rows)

        return tf.data.Dataset.range(count).map(batch)

    return dataset.ragged_batch(block).flat_map(cut)


def _join(part: Any) -> Any:
    """Join the rows of the base batches of a block; they are dense where all have as many."""
    if isinstance(part, tf.RaggedTensor):
        return part.merge_dims(0, 1)
    return tf.reshape(part, tf.concat([[-1], tf.shape(part)[2:]], axis=0))


def _rows(part: Any) -> tf.Tensor:
    return part.nrows(tf.int64) if isinstance(part, tf.RaggedTensor) else tf.shape(part, tf.int64)[0]


def _one(element: tuple[Any, ...]) -> Any:
    return element if len(element) > 1 else element[0]
