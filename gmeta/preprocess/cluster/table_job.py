"""A preparation by many workers: its description, the shards that each writes, and how they are joined.

A job's folder, which all workers see, holds

============  ==========================================================================================
job.json      the input and the settings; written first
bounds.tsv    the first rows of the ranges (`gmeta.preprocess.plan.ranges`)
tally.json    how many records were read, and which were bad
counts/       one file per range: how many rows its tasks have
collected/    the texts that mappers collected (`gmeta.preprocess.plan.texts`)
shards/       the shards and their indexes; they are moved to the data set's folder at the end
============  ==========================================================================================

Workers may be killed, repeated, or run twice at once. Each attempt at a shard writes into a separate folder
(`write_attempt`). Once the shard and its index are whole and on the disk, it renames them to their final
names. A later attempt replaces files by equal files, so it doesn't matter which attempt a scheduler accepts.
Killed attempts leave only their folders, which are removed at the end of the job.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core.data_manifest import Shard
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import restore, write_atomically
from gmeta.core.group_index import GroupIndex, index_path
from gmeta.core.json_values import FILE_NAME as MANIFEST
from gmeta.core.schema import Schema, check_on_bad
from gmeta.preprocess.cluster.table_input import TableInput, Tally, find_table
from gmeta.preprocess.config import PlanConfig, PrepareConfig
from gmeta.preprocess.local.preparation import check_replaceable, describe_plan, holds, summarise
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.outcome import Census, refuse_empty
from gmeta.preprocess.shards.data_set import save_manifest, shard_name, write_shard
from gmeta.preprocess.source import BadRecords, Columns, join_rows, part, row_count, single
from gmeta.preprocess.summary import PrepareSummary
from gmeta.preprocess.table_spec import TableSpec

RANGE_BYTES = 64 << 20
"""The bytes of input in a range; a worker's memory holds a few times as much."""


@dataclass(frozen=True)
class TableJob(TableInput):
    """The description of a preparation: its input, its settings and its output.

    Attributes:
      out: The data set's folder.
      config: The settings.
      plan: The part of the settings that the manifest keeps (`describe_plan`).
      ranges: The number of ranges that the rows are cut into.
      overwrite: Whether to replace a data set that was prepared with other settings or input.
    """

    out: str
    config: PlanConfig
    plan: Mapping[str, Any]
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
    ) -> TableJob:
        """Make the job that prepares some files as `prepare` would.

        Args:
          data: Files, folders and patterns (`table_files.find_files`).
          out: The data set's folder.
          spec: The description of the columns; the first file decides its open settings.
          config: The settings.
          on_bad: The rule for bad records.
          ranges: The number of ranges; None: one for each `RANGE_BYTES` of the files.
          overwrite: Whether to replace a data set that was prepared with other settings or input.

        Raises:
          ConfigError: A setting is out of range, or the spec doesn't fit.
          DataError: A file can't be read.
        """
        rule = check_on_bad(on_bad)
        if ranges is not None and not 1 <= ranges <= 999_999:
            raise ConfigError(f"ranges must be in 1..999999, got {ranges}")
        table, settings = find_table(data, spec), config.resolve(PlanConfig())
        return cls(
            out=str(out),
            name=table.name,
            spec=table.spec,
            config=settings,
            on_bad=rule,
            plan=describe_plan(table.name, table.spec, settings, rule, table.inputs),
            files=table.files,
            ranges=ranges or -(-table.bytes // RANGE_BYTES),
            overwrite=overwrite,
        )

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
        self,
        folder: Path,
        shards: Mapping[str, Sequence[Shard]],
        census: Census,
        tally: Tally,
        collected: Path,
    ) -> PrepareSummary:
        """Write the texts, the summary and, last, the manifest.

        Args:
          folder: The folder of the shards.
          shards: Split -> its shards (`collect`).
          census: The census of all good rows.
          tally: The tally of all records, repeated keys included.
          collected: The folder of the texts that workers collected.
        """
        texts = self.texts()
        texts.load(collected)
        spec = replace(self.spec, notes=(*self.spec.notes, *texts.write(folder)))
        bad = BadRecords(self.on_bad)
        tally.report(bad, self.path_of)
        result = census.result(shards, tally.rows_read)
        summary = summarise(Path(self.out), _Named(self.name), spec, self.config, result, bad)
        save_manifest(folder, self.spec.schema, shards, self.config, self.plan, summary)
        return summary

    def check(self, census: Census, tally: Tally) -> None:
        """Raise an error if the job can't be finished.

        Raises:
          DataError: A record is bad and the rule is ``"raise"``, rows were lost, or a split would have no
            task.
        """
        self.check_rows(census.rows, tally)
        kept = {split: tasks for split, (tasks, _, _) in census.of_splits().items()}
        refuse_empty(kept, census.tasks, census.left_out, self.path_of(0))


@dataclass(frozen=True)
class _Named:
    name: str

    def holds_rows(self, file: str) -> bool:
        return True


ATTEMPTS = "_attempts"
"""The folder of the attempts' folders, in the folder that they write to."""


def place_name(place: int, config: PlanConfig) -> str:
    """Return the name of the shard at ``split * shards + shard``."""
    return shard_name(plan.splits(config)[place // config.shards], place % config.shards, config.shards)


def write_attempt(
    folder: Path, place: int, schema: Schema, config: PlanConfig, parts: Iterable[Columns], attempt: str
) -> Shard:
    """Write a shard and its index, safely while other attempts write the same shard.

    Args:
      folder: The folder of all shards, the same for every worker.
      place: ``split * shards + shard``.
      schema: The columns.
      config: The settings.
      parts: The shard's rows in order, cut into parts anywhere.
      attempt: A name of the attempt for people who look into the folder; it needn't be unique.

    Returns:
      The shard's entry in the manifest.

    Raises:
      DataError: A batch is too large for a record.
      OSError: The file can't be written.
    """
    with own_folder(folder, attempt) as own:
        path = own / place_name(place, config)
        shard = write_shard(path, schema, config.layout, whole_batches(parts, schema), config.codec)
        # The index goes last: `collect` treats a shard as written once its index exists.
        path.replace(folder / path.name)
        index_path(path).replace(index_path(folder / path.name))
    return shard


def write_note(path: Path, text: str, attempt: str) -> None:
    """Write a small file, safely while other attempts write the same content."""
    with own_folder(path.parent, attempt) as own:
        write_atomically(own / path.name, text).replace(path)


@contextmanager
def own_folder(folder: Path, attempt: str) -> Iterator[Path]:
    """Make a folder for an attempt to write in, below the job's, and remove it at the end.

    Raises:
      OSError: The job's folder no longer exists: the job has ended.
    """
    own = folder / ATTEMPTS / f"{attempt}-{uuid.uuid4().hex}"
    own.parent.mkdir(exist_ok=True)
    own.mkdir()
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def whole_batches(parts: Iterable[Columns], schema: Schema) -> Iterator[Columns]:
    """Yield the rows of ``parts``, cut only where a batch ends."""
    held: list[Columns] = []
    for rows in parts:
        if not row_count(rows):
            continue
        rows = {column.name: rows[column.name] for column in schema}
        task, batch = single(rows, schema.task), single(rows, schema.batch)
        if held and (single(held[0], schema.task)[0], single(held[0], schema.batch)[0]) != (
            task[0],
            batch[0],
        ):
            yield join_rows(held)
            held = []
        changes = np.flatnonzero((task[1:] != task[:-1]) | (batch[1:] != batch[:-1]))
        cut = int(changes[-1]) + 1 if len(changes) else 0
        if cut:
            yield join_rows([*held, part(rows, 0, cut)])
            held = []
        held.append(part(rows, cut, row_count(rows)))
    if held:
        yield join_rows(held)


def collect(
    folder: Path, schema: Schema, config: PlanConfig, expected: Mapping[str, tuple[int, int, int]]
) -> dict[str, list[Shard]]:
    """Return all shards of a job whose workers have ended, and write the shards that received no rows.

    Args:
      folder: The folder of the shards.
      schema: The columns.
      config: The settings.
      expected: Split -> (tasks, groups, rows) that it must hold.

    Raises:
      DataError: A shard is missing, a shard doesn't match its index, or rows are missing or duplicated.
    """
    shutil.rmtree(folder / ATTEMPTS, ignore_errors=True)
    found: dict[str, list[Shard]] = {}
    for number, split in enumerate(plan.splits(config)):
        places = range(number * config.shards, (number + 1) * config.shards)
        written = {place: _shard(folder / place_name(place, config), config) for place in places}
        missing = [place for place, shard in written.items() if shard is None]
        there = [shard for shard in written.values() if shard is not None]
        rows, groups = sum(shard.rows for shard in there), sum(shard.groups for shard in there)
        if (groups, rows) != expected[split][1:]:
            names = ", ".join(place_name(place, config) for place in missing)
            raise DataError(
                f"{split} has {rows} rows in {groups} groups, {expected[split][2]} in {expected[split][1]} "
                "were cut" + (f"; these shards aren't there: {names}" if names else ""),
                path=folder,
                advice="run the job that writes the shards again",
            )
        empty = {place: write_attempt(folder, place, schema, config, (), "empty") for place in missing}
        found[split] = [written[place] or empty[place] for place in places]
    return found


def _shard(path: Path, config: PlanConfig) -> Shard | None:
    """Return the shard that was written at ``path``, or None."""
    if not index_path(path).exists():
        return None
    index = GroupIndex.load(path)
    if index.layout != config.layout:
        raise DataError(f"layout {index.layout}, {config.layout} is requested", path=path)
    return Shard(path.name, len(index.groups), index.rows, index.shard_bytes, index.checksum)
