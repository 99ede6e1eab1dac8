"""Prepared data sets as a source: the rows that `gmeta prepare` wrote, group by group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from gmeta.core.data_manifest import Manifest, Shard
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.group_index import Layout
from gmeta.core.json_values import FILE_NAME
from gmeta.core.schema import Column, Roles
from gmeta.core.settings import from_mapping
from gmeta.preprocess.config import Progress
from gmeta.preprocess.plan.normalisation import Fault, normalise
from gmeta.preprocess.shards.data_set import GroupRows, read_groups
from gmeta.preprocess.source import BadRecord, BadRecords, Columns, Reason, arrow_type, row_count
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec
from gmeta.preprocess.tables.table_files import FileDigests

_APPLIED: Mapping[str, Any] = {"values": None, "positive": None, "format": None}
"""The rules of columns that were already applied to a prepared data set."""


@dataclass(frozen=True)
class _File:
    """A shard, and how it is read."""

    path: Path
    shard: Shard
    layout: Layout
    columns: tuple[Column, ...]  # those to read, including the key
    key: tuple[str, str]
    spec: TableSpec  # with the data set's columns as sources, and hashes as the numbers that they are


def is_prepared(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a prepared data set, or a split of one, such as ``clicks/train``."""
    return _folder_of(Path(path)) is not None


def prepared_roles(path: str | os.PathLike[str]) -> Roles:
    """Return the roles of the columns of a prepared data set, or of a split of one.

    Raises:
      DataError: Its manifest can't be read.
    """
    return Manifest.load(_folder_of(Path(path)) or Path(path), check_shards=False).roles


class PreparedSource:
    """The rows of prepared data sets.

    Values that `gmeta prepare` hashed are read unchanged. All other rules of the spec apply as for any table.

    Args:
      data: Data sets' folders, of which all splits are read, or folders followed by the name of a split.
      spec: The columns; columns that it leaves open are read as the first data set was prepared.

    Attributes:
      path: The first of the data.
      files: The shards that are read.
      spec: The columns, as for the table that the data set was prepared from.

    Raises:
      ConfigError: The spec doesn't fit, a column is hashed in only one of spec and data set, there is no such
        split, or data sets were prepared in different ways.
      DataError: A manifest can't be read, or doesn't match its shards.
    """

    def __init__(self, data: Sequence[str | os.PathLike[str]], spec: TableSpec) -> None:
        self.path, self.files, self._rows = Path(data[0]), list[_File](), 0
        for given in map(Path, data):
            folder = _folder_of(given)
            if folder is None:
                raise ConfigError(
                    f"{given} is no prepared data set, and {data[0]} is: append them one by one"
                )
            manifest = Manifest.load(folder)
            own = _resolve(spec, manifest, folder)
            if not self.files:
                self.spec = own
            if replace(own, unused=()) != replace(self.spec, unused=()):
                raise ConfigError(
                    f"{given} was prepared in another way than {data[0]}: append them one by one"
                )
            self.files += _files(manifest, given, folder, own)
        real = Counter(file.path.resolve() for file in self.files)
        if twice := [path for path, times in real.items() if times > 1]:
            raise ConfigError(f"{twice[0]} is given twice: its rows would be too")
        self._digests = FileDigests([file.path for file in self.files])

    def start_digests(self) -> None:
        """Begin to digest the shards, in parallel with other work."""
        self._digests.start()

    def digests(self) -> Mapping[str, str]:
        """Wait for the digests and return them, file name -> SHA-256.

        Raises:
          DataError: A file has changed since reading began.
        """
        return self._digests.wait()

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield the good rows, in parts.

        Raises:
          DataError: An index is damaged, or, unless the rule is to skip bad records, a group is.
        """
        total = sum(file.shard.rows for file in self.files)
        if not total:
            raise DataError("there is no row in it", path=self.path)
        for file in self.files:
            first = 0
            with closing(read_groups(file.path, file.shard, file.layout, file.columns, file.key)) as parts:
                for part in parts:
                    _report_damage(part, file.path, bad)
                    found = normalise(_records(part, file), file.spec)
                    for fault in found.faults:
                        _report(fault, first, file.path, bad)
                    if len(found.rows):
                        yield found.columns
                    first += row_count(part.columns)
                    progress("read", self._rows + first, total)
            self._rows += first


def _folder_of(path: Path) -> Path | None:
    if (path / FILE_NAME).exists():
        return path
    return path.parent if not path.exists() and (path.parent / FILE_NAME).exists() else None


def _resolve(spec: TableSpec, manifest: Manifest, folder: Path) -> TableSpec:
    """Return the spec of the table that was prepared, with this one's settings of its columns."""
    recorded, columns = _recorded(manifest), {}
    for name in spec.columns or recorded:
        given = spec.columns.get(name, ColumnSpec())
        own = recorded.get(_source(name, given, recorded), ColumnSpec())
        columns[name] = own if given == ColumnSpec() else given
        if name in spec.columns and given != ColumnSpec() and given.hash != own.hash:
            said = ("hashed text", "numbers")[:: 1 if given.hash else -1]
            raise ConfigError(f"column {name!r} is {said[0]} in the spec, and {said[1]} in {folder}")
    for name in spec.roles:
        if name in recorded:
            columns.setdefault(name, recorded[name])
    table = {name: manifest.schema[name] for name in recorded}
    for name, column in columns.items():
        if (source := _source(name, column, recorded)) in recorded:
            table[column.source or name] = manifest.schema[source]
    try:
        return replace(spec, columns=columns).resolve(
            pa.schema([(name, arrow_type(column)) for name, column in table.items()])
        )
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error


def _recorded(manifest: Manifest) -> dict[str, ColumnSpec]:
    """Return name -> how `gmeta prepare` read a column of the data set; without the batch."""
    table = manifest.config.get("table") or {}
    own = table.get("columns") or {}
    return {
        column.name: from_mapping(ColumnSpec, own[column.name]) if column.name in own else ColumnSpec()
        for column in manifest.schema
        if column.name != manifest.roles.batch
    }


def _source(name: str, column: ColumnSpec, recorded: Mapping[str, ColumnSpec]) -> str:
    """Return the data set's column for a column of the spec.

    A data set has a table's columns under the names that its own spec gave them.
    """
    source = column.source or name
    same = name in recorded and (recorded[name].source or name) == source
    return name if same or source not in recorded else source


def _files(manifest: Manifest, given: Path, folder: Path, spec: TableSpec) -> Iterator[_File]:
    names = list(manifest.splits) if given == folder else [given.name]
    if names[0] not in manifest.splits:
        raise ConfigError(f"{folder} has no split {names[0]!r}; it has {', '.join(manifest.splits)}")
    recorded, roles = _recorded(manifest), manifest.roles
    sources = {name: _source(name, column, recorded) for name, column in spec.columns.items()}
    own = {
        name: replace(column, source=sources[name], hash=False, default=_number(column), **_APPLIED)
        for name, column in spec.columns.items()
    }
    wanted = dict.fromkeys((roles.task, roles.batch, *sources.values()))
    columns = tuple(manifest.schema[name] for name in wanted if not manifest.schema[name].is_list)
    for name in names:
        for shard in manifest.splits[name].shards:
            if shard.groups:
                reading = replace(spec, columns=own)
                path = folder / shard.name
                yield _File(path, shard, manifest.layout, columns, (roles.task, roles.batch), reading)


def _number(column: ColumnSpec) -> float | None:
    return None if isinstance(column.default, str) else column.default


def _records(part: GroupRows, file: _File) -> pa.RecordBatch:
    names = list(part.columns)
    return pa.RecordBatch.from_arrays([pa.array(part.columns[name]) for name in names], names=names)


def _report_damage(part: GroupRows, path: Path, bad: BadRecords) -> None:
    for damage in part.damage:
        if bad.on_bad == "raise":
            raise DataError(damage.message)
        bad.add(BadRecord(Reason.MALFORMED, damage.message), path, None, damage.rows)


def _report(fault: Fault, first: int, path: Path, bad: BadRecords) -> None:
    shown = fault.rows[: bad.EXAMPLES].tolist()
    for place, row in enumerate(shown):
        rest = len(fault.rows) - len(shown) if place + 1 == len(shown) else 0
        message = f"row {first + row + 1}: {fault.describe(row)}"
        bad.add(BadRecord(fault.reason, message, of_table=True), path, None, 1 + rest)
