"""Experiments on tasks: methods and baselines over several seeds, their runs, results and report.

The commands `gmeta train`, `gmeta evaluate` and `gmeta export` run them. A script imports `plan`, `runs`,
`measurement`, `results` and `report` from here.
"""

from gmeta.core.imports import load_lazily

_MOVED = {
    "Evaluation": "gmeta.experiment.results.evaluation",
    "ExperimentConfig": "gmeta.experiment.plan.experiment_config",
    "MethodConfig": "gmeta.experiment.plan.experiment_config",
    "RunFolder": "gmeta.experiment.runs.run_folder",
    "evaluate": "gmeta.experiment.measurement.run_pool",
    "export_run": "gmeta.experiment.runs.all_runs",
    "plan_experiment": "gmeta.experiment.plan.own_plan",
    "run_training": "gmeta.experiment.runs.all_runs",
    "train": "gmeta.experiment.runs.trainer",
    "write_report": "gmeta.experiment.report.page",
}
"""Old name -> the module that has it now, for one release."""

__all__: list[str] = []

__getattr__, __dir__ = load_lazily(__name__, {}, _MOVED)
