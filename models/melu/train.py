"""MeLU on MovieLens from Python: what `make demo` does with the command line.

python models/melu/train.py path/to/ml-100k --run runs/melu
"""

from __future__ import annotations

from pathlib import Path

import click

from gmeta.core.settings import read_toml
from gmeta.experiment.measurement.run_pool import evaluate
from gmeta.experiment.plan.own_plan import plan_experiment
from gmeta.experiment.report.page import write_report
from gmeta.experiment.runs.all_runs import TrainingProgress, run_training
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.preprocess import prepare

CONFIG = Path(__file__).with_name("ml-100k.toml")


@click.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.option(
    "--run", "run_path", type=click.Path(path_type=Path), default=Path("runs/melu"), show_default=True
)
@click.option("--config", "config_path", type=click.Path(path_type=Path), default=CONFIG, show_default=True)
def main(data: Path, run_path: Path, config_path: Path) -> None:
    """Prepare DATA, a MovieLens folder, train MeLU on its warm users and measure its cold ones."""
    run = RunFolder(run_path)
    prepare(data, run.data)
    config = plan_experiment(read_toml(config_path), run.data, str(config_path)).config
    with TrainingProgress() as progress:
        run_training(config, run, run.data, progress=progress)
    print(f"report: {write_report(evaluate(run), run.path)}")


if __name__ == "__main__":
    main()
