"""The checksum of a history, which says whether a reader rebuilds what a ranker saw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gmeta.core.errors import ConfigError
from gmeta.preprocess.history.files.library import history_library


def history_crcs(row_splits: ArrayLike, columns: Sequence[ArrayLike]) -> NDArray[np.int64]:
    """Compute the checksum of each history: the CRC-32C of its columns, one after another.

    Every value is a word of 64 bits, little end first; a float32 is its bits, with zeros above. A ranker logs
    the number beside the exposure, and ``gmeta.io.late(check="crc")`` compares the history with it.
    `gmeta.io.history_crc` computes the same in TensorFlow.

    Args:
      row_splits: (R + 1,) int64: history ``i`` has the values ``row_splits[i]`` to ``row_splits[i + 1] - 1``.
      columns: For each column its values (E,), int64 or float32, in the order that `late` names them in.

    Returns:
      (R,) int64, from 0 to 2^32 - 1; 0 for a history without events.

    Raises:
      ConfigError: ``row_splits`` doesn't ascend from 0 to E, or a column is of another type or length.

    Example:
      >>> history_crcs([0, 2, 2], [np.array([7, 9]), np.array([0.5, 2.0], np.float32)]).tolist()
      [1671835289, 0]

    References:
      Versioned Late Materialization, section 3.3.
    """
    splits = np.ascontiguousarray(row_splits, np.int64)
    if splits.ndim != 1 or not len(splits) or splits[0] != 0 or np.any(splits[1:] < splits[:-1]):
        raise ConfigError(
            f"history_crcs: row_splits must be a vector that ascends from 0, got {row_splits!r}"
        )
    if not columns:
        raise ConfigError("history_crcs: columns is empty: name what the ranker read")
    crcs = np.zeros(len(splits) - 1, np.int64)
    for number, column in enumerate(columns):
        values = np.ascontiguousarray(column)
        if values.dtype not in (np.int64, np.float32) or values.shape != (splits[-1],):
            raise ConfigError(
                f"history_crcs: column {number} must be int64 or float32 of shape ({splits[-1]},), as "
                f"row_splits says; got {values.dtype} of shape {values.shape}"
            )
        is_float = values.dtype == np.float32
        history_library().gmeta_history_crc(
            len(crcs), splits.ctypes.data, is_float, values.ctypes.data, crcs.ctypes.data
        )
    return crcs
