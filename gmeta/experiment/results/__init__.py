"""The results of an experiment.

`metrics` has the metrics of predictions and their intervals over tasks, `evaluation` the results as data, and
`evaluation_json` their file format.
"""

__all__: list[str] = []
