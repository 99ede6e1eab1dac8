"""``gmeta prepare``: turns tables of events, or MovieLens files, into a prepared data set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gmeta.cli.options import DATA, engine_options, on_bad_option
from gmeta.core.data.group_index import CODECS, LAYOUTS
from gmeta.core.data.on_bad import OnBad
from gmeta.core.errors import ConfigError
from gmeta.preprocess.config import Engine, PrepareConfig
from gmeta.preprocess.table_spec import TableSpec

_DEFAULT = PrepareConfig()


@click.command("prepare")
@click.option(
    "--out", type=click.Path(path_type=Path), default=DATA, show_default=True, help="Folder to make."
)
@click.option(
    "--data",
    multiple=True,
    help="CSV, Parquet or JSON lines, with --task or --spec: a file, a folder or a pattern; may be repeated. "
    "Or a MovieLens folder, with u.data (100K), ratings.dat (1M) or ratings.csv.gz (1M with MeLU's split).",
)
@click.option(
    "--synthetic", is_flag=True, help="Generate ratings in MovieLens-100K's layout, in place of --data."
)
@click.option(
    "--spec", "spec_file", type=click.Path(path_type=Path), help="TOML file that describes columns."
)
@click.option("--task", help="Column of the tasks; with or without --spec.")
@click.option("--time", help="Column that orders a task's rows.")
@click.option("--label", help="Column to predict.")
@click.option(
    "--unique", multiple=True, help="Column whose values may not repeat in a task, such as the item."
)
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

    The command brings the rows of one task, such as a user, together in time order and cuts them into
    batches. It keeps tasks with --min-rows to --max-rows rows; --cold-modulus splits them by their ids into
    warm tasks, to train on, and cold tasks, to evaluate on. OUT appears whole or not at all. If OUT was made
    before from the same files with the same settings, it is used as it is.
    """
    from gmeta.cli.prepare_jobs import describe_jobs, refuse_foreign, run_on_spark
    from gmeta.cli.prepare_output import PrepareProgress, print_summary
    from gmeta.core.staging import explain_write_errors
    from gmeta.preprocess import SyntheticConfig
    from gmeta.preprocess import prepare as run
    from gmeta.preprocess.local.memory import parse_bytes
    from gmeta.preprocess.task_sizes import FILE_NAME, draw_task_sizes

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
    spec = _spec(settings)
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
            draw_task_sizes(summary, out / FILE_NAME)
    print_summary(summary)


def _spec(settings: dict[str, Any]) -> TableSpec | None:
    """Make a table's spec from its file and the options, which override it and leave ``settings``."""
    path = settings.pop("spec_file")
    own = {name: settings.pop(name) for name in ("task", "time", "label", "unique")}
    own = {name: value for name, value in own.items() if value}
    if path is not None:
        return replace(TableSpec.load(path), **own)
    if own and "task" not in own:
        raise ConfigError(f"--{next(iter(own))} is of a table: name its --task too")
    return TableSpec(**own) if own else None
