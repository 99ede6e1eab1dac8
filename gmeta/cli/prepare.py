"""``gmeta prepare``: raw rating files to a prepared data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gmeta.cli.options import on_bad_option
from gmeta.core.group_index import LAYOUTS
from gmeta.core.on_bad import OnBad
from gmeta.preprocess.config import PrepareConfig

_DEFAULT = PrepareConfig()


@click.command("prepare")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="MovieLens folder with u.data (100K) or ratings.dat (1M).  [default: generate synthetic data]",
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
@click.option("--shards", default=_DEFAULT.shards, show_default=True, help="Files a split.")
@click.option("--overwrite", is_flag=True, help="Replace a data set that was prepared otherwise.")
def prepare(data: Path | None, out: Path, on_bad: OnBad, overwrite: bool, **settings: Any) -> None:
    """Turn raw MovieLens files into a data set that `gmeta train` reads.

    A user is a task. Users with --min-ratings to --max-ratings ratings are kept, and split by their ids into
    warm ones, to train on, and cold ones, to evaluate on. OUT appears whole or not at all. Made from the same
    files with the same settings before, it is used as it is.
    """
    from gmeta.cli.prepare_output import PrepareProgress, print_summary
    from gmeta.preprocess import prepare as run
    from gmeta.preprocess.staging import write_errors_explained
    from gmeta.preprocess.task_sizes import FILE_NAME, draw_task_sizes

    config = PrepareConfig(**settings)
    if data is None:
        click.echo(
            f"no --data: using a synthetic data set in MovieLens-100K's layout, seed {config.seed}", err=True
        )
    with PrepareProgress() as progress:
        summary = run(data, out, config, on_bad, overwrite=overwrite, progress=progress)
    if not summary.reused:
        with write_errors_explained(out):
            draw_task_sizes(summary, out / FILE_NAME)
    print_summary(summary)
