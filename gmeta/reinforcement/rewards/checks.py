"""Checks what a reward returns, so that one bad number doesn't become a bad policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph.conditions import refuse_unless

Batch = Mapping[str, Any]
Reward = Callable[[Batch, tf.Tensor], Any]
"""Takes a batch and ids of items, (users, group); returns numbers, (users, group)."""


def name_of(reward: Reward) -> str:
    """Return what messages call a reward: its ``name``, or that of its function or class."""
    name = getattr(reward, "name", None) or getattr(reward, "__name__", None)
    return str(name or type(reward).__name__)


def rewards_of(reward: Reward, batch: Batch, items: tf.Tensor, *, user: str | None = None) -> tf.Tensor:
    """Compute rewards, and refuse those that can't be used.

    Args:
      reward: The reward.
      batch: A batch of columns, a row a user.
      items: (users, group) ids.
      user: The column of users' ids, by which messages name a user; None: a user is named by its place.

    Returns:
      float32 (users, group), without gradient.

    Raises:
      ConfigError: The rewards have another shape, or one is NaN or infinite; the message names the reward and
        the user (in a graph, if it runs within `gmeta.core.graph.conditions.name_refusals`).
    """
    name = name_of(reward)
    found = tf.cast(tf.convert_to_tensor(reward(batch, items)), tf.float32)
    if not found.shape.is_compatible_with(items.shape):
        raise ConfigError(
            f"reward {name}: rewards must be {items.shape}, one for each item of each user, got {found.shape}"
        )
    sizes = tf.shape(found), tf.shape(items)
    alike = tf.equal(tf.size(sizes[0]), 2)
    alike = tf.cond(alike, lambda: tf.reduce_all(tf.equal(*sizes)), lambda: tf.constant(False))
    told = tf.strings.join(
        [
            f"reward {name}: rewards must be one for each item of each user, ",
            tf.strings.format("{}, got {}", [sizes[1], sizes[0]]),
        ]
    )
    found = tf.cond(alike, lambda: found, lambda: tf.zeros_like(items, tf.float32))
    found = refuse_unless(tf.ensure_shape(found, items.shape), alike, told)
    good = tf.math.is_finite(found)
    rows = tf.concat([tf.reduce_all(good, axis=1), [False]], axis=0)
    row = tf.argmin(tf.cast(rows, tf.int32))  # the number of users, if every one is good
    column = None if user is None else batch[user]
    users = tf.range(tf.shape(items)[0]) if column is None else tf.convert_to_tensor(column)
    texts = users if users.dtype == tf.string else tf.strings.as_string(users)
    values = tf.concat([found, tf.zeros([1, tf.shape(found)[1]])], axis=0)[row]
    told = tf.strings.join(
        [
            f"reward {name}: the rewards of user ",
            tf.concat([texts, [""]], axis=0)[row],
            "" if user is not None else " of the batch",
            " are not finite: ",
            tf.strings.reduce_join(tf.strings.as_string(values), separator=", "),
            "; let it give every item a number",
        ]
    )
    return tf.stop_gradient(refuse_unless(found, good, told))


def column_of(name: str, batch: Batch, column: str) -> tf.Tensor:
    """Return a column of a batch that a reward needs.

    Raises:
      ConfigError: It isn't there.
    """
    if column not in batch:
        raise ConfigError(
            f"reward {name}: the batch lacks {column!r}, it has {', '.join(map(str, batch))}: add the column"
        )
    return tf.convert_to_tensor(batch[column])
