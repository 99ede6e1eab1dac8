"""The choice of methods' settings on training tasks, within a budget of time.

`gmeta.experiment.search.trials.choose_settings` is what `gmeta train` calls.
"""

__all__: list[str] = []
