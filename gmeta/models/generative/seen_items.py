"""Which items users have had, to be asked of many pairs at once."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.ops import Jagged, jagged

_ODD = 0x2545F4914F6CDD1D  # powers of it wrap around, and stay odd


class SeenItems:
    """The items of histories, sorted, with the place at which each first occurs.

    Args:
      histories: Values are numbers of items, from -1 on (-1: not in the catalogue), one sequence a user.
      size: V, the number of items.
    """

    def __init__(self, histories: Jagged, size: int) -> None:
        self.size = size
        keys = self._keys(jagged.row_ids(histories), histories.values)
        order = tf.argsort(keys, stable=True)  # of equal items the first stands first
        self.keys, self.places = tf.gather(keys, order), tf.cast(order, tf.int64)

    def holds(self, users: tf.Tensor, items: tf.Tensor, until: Any = None) -> tf.Tensor:
        """Say whether users have had items.

        Args:
          users: (n,) int64.
          items: (n, c) int64, numbers from 0 on.
          until: (n,) int64, places in the histories' values: only items up to them count. None: all count.

        Returns:
          bool (n, c).
        """
        wanted = self._keys(users[:, tf.newaxis], items)
        keys, places = tf.concat([self.keys, [-1]], 0), tf.concat([self.places, [0]], 0)
        found = tf.searchsorted(self.keys, tf.reshape(wanted, [-1]), out_type=tf.int64)
        found = tf.reshape(found, tf.shape(wanted))
        there = tf.gather(keys, found) == wanted
        return there if until is None else there & (tf.gather(places, found) <= until[:, tf.newaxis])

    def _keys(self, users: tf.Tensor, items: tf.Tensor) -> tf.Tensor:
        return users * (self.size + 1) + items + 1


def history_keys(histories: Jagged) -> tf.Tensor:
    """Compute a hash of each history's items and their order, (users,) int64."""
    longest = tf.reduce_max(tf.concat([jagged.lengths(histories), [0]], 0))
    powers = tf.math.cumprod(tf.fill([longest], tf.constant(_ODD, tf.int64)))
    terms = (histories.values + 2) * tf.gather(powers, jagged.positions(histories))
    return jagged.sums(histories._replace(values=terms))
