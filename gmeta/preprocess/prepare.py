"""From raw files to a prepared data set, whole or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.manifest import FILE_NAME as MANIFEST
from gmeta.core.manifest import Manifest
from gmeta.core.on_bad import OnBad, check_on_bad
from gmeta.preprocess import memory_engine, movielens, synthetic
from gmeta.preprocess.bad_records import BadRecords
from gmeta.preprocess.config import PlanConfig, PrepareConfig
from gmeta.preprocess.engine import EngineResult
from gmeta.preprocess.movielens import ML_100K
from gmeta.preprocess.movielens_source import MovieLensSource
from gmeta.preprocess.plan import PLAN_VERSION
from gmeta.preprocess.progress import Progress, no_progress
from gmeta.preprocess.raw_file import RawFile
from gmeta.preprocess.shard_files import save_manifest
from gmeta.preprocess.source import Source
from gmeta.preprocess.staging import staged_folder
from gmeta.preprocess.summary import BadKind, LeftOut, PrepareSummary, SplitCount
from gmeta.preprocess.table_spec import TableSpec

RAW_FOLDER = "raw"


def prepare(
    data: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    config: PrepareConfig | None = None,
    on_bad: str = "raise",
    *,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> PrepareSummary:
    """Prepare a data set: map, sort, reduce, permute, and write shards and a manifest.

    The folder ``out`` then holds ``warm-*.tfrecord``, ``cold-*.tfrecord``, ``manifest.json`` and
    ``summary.json``, and, if no ``data`` were given, the synthetic raw files in ``raw/``. Everything is
    written beside ``out`` and renamed at the end, so an interrupted run leaves nothing under that name. The
    same input, settings and rule give the same bytes, whatever the order of the ratings file's lines.

    A folder that is there already is

    * used as it is, if its manifest names the same input (by SHA-256), settings and rule;
    * refused, if it holds anything else, unless ``overwrite`` is set;
    * never overwritten, if it holds files but no manifest: it isn't a prepared data set.

    Args:
      data: A folder in MovieLens-100K's or -1M's layout. None generates a synthetic one, from
        ``config.seed``.
      out: The folder to make.
      config: The plan's settings; `PrepareConfig`'s defaults if None.
      on_bad: ``"raise"`` ends the run at the first bad record, ``"skip"`` counts each and leaves it out. A
        missing or an empty file, or a folder of another layout, ends the run under either rule.
      overwrite: Replace a prepared data set that differs.
      progress: Is told of the stages ``"read"`` and ``"write"``.

    Returns:
      What was read, kept and left out.

    Raises:
      ConfigError: A setting is out of range.
      DataError: The folder isn't MovieLens', a record is bad, or a split has no task left.
      GmetaError: ``out`` holds something else, or can't be written.

    Example:
      >>> summary = prepare(Path("ml-100k"), Path("data"))  # doctest: +SKIP
      >>> summary.splits["warm"].tasks, summary.splits["cold"].tasks  # doctest: +SKIP
      (461, 121)
    """
    started = time.perf_counter()
    data, out = None if data is None else Path(data), Path(out)
    config, bad = config or PrepareConfig(), BadRecords(check_on_bad(on_bad))
    raw = synthetic.files(synthetic.SyntheticConfig(seed=config.seed)) if data is None else {}
    if data is None:
        folder = movielens.load(ML_100K, lambda file: RawFile(out / RAW_FOLDER / file, raw[file]), bad)
        source: Source = MovieLensSource(folder, "synthetic")
    else:
        source = MovieLensSource(movielens.open_folder(data, bad))
    settings = config.resolve(source.defaults)
    plan = describe_plan(source.name, source.spec, settings, bad.on_bad, source.digests())
    if not overwrite and _holds(out, plan):
        return PrepareSummary.load(out)
    _check_replaceable(out)

    with staged_folder(out) as staging:
        result = memory_engine.run(source, settings, bad, progress, staging)
        summary = summarise(out, source, settings, result, bad)
        if raw:
            synthetic.write(staging / RAW_FOLDER, raw)
        save_manifest(staging, source.spec.schema, result.shards, settings, plan, summary)
    return replace(summary, seconds=time.perf_counter() - started)


def describe_plan(
    name: str, spec: TableSpec, config: PlanConfig, on_bad: OnBad, inputs: Mapping[str, str]
) -> dict[str, Any]:
    """What the manifest keeps of a run's settings; equal ones, on equal input, make equal data sets.

    Args:
      name: What was read, in words.
      spec: The columns, decided.
      config: The settings.
      on_bad: The rule for bad records.
      inputs: File name -> SHA-256, or whatever else tells one version of the input from another.
    """
    return {
        "plan": PLAN_VERSION,
        "source": name,
        "inputs": dict(inputs),
        "on_bad": on_bad,
        "table": spec.to_json(),
        **asdict(config),
    }


def summarise(
    out: Path, source: Source, config: PlanConfig, result: EngineResult, bad: BadRecords
) -> PrepareSummary:
    """The account of a run."""
    return PrepareSummary(
        out=out,
        source=source.name,
        rows_read=result.rows_read,
        splits={
            name: SplitCount(
                result.tasks[name], sum(shard.groups for shard in shards), sum(shard.rows for shard in shards)
            )
            for name, shards in result.shards.items()
        },
        left_out=tuple(LeftOut(why, rows, tasks) for why, (rows, tasks) in result.left_out.items()),
        bad=tuple(
            BadKind(file, reason.value, count, tuple(bad.examples[file, reason]), source.holds_rows(file))
            for (file, reason), count in bad.counts.items()
        ),
        task_sizes=result.task_sizes,
        min_rows=config.min_rows,
        max_rows=config.max_rows,
    )


def _holds(out: Path, plan: Mapping[str, Any]) -> bool:
    """Whether ``out`` is a whole data set made by ``plan``; refuses one damaged or made by another."""
    if not (out / MANIFEST).exists():
        return False
    try:
        there = Manifest.load(out).config
    except DataError as error:
        raise GmetaError(f"{error}, with --overwrite") from error
    if there == plan:
        return True
    differences = [
        "other input files" if key == "inputs" else f"{key} {there.get(key)} there, {value} asked for"
        for key, value in plan.items()
        if there.get(key) != value
    ]
    raise GmetaError(
        f"{out} was prepared otherwise ({', '.join(differences)}): "
        "add --overwrite to replace it, or name another folder"
    )


def _check_replaceable(out: Path) -> None:
    """Refuse to replace anything but nothing, an empty folder, or a prepared data set."""
    if out.exists() and not out.is_dir():
        raise GmetaError(f"{out} is a file: name a folder")
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).exists():
        raise GmetaError(
            f"{out} holds files but no {MANIFEST}: it isn't a prepared data set, so it won't be replaced; "
            "name another folder"
        )
