"""``gmeta prepare``: turns tables of events, or MovieLens files, into a prepared data set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import ProgressColumn, Task, TaskID
from rich.table import Table
from rich.text import Text

from gmeta.cli.options import DATA, engine_options, on_bad_option, spec_of, spec_options
from gmeta.core.errors import ConfigError
from gmeta.core.group_index import CODECS, LAYOUTS
from gmeta.core.schema import OnBad
from gmeta.core.terminal import Bars
from gmeta.preprocess.cluster.table_job import TableJob
from gmeta.preprocess.config import STAGES, Engine, PrepareConfig
from gmeta.preprocess.summary import PrepareSummary
from gmeta.preprocess.table_spec import TableSpec

_DEFAULT = PrepareConfig()


@click.command("prepare")
@click.option(
    "--out", type=click.Path(path_type=Path), default=DATA, show_default=True, help="Folder to make."
)
@click.option(
    "--data",
    multiple=True,
    help="CSV, Parquet or JSON, with --task or --spec: a file, a folder or a pattern; may be repeated. Files "
    "and folders of MovieLens, RecBole and LightGCN need no more.",
)
@click.option(
    "--synthetic", is_flag=True, help="Generate ratings in MovieLens-100K's layout, in place of --data."
)
@spec_options
@on_bad_option
@click.option(
    "--seed", default=_DEFAULT.seed, show_default=True, help="Seeds the tasks' order and the synthetic data."
)
@click.option(
    "--cold-modulus",
    type=int,
    help="Tasks whose id is divisible by it are cold; 0: one split.  [default: 5 for MovieLens, else 0]",
)
@click.option("--min-rows", type=int, help="Fewest rows of a kept task.  [default: 13 for MovieLens, else 1]")
@click.option(
    "--max-rows",
    type=int,
    help="Most rows of a kept task; 0: any number.  [default: 100 for MovieLens, else 0]",
)
@click.option(
    "--batch-rows", type=int, help="Cut tasks into batches of this size.  [default: a task a batch]"
)
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    default=_DEFAULT.layout,
    show_default=True,
    help="How rows are encoded: a record a batch, or a tf.train.Example a row, for other tools.",
)
@click.option("--codec", type=click.Choice(CODECS), help="Compress each record of the columnar layout.")
@click.option("--shards", default=_DEFAULT.shards, show_default=True, help="Files a split.")
@click.option("--overwrite", is_flag=True, help="Replace a data set that was prepared otherwise.")
@click.option(
    "--resume", is_flag=True, help="Go on where a run was killed, and keep what this one does if it fails."
)
@click.option("--memory-limit", help="Memory to keep to, such as 2GB.  [default: half of what there is]")
@engine_options
@click.option(
    "--ranges", type=int, help="Parts to sort apart, each in a worker's memory.  [default: by size]"
)
@click.option("--compress", help="Refused, with the reason.", hidden=True)
def command(
    data: tuple[str, ...],
    synthetic: bool,
    out: Path,
    on_bad: OnBad,
    overwrite: bool,
    resume: bool,
    memory_limit: str | None,
    compress: str | None,
    engine: Engine,
    job: Path | None,
    ranges: int | None,
    spark_master: str | None,
    spark_conf: tuple[str, ...],
    **settings: Any,
) -> None:
    """Turn tables of events, or MovieLens files, into a data set that `gmeta train` reads.

    The command groups the rows of each task, such as a user, in time order and cuts them into batches. It
    keeps tasks with --min-rows to --max-rows rows; --cold-modulus splits them by their ids into warm tasks,
    for training, and cold tasks, for evaluation. OUT appears whole or not at all. If OUT already exists,
    made from the same files with the same settings, it is reused.
    """
    from gmeta.core.files import explain_write_errors
    from gmeta.preprocess import SyntheticConfig
    from gmeta.preprocess import prepare as run
    from gmeta.preprocess.local.duckdb_engine import parse_bytes
    from gmeta.preprocess.summary import HISTOGRAM, draw_task_sizes

    if compress is not None:
        raise ConfigError(
            f"--compress {compress}: shards aren't compressed as files: a compressed file can't be entered "
            "in the middle, and readers start at any batch. The layout columnar packs numbers into few "
            "bytes, and --codec zstd compresses each of its records"
        )
    refuse_foreign(
        engine,
        synthetic=synthetic,
        resume=resume,
        memory_limit=memory_limit,
        job=job,
        ranges=ranges,
        spark_master=spark_master,
        spark_conf=spark_conf,
    )
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    spec = spec_of(settings)
    config = PrepareConfig(**settings)
    if engine == "duckdb" and bool(data) == synthetic:
        raise ConfigError(
            "name the data: --data FILES --task COLUMN for tables of events, --data FOLDER for MovieLens, or "
            "--synthetic for generated ratings" + (", and not both" if synthetic else "")
        )
    if engine == "streaming":
        click.echo(describe_jobs(data, out, config, on_bad, spec, overwrite, job, ranges))
        return
    with PrepareProgress() as progress:
        if engine == "spark":
            summary = run_on_spark(
                data,
                out,
                config,
                on_bad,
                spec,
                overwrite=overwrite,
                ranges=ranges,
                master=spark_master,
                conf=spark_conf,
                progress=progress,
            )
        else:
            summary = run(
                SyntheticConfig(seed=config.seed) if synthetic else data,
                out,
                config,
                on_bad,
                spec=spec,
                overwrite=overwrite,
                resume=resume,
                memory_limit=limit,
                progress=progress,
            )
    if not summary.reused:
        with explain_write_errors(out):
            draw_task_sizes(summary, out / HISTOGRAM)
    print_summary(summary)


# The part of ``gmeta prepare`` for engines other than this process: Hadoop Streaming jobs and Spark.

_OF: dict[str, tuple[Engine, ...]] = {
    "synthetic": ("duckdb",),
    "resume": ("duckdb",),
    "memory_limit": ("duckdb",),
    "job": ("streaming",),
    "ranges": ("spark", "streaming"),
    "spark_master": ("spark",),
    "spark_conf": ("spark",),
}


def refuse_foreign(engine: Engine, **given: Any) -> None:
    """Refuse options that the engine doesn't use.

    Raises:
      ConfigError: Such an option is given.
    """
    for name, value in given.items():
        if value not in (None, False, ()) and engine not in _OF[name]:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is for --engine {' and '.join(_OF[name])}, not for {engine}")


def describe_jobs(
    data: Sequence[str],
    out: Path,
    config: PrepareConfig,
    on_bad: str,
    spec: TableSpec | None,
    overwrite: bool,
    folder: Path | None,
    ranges: int | None,
) -> str:
    """Make the folder of a job, and return a description of the next step.

    Raises:
      ConfigError: The files, the task or the folder aren't given.
      GmetaError: Something else is at ``out``, or the data set exists already.
    """
    if not data or spec is None or folder is None:
        raise ConfigError(
            "--engine streaming needs --data, --task or --spec, and --job, a folder for the jobs"
        )
    job = TableJob.of_files(data, out, spec, config, on_bad, ranges=ranges, overwrite=overwrite)
    if job.is_done():
        return f"already prepared, from the same files with the same settings: {out}"
    folder.mkdir(parents=True, exist_ok=True)
    job.save(folder)
    return (
        f"{folder}: files {len(job.files)}, ranges {job.ranges}, shards {job.config.shards} a split; "
        f"run the jobs (docs/preprocessing.md), then: gmeta-reduce finish --job {folder}"
    )


def run_on_spark(
    data: Sequence[str],
    out: Path,
    config: PrepareConfig,
    on_bad: str,
    spec: TableSpec | None,
    *,
    conf: Sequence[str],
    **options: Any,
) -> PrepareSummary:
    """Prepare on Spark with ``conf``, settings ``name=value``; the rest is as for `prepare_on_spark`.

    Raises:
      ConfigError: The data or the task aren't given, or a setting has no value.
    """
    from gmeta.preprocess.cluster import spark_engine

    if not data or spec is None:
        raise ConfigError(
            "--engine spark needs --data, and --task or --spec; it doesn't read MovieLens' files"
        )
    return spark_engine.prepare_on_spark(
        data, out, config, on_bad, spec=spec, conf=parse_settings(conf), **options
    )


def parse_settings(conf: Sequence[str]) -> dict[str, str]:
    """Parse Spark's settings from texts ``name=value``.

    Raises:
      ConfigError: A setting has no value.
    """
    if wrong := [setting for setting in conf if "=" not in setting]:
        raise ConfigError(f"--spark-conf {wrong[0]}: write it as NAME=VALUE")
    return dict(setting.split("=", 1) for setting in conf)


# Output of ``gmeta prepare``: progress bars while it works, and a table of the results.

_COLUMNS = 8  # the table names at most this many columns of a kind


class _Rate(ProgressColumn):
    """Column with the rows per second over the stage so far."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} rows/s" if speed else "")


class _TimeLeft(ProgressColumn):
    """Column with the time that the stage still needs, or, once it is done, that it took."""

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"in {_duration(task.finished_time or 0.0)}")
        left = task.time_remaining
        return Text("" if left is None else f"{_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class PrepareProgress(Bars):
    """One progress bar per stage on standard error; without a terminal, one line at the end of each stage.

    Callers use it as a `gmeta.preprocess.config.Progress`.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(_Rate(), _TimeLeft(), console=console)
        self._stages: dict[str, tuple[TaskID, float]] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Update the stage's bar."""
        if stage not in self._stages:
            self._stages[stage] = self.bars.add_task(STAGES[stage], total=total), time.monotonic()
        bar, started = self._stages[stage]
        self.bars.update(bar, completed=done, total=total)
        if done == total and not self.drawn:
            seconds = time.monotonic() - started
            self.say(f"{STAGES[stage]}: {total:,} rows in {seconds:.1f} s")


def print_summary(summary: PrepareSummary, console: Console | None = None) -> None:
    """Print the counts of kept and left-out data, with the first bad records by name."""
    console = console or Console()
    console.print(_table(summary))
    least, _, median, _, most = summary.size_quantiles()
    console.print(f"rows a task: {least:,} to {most:,}, median {median:,}", highlight=False)
    for note in summary.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    for kind in summary.bad:
        for example in kind.examples:
            console.print(f"skipped: {example}", highlight=False, markup=False, soft_wrap=True)
        if kind.count > len(kind.examples):
            more = kind.count - len(kind.examples)
            console.print(
                f"skipped: {more:,} more in {kind.file}: {kind.reason}", highlight=False, markup=False
            )
    if summary.reused:
        text = f"already prepared, from the same files with the same settings: {summary.out}"
    else:
        text = f"prepared in {summary.seconds:.1f} s: {summary.out}"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _table(summary: PrepareSummary) -> Table:
    table = Table(
        title=f"{summary.source}: {summary.rows_read:,} rows",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("tasks", justify="right")
    table.add_column("rows", justify="right")
    for name, split in summary.splits.items():
        table.add_row(name, f"{split.tasks:,}", f"{split.rows:,}")
    of_all = f" of {summary.rows_read:,}"
    for entry in summary.left_out:
        table.add_row(f"left out: {entry.reason}", f"{entry.tasks:,}", f"{entry.rows:,}{of_all}")
    for kind in summary.bad:
        count = f"{kind.count:,}{of_all if kind.of_rows else ''}"
        table.add_row(f"bad: {kind.reason} ({kind.file})", "", count)
    for what, names in (("hashed", summary.columns_hashed), ("left out", summary.columns_left_out)):
        if names:
            shown = ", ".join(names[:_COLUMNS]) + (", ..." if len(names) > _COLUMNS else "")
            table.add_row(f"{what}: {escape(shown)}", "", f"{len(names):,} of {summary.columns:,} columns")
    return table
