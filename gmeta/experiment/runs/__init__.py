"""Training of an experiment's runs.

`all_runs` trains every method with every seed, `trainer` trains one method with one seed, `best_epoch` trains
until validation no longer improves, `run_folder` and `parts` have the files, and `model_choice` builds and
compiles the models.
"""

__all__: list[str] = []
