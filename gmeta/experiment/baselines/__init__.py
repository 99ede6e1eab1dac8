"""Baselines without a network, tuned on warm tasks.

- `biases`, `neighbours`, `vectors` and `attributes`: item means and biases, k nearest neighbours, ridge on
  vectors of items (kriging and factors), and ridge on attributes.
- `task_rows` holds the rows of tasks as arrays; `pseudo_cold` and `tuning` choose the settings.
"""

ITEM_MEAN, BIASES, NEIGHBOURS, KRIGING, FACTORS = "item_mean", "biases", "neighbours", "kriging", "factors"
ATTRIBUTES = "attributes"
NAMES = (ITEM_MEAN, BIASES, NEIGHBOURS, KRIGING, FACTORS, ATTRIBUTES)
"""Names of the baselines."""

__all__ = ["ATTRIBUTES", "BIASES", "FACTORS", "ITEM_MEAN", "KRIGING", "NAMES", "NEIGHBOURS"]
