"""Experiments on tasks: methods and baselines over several seeds, their runs, results and report.

- `plan`: the settings; `runs`: training; `baselines`: methods without a network.
- `measurement` predicts and measures, `results` holds the numbers, and `report` draws the page.

Each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.core.lazy import load_lazily

if TYPE_CHECKING:
    from gmeta.experiment.measurement.run_pool import evaluate
    from gmeta.experiment.plan.experiment_config import ExperimentConfig
    from gmeta.experiment.plan.method_config import MethodConfig
    from gmeta.experiment.plan.own_plan import plan_experiment
    from gmeta.experiment.report.page import write_report
    from gmeta.experiment.results.evaluation import Evaluation
    from gmeta.experiment.runs.all_runs import export_run, run_training
    from gmeta.experiment.runs.run_folder import RunFolder
    from gmeta.experiment.runs.trainer import train

_WHERE = {
    "Evaluation": "gmeta.experiment.results.evaluation",
    "ExperimentConfig": "gmeta.experiment.plan.experiment_config",
    "MethodConfig": "gmeta.experiment.plan.method_config",
    "RunFolder": "gmeta.experiment.runs.run_folder",
    "evaluate": "gmeta.experiment.measurement.run_pool",
    "export_run": "gmeta.experiment.runs.all_runs",
    "plan_experiment": "gmeta.experiment.plan.own_plan",
    "run_training": "gmeta.experiment.runs.all_runs",
    "train": "gmeta.experiment.runs.trainer",
    "write_report": "gmeta.experiment.report.page",
}
"""Name -> the module that defines it."""

__all__ = [
    "Evaluation",
    "ExperimentConfig",
    "MethodConfig",
    "RunFolder",
    "evaluate",
    "export_run",
    "plan_experiment",
    "run_training",
    "train",
    "write_report",
]

__getattr__, __dir__ = load_lazily(__name__, _WHERE)
