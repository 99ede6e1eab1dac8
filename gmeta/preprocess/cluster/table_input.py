"""The table that a job on a cluster reads: its columns and its files, as every worker sees them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.json_values import parse_json
from gmeta.core.schema import Column, OnBad
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.preprocess.cluster.row_text import Refused, TextForm
from gmeta.preprocess.local import duckdb_engine
from gmeta.preprocess.local import duckdb_engine as memory
from gmeta.preprocess.plan.normalisation import normalise
from gmeta.preprocess.plan.outcome import describe_repeated
from gmeta.preprocess.plan.texts import TextCollector, find_titles
from gmeta.preprocess.shape_spec import Shape
from gmeta.preprocess.source import NUMBER, BadRecord, BadRecords, Columns, Reason, single, take
from gmeta.preprocess.table_spec import CsvForm, TableSpec
from gmeta.preprocess.tables.recognition import TableFile
from gmeta.preprocess.tables.table_source import TableSource

# The counts of bad records, kept by each worker and added up; the sum doesn't depend on who read what.
#
# A worker that reads a piece of a file can't determine its position in the file. So examples show the
# records' content, and the first ones in alphabetical order are kept.

_DESCRIBED = (
    1000  # bad records of a part that are described: enough that the cuts seldom affect the kept examples
)


@dataclass
class Tally:
    """The counts of records read and of bad records.

    Attributes:
      rows_read: The number of records read, bad ones included.
      counts: (file's number, reason) -> the number of bad records.
      examples: (file's number, reason) -> messages on the first few.
    """

    rows_read: int = 0
    counts: dict[tuple[int, Reason], int] = field(default_factory=dict)
    examples: dict[tuple[int, Reason], list[str]] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        """The number of bad records."""
        return sum(self.counts.values())

    def add(self, file: int, reason: Reason, messages: Iterable[str], count: int) -> None:
        """Count bad records of a file; ``messages`` describe some of them."""
        key = file, reason
        self.counts[key] = self.counts.get(key, 0) + count
        self.examples[key] = sorted({*self.examples.get(key, ()), *messages})[: BadRecords.EXAMPLES]

    def add_refused(self, file: int, lines: Sequence[Refused]) -> None:
        """Count lines that aren't records."""
        self.rows_read += len(lines)
        for line in lines:
            self.add(file, line.reason, [line.message], 1)

    def add_repeated(self, rows: Columns, spec: TableSpec) -> None:
        """Count rows whose key an earlier row of the task has; `NUMBER` holds each row's file."""
        files = single(rows, NUMBER)
        for file in np.unique(files).tolist():
            own = np.flatnonzero(files == file)
            messages = (message for _, message in describe_repeated(take(rows, own[:_DESCRIBED]), spec))
            self.add(file, Reason.REPEATED_KEY, messages, len(own))

    def merge(self, other: Tally) -> None:
        """Add another worker's tally."""
        self.rows_read += other.rows_read
        for key, count in other.counts.items():
            self.add(*key, other.examples[key], count)

    def to_json(self) -> str:
        """Encode the tally as one line of JSON."""
        kinds = [
            [file, reason.name, count, self.examples[file, reason]]
            for (file, reason), count in sorted(
                self.counts.items(), key=lambda one: (one[0][0], one[0][1].name)
            )
        ]
        return json.dumps([self.rows_read, kinds])

    @classmethod
    def from_json(cls, text: str) -> Tally:
        """Decode what `to_json` encoded."""
        rows_read, kinds = json.loads(text)
        found = cls(rows_read)
        for file, reason, count, examples in kinds:
            found.add(file, Reason[reason], examples, count)
        return found

    def report(self, bad: BadRecords, path_of: Callable[[int], Path]) -> None:
        """Apply the rule for bad records to the tally.

        Args:
          bad: The rule; it counts the records, or raises at the first one.
          path_of: A file's number -> the file.

        Raises:
          DataError: The rule is ``"raise"``, and there is a bad record.
        """
        for (file, reason), count in sorted(self.counts.items(), key=lambda one: (one[0][0], one[0][1].name)):
            examples = self.examples[file, reason]
            for place, message in enumerate(examples):
                rest = count - len(examples) if place + 1 == len(examples) else 0
                bad.add(BadRecord(reason, message, of_table=True), path_of(file), None, 1 + rest)


def good_rows(
    batch: pa.RecordBatch, spec: TableSpec, file: int, tally: Tally, texts: TextCollector | None = None
) -> Columns | None:
    """Return the good rows of some records, or None if there are none, and count the bad records.

    Args:
      batch: Records.
      spec: The columns, as `TableSpec.resolve` decided them.
      file: The number of the records' file.
      tally: Counts all records.
      texts: Collects the texts of the good rows.
    """
    tally.rows_read += batch.num_rows
    if not batch.num_rows:
        return None
    found = normalise(batch, spec)
    if texts is not None:
        texts.add(batch, found)
    for fault in found.faults:
        messages = {fault.describe(row) for row in fault.rows[:_DESCRIBED].tolist()}
        tally.add(file, fault.reason, messages, len(fault.rows))
    return found.columns if len(found.rows) else None


_FILE = "job.json"
J = TypeVar("J", bound="TableInput")


@dataclass(frozen=True)
class InputFile:
    """A file of the table; ``form`` is None if it isn't text."""

    path: str
    form: TextForm | None = None


@dataclass(frozen=True)
class TableInput:
    """The facts about a table that workers need.

    Attributes:
      name: The table's name in the summary.
      spec: The columns, as `TableSpec.resolve` decided them.
      on_bad: The rule for bad records.
      files: The table's files; tallies refer to a file by its number in this tuple.
    """

    name: str
    spec: TableSpec
    on_bad: OnBad
    files: tuple[InputFile, ...]

    def texts(self) -> TextCollector:
        """Return a collector of the table's texts."""
        return TextCollector(self.spec, find_titles(self.spec))

    def columns(self, *added: str) -> list[Column]:
        """Return the columns of rows that move between workers, followed by the added ones."""
        own = [Column(name, c.dtype or "int64", bool(c.is_list)) for name, c in self.spec.columns.items()]
        return [*own, *map(Column, added)]

    def path_of(self, file: int) -> Path:
        """Return the path of the file with this number."""
        return Path(self.files[file].path)

    def file_of(self, uri: str | None) -> int:
        """Return the number of the file that a cluster names ``uri``, by the longest common path end."""
        if uri is None:
            return 0
        parts = PurePosixPath(unquote(uri)).parts[::-1]

        def alike(number: int) -> int:
            own = PurePosixPath(self.files[number].path).parts[::-1]
            return next(
                (place for place, (a, b) in enumerate(zip(own, parts, strict=False)) if a != b), len(own)
            )

        return max(range(len(self.files)), key=alike)

    def check_rows(self, rows: int, tally: Tally) -> None:
        """Raise an error if bad records are refused, or if good rows are missing.

        Args:
          rows: The number of rows that arrived where they are written.
          tally: The tally of all records.

        Raises:
          DataError: A record is bad and the rule is ``"raise"``, or there is no record.
          GmetaError: Rows were lost.
        """
        tally.report(BadRecords(self.on_bad), self.path_of)
        if rows + tally.bad != tally.rows_read:
            raise GmetaError(
                f"{tally.rows_read} records were read, {tally.bad} of them bad, but {rows} rows were "
                "sorted: the input changed meanwhile, or a job before this one hasn't ended; run it again"
            )
        if not tally.rows_read:
            raise DataError("there is no row in it", path=self.path_of(0))

    def save(self, folder: Path) -> None:
        """Write ``job.json``."""
        (folder / _FILE).write_text(json.dumps(to_mapping(self), indent=1) + "\n")

    @classmethod
    def load(cls: type[J], folder: Path) -> J:
        """Read ``job.json``.

        Raises:
          DataError: The file doesn't exist, is of another job, or was written by another version of gmeta.
        """
        path = folder / _FILE
        try:
            return from_mapping(cls, parse_json(path.read_text()), where=str(path))
        except (OSError, ValueError) as error:
            raise DataError(
                f"no description of a job: {error}", path=path, advice="make one first"
            ) from error


class FoundTable(NamedTuple):
    """A table, before anything is decided about its rows.

    Attributes:
      name: Its name in summaries.
      spec: The columns, as `TableSpec.resolve` decided them.
      files: Its files.
      inputs: The file's name -> its SHA-256, or its size and time where only the cluster can read it.
      bytes: The size of all files; 0 where only the cluster can read them.
    """

    name: str
    spec: TableSpec
    files: tuple[InputFile, ...]
    inputs: Mapping[str, str]
    bytes: int = 0


def find_table(data: Sequence[str | os.PathLike[str]], spec: TableSpec) -> FoundTable:
    """Find a table's files on this machine, and decide what its spec leaves open.

    Args:
      data: Files, folders and patterns (`table_files.find_files`).
      spec: The description of the columns; the first file decides its open settings.

    Raises:
      ConfigError: The spec doesn't fit.
      DataError: A file can't be read.
    """
    refuse_shape(spec)
    with closing(duckdb_engine.connect(memory.default_limit())) as connection:
        source = TableSource(data, spec, connection)
        return FoundTable(
            source.name,
            source.spec,
            tuple(InputFile(str(file.path), _form(file)) for file in source.files),
            source.digests(),
            sum(file.path.stat().st_size for file in source.files),
        )


def refuse_shape(spec: TableSpec) -> None:
    """Refuse settings that only a preparation on one machine supports.

    Raises:
      ConfigError: The spec has a shape, or titles in a column that it doesn't store.
    """
    stored = {column.source or name for name, column in spec.columns.items()} | {*spec.roles}
    if unread := [] if spec.is_open else [one for one in (spec.titles or {}).values() if one not in stored]:
        raise ConfigError(
            f"title {unread[0]!r}: Spark and Hadoop Streaming read only columns that are stored: store it "
            "too, or use --engine duckdb"
        )
    if spec.shape != Shape():
        raise ConfigError(
            f"{', '.join(spec.shape.to_json())}: Spark and Hadoop Streaming don't join, explode or "
            "filter rows: use --engine duckdb, or do it in a job before"
        )


def _form(file: TableFile) -> TextForm | None:
    if file.format == "parquet":
        return None
    if file.copy is not None:
        raise ConfigError(
            f"{file.path}: Spark and Hadoop Streaming read UTF-8 text with a record a line: use "
            "--engine duckdb, or rewrite the file as JSON lines or CSV"
        )
    return TextForm("json") if file.format == "json" else text_form(file.form, file.names, file.path)


def text_form(form: CsvForm, names: Sequence[str], path: Path | str) -> TextForm:
    """Return the form of a file of separated fields, as workers read it.

    Raises:
      ConfigError: Workers don't read files of this form.
    """
    delimiter = form.delimiter or ","
    if len(delimiter) > 1 or form.escape:
        what = f"the delimiter {delimiter!r}" if len(delimiter) > 1 else "escaped quotes"
        raise ConfigError(f"{path}: Spark and Hadoop Streaming don't read {what}: use --engine duckdb")
    return TextForm("csv", tuple(names), delimiter, form.quote, form.header, form.null)
