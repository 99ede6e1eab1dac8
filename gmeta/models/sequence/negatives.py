"""Negatives of models that rank a catalogue: their laws, and how likely each item is among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.losses.softmax import popularity_negatives, uniform_negatives
from gmeta.ops import Jagged, jagged

Per = Literal["step", "user", "position"]
DrawnLaw = Literal["uniform", "popularity"]
"""Laws of negatives that are drawn from a catalogue: evenly, or in proportion to how often items occur."""
Law = Literal["in-batch", "uniform", "popularity"]
"""Laws of negatives: the positives of the other samples of a batch, or drawn ones."""


@dataclass(frozen=True)
class NegativeDraw:
    """Negatives for the positions of a batch of histories, drawn from a catalogue.

    Attributes:
      owner: The name that messages begin with.
      count: m, the number of negatives that a position sees.
      per: Which positions share negatives: ``"step"``: all of a step, on all ranks; ``"user"``: those of one
        history; ``"position"``: none.
      items: V, the size of the catalogue.
      seed: The seed of the draws.
      shares: (V,) how likely each item is drawn; None: evenly.

    Raises:
      ConfigError: A setting is invalid.
    """

    owner: str
    count: int
    per: Per
    items: int
    seed: int
    shares: tf.Tensor | None = None

    def __post_init__(self) -> None:
        whole_number(f"{self.owner}: negatives", self.count, least=1)
        if self.per not in get_args(Per):
            raise ConfigError(
                f"{self.owner}: negatives_per must be 'step', 'user' or 'position', got {self.per!r}"
            )

    def __call__(self, positions: Jagged, step: Any) -> tf.Tensor:
        """Draw the numbers of items, (m,), (users, m) or (positions, m) int64.

        Args:
          positions: The positions that have a next item, by user; only their offsets are read.
          step: The step of the training.
        """
        if self.per == "step":
            return self._draw(self.count, self.seed, step)
        sets = tf.size(jagged.lengths(positions)) if self.per == "user" else tf.shape(positions.values)[0]
        # Ranks have different users, so each draws its own.
        seed = (self.seed + collectives.world().rank) % 2**64
        return self._draw([sets, self.count], seed, step)

    def _draw(self, shape: Any, seed: int, step: Any) -> tf.Tensor:
        if self.shares is None:
            return uniform_negatives(shape, self.items, seed=seed, step=step)
        return popularity_negatives(shape, self.shares, seed=seed, step=step)

    def expected(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return how often items are among m negatives on average, float32 of the shape of ``numbers``."""
        if self.shares is None:
            return tf.fill(tf.shape(numbers), tf.constant(self.count / self.items, tf.float32))
        return self.count * tf.gather(tf.cast(self.shares, tf.float32), numbers)


def popularity_shares(owner: str, counts: Any, items: int, *, law: str, in_batch: bool) -> tf.Tensor | None:
    """Turn counts of items into their shares, (V,) float32.

    Args:
      owner: The name that messages begin with.
      counts: (V,) numbers from 0 on; or None.
      items: V.
      law: The law of the drawn negatives.
      in_batch: Whether the loss has in-batch negatives.

    Raises:
      ConfigError: The counts aren't V numbers from 0 on; nothing would read them; or the law needs them.
    """
    if counts is None:
        if law == "popularity":
            raise ConfigError(
                f"{owner}: the law 'popularity' draws items in proportion to their counts: give popularity=, "
                "how often each item occurs in training"
            )
        return None
    values = np.asarray(counts, np.float64)
    if values.shape != (items,) or not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise ConfigError(
            f"{owner}: popularity must be {items} numbers from 0 on, how often each item occurs, got "
            f"{values.dtype} of shape {values.shape}"
        )
    if not in_batch and law == "uniform":
        raise ConfigError(
            f"{owner}: popularity corrects for in-batch negatives and for those drawn by the law "
            "'popularity', and there are neither: choose another law, or leave popularity out"
        )
    return tf.constant(values / values.sum(), tf.float32)


def log_expected(
    popularity: tf.Tensor,
    numbers: tf.Tensor,
    *,
    samples: tf.Tensor,
    draw: NegativeDraw | None,
    in_batch: bool,
) -> tf.Tensor:
    r"""Compute log Q of items, where Q is the expected count of each among the negatives of a sample.

    .. math:: \log Q_j = \log((n - 1)\, p_j + m q_j)

    with :math:`q_j = 1 / V` for negatives drawn evenly, and :math:`q_j = p_j` for the law "popularity".

    Args:
      popularity: p, (V,): the shares of the training's positions whose next item is j.
      numbers: The items' numbers, of any shape.
      samples: n, the number of samples whose positives are each other's negatives.
      draw: How m further negatives are drawn; None: there are none.
      in_batch: Whether there are in-batch negatives; if not, the first term is 0.

    Returns:
      float32 of the shape of ``numbers``.
    """
    expected = tf.zeros(tf.shape(numbers)) if draw is None else draw.expected(numbers)
    if in_batch:
        others = tf.cast(tf.maximum(samples - 1, 0), tf.float32)
        expected += others * tf.gather(popularity, numbers)
    return tf.math.log(tf.maximum(expected, _LEAST))


_LEAST = 1e-20  # of an item that never occurs, and that no law draws


def corrections(
    popularity: tf.Tensor | None,
    following: tf.Tensor,
    drawn: tf.Tensor,
    draw: NegativeDraw | None,
    in_batch: bool,
) -> dict[str, tf.Tensor]:
    """Compute ``log_q`` of the right items, and ``negative_log_q`` of the drawn ones, by `log_expected`.

    Without ``popularity``, there are none.
    """
    if popularity is None:
        return {}
    of: dict[str, Any] = {"samples": tf.size(following), "draw": draw, "in_batch": in_batch}
    named = (("log_q", following), ("negative_log_q", drawn))
    return {name: log_expected(popularity, numbers, **of) for name, numbers in named}


def shape_as(drawn: tf.Tensor, vectors: tf.Tensor) -> tf.Tensor:
    """Give vectors the shape of drawn numbers, (…, d)."""
    dim = vectors.shape[-1]
    shaped = tf.reshape(vectors, tf.concat([tf.shape(drawn), [dim]], axis=0))
    return tf.ensure_shape(shaped, [*drawn.shape, dim])


# Candidates for users whose right items are several: the right ones, and negatives by one law or more.

_NEGATIVES = 8192


class Candidates(NamedTuple):
    """Items that the users of a step are held against.

    Attributes:
      numbers: (c,) int64, each once, ascending.
      log_counts: (c,) the log of how often each counts as a negative; -inf for a right item alone.
      log_q: (c,) the log of how often each is expected to; None if that is the same for all.
    """

    numbers: tf.Tensor
    log_counts: tf.Tensor
    log_q: tf.Tensor | None


class CandidateDraw:
    """Draws the candidates of a step, by one law of negatives or several together.

    Args:
      owner: The name that messages begin with.
      law: A `Law`, or several.
      count: m, how many negatives are drawn for each drawn law. None: 8,192; of the law ``"uniform"``, each
        item once if there are at most as many.
      popularity: (V,) how often each item occurs in training, or None.
      items: V.
      seed: Of the draws.

    Raises:
      ConfigError: A setting is invalid, or a law needs ``popularity``.
    """

    def __init__(
        self, owner: str, law: Law | Sequence[Law], count: int | None, popularity: Any, items: int, seed: int
    ) -> None:
        self.laws: tuple[str, ...] = (law,) if isinstance(law, str) else tuple(law)
        if not self.laws or len(set(self.laws)) < len(self.laws) or not {*self.laws} <= {*get_args(Law)}:
            raise ConfigError(
                f"{owner}: law must be 'in-batch', 'uniform' or 'popularity', or several of them, got {law!r}"
            )
        self.in_batch = "in-batch" in self.laws
        if popularity is None and self.in_batch:
            raise ConfigError(
                f"{owner}: the law 'in-batch' needs popularity=, how often each item occurs in training, "
                "which its loss corrects for"
            )
        self.shares = popularity_shares(
            owner,
            popularity,
            items,
            law="popularity" if "popularity" in self.laws else "uniform",
            in_batch=self.in_batch,
        )
        self.count, self.items = count, items
        number = _NEGATIVES if count is None else count
        self.whole = count is None and items <= _NEGATIVES
        self.draws = {}
        for each in self.laws:
            if each == "popularity":
                self.draws[each] = NegativeDraw(owner, number, "step", items, seed, self.shares)
            elif each == "uniform":  # each item once, where all of them are taken
                of_all = items if self.whole else number
                self.draws[each] = NegativeDraw(owner, of_all, "step", items, seed, None)

    @property
    def config(self) -> dict[str, Any]:
        """The settings by the names of a model's arguments, in a form that JSON can hold."""
        shares = None if self.shares is None else self.shares.numpy().tolist()
        return {"law": list(self.laws), "negatives": self.count, "popularity": shares}

    def __call__(self, right: Jagged, step: Any) -> Candidates:
        """Draw the candidates.

        Args:
          right: The numbers of the right items, by user.
          step: The step of the training.
        """
        found = [right.values]
        counted = [tf.fill(tf.shape(right.values), 1.0 if self.in_batch else 0.0)]
        for law, draw in self.draws.items():
            once = law == "uniform" and self.whole
            found.append(tf.range(self.items, dtype=tf.int64) if once else draw(right, step))
            counted.append(tf.ones_like(found[-1], tf.float32))
        every = tf.concat(found, axis=0)
        numbers = tf.unique(tf.sort(every)).y
        places = tf.searchsorted(numbers, every, out_type=tf.int64)
        counts = tf.math.unsorted_segment_sum(tf.concat(counted, axis=0), places, tf.size(numbers))
        return Candidates(numbers, tf.math.log(counts), self._log_q(numbers, tf.size(right.values)))

    def _log_q(self, numbers: tf.Tensor, samples: tf.Tensor) -> tf.Tensor | None:
        if self.shares is None:
            return None
        draws: list[NegativeDraw | None] = [*self.draws.values()] or [None]
        # The right items count once: with the first of the drawn laws, or alone.
        parts = [
            log_expected(
                self.shares, numbers, samples=samples, draw=draw, in_batch=self.in_batch and draw is draws[0]
            )
            for draw in draws
        ]
        return tf.reduce_logsumexp(tf.stack(parts), axis=0)
