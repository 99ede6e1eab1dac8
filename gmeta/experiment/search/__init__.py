"""Chooses methods' settings on training tasks or validation data, within a time budget.

`gmeta train` calls `gmeta.experiment.search.trials.choose_settings`. `gmeta tune` searches longer: ``study``
runs trials with Optuna, and ``tunables`` defines a trial for each family of experiments.
"""

__all__: list[str] = []
