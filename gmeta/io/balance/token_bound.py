"""Refuses a group or a batch of more tokens than memory allows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.data.schema import Schema
from gmeta.core.graph.conditions import assert_first


def group_tokens(
    element: dict[str, Any], schema: Schema, column: str | None, longest: int | None
) -> tf.Tensor:
    """Count the tokens of an element's groups, (G,) int64, as the native reader does when it cuts.

    Args:
      element: An element of `gmeta.io.groups`.
      schema: Of its columns.
      column: `gmeta.io.Balance.tokens`.
      longest: `gmeta.io.Balance.longest`.
    """
    splits = element["row_splits"]
    rows = splits[1:] - splits[:-1]
    most = tf.int64.max if longest is None else longest
    if column is None:
        return tf.minimum(rows, most)
    if column not in element["columns"] or not (schema[column].is_list or schema[column].dtype == "int64"):
        return tf.zeros_like(rows)  # the native reader refuses it
    values = element["columns"][column]
    if schema[column].is_list:
        ends = tf.gather(values.row_splits, splits)
        return tf.minimum(ends[1:] - ends[:-1], most)
    last = tf.gather(tf.concat([[0], values], axis=0), splits[1:])  # the value of a group's last row
    return tf.where(rows > 0, tf.clip_by_value(last, 0, most) + rows, 0)


def bound_groups(element: dict[str, Any], tokens: tf.Tensor, max_tokens: int, path: str) -> dict[str, Any]:
    """Return the element, if each of its groups has ``max_tokens`` at most.

    Args:
      element: An element of `gmeta.io.groups`.
      tokens: Of its groups, (G,) int64.
      max_tokens: `gmeta.io.Balance.max_tokens`.
      path: Of the split, for the message.

    Raises:
      tf.errors.InvalidArgumentError: While iterating, as `gmeta.io.as_data_error` reads it.
    """
    first = tf.argmax(tf.concat([tokens, [0]], axis=0))  # an element may have no groups
    sentence = tf.strings.join(
        [
            f"gmeta: {path}: the group of task ",
            tf.strings.as_string(tf.concat([element["task"], [0]], axis=0)[first]),
            " has ",
            tf.strings.as_string(tf.concat([tokens, [0]], axis=0)[first]),
            f" tokens, and a batch may have max_tokens={max_tokens}; let longest= cut long sequences, of the "
            "reader and of Balance, or leave them out when preparing the data\n",
        ]
    )
    return assert_first(element, tokens <= max_tokens, [sentence])


def bound_batch(batch: dict[str, Any], max_tokens: int, path: str) -> dict[str, Any]:
    """Return a batch of `gmeta.io.sequences`, if its events and exposures are ``max_tokens`` at most.

    They can be more than the reader counted, if `longest` limits what counts of a user and the user has
    exposures besides the history that `longest` limits.

    Args:
      batch: The batch.
      max_tokens: The most events and exposures.
      path: Of the split, for the message.

    Raises:
      tf.errors.InvalidArgumentError: While iterating, as `gmeta.io.as_data_error` reads it.
    """
    counted = tf.constant(0, tf.int64)
    for parts in (batch["history"], {**batch["targets"], **batch["labels"]}):
        for column in list(parts.values())[:1]:
            counted += column.row_splits[-1]
    sentence = tf.strings.join(
        [
            f"gmeta: {path}: a batch has ",
            tf.strings.as_string(counted),
            f" events and exposures, and may have max_tokens={max_tokens}; set longest= of Balance to "
            "the reader's plus the most exposures of a user, so that exposures count\n",
        ]
    )
    return assert_first(batch, counted <= max_tokens, [sentence])
