"""``gmeta train``: every method of an experiment with every seed."""

from __future__ import annotations

from pathlib import Path

import click

from gmeta.cli.options import on_bad_option, run_option
from gmeta.cli.ranks import elastic_of, elastic_options, ranks_option, start_ranks
from gmeta.core.on_bad import OnBad


@click.command("train")
@run_option
@click.option("--data", type=click.Path(path_type=Path), help="A prepared data set.  [default: RUN/data]")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Settings in TOML.  [default: MeLU on MovieLens]",
)
@on_bad_option
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Save after so many steps too, besides at the end of each epoch.",
)
@ranks_option
@elastic_options
def train(
    run_path: Path,
    data: Path | None,
    config_path: Path | None,
    on_bad: OnBad,
    checkpoint_every: int | None,
    size: int | None,
    elastic: bool,
    min_np: int | None,
    script: str | None,
) -> None:
    """Train on a prepared data set; resume where a run stopped.

    Every epoch ends with a checkpoint. Interrupted, the same command goes on from the last one, and says so;
    with another --np too. With --elastic it does so by itself when a rank is lost.
    """
    if start_ranks(size, elastic=elastic_of(size, elastic, min_np, script)):
        return
    # Here and not above: `gmeta train --help` needn't wait for TensorFlow.
    from rich.console import Console

    from gmeta.core.collectives import check_agreement, world
    from gmeta.core.config import load_toml, to_mapping
    from gmeta.training.experiment import run_training
    from gmeta.training.experiment_config import ExperimentConfig
    from gmeta.training.progress import TrainingProgress
    from gmeta.training.run_folder import RunFolder

    config = load_toml(ExperimentConfig, config_path) if config_path else ExperimentConfig()
    check_agreement({name: repr(value) for name, value in to_mapping(config).items()})
    run, first = RunFolder(run_path), world().rank == 0
    with TrainingProgress(None if first else Console(quiet=True)) as progress:
        waiting = run_training(
            config,
            run,
            data or run.data,
            progress=progress,
            on_bad=on_bad,
            checkpoint_every=checkpoint_every,
        )
    if first:
        if waiting.elements:
            click.echo(str(waiting), err=True)
        click.echo(f"trained: {run.path}; now `gmeta evaluate --run {run.path}`")
