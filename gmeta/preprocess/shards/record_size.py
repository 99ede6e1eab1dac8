"""The check for records that readers would refuse as too large; it runs before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import DataError
from gmeta.preprocess.columns import Ints
from gmeta.preprocess.shards.record_encoder import GroupRuns, RecordEncoder

MAX_RECORD = 256 << 20
"""The largest record in bytes that readers accept (``max_record`` in ``io/records/tfrecord.h``)."""

FRAME = 16
"""The bytes of a record that aren't payload."""

_WIDEST = 11  # bytes of the widest value in either layout
_HEADER = 1 << 16  # more bytes than the names of any columns take
_BLOCK = 4 << 20


def refuse_large(
    encoder: RecordEncoder,
    values: Sequence[NDArray[Any]],
    splits: Sequence[Ints | None],
    ends: Ints,
    key: tuple[Ints, Ints],
    path: Path | None,
) -> None:
    """Refuse records of more than `MAX_RECORD` bytes.

    An upper bound clears nearly every record; the remaining records are encoded to find their size.

    Args:
      encoder: The encoder of the records.
      values: The values of each column, as for `RecordEncoder.blocks`.
      splits: Row splits of each list column, None for the others.
      ends: (R,) the row before which each record ends.
      key: (N,) the task and the batch of each row.
      path: The path that the error names.

    Raises:
      DataError: A record is too large; the message gives its task, batch and size.
    """
    rows = len(key[0])
    widest = max((int(np.diff(of).max(initial=0)) for of in splits if of is not None), default=0)
    longest = int(np.diff(ends, prepend=0).max(initial=0))
    if longest * len(values) * max(1, 2 * widest) * _WIDEST + _HEADER <= MAX_RECORD:
        return
    bound = np.zeros(rows + 1, np.int64)  # the number of values before each row
    for of_list in splits:
        bound += np.arange(rows + 1) if of_list is None else of_list + np.arange(rows + 1)
    starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
    large = (bound[ends] - bound[starts]) * _WIDEST + _HEADER > MAX_RECORD
    for start, end in zip(starts[large].tolist(), ends[large].tolist(), strict=True):
        own: list[NDArray[Any]] = []
        own_splits: list[Ints | None] = []
        for array, of_list in zip(values, splits, strict=True):
            inside = None if of_list is None else np.ascontiguousarray(of_list[start : end + 1])
            own.append(array[start:end] if inside is None else array[inside[0] : inside[-1]])
            own_splits.append(None if inside is None else inside - inside[0])
        one = GroupRuns(np.array([end - start], np.int64))
        size = sum(len(block) for block in encoder.blocks(own, own_splits, one, _BLOCK)) - FRAME
        if size > MAX_RECORD:
            task, batch = (int(values[start]) for values in key)
            raise DataError(
                f"task {task}, batch {batch}: its record of {end - start:,} rows would have {size:,} bytes, "
                f"readers take {MAX_RECORD:,}",
                path=path,
                advice="cut tasks into smaller batches (--batch-rows), or leave such tasks out (--max-rows)",
            )
