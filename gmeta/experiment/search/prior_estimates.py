r"""Prior variances of the factor model, estimated from the training labels.

Ridge on factors (`gmeta.experiment.baselines.vectors`) has the same parts as the factor model: an item's bias
and factors, with tasks' vectors of variance 1. So the variances of its biases and factors estimate the prior
variances of the factor model's rows (empirical Bayes).

The variance of an item's number is split by moments between the item's row and the rows of its attributes.
For two items, the product of their numbers has the expectation :math:`w K_{ij}`, where w is the variance of
an attribute's row and :math:`K_{ij}` the product of the items' attributes. w is the regression of these
products on K over all pairs of two items; the rest of an item's variance is that of the item's row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.sparse import csr_matrix, diags, hstack

from gmeta.experiment.baselines.attributes import ItemAttributes
from gmeta.experiment.baselines.biases import Biases
from gmeta.experiment.baselines.pseudo_cold import cut_folds
from gmeta.experiment.baselines.task_rows import Floats, Tasks
from gmeta.experiment.baselines.tuning import one_thread
from gmeta.experiment.baselines.vectors import CoRatings, Factors, ItemVectors, Start
from gmeta.models.zoo.factor_model import FactorSettings

_TRUSTED = 30.0
"""An item with so many rows weighs half of one with infinitely many."""
_LEAST = 0.02
"""The least share of a variance that own rows, and rows of attributes, get."""


def estimate_priors(
    warm: Tasks, items: int, attributes: ItemAttributes | None, unit: float, settings: FactorSettings
) -> FactorSettings:
    """Return the settings with the variances of items and attributes that the labels suggest.

    Args:
      warm: The training tasks; those that stand for new tasks are cut like test tasks.
      items: The number of items.
      attributes: The attributes of all items; None: items have none.
      unit: The change of a label, or of a rate, where the model's output changes by 1.
      settings: The number of factors, and all other settings.
    """
    with one_thread():
        found = _fit(warm, items, settings.dim)
        # The penalty makes factors too small, and the tasks' vectors too large by the same factor.
        scale = np.linalg.cholesky(found.moments(warm.whole())[1:, 1:])
    rows = np.bincount(warm.whole().items, minlength=items)[:items]
    weights = rows / (rows + _TRUSTED)
    known = None if attributes is None else csr_matrix(hstack(list(attributes.columns.values())))[:items]
    own_bias, bias = _divide(found.bias[:items, None] / unit, known, weights)
    vectors = found.vectors[found.slots[:items], 1:] @ scale
    own_factors, factors = _divide(vectors / unit, known, weights)
    return replace(settings, own_bias=own_bias, own_factors=own_factors, bias=bias, factors=factors)


def _fit(warm: Tasks, items: int, rank: int) -> ItemVectors:
    """Fit ridge on factors with settings that cross-validation chooses, and ``rank`` factors."""
    folds = cut_folds(warm)
    biases = Biases.tune(folds, items)
    turns = []
    for fold in folds:
        fitted = biases.fit(fold.warm, items)
        turns.append((fold, fitted, Start.of(CoRatings.of(fold.warm, fitted), rank)))
    factors = replace(Factors.tune(turns, biases), rank=rank)
    rows = warm.whole()
    fitted = biases.fit(rows, items)
    return factors.fit(rows, biases, fitted, Start.of(CoRatings.of(rows, fitted), rank))


def _divide(numbers: Floats, known: csr_matrix | None, weights: Floats) -> tuple[float, float]:
    """Split the variance of items' numbers, (items, columns), between items' and attributes' rows.

    Args:
      numbers: The numbers of the items.
      known: (items, values) the items' attributes.
      weights: (items,).
    """
    lengths = np.square(numbers).mean(axis=1)
    whole = max(float(np.average(lengths, weights=weights)), 1e-6)
    if known is None:
        return whole, whole * _LEAST
    own = np.asarray(known.multiply(known).sum(axis=1)).ravel()  # K_ii
    sums = known.T @ (weights[:, None] * numbers)
    products = np.square(sums).sum() / numbers.shape[1] - (weights**2 * lengths * own).sum()
    gram = known.T @ diags(weights) @ known
    squares = gram.multiply(gram).sum() - np.square(weights * own).sum()
    share = float(np.clip(products / squares if squares > 0 else 0.0, whole * _LEAST, whole))
    explained = share * float(np.average(own, weights=weights))
    return max(whole - explained, whole * _LEAST), share
