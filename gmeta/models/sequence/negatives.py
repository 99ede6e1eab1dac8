"""Negatives of models that rank a catalogue: their laws, and how likely each item is among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.losses.sampled_softmax import popularity_negatives, uniform_negatives
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
