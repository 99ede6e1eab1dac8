"""The preparation of a data set from raw files, completely or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gmeta.core.data_manifest import Manifest, Shard
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.files import clear, restore, resumable_folder
from gmeta.core.group_index import GroupIndex
from gmeta.core.json_values import FILE_NAME as MANIFEST
from gmeta.core.json_values import parse_json
from gmeta.core.schema import OnBad, check_on_bad
from gmeta.preprocess.config import PartsProgress, PlanConfig, PrepareConfig, Progress, no_progress
from gmeta.preprocess.local import duckdb_engine
from gmeta.preprocess.local import duckdb_engine as memory
from gmeta.preprocess.local.group_sorter import ShardMerger
from gmeta.preprocess.movielens import movielens_folder as movielens
from gmeta.preprocess.movielens.movielens_folder import ML_1M_MELU, ML_100K
from gmeta.preprocess.movielens.movielens_records import RawFile
from gmeta.preprocess.movielens.movielens_source import MeluSource, MovieLensSource
from gmeta.preprocess.plan.outcome import EngineResult
from gmeta.preprocess.plan.placement import PLAN_VERSION, splits
from gmeta.preprocess.shards.data_set import save_manifest, shard_name
from gmeta.preprocess.source import BadRecords, Named, Source
from gmeta.preprocess.summary import BadKind, LeftOut, PrepareSummary, SplitCount
from gmeta.preprocess.synthetic import ratings as synthetic
from gmeta.preprocess.synthetic.ratings import SyntheticConfig
from gmeta.preprocess.table_spec import TEXTS_LIMIT, TableSpec
from gmeta.preprocess.tables.duckdb_text import sql_text
from gmeta.preprocess.tables.table_source import TableSource

if TYPE_CHECKING:
    import duckdb

# The journal of a preparation, from which a killed preparation resumes.

FILE_NAME = "journal.jsonl"


class Journal:
    """Lines of JSON in the staging folder; each line is on the disk before the work continues.

    The first line holds the plan: settings, and stamps of the input. A ``sorted`` line follows once the runs
    of sorted batches are whole, and then a ``shard`` line for each written shard. An incomplete last line
    counts as not written, and files that the journal doesn't mention are removed.

    Args:
      folder: The staging folder.
      plan: The settings and the input's stamps, as JSON values.

    Attributes:
      runs: The number of runs, or None while they aren't whole.
      shards: Name -> shard, for the shards that are written.

    Raises:
      GmetaError: The folder's journal has another plan.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self._folder, self._path = folder, folder / FILE_NAME
        self.runs: int | None = None
        self.shards: dict[str, Shard] = {}
        entries = self._read()
        plan = json.loads(json.dumps(plan))
        if entries and entries[0] != {"plan": plan}:
            there = entries[0].get("plan", {})
            different = sorted(key for key in {*plan, *there} if plan.get(key) != there.get(key))
            raise GmetaError(
                f"{folder} is left from a run with other settings or input ({', '.join(different)}): "
                "run without --resume to start again"
            )
        for entry in entries[1:]:
            if "sorted" in entry:
                self.runs = entry["sorted"]
            elif "shard" in entry:
                self._believe(Shard(**entry["shard"]))
        if self.runs is None:
            self.shards.clear()
            clear(folder)
            self._add({"plan": plan})
        for path in folder.glob("*.tmp"):  # files that were being written
            path.unlink()

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        entries = []
        for line in self._path.read_bytes().split(b"\n")[:-1]:
            try:
                entries.append(parse_json(line))
            except ValueError:
                break
        # Remove an incomplete last line; otherwise the next entry would be appended to it.
        self._path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return entries

    def _believe(self, shard: Shard) -> None:
        """Count a shard as written if its file matches the journal's entry."""
        path = self._folder / shard.name
        try:
            if GroupIndex.load(path).checksum == shard.index and path.stat().st_size == shard.bytes:
                self.shards[shard.name] = shard
        except (DataError, OSError):
            path.unlink(missing_ok=True)

    def add_sorted(self, runs: int) -> None:
        """Record that the runs are whole."""
        self.runs = runs
        self._add({"sorted": runs})

    def add_shard(self, shard: Shard) -> None:
        """Record that a shard is written."""
        self.shards[shard.name] = shard
        self._add({"shard": asdict(shard)})

    def _add(self, entry: Mapping[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


RAW_FOLDER = "raw"
Data = str | os.PathLike[str]
_RUNS, _TEMPORARY = "runs", "temporary"  # folders inside the staging folder, until the shards are written


def prepare(
    data: Data | Sequence[Data] | SyntheticConfig,
    out: str | os.PathLike[str],
    config: PrepareConfig | None = None,
    on_bad: str = "raise",
    *,
    spec: TableSpec | None = None,
    overwrite: bool = False,
    resume: bool = False,
    memory_limit: int | None = None,
    progress: Progress = no_progress,
) -> PrepareSummary:
    """Prepare a data set: normalise, sort, cut, permute, and write shards with their indexes and a manifest.

    The folder ``out`` then holds the shards ``<split>-00000-of-00002.tfrecord`` and so on, each with its
    ``.gidx``, plus ``manifest.json`` and ``summary.json``; for synthetic data also the raw files, in
    ``raw/``. Everything is written beside ``out`` and renamed at the end, so ``out`` never holds a partial
    data set. The same input, settings and rule give the same bytes, regardless of the memory and of the
    input's order and format.

    A folder ``out`` that exists already is

    * reused, if its manifest names the same input (by SHA-256), settings and rule;
    * refused, if it holds anything else, unless ``overwrite`` is set;
    * never overwritten, if it holds files but no manifest: it isn't a prepared data set.

    Args:
      data: Files, folders or patterns of CSV, Parquet or JSON, which ``spec`` describes. Files with known
        columns, such as MovieLens' and LightGCN's, need no ``spec``. Without one, a folder in
        MovieLens-100K's or -1M's layout, or in -1M's with MeLU's split, is read as such. A `SyntheticConfig`
        generates ratings in MovieLens-100K's layout.
      out: The folder to make.
      config: The plan's settings; `PrepareConfig`'s defaults if None.
      on_bad: ``"raise"`` ends the run at the first bad record; ``"skip"`` counts each bad record and leaves
        it out. A missing, empty or damaged file ends the run under either rule.
      spec: The description of a table's columns.
      overwrite: Replace a prepared data set that differs.
      resume: Continue a killed run with the same settings; its sorted batches and finished shards are reused.
        If this run fails, its results so far are kept for the next one.
      memory_limit: Bytes of memory to stay within; further data is written to temporary files beside ``out``.
        None: half of the available memory.
      progress: Called with the progress of the stages ``"read"``, ``"sort"`` and ``"write"``.

    Returns:
      A summary of the data read, kept and left out.

    Raises:
      ConfigError: A setting is out of range, or the spec doesn't fit the table.
      DataError: A file can't be read, a record is bad, or a split has no task left.
      GmetaError: ``out`` holds something else, or can't be written.

    Example:
      >>> summary = prepare(Path("ml-100k"), Path("data"))  # doctest: +SKIP
      >>> summary.splits["warm"].tasks, summary.splits["cold"].tasks  # doctest: +SKIP
      (461, 121)
      >>> prepare("clicks/*.parquet", "data", spec=TableSpec("user", time="ts"))  # doctest: +SKIP
    """
    raw = synthetic.files(data) if isinstance(data, SyntheticConfig) else {}
    return prepare_source(
        lambda connection, bad: _open(data, Path(out), raw, spec, bad, connection),
        out,
        config,
        on_bad,
        raw=raw,
        overwrite=overwrite,
        resume=resume,
        memory_limit=memory_limit,
        progress=progress,
    )


def prepare_source(
    open_source: Callable[[duckdb.DuckDBPyConnection, BadRecords], Source],
    out: str | os.PathLike[str],
    config: PrepareConfig | None = None,
    on_bad: str = "raise",
    *,
    raw: Mapping[str, bytes] = MappingProxyType({}),
    overwrite: bool = False,
    resume: bool = False,
    memory_limit: int | None = None,
    progress: Progress = no_progress,
) -> PrepareSummary:
    """Prepare a data set from the rows of any source, as `prepare` does.

    Args:
      open_source: Opens the source, which reads with the connection and reports bad records.
      out: As for `prepare`.
      config: As for `prepare`.
      on_bad: As for `prepare`.
      raw: Name -> content of additional files, which the folder holds in ``raw/``.
      overwrite: As for `prepare`.
      resume: As for `prepare`.
      memory_limit: As for `prepare`.
      progress: As for `prepare`.
    """
    started = time.perf_counter()
    out = Path(out)
    restore(out)
    config, bad = config or PrepareConfig(), BadRecords(check_on_bad(on_bad))
    memory_limit = memory_limit or memory.default_limit()
    with closing(duckdb_engine.connect(memory_limit)) as connection:
        source = open_source(connection, bad)
        settings = config.resolve(source.defaults)

        def plan() -> dict[str, Any]:
            return describe_plan(source.name, source.spec, settings, bad.on_bad, source.digests())

        if not overwrite and (out / MANIFEST).exists() and holds(out, plan()):
            return PrepareSummary.load(out)
        check_replaceable(out)
        source.start_digests()
        with resumable_folder(out, resume=resume) as staging:
            job = {
                **describe_plan(source.name, source.spec, settings, bad.on_bad, {}),
                "inputs": source.stamps(),
            }
            journal = Journal(staging, job)
            if journal.runs is None:
                _sort(staging, source, settings, bad, progress, connection, memory_limit)
                journal.add_sorted(len(list((staging / _RUNS).glob("*.groups"))))
            shards = _merge(
                staging, journal, settings, progress, memory.share(memory_limit, memory.MERGE_SHARE)
            )
            summary = replace(PrepareSummary.load(staging), out=out, reused=False).with_shards(shards)
            if raw:
                synthetic.write(staging / RAW_FOLDER, raw)
            save_manifest(staging, source.spec.schema, shards, settings, plan(), summary)
            for name in (_RUNS, _TEMPORARY):
                shutil.rmtree(staging / name, ignore_errors=True)
            (staging / FILE_NAME).unlink()
    return replace(summary, seconds=time.perf_counter() - started)


def _open(
    data: Data | Sequence[Data] | SyntheticConfig,
    out: Path,
    raw: Mapping[str, bytes],
    spec: TableSpec | None,
    bad: BadRecords,
    connection: duckdb.DuckDBPyConnection,
) -> Source:
    table_spec = spec or TableSpec()
    limit = table_spec.texts_limit
    is_bare = replace(table_spec, texts_limit=TEXTS_LIMIT) == TableSpec()  # it describes no column
    if isinstance(data, SyntheticConfig):
        if not is_bare:
            raise ConfigError("a spec describes the columns of a table, and synthetic data have their own")
        folder = movielens.load(ML_100K, lambda file: RawFile(out / RAW_FOLDER / file, raw[file]), bad)
        return MovieLensSource(folder, "synthetic", texts_limit=limit)
    paths = [data] if isinstance(data, str | os.PathLike) else list(data or ())
    if not paths:
        raise ConfigError(
            f"no data to prepare, got {data!r}: name files of a table, with a spec, or a MovieLens folder; "
            "SyntheticConfig() generates ratings"
        )
    first = Path(paths[0])
    if is_bare and len(paths) == 1 and first.is_dir() and not movielens.is_table(first):
        opened = movielens.open_folder(first, bad)
        kind = MeluSource if opened.layout is ML_1M_MELU else MovieLensSource
        return kind(opened, texts_limit=limit)
    table = TableSource(*movielens.as_table(paths, table_spec), connection)
    if is_bare and table.spec.blocks:
        known = table.spec.columns.items()
        columns = [column.source or name for name, column in known if name != table.spec.task]
        nameless = all(re.fullmatch(r"[-+.\d]+", name) for name in columns)
        advice = "; if the first line has no names, give them with --no-header --columns A,B,C"
        raise ConfigError(
            f"{paths[0]}: name the column of the task, with --task COLUMN or --spec FILE; the columns are "
            f"{', '.join(columns)}{advice if nameless else ''}"
        )
    return table


def _sort(
    staging: Path,
    source: Source,
    config: PlanConfig,
    bad: BadRecords,
    progress: Progress,
    connection: duckdb.DuckDBPyConnection,
    memory_limit: int,
) -> None:
    """Write sorted runs of batches, texts, and a preliminary summary, into the staging folder."""
    for name in (_RUNS, _TEMPORARY):
        (staging / name).mkdir()
    connection.execute(f"SET temp_directory = {sql_text(str(staging / _TEMPORARY))}")
    nothing: dict[str, list[Shard]] = {name: [] for name in splits(config)}
    parts, results = source.parts(), []
    stages = PartsProgress(progress, len(parts))
    for number, part in enumerate(parts):
        own = replace(config, partition=number)
        tasks, sizes = duckdb_engine.sort_groups(
            part, own, bad, stages.of(number), connection, staging / _RUNS, memory_limit
        )
        results.append(EngineResult.of(nothing, part, own, tasks, sizes))
    spec = replace(source.spec, notes=(*source.spec.notes, *source.write_texts(staging)))
    summarise(staging, source, spec, config, EngineResult.together(results), bad).save(staging)


def _merge(
    staging: Path, journal: Journal, config: PlanConfig, progress: Progress, limit: int
) -> dict[str, list[Shard]]:
    """Write the shards that don't exist yet."""
    names = {
        shard_name(split, number, config.shards): (place * config.shards + number, split)
        for place, split in enumerate(splits(config))
        for number in range(config.shards)
    }
    missing = [name for name in names if name not in journal.shards]
    done = sum(shard.rows for shard in journal.shards.values())
    if missing:
        merger = ShardMerger(staging / _RUNS, journal.runs or 0, limit)
        progress("write", done, merger.rows)
        for name in missing:
            journal.add_shard(merger.write(staging / name, names[name][0], config))
            done += journal.shards[name].rows
            if done < merger.rows:
                progress("write", done, merger.rows)
    progress("write", done, done)
    shards: dict[str, list[Shard]] = {split: [] for split in splits(config)}
    for name, (_, split) in names.items():
        shards[split].append(journal.shards[name])
    return shards


def describe_plan(
    name: str, spec: TableSpec, config: PlanConfig, on_bad: OnBad, inputs: Mapping[str, str]
) -> dict[str, Any]:
    """Return a run's settings as the manifest keeps them; equal settings and input make equal data sets.

    Args:
      name: The name of the input.
      spec: The columns, as `TableSpec.resolve` decided them.
      config: The settings.
      on_bad: The rule for bad records.
      inputs: File name -> SHA-256, or another value that identifies the version of the input.
    """
    return {
        "plan": PLAN_VERSION,
        "source": name,
        "inputs": dict(inputs),
        "on_bad": on_bad,
        "table": spec.to_json(),
        **{name: value for name, value in asdict(config).items() if name not in ("partition", "partitions")},
        **({"partitions": list(config.partitions)} if config.partitions else {}),
    }


def summarise(
    out: Path, source: Named, spec: TableSpec, config: PlanConfig, result: EngineResult, bad: BadRecords
) -> PrepareSummary:
    """Return the summary of a run."""
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
        columns=len({*spec.sources.values()}) + len(spec.unused),
        columns_left_out=spec.unused,
        columns_hashed=tuple(name for name, column in spec.columns.items() if column.hash),
        notes=spec.notes,
    )


def holds(out: Path, plan: Mapping[str, Any]) -> bool:
    """Return True if ``plan`` made the data set at ``out``; refuse one that is damaged or made otherwise."""
    try:
        there = Manifest.load(out).config
    except DataError as error:
        raise GmetaError(f"{error}, with --overwrite") from error
    if there == plan:
        return True
    differences = [
        f"other input files: {_changed(there.get(key), value)}"
        if key == "inputs"
        else f"{key} {there.get(key)} there, {value} requested"
        for key, value in plan.items()
        if there.get(key) != value
    ]
    raise GmetaError(
        f"{out} was prepared otherwise ({', '.join(differences)}): "
        "add --overwrite to replace it, or name another folder"
    )


def _changed(before: Any, now: Mapping[str, str], most: int = 3) -> str:
    """Return the names of inputs that exist on one side only, or differ."""
    known = before if isinstance(before, Mapping) else {}
    names = sorted(name for name in {*known, *now} if known.get(name) != now.get(name))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_replaceable(out: Path) -> None:
    """Refuse to replace a file, or a folder that has files but isn't a prepared data set."""
    if out.exists() and not out.is_dir():
        raise GmetaError(f"{out} is a file: name a folder")
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).exists():
        raise GmetaError(
            f"{out} holds files but no {MANIFEST}: it isn't a prepared data set, so it won't be replaced; "
            "name another folder"
        )
