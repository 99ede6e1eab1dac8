"""The manifest of a sharded checkpoint: it lists which file holds what, and is written last.

It is JSON. A reader needs nothing but the manifest and the Arrow files::

    {"format": "gmeta-sharded-checkpoint", "version": 2, "id": ..., "base": folder name or null,
     "base_id": ..., "world_size": 2, "metadata": {...},
     "files": {"dense/...": {"bytes": ..., "crc32": ...}},
     "tables": {name: {"dim": 64, "optimizer": "adam", "slots": ["m", "v"], "slot_floats": 128, ...,
                       "filter": {"shards": 64, "counters": ..., "hashes": 7} or null,
                       "parts": [{"rank": 0, "first_shard": 0, "last_shard": 512, "kind": "full", ...,
                                  "rows": {"name": ..., "bytes": ..., "segments": {"shard": [...], ...}},
                                  "removed": ..., "waiting": ..., "filter": ...}]}},
     "digest": SHA-256 of all of the above}
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import starmap
from pathlib import Path
from typing import Any

from gmeta.checkpoint.record_file import Segment
from gmeta.core.errors import DataError
from gmeta.core.files import write_atomically
from gmeta.core.json_values import (
    MOST,
    folder_name,
    inner_path,
    items,
    mapping,
    parse_json,
    short,
    text,
    whole,
    wholes,
)
from gmeta.core.merged_tables import MergedKeys
from gmeta.core.shares import LOGICAL_SHARDS

FILE_NAME = "manifest.json"
FORMAT, VERSION = "gmeta-sharded-checkpoint", 2

FULL, INCREMENT = "full", "increment"
_FILES = ("rows", "removed", "waiting", "filter")


@dataclass(frozen=True)
class SegmentFile:
    """Arrow file: its name inside the checkpoint's folder, its size, and its batches."""

    name: str
    bytes: int
    segments: tuple[Segment, ...]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values. Segments are stored by column, so that a thousand of them stay readable."""
        columns = {f.name: [getattr(s, f.name) for s in self.segments] for f in fields(Segment)}
        return {"name": self.name, "bytes": self.bytes, "segments": columns}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SegmentFile:
        """Restore from JSON values: the inverse of `to_json`.

        Raises:
          ValueError: The values aren't what gmeta writes; likewise KeyError and TypeError. `Manifest.load`
            reports the reason.
        """
        name = inner_path(value["name"], "a file")
        size = whole(value["bytes"], f"{name!r}: bytes")
        columns = {f.name: wholes(value["segments"][f.name], f"{name!r}: {f.name}") for f in fields(Segment)}
        segments = tuple(starmap(Segment, zip(*columns.values(), strict=True)))
        if len({segment.shard for segment in segments}) < len(segments):
            raise ValueError(f"{name!r} has a logical shard twice")
        for segment in segments:
            ends = segment.offset + segment.bytes <= size
            if not ends or segment.shard >= LOGICAL_SHARDS or segment.rows > segment.bytes:
                raise ValueError(f"{name!r}: {segment} isn't in a file of {size} bytes")
        return cls(name, size, segments)


@dataclass(frozen=True)
class Part:
    """Part of a table that one rank saved.

    Attributes:
      rank: The rank.
      first_shard: The first logical shard that it owned.
      last_shard: One past the last one.
      kind: ``"full"``: all records of these shards. ``"increment"``: the records that were touched since the
        base checkpoint, and the keys that were removed since; nothing else has changed.
      since: The table's step when the base was saved; 0 for a full part.
      step: The table's step.
      live: For each of the shards, how many rows the table had in it.
      rows: The records.
      removed: The removed keys; removals apply before the records. None if no key was removed.
      waiting: All keys that wait for admission, with their exact counts, even in an increment. None without
        such keys.
      filter: All counters of the admission filter, even in an increment: one batch per filter that isn't all
        zero. None without such filters.
      reason: Why the part is full although a base was given; else empty.
      step_times: Steps of the table and their times, in turn, if its rows have a lifetime by a clock.
    """

    rank: int
    first_shard: int
    last_shard: int
    kind: str
    since: int
    step: int
    live: tuple[int, ...]
    rows: SegmentFile
    removed: SegmentFile | None = None
    waiting: SegmentFile | None = None
    filter: SegmentFile | None = None
    reason: str = ""
    step_times: tuple[int, ...] = ()

    @property
    def files(self) -> tuple[SegmentFile, ...]:
        """Files of the part."""
        files = (self.rows, self.removed, self.waiting, self.filter)
        return tuple(file for file in files if file is not None)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        value = {f.name: getattr(self, f.name) for f in fields(self)}
        files = {name: value[name] and value[name].to_json() for name in _FILES}
        times = value.pop("step_times")
        clock = {"step_times": list(times)} if times else {}  # only then, for earlier versions of gmeta
        return {**value, "live": list(self.live), **files, **clock}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Part:
        """Restore from JSON values: the inverse of `to_json`."""
        files = {name: None if value[name] is None else SegmentFile.from_json(value[name]) for name in _FILES}
        counts = {"live": tuple(wholes(value["live"], "live"))}
        times = items(value.get("step_times", []), "step_times")
        counts["step_times"] = tuple(whole(time, "a step time", -MOST, MOST) for time in times)
        part = cls(**{**value, **counts, **files})
        if len(times) % 2:
            raise ValueError(f"the part of rank {part.rank} has a step without a time")
        for name in ("rank", "since", "step"):
            whole(getattr(part, name), name)
        whole(part.first_shard, "first_shard", 0, LOGICAL_SHARDS - 1)
        whole(part.last_shard, "last_shard", part.first_shard + 1, LOGICAL_SHARDS)
        text(part.reason, "reason")
        if part.kind not in (FULL, INCREMENT):
            raise ValueError(f"a part must be {FULL!r} or {INCREMENT!r}, got {short(part.kind)}")
        if part.rows is None or len(part.live) != part.last_shard - part.first_shard:
            raise ValueError(f"the part of rank {part.rank} lacks rows, or counts of some of its shards")
        for file in filter(None, (part.rows, part.removed, part.waiting)):
            for segment in file.segments:
                if not part.first_shard <= segment.shard < part.last_shard:
                    raise ValueError(
                        f"{file.name!r} has logical shard {segment.shard}, which another part has"
                    )
        rows = {segment.shard: segment.rows for segment in part.rows.segments}
        counted = dict(zip(range(part.first_shard, part.last_shard), part.live, strict=True))
        if part.kind == FULL and rows != {shard: count for shard, count in counted.items() if count}:
            raise ValueError(f"the part of rank {part.rank} counts other rows than it has")
        return part


@dataclass(frozen=True)
class FilterLayout:
    """Layout of admission's filter; filters of equal layout can be merged, counter by counter.

    Attributes:
      shards: How many filters there are; each covers the keys of equally many neighboring logical shards.
      counters: How many counters each filter has, a byte each.
      hashes: How many of the counters belong to a key.
    """

    shards: int
    counters: int
    hashes: int

    @property
    def width(self) -> int:
        """Number of logical shards that share a filter."""
        return LOGICAL_SHARDS // self.shards

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FilterLayout:
        """Restore from JSON values: the inverse of `dataclasses.asdict`."""
        layout = cls(**value)
        for f in fields(cls):
            whole(getattr(layout, f.name), f"filter: {f.name}", 1)
        if LOGICAL_SHARDS % layout.shards:
            raise ValueError(f"{layout.shards} filters don't divide {LOGICAL_SHARDS} logical shards")
        return layout

    def filters_of(self, shards: range) -> range:
        """Return the numbers of the filters that cover some logical shards."""
        return range(shards.start // self.width, -(-shards.stop // self.width))


@dataclass(frozen=True)
class TableEntry:
    """Manifest entry of one table.

    Attributes:
      dim: Width of a row.
      optimizer: The kind of its optimizer.
      slots: Names of the optimizer's slots, in their order in the column ``slots``.
      slot_floats: The width of that column.
      settings: Settings of optimizer, initializer, admission and table, for the reader's information.
      filter: The layout of admission's filter; None if it has none.
      parts: What each rank saved; together, the parts contain every logical shard once.
    """

    dim: int
    optimizer: str
    slots: tuple[str, ...]
    slot_floats: int
    settings: Mapping[str, Any]
    filter: FilterLayout | None
    parts: tuple[Part, ...]

    @property
    def step(self) -> int:
        """Step of the table."""
        return max(part.step for part in self.parts)

    @property
    def step_times(self) -> tuple[int, ...]:
        """Steps and times, in turn, by which all ranks continue: those of the first rank."""
        return self.parts[0].step_times

    @property
    def size(self) -> int:
        """Number of rows that the table had."""
        return sum(sum(part.live) for part in self.parts)

    @property
    def merged_keys(self) -> MergedKeys | None:
        """How ids map to its keys, if it belonged to a collection and the checkpoint records it."""
        return MergedKeys.from_json(self.settings) if "tables" in self.settings else None

    def live_in(self, shards: range) -> int:
        """Count the rows that the table had in some logical shards."""
        return sum(
            sum(part.live[max(shards.start - part.first_shard, 0) : max(shards.stop - part.first_shard, 0)])
            for part in self.parts
        )

    @property
    def waiting(self) -> int:
        """Number of keys that waited for admission with exact counts."""
        return sum(segment.rows for part in self.parts if part.waiting for segment in part.waiting.segments)

    @property
    def bytes(self) -> int:
        """Number of bytes of the table's files in this checkpoint alone."""
        return sum(file.bytes for part in self.parts for file in part.files)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        value = {f.name: getattr(self, f.name) for f in fields(self)}
        layout = None if self.filter is None else asdict(self.filter)
        parts = [part.to_json() for part in self.parts]
        return {**value, "slots": list(self.slots), "filter": layout, "parts": parts}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableEntry:
        """Restore from JSON values: the inverse of `to_json`."""
        parts = tuple(Part.from_json(part) for part in items(value["parts"], "parts"))
        layout = None if value["filter"] is None else FilterLayout.from_json(value["filter"])
        slots = tuple(text(slot, "a slot") for slot in items(value["slots"], "slots"))
        table = cls(**{**value, "slots": slots, "filter": layout, "parts": parts})
        whole(table.dim, "dim", 1, 2**31 - 1)
        whole(table.slot_floats, "slot_floats", 0, 2**31 - 1)
        text(table.optimizer, "optimizer")
        mapping(table.settings, "settings")
        _ = table.merged_keys
        return table

    def check_whole(self) -> None:
        """Check that the parts contain every logical shard once.

        Raises:
          ValueError: A shard is missing, or in two parts.
        """
        ends = [0, *(part.last_shard for part in self.parts)]
        if [part.first_shard for part in self.parts] != ends[:-1] or ends[-1] != LOGICAL_SHARDS:
            raise ValueError(f"its parts don't have all {LOGICAL_SHARDS} logical shards once, in order")


@dataclass(frozen=True)
class OtherFile:
    """File that doesn't belong to a table, such as one of the dense weights."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Manifest of a checkpoint.

    Attributes:
      id: Unique id of the checkpoint.
      base: The checkpoint that the increments continue: the name of its folder, beside this one; or None.
      base_id: The id of the base.
      world_size: How many ranks saved the checkpoint.
      metadata: The caller's metadata, as JSON values.
      files: Name inside the folder -> file that doesn't belong to a table.
      tables: Name -> table.
    """

    id: str
    base: str | None
    base_id: str | None
    world_size: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, OtherFile] = field(default_factory=dict)
    tables: Mapping[str, TableEntry] = field(default_factory=dict)

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "id": self.id,
            "base": self.base,
            "base_id": self.base_id,
            "logical_shards": LOGICAL_SHARDS,
            "world_size": self.world_size,
            "metadata": dict(self.metadata),
            "files": {name: asdict(file) for name, file in self.files.items()},
            "tables": {name: table.to_json() for name, table in self.tables.items()},
        }

    @property
    def bytes(self) -> int:
        """Number of bytes of all files except the manifest."""
        tables = sum(table.bytes for table in self.tables.values())
        return tables + sum(file.bytes for file in self.files.values())

    def parts(self) -> Iterator[Part]:
        """Iterate over every part of every table."""
        for table in self.tables.values():
            yield from table.parts

    def save(self, folder: Path) -> Path:
        """Write ``manifest.json`` into ``folder`` atomically."""
        body = self._body()
        return write_atomically(folder / FILE_NAME, json.dumps({**body, "digest": _digest(body)}) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
          DataError: The manifest is missing or damaged. Also raised if its digest is right but it names files
            outside its folder, or has values that gmeta doesn't write.
        """
        path = folder / FILE_NAME
        advice = "name the folder of a whole checkpoint"
        try:
            value = parse_json(path.read_bytes())
        except OSError as error:
            raise DataError(f"no checkpoint here: {error.strerror}", path=path, advice=advice) from error
        except ValueError as error:
            raise DataError(f"damaged: {error}", path=path, advice=advice) from error
        if not isinstance(value, dict) or (value.get("format"), value.get("version")) != (FORMAT, VERSION):
            raise DataError(f"not a {FORMAT} manifest of version {VERSION}", path=path, advice=advice)
        try:
            if value.pop("digest", None) != _digest(value):
                raise DataError("damaged: its digest doesn't match its content", path=path, advice=advice)
            return cls._from_json(value)
        except DataError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise DataError(f"not what gmeta writes: {reason}", path=path, advice=advice) from error

    @classmethod
    def _from_json(cls, value: Mapping[str, Any]) -> Manifest:
        base, base_id = value["base"], value["base_id"]
        if whole(value["logical_shards"], "logical_shards") != LOGICAL_SHARDS:
            raise ValueError(f"{value['logical_shards']} logical shards, not {LOGICAL_SHARDS}")
        files = {}
        for name, file in mapping(value["files"], "files").items():
            numbers = {
                key: whole(number, f"{name!r}: {key}") for key, number in mapping(file, f"{name!r}").items()
            }
            files[inner_path(name, "a file")] = OtherFile(**numbers)
        tables = {}
        for name, table in mapping(value["tables"], "tables").items():
            try:
                tables[name] = TableEntry.from_json(table)
                tables[name].check_whole()
            except (TypeError, ValueError) as error:
                raise ValueError(f"table {short(name)}: {error}") from error
        parts = [part for table in tables.values() for part in table.parts]
        for name, count in Counter([*files, *(file.name for part in parts for file in part.files)]).items():
            # A reader stores the positions of a file's batches by the file's name.
            if count > 1:
                raise ValueError(f"{short(name)} is named {count} times; no two parts share a file")
        return cls(
            id=text(value["id"], "id"),
            base=None if base is None else folder_name(base, "base"),
            base_id=None if base_id is None else text(base_id, "base_id"),
            world_size=whole(value["world_size"], "world_size", 1),
            metadata=mapping(value["metadata"], "metadata"),
            files=files,
            tables=tables,
        )


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
