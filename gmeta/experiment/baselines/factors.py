r"""Ridge on factors: items have vectors that alternating least squares finds on the warm rows.

The model is that of `gmeta.experiment.baselines.item_vectors` with :math:`x_i = (s, f_i)`. By turns,

* each warm task's vector gets its posterior :math:`N(\bar u, A^{-1})` by ridge regression on its items;
* each item's bias and factors become the ridge regression of its labels on the vectors of its tasks, where
  :math:`\bar u \bar u^T + A^{-1}` stands for :math:`u u^T`: what a task of few rows says counts less;
* s and :math:`\sigma^2` become what fits best.

This is expectation maximisation of a factor analysis with missing entries. The priors are
:math:`b_i \sim N(0, \sigma^2 / d_i)`, with the damping of the biases, and
:math:`f_i \sim N(0, v / \lambda)`, with the
variance v of residuals. A new task's ridge regression needs no further setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import csr_matrix

from gmeta.experiment.baselines.biases import Biases, FittedBiases
from gmeta.experiment.baselines.co_ratings import CoRatings, number_frequent
from gmeta.experiment.baselines.item_vectors import ItemVectors
from gmeta.experiment.baselines.kriging import SHRINKAGES
from gmeta.experiment.baselines.pseudo_cold import Fold, choose, squared_error
from gmeta.experiment.baselines.task_rows import Floats, Ints, Rows

PENALTIES, RANKS = (100.0, 10.0, 30.0, 300.0), (8, 4, 16)
MOST_ITEMS = 20_000
"""So many items have factors, those with most warm rows; the others have biases."""
TURNS = 10
_AT_ONCE = 8192  # tasks whose matrices are held together


@dataclass(frozen=True)
class Start:
    """Where the turns start.

    Attributes:
      slots: (items + 1,) of `CoRatings`.
      vectors: (slots, width) the vectors of kriging, on which the factors start.
      common: The variance of a task's bias.
    """

    slots: Ints
    vectors: Floats
    common: float

    @classmethod
    def of(cls, pairs: CoRatings, width: int) -> Start:
        """Start from the vectors of kriging with the usual shrinkage."""
        return cls(pairs.slots, pairs.vectors(SHRINKAGES[0], width).astype(np.float64), pairs.common)


@dataclass(frozen=True)
class Factors:
    r"""The settings of factors.

    Attributes:
      rank: How many factors an item has.
      penalty: :math:`\lambda`.
    """

    rank: int
    penalty: float

    @classmethod
    def tune(cls, turns: Sequence[tuple[Fold, FittedBiases, Start]], biases: Biases) -> Factors:
        """Choose the penalty with the usual rank, then the rank with that penalty, on pseudo-cold tasks.

        Args:
          turns: Each fold with the biases and the start of its warm rows.
          biases: The settings of the biases.
        """

        def best(every: list[Factors]) -> Factors:
            return choose(
                every,
                (
                    [squared_error(one.fit(fold.warm, biases, fitted, start), fold.cold) for one in every]
                    for fold, fitted, start in turns
                ),
            )

        first = best([cls(RANKS[0], penalty) for penalty in PENALTIES])
        return best([replace(first, rank=rank) for rank in RANKS])

    def fit(self, warm: Rows, biases: Biases, fitted: FittedBiases, start: Start) -> ItemVectors:
        """Take the turns over the warm rows, from the vectors of kriging."""
        items = len(fitted.item) - 1
        slots = number_frequent(warm.items, items, MOST_ITEMS)
        rest = int(slots.max())
        variance = max(float(np.square(fitted.residuals(warm)).mean()), 1e-12)
        vectors = np.zeros((rest + 1, 1 + self.rank))
        vectors[slots, 1 : 1 + start.vectors.shape[1]] = start.vectors[start.slots, : self.rank]
        vectors[:, 0] = np.sqrt(start.common)
        bias = np.zeros(rest + 1)
        bias[slots] = fitted.item
        bias[rest] = 0
        rare = np.where(slots == rest, fitted.item, 0.0)  # the biases of items without factors stay
        rows = replace(warm, items=slots[warm.items], labels=warm.labels - fitted.mean - rare[warm.items])
        state = _State(bias, vectors, max(0.9 * (variance - start.common), 1e-3 * variance))
        for _ in range(TURNS):
            state = _turn(state, rows, biases.item_damping, self.penalty / variance, 1e-3 * variance)
        return ItemVectors(fitted.mean, state.bias[slots] + rare, slots, state.vectors, state.noise)


@dataclass(frozen=True)
class _State:
    bias: Floats
    vectors: Floats
    noise: float


def _turn(state: _State, rows: Rows, damping: float, precision: float, least: float) -> _State:
    """Take one turn: the tasks' posteriors, then items, scale and noise."""
    bias, vectors, noise = state.bias, state.vectors, state.noise
    slots, width = vectors.shape
    squares = np.einsum("ij,ik->ijk", vectors, vectors).reshape(slots, -1)
    left, right, spread, error = np.zeros((slots, width * width)), np.zeros((slots, width)), 0.0, 0.0
    for first in range(0, len(rows.sizes), _AT_ONCE):
        part = rows.choose(np.arange(first, min(first + _AT_ONCE, len(rows.sizes))))
        shape, rest = (len(part.sizes), slots), part.labels - bias[part.items]
        counts = csr_matrix((np.ones(len(rest)), part.items, part.row_splits), shape=shape)
        sums, labels = (
            csr_matrix((each, part.items, part.row_splits), shape=shape) for each in (rest, part.labels)
        )
        gram = (counts @ squares).reshape(-1, width, width)
        inverse = np.linalg.inv(gram / noise + np.eye(width))
        mean = np.einsum("tij,tj->ti", inverse, (sums @ vectors) / noise)
        spread += float((mean[:, 0] ** 2 + inverse[:, 0, 0]).sum())
        missed = rest - np.einsum("rk,rk->r", vectors[part.items], mean[part.task])
        error += float(np.square(missed).sum() + (inverse * gram).sum())
        # A row's label is (1, factors of the task) times (bias, factors of the item), plus scale times the
        # task's first number: the second moments of the task's vector, its first number turned to 1.
        moments = inverse + np.einsum("ti,tj->tij", mean, mean)
        offset = vectors[0, 0] * np.concatenate([mean[:, :1], moments[:, 0, 1:]], axis=1)
        moments[:, 0, 1:] = moments[:, 1:, 0] = mean[:, 1:]
        moments[:, 0, 0] = 1
        mean = np.concatenate([np.ones((len(mean), 1)), mean[:, 1:]], axis=1)
        left += counts.T @ moments.reshape(len(mean), -1)
        right += labels.T @ mean - counts.T @ offset
    prior = np.concatenate([[damping / noise], np.full(width - 1, precision)])
    found = np.linalg.solve(
        left.reshape(slots, width, width) / noise + np.diag(prior), right[..., None] / noise
    )
    found[-1] = 0  # items without factors share the last slot
    scale = np.full((slots, 1), vectors[0, 0] * np.sqrt(spread / len(rows.sizes)))
    return _State(
        found[:, 0, 0], np.concatenate([scale, found[:, 1:, 0]], axis=1), max(error / len(rows.labels), least)
    )
