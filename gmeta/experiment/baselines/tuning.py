"""The choice of all baselines' settings by cross-validation, and their fit with these settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gmeta.experiment.baselines import (
    ATTRIBUTES,
    BIASES,
    FACTORS,
    ITEM_MEAN,
    KRIGING,
    NEIGHBOURS,
    kriging,
    neighbours,
)
from gmeta.experiment.baselines.attribute_levels import ItemAttributes
from gmeta.experiment.baselines.attributes import Attributes
from gmeta.experiment.baselines.biases import Biases
from gmeta.experiment.baselines.co_ratings import CoRatings
from gmeta.experiment.baselines.factors import RANKS, Factors, Start
from gmeta.experiment.baselines.item_mean import ItemMean
from gmeta.experiment.baselines.kriging import Kriging
from gmeta.experiment.baselines.neighbours import Neighbours
from gmeta.experiment.baselines.pseudo_cold import Fold, Predictor, choose
from gmeta.experiment.baselines.task_rows import Rows


@dataclass(frozen=True)
class ByPairs:
    """The settings of baselines that know how labels of two items go together."""

    neighbours: Neighbours
    kriging: Kriging
    factors: Factors


@dataclass(frozen=True)
class Tuned:
    """The settings of all baselines.

    Attributes:
      mean: Of the item mean.
      biases: Of the biases, which the others start from.
      pairs: Of those by pairs; None: rows have no item.
      attributes: Of ridge on attributes; None: items have no attributes.
    """

    mean: ItemMean
    biases: Biases
    pairs: ByPairs | None
    attributes: Attributes | None = None

    def fit(self, warm: Rows, items: int) -> dict[str, Predictor]:
        """Fit all baselines, name -> what predicts, from the simplest on."""
        biases = self.biases.fit(warm, items)
        found: dict[str, Predictor] = {ITEM_MEAN: self.mean.fit(warm, items), BIASES: biases}
        if self.pairs is not None:
            pairs, factors = CoRatings.of(warm, biases), self.pairs.factors
            found[NEIGHBOURS] = self.pairs.neighbours.fit(biases, pairs)
            found[KRIGING] = self.pairs.kriging.fit(biases, pairs)
            found[FACTORS] = factors.fit(warm, self.biases, biases, Start.of(pairs, factors.rank))
        if self.attributes is not None:
            found[ATTRIBUTES] = self.attributes.fit(warm)
        return found

    def describe(self) -> dict[str, str]:
        """Return the settings of each baseline as part of a sentence, name -> text."""
        damping = f"{self.biases.item_damping:g} rows of an item and {self.biases.task_damping:g} of a task"
        found = {ITEM_MEAN: f"damped by {self.mean.damping:g} rows", BIASES: f"damped by {damping}"}
        if self.pairs is not None:
            near, krige, factors = self.pairs.neighbours, self.pairs.kriging, self.pairs.factors
            size, shrinkage = f"the {near.size} nearest", f"shrunk by {near.shrinkage:g} pairs"
            found[NEIGHBOURS] = f"{size}, {shrinkage}, damped by {near.damping:g}"
            found[KRIGING] = (
                f"rank {krige.rank}, shrunk by {krige.shrinkage:g} pairs, {krige.noise:.0%} noise"
            )
            found[FACTORS] = f"{factors.rank} factors, penalty {factors.penalty:g}"
        if self.attributes is not None:
            levels = self.attributes.levels
            found[ATTRIBUTES] = (
                f"penalty {levels.penalty:g}, damped by {levels.item_damping:g} rows of an item"
            )
        return found


def tune(folds: Sequence[Fold], items: int, by_item: bool, attributes: ItemAttributes | None = None) -> Tuned:
    """Choose the settings of all baselines by their squared errors on pseudo-cold tasks.

    Args:
      folds: The folds of warm tasks; without one, the usual settings are taken.
      items: How many items there are.
      by_item: Whether rows have an item.
      attributes: The items' attributes.
    """
    mean, biases = ItemMean.tune(folds, items), Biases.tune(folds, items)
    pairs = _tune_pairs(folds, biases, items) if by_item else None
    ridge = None if attributes is None else Attributes.tune(folds, attributes, biases.task_damping)
    return Tuned(mean, biases, pairs, ridge)


def _tune_pairs(folds: Sequence[Fold], biases: Biases, items: int) -> ByPairs:
    near_errors, krige_errors, turns = [], [], []
    for fold in folds:
        fitted = biases.fit(fold.warm, items)
        pairs = CoRatings.of(fold.warm, fitted)
        near_errors.append(neighbours.squared_errors(Neighbours.grid(), fitted, pairs, fold.cold))
        krige_errors.append(kriging.squared_errors(Kriging.grid(), fitted, pairs, fold.cold))
        turns.append((fold, fitted, Start.of(pairs, max(RANKS))))
    return ByPairs(
        choose(Neighbours.grid(), near_errors),
        choose(Kriging.grid(), krige_errors),
        Factors.tune(turns, biases),
    )
