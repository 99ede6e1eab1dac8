"""Training of an experiment's runs.

`all_runs` trains every method with every seed, `trainer` trains one method with one seed, `run_folder` has
their files, and `model_choice` builds and compiles the models.
"""

__all__: list[str] = []
