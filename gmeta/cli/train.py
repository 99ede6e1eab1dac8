"""``gmeta train``: every method of an experiment with every seed."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("train")
@click.option("--run", "run_path", required=True, type=click.Path(path_type=Path), help="Folder of the run.")
@click.option("--data", type=click.Path(path_type=Path), help="A prepared data set.  [default: RUN/data]")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Settings in TOML.  [default: MeLU on MovieLens]",
)
@click.option(
    "--on-bad",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="What a bad record or a task too small to split does.",
)
def train(run_path: Path, data: Path | None, config_path: Path | None, on_bad: str) -> None:
    """Train on a prepared data set; resume where a run stopped.

    Every epoch ends with a checkpoint. Interrupted, the same command goes on from the last one, and says so.
    """
    # Here and not above: `gmeta train --help` needn't wait for TensorFlow.
    from gmeta.core.config import load_toml
    from gmeta.training.experiment import run_training
    from gmeta.training.experiment_config import ExperimentConfig
    from gmeta.training.progress import TrainingProgress
    from gmeta.training.run_folder import RunFolder

    config = load_toml(ExperimentConfig, config_path) if config_path else ExperimentConfig()
    run = RunFolder(run_path)
    with TrainingProgress() as progress:
        run_training(config, run, data or run.data, progress=progress, on_bad=on_bad)
    click.echo(f"trained: {run.path}; now `gmeta evaluate --run {run.path}`")
