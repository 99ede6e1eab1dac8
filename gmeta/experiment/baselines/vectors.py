r"""Ridge regression of a task's labels on vectors of its items, with which kriging and factors predict.

Each task has a vector u, drawn from N(0, I), and a row of item i has the label

.. math:: y = \mu + b_i + x_i^T u + \varepsilon, \quad \varepsilon \sim N(0, \sigma^2)

Given the support rows S with residuals r, the posterior of u is a ridge regression:

.. math:: A = I + \sum_S x x^T / \sigma^2, \quad \bar u = A^{-1} \sum_S x r / \sigma^2

so that :math:`\hat y = \mu + b_i + x_i^T \bar u`, with variance :math:`\sigma^2 + x_i^T A^{-1} x_i`. This
equals kriging with the covariance :math:`X X^T` of items, without a matrix of the support's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import eigsh

from gmeta.experiment.baselines.attributes import Biases, FittedBiases
from gmeta.experiment.baselines.task_rows import Floats, Fold, Ints, Rows, Tasks, choose, squared_error

AT_ONCE = 4096
"""Tasks whose matrices are held together."""


@dataclass(frozen=True)
class ItemVectors:
    r"""Biases and vectors of items.

    Attributes:
      mean: The mean of all labels.
      bias: (items + 1,); the last is for unknown items.
      slots: (items + 1,) the index of each item's vector.
      vectors: (slots, width).
      noise: :math:`\sigma^2`.

    Example:
      >>> fitted = ItemVectors(3.0, np.zeros(2), np.array([0, 1]), np.array([[1.0], [1.0]]), noise=1.0)
      >>> support = Rows(np.array([0]), np.array([5.0]), np.array([0, 1]))
      >>> tasks = Tasks(support, Rows(np.array([1]), np.zeros(1), np.array([0, 1])))
      >>> fitted.predict(tasks), fitted.variance(tasks)
      (array([4.]), array([1.5]))
    """

    mean: float
    bias: Floats
    slots: Ints
    vectors: Floats
    noise: float

    def predict(self, tasks: Tasks) -> Floats:
        """Predict the query rows, (rows,)."""
        found = []
        for part, support in self._parts(tasks):
            means = self._means(support)
            found.append(np.einsum("rk,rk->r", self._of(part.query), means[part.query.task]))
        return self.mean + self.bias[tasks.query.items] + np.concatenate([np.zeros(0), *found])

    def posterior_means(self, support: Rows) -> Floats:
        r"""Compute :math:`\bar u` of each task, (tasks, width)."""
        parts = [self._means(part) for _, part in self._parts(Tasks(support, support))]
        return np.concatenate([np.zeros((0, self.vectors.shape[1])), *parts])

    def _means(self, support: Rows) -> Floats:
        found: Floats = np.linalg.solve(*self._normal(support))[..., 0]
        return found

    def variance(self, tasks: Tasks) -> Floats:
        """Compute the variance of the query rows' labels, (rows,), noise included."""
        found = []
        for part, support in self._parts(tasks):
            inverse, wanted = np.linalg.inv(self._normal(support)[0]), self._of(part.query)
            spread = np.matmul(wanted[:, None], inverse[part.query.task])[:, 0]
            found.append(np.einsum("rk,rk->r", spread, wanted))
        return self.noise + np.concatenate([np.zeros(0), *found])

    def moments(self, rows: Rows) -> Floats:
        """Compute the mean second moments of the tasks' vectors under their posteriors, (width, width)."""
        total = np.zeros((self.vectors.shape[1], self.vectors.shape[1]))
        for _, support in self._parts(Tasks(rows, rows)):
            left, right = self._normal(support)
            inverse = np.linalg.inv(left)
            means = np.matmul(inverse, right)[..., 0]
            total += inverse.sum(axis=0) + means.T @ means
        return total / max(len(rows.sizes), 1)

    def _of(self, rows: Rows) -> Floats:
        return self.vectors[self.slots[rows.items]]

    def _parts(self, tasks: Tasks) -> Iterator[tuple[Tasks, Rows]]:
        for start in range(0, len(tasks), AT_ONCE):
            part = tasks.choose(np.arange(start, min(start + AT_ONCE, len(tasks))))
            yield part, part.support

    def _normal(self, support: Rows) -> tuple[Floats, Floats]:
        """Compute both sides of the equations, (tasks, width, width) and (tasks, width, 1)."""
        width, slots = self.vectors.shape[1], self.slots[support.items]
        shape = len(support.sizes), len(self.vectors)
        rest = support.labels - self.mean - self.bias[support.items]
        squares = np.einsum("ij,ik->ijk", self.vectors, self.vectors).reshape(shape[1], -1)
        counts = csr_matrix((np.ones(len(rest)), slots, support.row_splits), shape=shape)
        sums = csr_matrix((rest, slots, support.row_splits), shape=shape)
        left = (counts @ squares).reshape(-1, width, width) / self.noise + np.eye(width)
        return left, (sums @ self.vectors)[..., None] / self.noise


# The covariance of two items' labels in one task.
#
# Over the warm tasks with residuals r (labels less mean and item bias), for items i and j,
#
# .. math:: C_{ij} = \sum_t \sum_{a \ne b \in t,\, i(a) = i,\, i(b) = j} r_a r_b
#
# and :math:`N_{ij}` is the number of terms: no row is paired with itself. Their covariance is shrunk towards
# :math:`c`, the mean of all products, as if there were :math:`\beta` more pairs with that mean:
#
# .. math:: \Sigma_{ij} = \frac{C_{ij} + \beta c}{N_{ij} + \beta}, \quad
#    \Sigma_{ij} - c = \frac{C_{ij} - c N_{ij}}{N_{ij} + \beta}
#
# :math:`c` is the variance of the task's own bias, which all rows of a task share.

Matrix = NDArray[np.float32]

MOST_PAIRED_ITEMS = 3000
"""The most items that have pairs, those with most warm rows; two tables of this width squared are held."""

_FEW = 256  # up to this width, computing all eigenvectors is cheap


@dataclass(frozen=True)
class CoRatings:
    """The sums over pairs of rows.

    Attributes:
      slots: (items + 1,) an item's row and column in the tables; the last one, of zeros, is for items
        without pairs.
      products: (slots, slots) :math:`C - cN`, float32.
      counts: (slots, slots) :math:`N`, float32.
      common: :math:`c`, at least a thousandth of ``variance``.
      variance: The mean squared residual.
    """

    slots: Ints
    products: Matrix
    counts: Matrix
    common: float
    variance: float

    @classmethod
    def of(cls, warm: Rows, biases: FittedBiases, most: int = MOST_PAIRED_ITEMS) -> CoRatings:
        """Sum over all pairs of rows in each warm task."""
        residuals, task, sizes = biases.residuals(warm), warm.task, warm.sizes
        variance = max(float(np.square(residuals).mean()), 1e-12)
        slots = number_frequent(warm.items, len(biases.item) - 1, most)
        width, place = int(slots.max()) + 1, (task, slots[warm.items])
        tables = []
        for values in (residuals, np.ones_like(residuals)):
            by_task = csr_matrix((values.astype(np.float32), place), shape=(len(sizes), width))
            table = (by_task.T @ by_task).toarray()
            table[np.diag_indices(width)] -= np.bincount(place[1], weights=values**2, minlength=width)
            table[-1] = table[:, -1] = 0
            tables.append(table)
        sums = np.bincount(task, weights=residuals, minlength=len(sizes))
        squares = np.bincount(task, weights=residuals**2, minlength=len(sizes))
        # Tasks are weighted by their rows, not by their pairs, or else the longest tasks would dominate.
        each = (sums**2 - squares) / np.maximum(sizes - 1, 1)
        common = max(float(each.sum() / max(sizes[sizes > 1].sum(), 1)), variance / 1000)
        return cls(slots, tables[0] - np.float32(common) * tables[1], tables[1], common, variance)

    def vectors(self, shrinkage: float, most: int) -> Matrix:
        r"""Compute the vectors of items whose products come closest to :math:`\Sigma - c`.

        Args:
          shrinkage: :math:`\beta`.
          most: The maximum width: one dimension for each of the largest eigenvalues above 0.

        Returns:
          (slots, width), largest eigenvalue first; the last slot's vector is 0.
        """
        centred = self.products / (self.counts + np.float32(shrinkage))
        width = len(centred)
        if width <= max(_FEW, 3 * most):
            values, found = eigh(centred, subset_by_index=[max(width - most, 0), width - 1])
        else:
            values, found = eigsh(centred, k=most, which="LA", v0=np.ones(width, np.float32), tol=1e-3)
        order = np.argsort(-values)
        vectors = found[:, order] * np.sqrt(np.maximum(values[order], 0))
        vectors[-1] = 0
        return np.asarray(vectors, np.float32)


def number_frequent(used: Ints, items: int, most: int) -> Ints:
    """Number the ``most`` most frequent items from 0; all others, and unknown ones, get the next number.

    Args:
      used: (rows,) the items of the warm rows, each below ``items``.
      items: The number of items.
      most: How many items get a separate number.

    Returns:
      (items + 1,).
    """
    frequent = np.argsort(-np.bincount(used, minlength=items)[:items], kind="stable")[:most]
    slots = np.full(items + 1, len(frequent))
    slots[frequent] = np.arange(len(frequent))
    return slots


# Kriging: a Gaussian process over items, conditioned on a task's support rows.
#
# The labels of a task, less mean and item biases, are normal with covariance :math:`\Sigma_{ij}` between
# items, estimated from warm tasks (`CoRatings`), and with noise :math:`\sigma^2` per row:
#
# .. math:: \hat y_q = \mu + b_q + \Sigma_{qS} (\Sigma_{SS} + \sigma^2 I)^{-1} r_S
#
# A covariance that is estimated pair by pair may not be positive definite, which makes its predictions
# meaningless. So :math:`\Sigma - c` is replaced by the nearest matrix of a low rank without negative
# eigenvalues, :math:`\Sigma = c 1 1^T + F F^T`. :math:`\sigma^2` is a share of :math:`v - c`, where v is the
# variance of residuals.

SHRINKAGES, KRIGING_RANKS, NOISES = (100.0, 20.0, 50.0, 200.0), (16, 4, 8, 32), (0.9, 0.8, 1.0)


@dataclass(frozen=True)
class Kriging:
    """The settings of kriging.

    Attributes:
      shrinkage: The number of pairs of the overall mean towards which a covariance is shrunk.
      rank: The width of F.
      noise: The share that is noise.
    """

    shrinkage: float
    rank: int
    noise: float

    @classmethod
    def grid(cls) -> list[Kriging]:
        """Return the settings to choose from."""
        return [cls(*each) for each in product(SHRINKAGES, KRIGING_RANKS, NOISES)]

    def fit(self, biases: FittedBiases, pairs: CoRatings) -> ItemVectors:
        """Find the vectors of items."""
        return self._with(biases, pairs, pairs.vectors(self.shrinkage, self.rank))

    def _with(self, biases: FittedBiases, pairs: CoRatings, vectors: Matrix) -> ItemVectors:
        common = np.full((len(vectors), 1), np.sqrt(pairs.common))
        noise = max(self.noise * (pairs.variance - pairs.common), 1e-3 * pairs.variance)
        whole = np.concatenate([common, vectors[:, : self.rank]], axis=1).astype(np.float64)
        return ItemVectors(biases.mean, biases.item, pairs.slots, whole, noise)


def squared_errors(
    settings: Sequence[Kriging], biases: FittedBiases, pairs: CoRatings, cold: Tasks
) -> list[float]:
    """Sum the squared errors of the query rows with each of the settings; compute eigenvectors once."""
    widest = max(one.rank for one in settings)
    vectors = {each: pairs.vectors(each, widest) for each in {one.shrinkage for one in settings}}
    return [squared_error(one._with(biases, pairs, vectors[one.shrinkage]), cold) for one in settings]


# Ridge on factors: alternating least squares fits the items' vectors to the warm rows.
#
# The model is that of `ItemVectors` with :math:`x_i = (s, f_i)`. Alternately,
#
# * each warm task's vector gets its posterior :math:`N(\bar u, A^{-1})` by ridge regression on its items;
# * each item's bias and factors become the ridge regression of its labels on the vectors of its tasks, where
#   :math:`\bar u \bar u^T + A^{-1}` replaces :math:`u u^T`, so a task of few rows counts less;
# * s and :math:`\sigma^2` are set to the values that fit best.
#
# This is expectation maximisation of a factor analysis with missing entries. The priors are
# :math:`b_i \sim N(0, \sigma^2 / d_i)`, with the damping of the biases, and
# :math:`f_i \sim N(0, v / \lambda)`, with the variance v of residuals. A new task's ridge regression needs no
# further setting.

PENALTIES, RANKS = (100.0, 10.0, 30.0, 300.0), (8, 4, 16)
MOST_ITEMS = 20_000
"""The most items that have factors, those with most warm rows; the others have biases."""
TURNS = 10
_AT_ONCE = 8192  # tasks whose matrices are in memory at once


@dataclass(frozen=True)
class Start:
    """The initial values of the alternation.

    Attributes:
      slots: (items + 1,) of `CoRatings`.
      vectors: (slots, width) the vectors of kriging, the initial factors.
      common: The variance of a task's bias.
    """

    slots: Ints
    vectors: Floats
    common: float

    @classmethod
    def of(cls, pairs: CoRatings, width: int) -> Start:
        """Start from the vectors of kriging with the default shrinkage."""
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
        """Choose the penalty with the default rank, then the rank with that penalty, on pseudo-cold tasks.

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
        """Run the alternation over the warm rows, from the vectors of kriging."""
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
    """Run one round: the tasks' posteriors, then items, scale and noise."""
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
        # task's first number. So these are the vector's second moments with its first number replaced by 1.
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
