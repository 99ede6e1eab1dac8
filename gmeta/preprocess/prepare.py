"""From a folder of raw MovieLens files to a prepared data set, whole or not at all."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.manifest import FILE_NAME as MANIFEST
from gmeta.core.manifest import Manifest
from gmeta.core.on_bad import check_on_bad
from gmeta.preprocess import local_engine, movielens, synthetic
from gmeta.preprocess.bad_records import BadRecords
from gmeta.preprocess.config import PrepareConfig
from gmeta.preprocess.local_engine import LocalResult, Progress, no_progress
from gmeta.preprocess.movielens import ML_100K, MovieLens
from gmeta.preprocess.plan import PLAN_VERSION, SCHEMA, split_of
from gmeta.preprocess.raw_file import RawFile
from gmeta.preprocess.shard_files import SPLITS, write_splits
from gmeta.preprocess.staging import staged_folder
from gmeta.preprocess.summary import BadKind, LeftOut, PrepareSummary, SplitCount, count_sizes

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
        name = "synthetic"
        source = movielens.load(ML_100K, lambda file: RawFile(out / RAW_FOLDER / file, raw[file]), bad)
    else:
        source = movielens.open_folder(data, bad)
        name = source.layout.name
    plan = {
        "plan": PLAN_VERSION,
        "source": name,
        "inputs": source.digests,
        "on_bad": bad.on_bad,
        **asdict(config),
    }
    if not overwrite and _holds(out, plan):
        return PrepareSummary.load(out)
    _check_replaceable(out)

    with staged_folder(out) as folder:
        result = local_engine.run(source, config, bad, progress)
        tasks = _count_tasks(result, source, config)
        splits = write_splits(folder, result.batches, source, config, progress)
        summary = PrepareSummary(
            out=out,
            source=name,
            ratings_file=source.ratings.path.name,
            rows_read=result.rows_read,
            splits={key: SplitCount(tasks[key], split.groups, split.rows) for key, split in splits.items()},
            left_out=tuple(LeftOut(why, rows, count) for why, (rows, count) in result.left_out.items()),
            bad=tuple(
                BadKind(file, reason.value, count, tuple(bad.examples[file, reason]))
                for (file, reason), count in bad.counts.items()
            ),
            task_sizes=count_sizes(result.task_sizes),
        )
        if raw:
            synthetic.write(folder / RAW_FOLDER, raw)
        summary.save(folder)
        Manifest(SCHEMA, splits, plan, summary.dropped).save(folder)
    return replace(summary, seconds=time.perf_counter() - started)


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


def _count_tasks(result: LocalResult, source: MovieLens, config: PrepareConfig) -> Counter[str]:
    """Split -> tasks in it; refuses a split without any."""
    tasks = Counter(split_of(batch.task, config) for batch in result.batches if batch.batch_id == 0)
    empty = [split for split in SPLITS if not tasks[split]]
    if empty:
        reasons = [f"{count} left out: {why}" for why, (_, count) in result.left_out.items()]
        raise DataError(
            f"of {len(result.task_sizes)} tasks none is left for {' and '.join(empty)}"
            + (f" ({'; '.join(reasons)})" if reasons else ""),
            path=source.ratings.path,
            advice="choose other bounds with --min-ratings, --max-ratings or --cold-modulus",
        )
    return tasks
