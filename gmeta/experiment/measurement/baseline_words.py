"""What tables and notes call the baselines, and a sentence on each."""

from __future__ import annotations

from collections.abc import Sequence

from gmeta.experiment.baselines import ATTRIBUTES, BIASES, FACTORS, ITEM_MEAN, KRIGING, NEIGHBOURS
from gmeta.experiment.baselines.tuning import Tuned
from gmeta.experiment.plan.experiment_config import ExperimentConfig

_LABELS = {
    ITEM_MEAN: "item mean",
    BIASES: "user and item biases",
    NEIGHBOURS: "nearest neighbours",
    KRIGING: "kriging",
    FACTORS: "ridge on factors",
    ATTRIBUTES: "ridge on attributes",
}
_WHAT = {
    BIASES: "The mean, how far the item lies off it, and how far the user's own support rows do",
    NEIGHBOURS: (
        "Those biases, and the support rows whose items go best with the item asked for, weighted by the "
        "covariance of their labels"
    ),
    KRIGING: "A Gaussian process over items with their covariance, conditioned on the user's support rows",
    FACTORS: "Items' factors by alternating least squares, and a ridge regression of the user's support rows",
    ATTRIBUTES: (
        "A ridge regression on items' attributes, which new items have too, and a Gaussian process over "
        "them, conditioned on the user's support rows"
    ),
}


def describe(tuned: Sequence[Tuned], config: ExperimentConfig) -> dict[str, tuple[str, str]]:
    """Return each baseline's label, and a sentence on what it is with the settings that each run chose."""
    chosen = [each.describe() for each in tuned]
    return {
        name: _describe(name, "; or ".join(dict.fromkeys(each[name] for each in chosen)), config)
        for name in chosen[0]
    }


def _describe(name: str, chosen: str, config: ExperimentConfig) -> tuple[str, str]:
    kind = config.label if config.own_columns else "rating"
    rows = f"the {config.train_split} tasks"
    if config.item is None:
        if name == ITEM_MEAN:
            return "mean", f"The mean {kind} of {rows}: no column is named as the item."
        return "task bias", f"That mean, and how far a task's own support rows lie off it ({chosen})."
    if name == ITEM_MEAN:
        what = f"The mean {kind} of the item ({config.item}) among {rows}; knows nothing of the user"
        return _LABELS[ITEM_MEAN], f"{what} ({chosen})."
    return _LABELS[name], f"{_WHAT[name]} ({chosen})."


NO_ITEM = (
    "No column is named as the item: the baselines by neighbours, kriging, factors and attributes, which "
    "need one, are left out."
)
