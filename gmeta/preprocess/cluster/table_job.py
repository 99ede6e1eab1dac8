"""A preparation by many workers: the description that each worker reads, and the joining of their parts.

A job's folder, which all workers see, holds

============  ==========================================================================================
job.json      the input and the settings; written first
bounds.tsv    the first rows of the ranges (`gmeta.preprocess.plan.ranges`)
tally.json    how many records were read, and which were bad
counts/       one file per range: how many rows its tasks have
collected/    what mappers collected of the texts (`gmeta.preprocess.plan.texts`)
shards/       the shards and their indexes; they are moved to the data set's folder at the end
============  ==========================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gmeta.core.data_manifest import Shard
from gmeta.core.errors import ConfigError
from gmeta.core.files import restore
from gmeta.core.json_values import FILE_NAME as MANIFEST
from gmeta.core.schema import check_on_bad
from gmeta.preprocess.cluster.table_input import TableInput, Tally, find_table
from gmeta.preprocess.config import PlanConfig, PrepareConfig
from gmeta.preprocess.local.preparation import check_replaceable, describe_plan, holds, summarise
from gmeta.preprocess.plan.outcome import Census, refuse_empty
from gmeta.preprocess.shards.data_set import save_manifest
from gmeta.preprocess.source import BadRecords
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
          ranges: How many ranges; None: one for each `RANGE_BYTES` of the files.
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
          shards: Split -> its shards (`attempts.collect`).
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
