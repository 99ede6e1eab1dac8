"""Training of an experiment's runs.

`all_runs` trains every method with every seed, `trainer` one of them, `run_folder` is their files, and
`model_choice` builds and compiles the models.
"""

__all__: list[str] = []
