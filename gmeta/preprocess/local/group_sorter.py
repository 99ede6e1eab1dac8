"""Sorting of batches into the order of the shards: an external sort whose values are encoded batches.

A batch arrives whole, and the native encoder encodes it once. From then on it is a byte string with a key,
which is moved but never decoded::

    batches in the order of tasks
        │ encode                                      in memory, up to a limit
        v
    sort by (split, shard, order_key, task, batch) ──> run 0 | run 1 | ...     files: .groups and .keys.npy
                                                          │       │
                        shard 0 <── merge ────────────────┴───────┤            each shard is one range of
                        shard 1 <── merge ────────────────────────┘            every run

Both passes read and write their files in long sequential blocks. So, for data of any size, the sort costs
two copies of the data in its compact encoded form, and no random access. A shard that exceeds the limit is
merged in ranges of the key, whose distribution is uniform. Runs stay until the shards are written: after a
kill, only unfinished shards are merged again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data_manifest import Shard
from gmeta.core.group_index import ENTRY, GroupIndex
from gmeta.core.schema import Schema
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.ranges import Cut
from gmeta.preprocess.shards.record_encoder import GroupRuns, RecordEncoder, refuse_large
from gmeta.preprocess.shards.record_writer import ShardFile
from gmeta.preprocess.source import Ints

KEY = np.dtype(
    [
        ("place", "<i8"),  # split * shards + shard
        ("key", "<u8"),
        ("task", "<i8"),
        ("batch_id", "<i8"),
        ("rows", "<i8"),
        ("size", "<i8"),
        ("crc", "<u4"),
    ]
)
"""The entry of a batch in a run's key file."""

_BLOCK = 4 << 20


class GroupSorter:
    """A sorter that takes batches in any order and writes sorted runs.

    Args:
      folder: The folder of the runs.
      schema: The columns.
      config: Seed, splits, shards, layout and codec.
      limit: Bytes of encoded batches to hold before a run is written.

    Attributes:
      runs: The number of runs written.
    """

    def __init__(self, folder: Path, schema: Schema, config: PlanConfig, limit: int) -> None:
        self._folder, self._schema, self._config, self._limit = folder, schema, config, limit
        self._encoder = RecordEncoder(schema, config.layout, config.codec)
        self._blocks: list[bytes] = []
        self._keys: list[NDArray[Any]] = []
        self._bytes = 0
        self.runs = sum(1 for _ in folder.glob("*.groups"))  # runs of other partitions

    def add(self, cut: Cut) -> None:
        """Encode some batches.

        Raises:
          DataError: A batch is too large for a record.
          OSError: The disk is full.
        """
        values, splits = [], []
        for column in self._schema:
            given = cut.columns[column.name]
            flat, of_list = given if isinstance(given, tuple) else (given, None)
            values.append(np.ascontiguousarray(flat, column.dtype))
            splits.append(None if of_list is None else np.ascontiguousarray(of_list, np.int64))
        names = [column.name for column in self._schema]
        key = values[names.index(self._schema.task)], values[names.index(self._schema.batch)]
        ends = np.ascontiguousarray(cut.ends, np.int64)
        records = ends if self._config.layout == "columnar" else np.arange(1, len(key[0]) + 1)
        refuse_large(self._encoder, values, splits, records, key, None)
        runs = GroupRuns(ends, np.zeros(len(ends), np.int64), np.zeros(len(ends), np.uint32))
        for block in self._encoder.blocks(values, splits, runs, _BLOCK):
            self._blocks.append(bytes(block))
            self._bytes += len(block)
        place = plan.place(cut.task, cut.batch_id, self._config)
        keys = np.zeros(len(ends), KEY)
        keys["place"], keys["key"] = place.split * self._config.shards + place.shard, place.key
        keys["task"], keys["batch_id"] = cut.task, cut.batch_id
        keys["rows"], keys["size"], keys["crc"] = np.diff(ends, prepend=0), runs.sizes, runs.crcs
        self._keys.append(keys)
        if self._bytes >= self._limit:
            self._write_run()

    def finish(self) -> None:
        """Write the batches still in memory as a last run.

        Raises:
          OSError: The disk is full.
        """
        if self._keys:
            self._write_run()

    def close(self) -> None:
        """Free the encoder; batches that aren't written yet are dropped."""
        self._encoder.close()

    def _write_run(self) -> None:
        keys = np.concatenate(self._keys)
        data = memoryview(b"".join(self._blocks)) if len(self._blocks) != 1 else memoryview(self._blocks[0])
        self._blocks.clear()
        self._keys.clear()
        self._bytes = 0
        order = _in_order(keys)
        path = run_path(self._folder, self.runs)
        with path.open("wb", buffering=0) as file:
            _write_all(file.fileno(), _gather(data, keys["size"], order), path)
        with path.with_suffix(".keys.npy").open("wb") as file:
            np.save(file, keys[order])
        self.runs += 1


class ShardMerger:
    """A merger of runs into shards.

    Args:
      folder: The folder of the runs.
      runs: The number of runs.
      limit: Bytes to hold in memory at once.
    """

    def __init__(self, folder: Path, runs: int, limit: int) -> None:
        self._paths = [run_path(folder, number) for number in range(runs)]
        self._keys = [np.load(path.with_suffix(".keys.npy"), mmap_mode="r") for path in self._paths]
        self._starts = [np.concatenate(([0], np.cumsum(keys["size"]))) for keys in self._keys]
        self._limit = limit

    @property
    def rows(self) -> int:
        """The number of rows of all batches."""
        return sum(int(keys["rows"].sum()) for keys in self._keys)

    def write(self, path: Path, place: int, config: PlanConfig) -> Shard:
        """Write a shard and its index.

        Args:
          path: The shard's file.
          place: ``split * shards + shard``.
          config: The settings, for the layout.

        Raises:
          OSError: The disk is full.
        """
        ranges = [np.searchsorted(keys["place"], (place, place + 1)) for keys in self._keys]
        size = sum(int(at[b] - at[a]) for at, (a, b) in zip(self._starts, ranges, strict=True))
        file, written = ShardFile(path), [np.zeros(0, KEY)]
        try:
            for part in self._parts(ranges, -(-size // self._limit)):
                keys, blocks = self._merge(part)
                for block in blocks:
                    file.put(block)
                written.append(keys)
            groups = np.concatenate(written)
            file.close(lambda: _index(groups, file.bytes, config))
        except BaseException:
            file.discard()
            raise
        return Shard(path.name, len(groups), int(groups["rows"].sum()), file.bytes, file.index or 0)

    def _parts(self, ranges: Sequence[Ints], pieces: int) -> Iterator[list[tuple[int, int]]]:
        """Cut the runs' ranges into ``pieces`` of equal width in the key."""
        if pieces <= 1:
            yield [(int(a), int(b)) for a, b in ranges]
            return
        own = [keys["key"][a:b] for keys, (a, b) in zip(self._keys, ranges, strict=True)]
        least = min(int(keys[0]) for keys in own if len(keys))
        most = max(int(keys[-1]) for keys in own if len(keys))
        edges = [least + (most + 1 - least) * number // pieces for number in range(pieces + 1)]
        for low, high in zip(edges, [*edges[1:-1], None], strict=False):
            cut = []
            for keys, (a, _) in zip(own, ranges, strict=True):
                start = np.searchsorted(keys, np.uint64(low))
                stop = len(keys) if high is None else np.searchsorted(keys, np.uint64(high))
                cut.append((int(a + start), int(a + stop)))
            yield cut

    def _merge(self, part: Sequence[tuple[int, int]]) -> tuple[NDArray[Any], Iterator[memoryview]]:
        full = [number for number, (start, stop) in enumerate(part) if stop > start]
        keys = np.concatenate([np.zeros(0, KEY), *(self._keys[n][slice(*part[n])] for n in full)])
        blocks = []
        for number in full:
            start, stop = (int(self._starts[number][place]) for place in part[number])
            with self._paths[number].open("rb", buffering=0) as file:
                file.seek(start)
                blocks.append(_read(file, stop - start))
        if len(full) < 2:
            return keys, map(memoryview, blocks)
        order = _in_order(keys)
        return keys[order], _gather(memoryview(b"".join(blocks)), keys["size"], order)


def run_path(folder: Path, number: int) -> Path:
    """Return the path of a run's batches; the run's keys are in ``.keys.npy`` beside it."""
    return folder / f"run-{number:05d}.groups"


def _in_order(keys: NDArray[Any]) -> Ints:
    return np.lexsort((keys["batch_id"], keys["task"], keys["key"], keys["place"]))


def _gather(data: memoryview, sizes: Ints, order: Ints) -> Iterator[memoryview]:
    """Yield the pieces of ``data`` in the given order, joined to blocks."""
    ends = np.cumsum(sizes)
    starts, ends = (ends - sizes)[order].tolist(), ends[order].tolist()
    first, size = 0, 0
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        size += end - start
        if size >= _BLOCK or place + 1 == len(ends):
            pieces = zip(starts[first : place + 1], ends[first : place + 1], strict=True)
            yield memoryview(b"".join([data[a:b] for a, b in pieces]))
            first, size = place + 1, 0


def _write_all(descriptor: int, blocks: Iterator[memoryview], path: Path) -> None:
    try:
        for block in blocks:
            while block:
                block = block[os.write(descriptor, block) :]
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full, free some space or write elsewhere" if full else error.strerror
        raise OSError(error.errno, reason, str(path)) from error


def _read(file: Any, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = file.readinto(view)
        if not count:
            raise OSError(errno.EIO, "a run of sorted batches was cut", str(file.name))
        view = view[count:]
    return data


def _index(groups: NDArray[Any], size: int, config: PlanConfig) -> GroupIndex:
    entries = np.zeros(len(groups), ENTRY)
    entries["offset"] = np.cumsum(groups["size"]) - groups["size"]
    entries["first_row"] = np.cumsum(groups["rows"]) - groups["rows"]
    for name in ("rows", "task", "batch_id", "crc"):
        entries[name] = groups[name]
    return GroupIndex(config.layout, size, entries)
