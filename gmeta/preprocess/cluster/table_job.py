"""A preparation by many workers: the description that each worker reads, and the joining of their parts.

A job's folder, which all workers see, holds

============  ==========================================================================================
job.json      what is prepared, and how; written first
bounds.tsv    the first rows of the ranges (`gmeta.preprocess.plan.ranges`)
tally.json    how many records were read, and which were bad
counts/       one file per range: how many rows its tasks have
shards/       the shards and their indexes; they are moved to the data set's folder at the end
============  ==========================================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from gmeta.core.data.manifest import Shard
from gmeta.core.data.manifest_file import FILE_NAME as MANIFEST
from gmeta.core.data.on_bad import OnBad, check_on_bad
from gmeta.core.data.schema import Column
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.core.staging import restore
from gmeta.preprocess.bad_records import BadRecords
from gmeta.preprocess.cluster.tally import Tally
from gmeta.preprocess.cluster.text_records import TextForm
from gmeta.preprocess.config import PlanConfig, PrepareConfig
from gmeta.preprocess.local import duckdb_engine, memory
from gmeta.preprocess.local.preparation import check_replaceable, describe_plan, holds, summarise
from gmeta.preprocess.plan.census import Census
from gmeta.preprocess.plan.outcome import refuse_empty
from gmeta.preprocess.shards.data_set import save_manifest
from gmeta.preprocess.summary import PrepareSummary
from gmeta.preprocess.table_spec import TableSpec
from gmeta.preprocess.tables.table_files import TableFile, csv_delimiter, csv_names
from gmeta.preprocess.tables.table_source import TableSource

RANGE_BYTES = 64 << 20
"""The bytes of input in a range; a worker's memory holds a few times as much."""

_FILE = "job.json"


@dataclass(frozen=True)
class InputFile:
    """A file of the table; ``form`` is None if it isn't text."""

    path: str
    form: TextForm | None = None


@dataclass(frozen=True)
class TableJob:
    """The description of a preparation: its input, its settings and its output.

    Attributes:
      out: The data set's folder.
      name: The table's name in the summary.
      spec: The columns, as `TableSpec.resolve` decided them.
      config: The settings.
      on_bad: The rule for bad records.
      plan: The part of the settings that the manifest keeps (`describe_plan`).
      files: The table's files; tallies refer to a file by its number in this tuple.
      ranges: The number of ranges that the rows are cut into.
      overwrite: Whether to replace a data set that was prepared with other settings or input.
    """

    out: str
    name: str
    spec: TableSpec
    config: PlanConfig
    on_bad: OnBad
    plan: Mapping[str, Any]
    files: tuple[InputFile, ...]
    ranges: int = 1
    overwrite: bool = False

    @classmethod
    def of_files(
        cls,
        data: Sequence[str | os.PathLike[str]],
        out: Path,
        spec: TableSpec,
        config: PrepareConfig,
        on_bad: str,
        *,
        ranges: int | None = None,
        overwrite: bool = False,
        stamp: str | None = None,
    ) -> TableJob:
        """Make the job that prepares some files as `prepare` would.

        Args:
          data: Files, folders and patterns (`table_files.find_files`).
          out: The data set's folder.
          spec: The description of the columns; the first file decides what it leaves open.
          config: The settings.
          on_bad: The rule for bad records.
          ranges: How many ranges; None: one for each `RANGE_BYTES` of the files.
          overwrite: Whether to replace a data set that was prepared with other settings or input.
          stamp: A text by which the manifest identifies the input, in place of the files' digests.

        Raises:
          ConfigError: A setting is out of range, or the spec doesn't fit.
          DataError: A file can't be read.
        """
        rule = check_on_bad(on_bad)
        if ranges is not None and not 1 <= ranges <= 999_999:
            raise ConfigError(f"ranges must be in 1..999999, got {ranges}")
        with closing(duckdb_engine.connect(memory.default_limit())) as connection:
            source = TableSource(data, spec, connection)
            settings = config.resolve(source.defaults)
            size = sum(file.path.stat().st_size for file in source.files)
            inputs = source.digests() if stamp is None else {source.name: stamp}
        return cls(
            out=str(out),
            name=source.name,
            spec=source.spec,
            config=settings,
            on_bad=rule,
            plan=describe_plan(source.name, source.spec, settings, rule, inputs),
            files=tuple(InputFile(str(f.path), _form(f, source.spec)) for f in source.files),
            ranges=ranges or -(-size // RANGE_BYTES),
            overwrite=overwrite,
        )

    def columns(self, *added: str) -> list[Column]:
        """Return the columns of rows that move between workers, followed by the added ones."""
        own = [Column(name, c.dtype or "int64", bool(c.is_list)) for name, c in self.spec.columns.items()]
        return [*own, *map(Column, added)]

    def path_of(self, file: int) -> Path:
        """Return the path of the file with this number."""
        return Path(self.files[file].path)

    def file_of(self, uri: str | None) -> int:
        """Return the number of the file that a cluster names ``uri``: the longest common path end decides."""
        if uri is None:
            return 0
        parts = PurePosixPath(unquote(uri)).parts[::-1]

        def alike(number: int) -> int:
            own = PurePosixPath(self.files[number].path).parts[::-1]
            return next(
                (place for place, (a, b) in enumerate(zip(own, parts, strict=False)) if a != b), len(own)
            )

        return max(range(len(self.files)), key=alike)

    def save(self, folder: Path) -> None:
        """Write ``job.json``."""
        (folder / _FILE).write_text(json.dumps(to_mapping(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> TableJob:
        """Read ``job.json``.

        Raises:
          DataError: The file doesn't exist, or another version of gmeta wrote it.
        """
        path = folder / _FILE
        try:
            return from_mapping(cls, json.loads(path.read_text()), where=str(path))
        except (OSError, ValueError) as error:
            raise DataError(
                f"no description of a job: {error}", path=path, advice="make one first"
            ) from error

    def is_done(self) -> bool:
        """Return whether the data set already exists, made by this plan.

        Raises:
          GmetaError: The folder holds something else that may not be replaced.
        """
        out = Path(self.out)
        restore(out)
        if not self.overwrite and (out / MANIFEST).exists() and holds(out, self.plan):
            return True
        check_replaceable(out)
        return False

    def finish(
        self, folder: Path, shards: Mapping[str, Sequence[Shard]], census: Census, tally: Tally
    ) -> PrepareSummary:
        """Write the summary and, last, the manifest.

        Args:
          folder: The folder of the shards.
          shards: Split -> its shards (`attempts.collect`).
          census: The census of all good rows.
          tally: The tally of all records, repeated keys included.
        """
        bad = BadRecords(self.on_bad)
        tally.report(bad, self.path_of)
        result = census.result(shards, tally.rows_read)
        summary = summarise(Path(self.out), _Named(self.name), self.spec, self.config, result, bad)
        save_manifest(folder, self.spec.schema, shards, self.config, self.plan, summary)
        return summary

    def check(self, census: Census, tally: Tally) -> None:
        """Raise an error if the job can't be finished.

        Raises:
          DataError: A record is bad and the rule is ``"raise"``, rows were lost, or a split would have no
            task.
        """
        tally.report(BadRecords(self.on_bad), self.path_of)
        if census.rows + tally.bad != tally.rows_read:
            raise GmetaError(
                f"{tally.rows_read} records were read, {tally.bad} of them bad, but {census.rows} rows were "
                "sorted: the input changed meanwhile, or a job before this one hasn't ended; run it again"
            )
        if not tally.rows_read:
            raise DataError("there is no row in it", path=self.path_of(0))
        kept = {split: tasks for split, (tasks, _, _) in census.of_splits().items()}
        refuse_empty(kept, census.tasks, census.left_out, self.path_of(0))


@dataclass(frozen=True)
class _Named:
    name: str

    def holds_rows(self, file: str) -> bool:
        return True


def _form(file: TableFile, spec: TableSpec) -> TextForm | None:
    if not file.is_text:
        return None
    if file.format == "json":
        return TextForm("json")
    names = tuple(csv_names(file.path, spec.csv))
    return TextForm("csv", names, csv_delimiter(file.path, spec.csv), spec.csv.quote, spec.csv.header)
