"""Baselines that count and solve, with which the models of an experiment on a catalogue are compared.

Each is a dataclass of settings with ``grid``, the settings among which validation chooses, and ``fit``,
which returns a `Scorer`: the scores of the whole catalogue for some histories. They are deterministic: each
run has the same baselines.

Sequential rules are Ludewig and Jannach's ("Evaluation of session-based recommendation algorithms", 2018,
section 3.1) with a decay by distance and a history of more than one item; item neighbours are those of their
section 3.2 with shrinkage; RP3beta is Paudel et al.'s ("Updatable, accurate, diverse, and scalable
recommendations for interactive applications", 2017); EASE is Steck's ("Embarrassingly shallow autoencoders",
2019), and implicit ALS is Hu, Koren and Volinsky's (2008).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, sparse

from gmeta.experiment.baselines.tuning import one_thread
from gmeta.experiment.next_item.histories import Histories

Scores = NDArray[np.float32]
MOST_ITEMS = 15_000
"""EASE inverts a matrix of items by items; with more items it is left out."""

_EPSILON, _LEAST = 1e-5, 1e-9
_AT_ONCE = 1 << 22  # numbers of a batch of equations

Known = dict[Any, Any]
"""What was computed last of the same histories: its settings -> a matrix."""


class Scorer(Protocol):
    """A fitted model or baseline that ranks a catalogue."""

    def scores(self, histories: Histories) -> Scores:
        """Compute the scores of all items, (users, items); higher is likelier."""
        ...


class Settings(Protocol):
    """The settings of a baseline."""

    def fit(self, train: Histories, items: int, known: Known | None = None) -> Scorer:
        """Fit the baseline to histories; ``known`` caches what settings of the same kind share."""
        ...

    def describe(self) -> str:
        """Return the settings as part of a sentence."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same scores for all histories."""

    of_items: Scores

    def scores(self, histories: Histories) -> Scores:
        """Return the scores for each history."""
        return np.broadcast_to(self.of_items, (len(histories), len(self.of_items)))


@dataclass(frozen=True)
class Popularity:
    """The log of an item's number of events, weighted with a half-life.

    Attributes:
      half_life: The share of the training time after which an event counts half; 0: no decay.
    """

    half_life: float = 0.0

    @staticmethod
    def grid(recent: bool) -> list[Popularity]:
        """Return the settings to choose from: over all times, or over recent times."""
        return [Popularity(each) for each in (0.01, 0.03, 0.1, 0.3)] if recent else [Popularity()]

    def fit(self, train: Histories, items: int, known: Known | None = None) -> Scorer:
        """Count the items."""
        weights = np.ones(len(train.items))
        if self.half_life and train.times is not None:
            span = max(int(train.times.max() - train.times.min()), 1)
            weights = np.exp2((train.times - train.times.max()) / (self.half_life * span))
        counts = np.bincount(train.items, weights, minlength=items)
        return Constant(np.log(counts + _EPSILON).astype(np.float32))

    def describe(self) -> str:
        """Return the settings as part of a sentence."""
        return f"half-life {self.half_life:g} of the training time" if self.half_life else "of all times"


@dataclass(frozen=True)
class Pairs:
    """Scores from a matrix of items by items: the sum of the rows of the history's items, by recency."""

    matrix: Any
    last: int
    decay: float
    log: bool = True

    def scores(self, histories: Histories) -> Scores:
        """Sum the rows for each history, and scale the sums."""
        found = self.sums(histories)
        dense = np.asarray(found.todense() if sparse.issparse(found) else found, np.float32)
        return np.asarray(self.scale(dense, np))

    def sums(self, histories: Histories) -> Any:
        """Sum the rows for each history, (users, items), sparse if the matrix is."""
        return recency(histories, self.matrix.shape[0], self.last, self.decay) @ self.matrix

    def scale(self, sums: Any, by: Any) -> Any:
        """Return the log of each item's share, or the unchanged sums; ``by`` is NumPy or TensorFlow."""
        if not self.log:
            return sums
        if by is np:
            return np.log(sums / np.maximum(sums.sum(axis=1, keepdims=True), _LEAST) + _EPSILON)
        return by.math.log(sums / by.maximum(by.reduce_sum(sums, axis=1, keepdims=True), _LEAST) + _EPSILON)


def recency(histories: Histories, items: int, last: int, decay: float) -> Any:
    """Return the last items of each history as a sparse matrix, (users, items), weighted by ``place^-decay``.

    Args:
      histories: The histories.
      items: The number of items.
      last: How many of a history's last items count; 0: all.
      decay: The exponent. The weights of an item that occurs several times are summed.
    """
    back = histories.from_end
    used = back < last if last else np.ones(len(back), bool)
    weights = (back[used] + 1.0) ** -decay
    shape = (len(histories), items)
    return sparse.csr_matrix(
        (weights.astype(np.float32), (histories.owner[used], histories.items[used])), shape
    )


@dataclass(frozen=True)
class Rules:
    r"""Sequential rules: how often an item followed another one at a short distance.

    .. math::
       C_{ij} = n_j^{-\nu} \sum_{\text{j follows i at distance } g \le w} g^{-\alpha}, \quad
       s_j = \sum_{k \le l} k^{-\beta} C_{i_k j}

    with :math:`i_k` the k-th item from a history's end.

    Attributes:
      window: w, the greatest distance of a pair.
      distance_decay: α.
      popularity: ν, how strongly popular items are penalised.
      last: l, how many of a history's items count.
      recency_decay: β.
    """

    window: int = 10
    distance_decay: float = 0.5
    popularity: float = 0.5
    last: int = 50
    recency_decay: float = 1.0

    @staticmethod
    def grid() -> list[Rules]:
        """Return the settings to choose from."""
        values = (5, 10, 20), (0.5, 1.0), (0.0, 0.25, 0.5), (10, 50), (0.5, 1.0, 1.5)
        return [Rules(*each) for each in product(*values)]

    def fit(self, train: Histories, items: int, known: Known | None = None) -> Scorer:
        """Count the pairs."""
        matrix = _once(known, (self.window, self.distance_decay, self.popularity), self._count, train, items)
        return Pairs(matrix, self.last, self.recency_decay)

    def _count(self, train: Histories, items: int) -> Any:
        total = sparse.csr_matrix((items, items), dtype=np.float32)
        for distance in range(1, self.window + 1):
            follows = np.flatnonzero(train.from_end >= distance)
            weights = np.full(len(follows), distance**-self.distance_decay, np.float32)
            pairs = train.items[follows], train.items[follows + distance]
            total += sparse.csr_matrix((weights, pairs), (items, items))
        scale = np.maximum(np.bincount(train.items, minlength=items), 1.0) ** -self.popularity
        return (total @ sparse.diags(scale.astype(np.float32))).tocsr()

    def describe(self) -> str:
        """Return the settings as part of a sentence."""
        return (
            f"pairs within {self.window}, decay {self.distance_decay:g}, from the last {self.last} items "
            f"with decay {self.recency_decay:g}, popularity to the power {-self.popularity:g}"
        )


def _once(known: Known | None, key: Any, compute: Callable[..., Any], *arguments: Any) -> Any:
    """Return the value that ``known`` has for the key, or compute it and drop the others, which are large."""
    if known is None:
        return compute(*arguments)
    if key not in known:
        known.clear()
        known[key] = compute(*arguments)
    return known[key]


def sets_of(train: Histories, items: int) -> Any:
    """Return the items of each user as a sparse matrix of 0 and 1, (users, items)."""
    shape = (len(train), items)
    found = sparse.csr_matrix((np.ones(len(train.items), np.float32), (train.owner, train.items)), shape)
    found.data[:] = 1.0
    return found


@dataclass(frozen=True)
class Neighbours:
    r"""Item neighbours: :math:`s_j = \sum_i |U_i \cap U_j| / (\sqrt{|U_i| |U_j|} + h)`, i in a history.

    Attributes:
      shrinkage: h, which penalises pairs that few users have.
      last: How many of a history's last items count; 0: all.
      recency_decay: The exponent of their places, as in `Rules`.
    """

    shrinkage: float = 10.0
    last: int = 0
    recency_decay: float = 0.5

    @staticmethod
    def grid(ordered: bool = True) -> list[Neighbours]:
        """Return the settings to choose from."""
        if not ordered:
            return [Neighbours(each, 0, 0.0) for each in (0.0, 10.0, 50.0)]
        return [Neighbours(*each) for each in product((0.0, 10.0, 50.0), (0, 20), (0.0, 0.5, 1.0))]

    def fit(self, train: Histories, items: int, known: Known | None = None) -> Scorer:
        """Count the users that pairs of items share."""
        return Pairs(_once(known, self.shrinkage, self._count, train, items), self.last, self.recency_decay)

    def _count(self, train: Histories, items: int) -> Any:
        own = sets_of(train, items)
        shared = (own.T @ own).tocoo()
        sizes = shared.diagonal()
        apart = shared.row != shared.col
        row, col = shared.row[apart], shared.col[apart]
        values = shared.data[apart] / (np.sqrt(sizes[row] * sizes[col]) + self.shrinkage)
        return sparse.csr_matrix((values, (row, col)), shared.shape)

    def describe(self) -> str:
        """Return the settings as part of a sentence."""
        return (
            f"shrunk by {self.shrinkage:g} users, from {f'the last {self.last}' if self.last else 'all'} "
            f"items with decay {self.recency_decay:g}"
        )


@dataclass(frozen=True)
class Walks:
    r"""RP3beta: random walks of three steps, from a user to an item, to another user, to another item.

    .. math:: s_j = |U_j|^{-\beta} \sum_{i \neq j} |U_i|^{-\alpha} \sum_{u \in U_i \cap U_j} |I_u|^{-\alpha}

    with i in a history, :math:`U_i` the users who have item i, and :math:`I_u` the items of user u.

    Attributes:
      flatness: α, the exponent of each step's probability.
      popularity: β, how strongly popular items are penalised.
    """

    flatness: float = 1.0
    popularity: float = 0.6

    @staticmethod
    def grid() -> list[Walks]:
        """Return the settings to choose from."""
        return [Walks(*each) for each in product((0.5, 1.0), (0.2, 0.4, 0.6, 0.8))]

    def fit(self, train: Histories, items: int, known: Known | None = None) -> Scorer:
        """Walk from each item."""
        own = sets_of(train, items)
        shares = [np.maximum(own.sum(axis=axis).A1, 1.0) for axis in (0, 1)]
        of_items, of_users = (sparse.diags(each**-self.flatness) for each in shares)
        walked = (of_items @ own.T @ of_users @ own @ sparse.diags(shares[0] ** -self.popularity)).tocoo()
        apart = walked.row != walked.col
        values = walked.data[apart].astype(np.float32)
        matrix = sparse.csr_matrix((values, (walked.row[apart], walked.col[apart])), walked.shape)
        return Pairs(matrix, 0, 0.0)

    def describe(self) -> str:
        """Return the settings as part of a sentence."""
        return f"steps to the power {self.flatness:g}, popularity to the power {-self.popularity:g}"


@dataclass(frozen=True)
class Ease:
    r"""EASE: the least-squares weights of items for each other, :math:`B = I - P\,\mathrm{diag}(P)^{-1}`.

    :math:`P = (X^T X + \lambda I)^{-1}` with X the users' sets of items.

    Attributes:
      penalty: λ.
      last: How many of a history's last items count; 0: all.
      recency_decay: The exponent of their places, as in `Rules`.
    """

    penalty: float = 100.0
    last: int = 0
    recency_decay: float = 0.0

    @staticmethod
    def grid(ordered: bool = True) -> list[Ease]:
        """Return the settings to choose from."""
        if not ordered:
            return [Ease(each, 0, 0.0) for each in (30.0, 100.0, 200.0, 300.0, 500.0, 1000.0)]
        return [Ease(*each) for each in product((30.0, 100.0, 300.0, 1000.0), (0,), (0.0, 0.5, 1.0))]

    def fit(self, train: Histories, items: int, known: Known | None = None) -> Scorer:
        """Invert the matrix of items by items."""
        matrix = _once(known, self.penalty, self._invert, train, items)
        return Pairs(matrix, self.last, self.recency_decay, log=False)

    def _invert(self, train: Histories, items: int) -> Scores:
        own = sets_of(train, items)
        gram = (own.T @ own).toarray()
        gram[np.diag_indices(items)] += self.penalty
        inverse = linalg.inv(gram, overwrite_a=True, check_finite=False)
        inverse /= -np.diag(inverse)
        inverse[np.diag_indices(items)] = 0.0
        return inverse.astype(np.float32, copy=False)

    def describe(self) -> str:
        """Return the settings as part of a sentence."""
        return f"penalty {self.penalty:g}, decay {self.recency_decay:g}"


@dataclass(frozen=True)
class Als:
    r"""Implicit ALS: :math:`\min \sum_{ui} c_{ui} (p_{ui} - x_u \cdot y_i)^2 + \lambda(\|X\|^2 + \|Y\|^2)`.

    :math:`p_{ui}` is 1 where the user has the item, with confidence :math:`c_{ui} = 1 + a`, and otherwise 0
    with confidence 1. The vector of a new history is solved for.

    Attributes:
      rank: The length of a vector.
      confidence: a.
      penalty: λ.
      sweeps: How often both sides are solved for.
    """

    rank: int = 64
    confidence: float = 10.0
    penalty: float = 10.0
    sweeps: int = 8

    @staticmethod
    def grid(ordered: bool = True) -> list[Als]:
        """Return the settings to choose from."""
        if not ordered:
            return [Als(*each) for each in product((32, 64), (1.0, 3.0, 10.0), (10.0, 30.0))]
        return [Als(*each) for each in product((64,), (3.0, 20.0), (3.0, 30.0))]

    def fit(self, train: Histories, items: int, known: Known | None = None) -> Scorer:
        """Solve for items and users in turn."""
        own = sets_of(train, items)
        of_item = own.T.tocsr()
        vectors = np.random.default_rng(0).normal(0, 0.1, (items, self.rank)).astype(np.float32)
        for _ in range(self.sweeps):
            vectors = self._solve(of_item, self._solve(own, vectors))
        return Solved(self, vectors)

    def _solve(self, sets: Any, others: Scores) -> Scores:
        """Solve for the vectors of one side, given those of the other, (rows, rank).

        A row with n items, whose vectors are Y, solves :math:`(G + a Y^T Y) x = (1 + a) Y^T 1`. If n is less
        than the rank, it solves n equations:
        :math:`x = (1 + a) G^{-1} Y^T (I + a Y G^{-1} Y^T)^{-1} 1`.
        """
        gram = others.T @ others + self.penalty * np.eye(self.rank, dtype=np.float32)
        flat = others @ linalg.inv(gram)
        counts = np.diff(sets.indptr)
        found = np.zeros((sets.shape[0], self.rank), np.float32)
        with one_thread():
            for count in np.unique(counts[counts > 0]):
                of_count = np.flatnonzero(counts == count)
                for rows in np.array_split(of_count, -(-len(of_count) * int(count) * self.rank // _AT_ONCE)):
                    items = sets.indices[sets.indptr[rows, np.newaxis] + np.arange(count)]
                    found[rows] = self._solve_rows(others[items], flat[items], gram)
        return found

    def _solve_rows(self, own: Scores, flat: Scores, gram: Scores) -> Scores:
        """Solve for rows with equally many items: ``own`` is Y and ``flat`` is Y / G, (rows, n, rank)."""
        count = own.shape[1]
        across = own.transpose(0, 2, 1)
        if count < self.rank:
            left = np.eye(count, dtype=np.float32) + self.confidence * (flat @ across)
            weights = np.linalg.solve(left, np.ones((len(own), count, 1), np.float32))
            return (1 + self.confidence) * (flat * weights).sum(axis=1)
        right = (1 + self.confidence) * own.sum(axis=1)
        return np.linalg.solve(gram + self.confidence * (across @ own), right[:, :, np.newaxis])[:, :, 0]

    def describe(self) -> str:
        """Return the settings as part of a sentence."""
        return f"{self.rank} factors, confidence {1 + self.confidence:g}, penalty {self.penalty:g}"


@dataclass(frozen=True)
class Solved:
    """The vectors of items that implicit ALS solved for."""

    als: Als
    vectors: Scores = field(repr=False)

    def scores(self, histories: Histories) -> Scores:
        """Solve for each history's vector, and multiply it with those of all items."""
        users = self.als._solve(sets_of(histories, len(self.vectors)), self.vectors)
        return users @ self.vectors.T


LABELS = {
    "popularity": "popularity",
    "recent_popularity": "recent popularity",
    "neighbours": "item neighbours",
    "walks": "RP3beta",
    "rules": "sequential rules",
    "ease": "EASE",
    "als": "implicit ALS",
}
"""Name -> what tables call it."""


def grids(items: int, times: bool, ordered: bool = True) -> dict[str, Sequence[Settings]]:
    """Return name -> the settings among which validation chooses.

    Args:
      items: The size of the catalogue.
      times: Whether events have times.
      ordered: Whether the targets come after the history; if not, no baseline reads the order.
    """
    found: dict[str, Sequence[Settings]] = {"popularity": Popularity.grid(recent=False)}
    if times and ordered:
        found["recent_popularity"] = Popularity.grid(recent=True)
    found["neighbours"] = Neighbours.grid(ordered)
    found |= {"rules": Rules.grid()} if ordered else {"walks": Walks.grid()}
    found["als"] = Als.grid(ordered)
    if items <= MOST_ITEMS:
        found["ease"] = Ease.grid(ordered)
    return found


_KINDS: Mapping[str, type] = {
    "popularity": Popularity,
    "recent_popularity": Popularity,
    "neighbours": Neighbours,
    "walks": Walks,
    "rules": Rules,
    "ease": Ease,
    "als": Als,
}


def settings_of(name: str, values: Mapping[str, Any]) -> Settings:
    """Return the settings of a baseline from their values by field.

    Raises:
      KeyError: There is no such baseline.
      TypeError: The values aren't the fields of its settings.
    """
    return _KINDS[name](**values)
