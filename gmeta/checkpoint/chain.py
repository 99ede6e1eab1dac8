"""Reads the tables of a checkpoint and of those that it continues, shard by shard, as NumPy arrays."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.checkpoint.manifest import FULL, Manifest, Part, SegmentFile
from gmeta.checkpoint.record_file import (
    RESTORE_ADVICE,
    RecordFileReader,
    Segment,
    filter_schema,
    removed_schema,
    rows_schema,
    unreadable,
    waiting_schema,
)
from gmeta.core.errors import DataError
from gmeta.core.shares import LOGICAL_SHARDS

Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Link:
    """One checkpoint of a chain."""

    folder: Path
    manifest: Manifest


def read_links(folder: Path) -> list[Link]:
    """Read the manifests of a checkpoint and of those that it continues, oldest first.

    Raises:
      DataError: A manifest is missing or damaged, or a base isn't the checkpoint that was continued.
    """
    links = [Link(folder, Manifest.load(folder))]
    while links[0].manifest.base is not None:
        later = links[0]
        if later.manifest.base in {link.folder.name for link in links}:
            raise DataError(
                f"this checkpoint is an increment on {later.manifest.base}, which is an increment on it",
                path=later.folder,
                advice=RESTORE_ADVICE,
            )
        base = later.folder.parent / str(later.manifest.base)
        try:
            manifest = Manifest.load(base)
        except DataError as error:
            raise DataError(
                f"this checkpoint is an increment on {later.manifest.base}, which can't be read: {error}",
                path=later.folder,
            ) from error
        if manifest.id != later.manifest.base_id:
            raise DataError(
                f"this checkpoint is an increment on {later.manifest.base}, but another checkpoint has that "
                "name now",
                path=later.folder,
                advice=RESTORE_ADVICE,
            )
        links.insert(0, Link(base, manifest))
    return links


class CheckpointReader:
    """Context manager that reads the tables of a checkpoint, one logical shard at a time.

    Args:
      folder: The checkpoint.

    Attributes:
      links: The checkpoints of its chain, oldest first.
      manifest: The manifest of the checkpoint itself.

    Raises:
      DataError: The checkpoint isn't whole.

    Example:
      ::

        with CheckpointReader(Path("ckpt/step-000000000200")) as reader:
            for shard in range(1024):
                columns = reader.read_shard("item", shard)
                columns["key"], columns["weights"]
    """

    def __init__(self, folder: Path) -> None:
        self.links = read_links(folder)
        self.manifest = self.links[-1].manifest
        self._stack = ExitStack()
        self._files: dict[Path, RecordFileReader] = {}
        self._places: dict[Path, dict[int, Segment]] = {}

    @property
    def bytes_read(self) -> int:
        """Number of bytes of records read so far."""
        return sum(file.bytes_read for file in self._files.values())

    def open_files(self, table: str, shards: range) -> None:
        """Open the files of some logical shards, and compare their sizes with those in the manifest.

        Raises:
          DataError: A file is missing or has another size.
        """
        entry = self.manifest.tables[table]
        schema = rows_schema(entry.dim, entry.slot_floats)
        for link in self.links:
            for part in link.manifest.tables[table].parts if table in link.manifest.tables else ():
                if part.first_shard < shards.stop and shards.start < part.last_shard:
                    self._file(link.folder / part.rows.name, schema, part.rows.bytes)

    def _file(self, path: Path, schema: Any, size: int) -> RecordFileReader:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(RecordFileReader(path, schema, size))
        return self._files[path]

    def read_shard(self, table: str, shard: int) -> Columns:
        """Read the records of one logical shard, sorted by key.

        Args:
          table: The table's name.
          shard: The logical shard.

        Returns:
          ``key`` (n,) int64, ``weights`` (n, dim) float32, ``slots`` (n, slot_floats) float32, ``frequency``
          and ``last_step`` (n,) uint32.

        Raises:
          DataError: A file is missing or damaged, or the increments don't fit together.
        """
        entry = self.manifest.tables[table]
        schema = rows_schema(entry.dim, entry.slot_floats)
        found: list[Columns] = []
        # From the newest checkpoint back: a record counts if no newer checkpoint wrote or removed its key.
        newer = np.empty(0, np.int64)
        for link in reversed(self.links):
            part = self._part(link, table, shard)
            for columns in self._segments(link, part.rows, schema, shard):
                fresh = ~np.isin(columns["key"], newer) if newer.size else None
                found.append(columns if fresh is None else {k: v[fresh] for k, v in columns.items()})
                newer = np.union1d(newer, columns["key"]) if part.kind != FULL else newer
            if part.kind == FULL:
                break
            if part.removed is not None:
                for columns in self._segments(link, part.removed, removed_schema(), shard):
                    newer = np.union1d(newer, columns["key"])
        merged = _merge(found, entry.dim, entry.slot_floats)
        last = self._part(self.links[-1], table, shard)
        expected = last.live[shard - last.first_shard]
        if len(merged["key"]) != expected:
            raise DataError(
                f"table {table!r}, logical shard {shard}: {len(merged['key'])} rows, the manifest says "
                f"{expected}",
                path=self.links[-1].folder,
                advice="the increments don't fit together: load an earlier checkpoint",
            )
        return merged

    def read_waiting(self, table: str, shard: int) -> Columns:
        """Read the keys of one logical shard that waited for admission, sorted, with their exact counts.

        Returns:
          ``key`` (n,) int64 and ``count`` (n,) uint32.

        Raises:
          DataError: The file is missing or damaged.
        """
        link = self.links[-1]  # every checkpoint saves these keys in full
        file = self._part(link, table, shard).waiting
        for columns in self._segments(link, file, waiting_schema(), shard) if file is not None else ():
            return columns
        return {"key": np.empty(0, np.int64), "count": np.empty(0, np.uint32)}

    def read_filter(self, table: str, number: int) -> npt.NDArray[np.uint8] | None:
        """Read the counters of one of a table's filters; None if they are all zero.

        If the logical shards of a filter were divided among ranks, each rank counted its own keys. The result
        has the largest value of each counter, so that no key's count is too low
        (``ops/table/core/admission.h``).

        Raises:
          DataError: A file is missing or damaged.
        """
        link, merged = self.links[-1], None
        entry = self.manifest.tables[table]
        first = number * entry.filter.width if entry.filter is not None else 0
        for part in entry.parts:
            if part.filter is not None:
                for columns in self._segments(link, part.filter, filter_schema(), first):
                    found = columns["counter"]
                    if entry.filter is None or len(found) != entry.filter.counters:
                        raise DataError(
                            f"table {table!r}: filter {number} has {len(found)} counters, not as many as the "
                            "manifest says",
                            path=link.folder / part.filter.name,
                            advice=RESTORE_ADVICE,
                        )
                    merged = found if merged is None else np.maximum(merged, found)
        return merged

    def _part(self, link: Link, table: str, shard: int) -> Part:
        entry = link.manifest.tables.get(table)
        for part in entry.parts if entry is not None else ():
            if part.first_shard <= shard < part.last_shard:
                return part
        raise DataError(
            f"no logical shard {shard} of table {table!r}", path=link.folder, advice=RESTORE_ADVICE
        )

    def _segments(self, link: Link, file: SegmentFile, schema: Any, shard: int) -> Iterator[Columns]:
        path = link.folder / file.name
        if path not in self._places:
            self._places[path] = {segment.shard: segment for segment in file.segments}
        segment = self._places[path].get(shard)
        if segment is None:
            return
        yield self._file(path, schema, file.bytes).read(segment)

    def verify(self) -> None:
        """Read everything once, to check it.

        Raises:
          DataError: A file is missing or damaged.
        """
        for table in self.manifest.tables:
            for shard in range(LOGICAL_SHARDS):
                self.read_shard(table, shard)
                self.read_waiting(table, shard)
            layout = self.manifest.tables[table].filter
            for number in range(layout.shards if layout is not None else 0):
                self.read_filter(table, number)
        self.verify_files()

    def verify_files(self) -> None:
        """Check the files that don't belong to tables, such as those of the dense weights.

        Raises:
          DataError: A file is missing or damaged.
        """
        for name, file in self.manifest.files.items():
            path = self.links[-1].folder / name
            try:
                crc = crc32_of(path)
            except OSError as error:
                raise unreadable(path, error) from error
            if crc != file.crc32:
                raise DataError(
                    f"damaged: its CRC-32 is {crc:08x}, the manifest says {file.crc32:08x}",
                    path=path,
                    advice=RESTORE_ADVICE,
                )

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def crc32_of(path: Path) -> int:
    """Compute the CRC-32 of a whole file, reading it in pieces."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            crc = zlib.crc32(piece, crc)
    return crc


def _merge(found: list[Columns], dim: int, slot_floats: int) -> Columns:
    if not found:
        ints = {name: np.empty(0, np.uint32) for name in ("frequency", "last_step")}
        vectors = {"weights": np.empty((0, dim), np.float32), "slots": np.empty((0, slot_floats), np.float32)}
        return {"key": np.empty(0, np.int64), **vectors, **ints}
    for columns in found:
        columns.setdefault("slots", np.empty((len(columns["key"]), 0), np.float32))
    if len(found) == 1:
        return found[0]
    merged = {name: np.concatenate([columns[name] for columns in found]) for name in found[0]}
    order = np.argsort(merged["key"])
    return {name: values[order] for name, values in merged.items()}
