"""The results of an experiment.

`metrics` are the metrics of predictions, `bootstrap` their intervals over tasks, `evaluation` the results as
data, and `evaluation_json` their file.
"""

__all__: list[str] = []
