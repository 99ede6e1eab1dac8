"""The checksum of histories in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library


def history_crc(columns: Sequence[tf.RaggedTensor]) -> tf.Tensor:
    """Compute the checksum of each history: the CRC-32C of its columns, one after another.

    Every value is a word of 64 bits, little end first; a float32 is its bits, with zeros above. A ranker logs
    the number beside the exposure, and ``late(check="crc")`` compares the history with it.
    `gmeta.preprocess.history_crcs` computes the same without TensorFlow.

    Args:
      columns: RaggedTensors (R, None), int64 or float32, all with the same row splits, in the order that
        `late` names them in.

    Returns:
      (R,) int64, from 0 to 2^32 - 1; 0 for a history without events.

    Raises:
      ConfigError: There is no column, or one is no RaggedTensor (R, None) of int64 or float32.
      tf.errors.InvalidArgumentError: A column has another number of values than the first.

    Example:
      >>> items = tf.ragged.constant([[7, 9], []], tf.int64)
      >>> prices = tf.ragged.constant([[0.5, 2.0], []], tf.float32)
      >>> history_crc([items, prices]).numpy().tolist()
      [1671835289, 0]

    References:
      Versioned Late Materialization, section 3.3.
    """
    if not columns:
        raise ConfigError("history_crc: columns is empty: name what the ranker read")
    for number, column in enumerate(columns):
        is_ragged = isinstance(column, tf.RaggedTensor) and column.ragged_rank == 1 and column.shape.rank == 2
        if not is_ragged or column.dtype not in (tf.int64, tf.float32):
            raise ConfigError(
                f"history_crc: column {number} must be a RaggedTensor (R, None) of int64 or float32, "
                f"got {column!r}"
            )
    splits = tf.cast(columns[0].row_splits, tf.int64)
    crcs: tf.Tensor = load_op_library("io").gmeta_history_crc(
        row_splits=splits, columns=[column.values for column in columns]
    )
    return crcs
