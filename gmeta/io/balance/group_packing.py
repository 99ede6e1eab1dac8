"""Groups of rows packed into words of 32 bits, so that one tensor carries all columns, in any group order.

A group's record is the pieces of its columns, one after the other. A column's piece is its numbers; a list
column has one more piece before it, the length of each row's list. A float32 takes one word, an int64 two, a
length one. The length of each piece follows from the group's line, a row of int64: its task, batch, number
of rows, and the count of numbers in each list column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError

TASK, BATCH, ROWS = 0, 1, 2
"""Columns of a line; the sizes of the list columns follow."""


class GroupPacking:
    """The packing of elements with the same columns.

    Args:
      columns: An element's columns, or their specs: tensors (N,) or RaggedTensors (N, None), int64 or
        float32.

    Raises:
      ConfigError: A column is of another kind.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._dtypes = {name: column.dtype for name, column in columns.items()}
        self._lists = [name for name, column in columns.items() if _is_ragged(column)]
        for name, column in columns.items():
            ranks = (2,) if name in self._lists else (1,)
            if column.dtype not in (tf.int64, tf.float32) or column.shape.rank not in ranks:
                raise ConfigError(
                    f"groups are moved with columns (N,) or RaggedTensor (N, None) of int64 or float32; "
                    f"column {name!r} is {column.dtype.name} of shape {column.shape}"
                )

    def lines(self, element: Mapping[str, Any]) -> tf.Tensor:
        """Return the line of each group, int64 (G, 3 + list columns)."""
        splits, columns = element["row_splits"], element["columns"]
        sizes = [_lengths(tf.gather(columns[name].row_splits, splits)) for name in self._lists]
        return tf.stack([element["task"], element["batch_id"], _lengths(splits), *sizes], axis=1)

    def pack(self, element: Mapping[str, Any], order: tf.Tensor) -> tf.Tensor:
        """Pack the records of an element's groups in the given order, as int32 words."""
        splits, pieces = element["row_splits"], []
        for name, column in element["columns"].items():
            values, ends = column, splits
            if name in self._lists:
                lengths = tf.cast(column.row_lengths(), tf.int32)
                pieces.append(tf.RaggedTensor.from_row_splits(lengths, splits, validate=False))
                values, ends = column.flat_values, tf.gather(column.row_splits, splits)
            words = tf.reshape(tf.bitcast(values, tf.int32), [-1])
            ends = ends * self._width(name)
            pieces.append(tf.RaggedTensor.from_row_splits(words, ends, validate=False))
        # The pieces are ordered by piece, then by group; one gather reorders them by group, then by piece.
        groups = tf.size(splits) - 1
        places = order[:, None] + groups * tf.range(len(pieces))[None, :]
        return tf.gather(tf.concat(pieces, axis=0), tf.reshape(places, [-1])).flat_values

    def words(self, lines: tf.Tensor) -> tf.Tensor:
        """Count the words of each group's record, int64 (G,)."""
        return tf.reduce_sum(self._piece_words(lines), axis=1)

    def unpack(self, words: tf.Tensor, lines: tf.Tensor) -> dict[str, Any]:
        """Rebuild an element from its records, in their order."""
        piece_words = self._piece_words(lines)
        groups, pieces = tf.shape(lines)[0], piece_words.shape[1]
        by_group = tf.RaggedTensor.from_row_lengths(words, tf.reshape(piece_words, [-1]), validate=False)
        places = pieces * tf.range(groups)[None, :] + tf.range(pieces)[:, None]
        by_piece = tf.gather(by_group, tf.reshape(places, [-1])).flat_values
        parts = iter(tf.split(by_piece, tf.reduce_sum(piece_words, axis=0), num=pieces))
        columns: dict[str, Any] = {}
        for name, dtype in self._dtypes.items():
            lengths = next(parts) if name in self._lists else None
            part = next(parts)
            values = tf.bitcast(tf.reshape(part, [-1, 2]) if dtype == tf.int64 else part, dtype)
            if lengths is not None:
                values = tf.RaggedTensor.from_row_lengths(values, tf.cast(lengths, tf.int64), validate=False)
            columns[name] = values
        splits = tf.concat([[0], tf.cumsum(lines[:, ROWS])], axis=0)
        return {"task": lines[:, TASK], "batch_id": lines[:, BATCH], "row_splits": splits, "columns": columns}

    def _piece_words(self, lines: tf.Tensor) -> tf.Tensor:
        sizes = []
        for name in self._dtypes:
            numbers = lines[:, ROWS]
            if name in self._lists:
                sizes.append(numbers)  # the lengths' piece
                numbers = lines[:, ROWS + 1 + self._lists.index(name)]
            sizes.append(numbers * self._width(name))
        return tf.stack(sizes, axis=1)

    def _width(self, name: str) -> int:
        return int(self._dtypes[name].size) // 4


def _is_ragged(column: Any) -> bool:
    return isinstance(column, (tf.RaggedTensor, tf.RaggedTensorSpec))


def _lengths(splits: tf.Tensor) -> tf.Tensor:
    return splits[1:] - splits[:-1]
