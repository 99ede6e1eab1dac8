"""Saves and loads what admission remembers of ids that have no row.

Exact counts belong to keys, and therefore to logical shards, as rows do. A filter belongs to one of the
table's own shards, which holds the keys of several logical shards. If several ranks own parts of that shard,
each rank saves its own filter for it, and a load takes the larger of their counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.checkpoint.chain import CheckpointReader
from gmeta.checkpoint.manifest import FilterLayout
from gmeta.checkpoint.record_file import RecordFileWriter
from gmeta.core.errors import ConfigError
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.records import AdmissionState
from gmeta.policies import CountAdmission

_COUNTS_AT_A_TIME = 65536


def filter_layout(table: HashTable) -> FilterLayout | None:
    """Describe the layout of a table's filter; None if its admission has no filter."""
    admission = table.admission
    if not isinstance(admission, CountAdmission) or admission.filter is None:
        return None
    nothing = table.export_filter(0, 0)
    return FilterLayout(int(nothing.count), int(nothing.counters.shape[1]), admission.filter.hashes)


def write_filters(table: HashTable, layout: FilterLayout, shards: range, file: RecordFileWriter) -> None:
    """Write the filters that cover some logical shards, one at a time; skip filters that are all zero."""
    for number in layout.filters_of(shards):
        counters = _counters(table, number)
        if counters.any():
            file.write(number * layout.width, {"counter": counters})


def refuse_foreign_counts(name: str, table: HashTable, rank: int, shards: range) -> None:
    """Refuse a filter that has counted keys of other ranks' shards: the save would lose these counts.

    Raises:
      ConfigError: The filter has such counts.
    """
    layout = filter_layout(table)
    own = layout.filters_of(shards) if layout is not None else range(0)
    for number in range(layout.shards if layout is not None else 0):
        if number not in own and _counters(table, number).any():
            raise ConfigError(
                f"table {name!r} of rank {rank} has counted ids of logical shards outside [{shards.start}, "
                f"{shards.stop}), which other ranks save: route keys by their logical shard, or save with "
                "world_size=1"
            )


def load_admission(reader: CheckpointReader, name: str, table: HashTable, shards: range) -> tuple[int, str]:
    """Load the admission state of some logical shards into a table whose admission remembers nothing yet.

    Exact counts can be loaded into exact counts or into a filter. A filter can be loaded only into a filter
    of the same layout.

    Returns:
      How many keys with exact counts were loaded, and the reason why the saved state couldn't be loaded. The
      reason is empty if the state was loaded, or if this table's admission doesn't turn ids away by count.

    Raises:
      DataError: A file is missing or damaged.
    """
    admission = table.admission
    if not isinstance(admission, CountAdmission):
        return 0, ""
    nothing = np.empty(0, np.int64)
    waiting = 0
    for keys, counts in read_waiting(reader, name, shards):
        waiting += len(keys)
        table.import_admission(AdmissionState(keys, counts, np.empty(0, np.uint8)), replace=False)
    entry, own = reader.manifest.tables[name], filter_layout(table)
    if entry.filter is None:
        return waiting, ""
    if own != entry.filter:
        return waiting, _why_forgotten(str(entry.settings.get("admission")), admission, entry.filter, own)
    for number in own.filters_of(shards):
        counters = reader.read_filter(name, number)
        if counters is not None:
            state = AdmissionState(nothing, nothing, counters)
            table.import_admission(state, replace=False, first_filter=number)
    return waiting, ""


def _why_forgotten(
    saved_with: str, admission: CountAdmission, saved: FilterLayout, own: FilterLayout | None
) -> str:
    def in_words(layout: FilterLayout) -> str:
        return f"{layout.shards} filters of {layout.counters} counters, {layout.hashes} an id"

    to_fill = "exact counts, which a filter can't give" if own is None else in_words(own)
    advice = (
        "make it with the saved capacity and error, and the eviction bound, to keep them"
        if own is not None
        else f"make it with admission {saved_with} to keep them"
    )
    return (
        f"it was saved with {saved_with} ({in_words(saved)}), but the table to fill has {admission} "
        f"({to_fill}); {advice}"
    )


def _counters(table: HashTable, number: int) -> npt.NDArray[np.uint8]:
    with tf.device("CPU"):
        return np.asarray(table.export_filter(number, number + 1).counters)[0]


def read_waiting(
    reader: CheckpointReader, name: str, shards: range
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Read keys and counts, some logical shards at a time."""
    saved = {
        segment.shard
        for part in reader.manifest.tables[name].parts
        if part.waiting is not None
        for segment in part.waiting.segments
    }
    found: list[dict[str, npt.NDArray[Any]]] = []
    for shard in sorted(saved.intersection(shards)):
        found.append(reader.read_waiting(name, shard))
        if sum(len(columns["key"]) for columns in found) >= _COUNTS_AT_A_TIME:
            yield _join(found)
            found = []
    if found:
        yield _join(found)


def _join(found: list[dict[str, npt.NDArray[Any]]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    keys, counts = (np.concatenate([columns[name] for columns in found]) for name in ("key", "count"))
    return keys, counts.astype(np.int64)
