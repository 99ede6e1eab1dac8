"""How a next-item model draws its negatives, and how likely each item is among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.losses import uniform_negatives
from gmeta.ops import Jagged, jagged

Per = Literal["step", "user", "position"]


@dataclass(frozen=True)
class NegativeDraw:
    """Negatives for the positions of a batch of histories, drawn evenly from a catalogue.

    Attributes:
      owner: The name that messages begin with.
      count: m, the number of negatives that a position sees.
      per: Which positions share negatives: ``"step"``: all of a step, on all ranks; ``"user"``: those of one
        history; ``"position"``: none.
      items: V, the size of the catalogue.
      seed: The seed of the draws.

    Raises:
      ConfigError: A setting makes no sense.
    """

    owner: str
    count: int
    per: Per
    items: int
    seed: int

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
            return uniform_negatives(self.count, self.items, seed=self.seed, step=step)
        sets = tf.size(jagged.lengths(positions)) if self.per == "user" else tf.shape(positions.values)[0]
        # Ranks have different users, so each draws its own.
        seed = (self.seed + collectives.world().rank) % 2**64
        return uniform_negatives([sets, self.count], self.items, seed=seed, step=step)


def popularity_shares(owner: str, counts: Any, items: int, in_batch: bool) -> tf.Tensor | None:
    """Turn counts of items into their shares, (V,) float32.

    Raises:
      ConfigError: The counts aren't V numbers from 0 on, or nothing would read them.
    """
    if counts is None:
        return None
    values = np.asarray(counts, np.float64)
    if values.shape != (items,) or not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise ConfigError(
            f"{owner}: popularity must be {items} numbers from 0 on, how often each item occurs, got "
            f"{values.dtype} of shape {values.shape}"
        )
    if not in_batch:
        raise ConfigError(
            f"{owner}: popularity corrects for in-batch negatives, and the loss has none: give "
            "loss=gmeta.losses.SampledSoftmax(in_batch=True, ...), or leave it out"
        )
    return tf.constant(values / values.sum(), tf.float32)


def log_expected(popularity: tf.Tensor, numbers: tf.Tensor, *, samples: tf.Tensor, drawn: int) -> tf.Tensor:
    r"""Compute log Q of items: how often each is to be expected among the negatives of a sample.

    .. math:: \log Q_j = \log((n - 1)\, p_j + m / V)

    Args:
      popularity: p, (V,): the shares of the training's positions whose next item is j.
      numbers: The items' numbers, of any shape.
      samples: n, the number of samples whose positives are each other's negatives.
      drawn: m, the number of negatives drawn evenly.

    Returns:
      float32 of the shape of ``numbers``.
    """
    others = tf.cast(tf.maximum(samples - 1, 0), tf.float32)
    evenly = drawn / tf.cast(tf.size(popularity), tf.float32)
    return tf.math.log(others * tf.gather(popularity, numbers) + evenly)
