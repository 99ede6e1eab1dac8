"""Baselines without a network, tuned on warm tasks: means, biases, neighbours, factors, kriging."""

ITEM_MEAN, BIASES, NEIGHBOURS, KRIGING, FACTORS = "item_mean", "biases", "neighbours", "kriging", "factors"
NAMES = (ITEM_MEAN, BIASES, NEIGHBOURS, KRIGING, FACTORS)
"""Names of the baselines."""

__all__ = ["BIASES", "FACTORS", "ITEM_MEAN", "KRIGING", "NAMES", "NEIGHBOURS"]
