"""The choice of methods' settings on training tasks or validation data, within a budget of time.

`gmeta.experiment.search.trials.choose_settings` is what `gmeta train` calls. `gmeta tune` searches longer:
``study`` runs trials by Optuna, and ``tunables`` has what a trial of each family of experiments does.
"""

__all__: list[str] = []
