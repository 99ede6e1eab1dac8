"""Baselines without a network, tuned on warm tasks, from item means to ridge on attributes."""

ITEM_MEAN, BIASES, NEIGHBOURS, KRIGING, FACTORS = "item_mean", "biases", "neighbours", "kriging", "factors"
ATTRIBUTES = "attributes"
NAMES = (ITEM_MEAN, BIASES, NEIGHBOURS, KRIGING, FACTORS, ATTRIBUTES)
"""Names of the baselines."""

__all__ = ["ATTRIBUTES", "BIASES", "FACTORS", "ITEM_MEAN", "KRIGING", "NAMES", "NEIGHBOURS"]
