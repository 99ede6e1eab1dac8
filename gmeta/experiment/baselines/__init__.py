"""Baselines without a network, tuned on warm tasks.

- `attributes` and `vectors`: item means, biases and ridge on attributes, and ridge on vectors of items
  (kriging and factors).
- `task_rows` holds the rows of tasks as arrays, and their folds; `tuning` has k nearest neighbours and
  chooses the settings of all.
"""

ITEM_MEAN, BIASES, NEIGHBOURS, KRIGING, FACTORS = "item_mean", "biases", "neighbours", "kriging", "factors"
ATTRIBUTES = "attributes"
NAMES = (ITEM_MEAN, BIASES, NEIGHBOURS, KRIGING, FACTORS, ATTRIBUTES)
"""Names of the baselines."""

__all__ = ["ATTRIBUTES", "BIASES", "FACTORS", "ITEM_MEAN", "KRIGING", "NAMES", "NEIGHBOURS"]
