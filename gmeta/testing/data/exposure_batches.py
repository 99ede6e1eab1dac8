"""Drawn batches of users with contexts, history and exposures, as `gmeta.io.sequences` gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

IDS = {"item": 40, "category": 5, "action": 3, "city": 4, "age": 6, "scene": 2}


def draw_exposures(seed: int, events: list[int], exposures: list[int], tags: bool = False) -> dict[str, Any]:
    """A batch.

    Args:
      seed: Of all that is drawn.
      events: For each user, how many there are.
      exposures: For each user, how many there are; clicks go with the item, purchases with clicks.
      tags: Whether contexts have lists of tags.
    """
    random = np.random.default_rng(seed)

    def column(counts: list[int], name: str) -> tf.RaggedTensor:
        return _ragged(random.integers(0, IDS[name], sum(counts)), counts)

    history = {name: column(events, name) for name in ("item", "category", "action")}
    targets = {name: column(exposures, name) for name in ("item", "category", "scene")}
    clicks = (targets["item"].values.numpy() % 3 == 0).astype(np.float32)
    bought = clicks * (random.random(len(clicks)) < 0.5)
    times = [np.sort(random.integers(0, 10**6, count)) for count in events]
    shown = [np.sort(random.integers(5 * 10**5, 2 * 10**6, count)) for count in exposures]
    empty = [np.zeros(0, np.int64)]
    contexts: dict[str, Any] = {
        name: tf.constant(random.integers(0, IDS[name], len(events))) for name in ("city", "age")
    }
    if tags:
        several = random.integers(0, 4, len(events)).tolist()
        contexts["tags"] = _ragged(random.integers(0, 9, sum(several)), several)
    return {
        "task": tf.range(100, 100 + len(events), dtype=tf.int64),
        "contexts": contexts,
        "history": {**history, "time": _ragged(np.concatenate([*empty, *times]), events)},
        "targets": {**targets, "time": _ragged(np.concatenate([*empty, *shown]), exposures)},
        "labels": {"click": _ragged(clicks, exposures), "buy": _ragged(bought, exposures)},
    }


def of_user(batch: dict[str, Any], user: int) -> dict[str, Any]:
    """One of the users, alone."""
    return {
        part: {name: values[user : user + 1] for name, values in columns.items()}
        if isinstance(columns, dict)
        else columns[user : user + 1]
        for part, columns in batch.items()
    }


def with_targets(batch: dict[str, Any], change: Any) -> dict[str, Any]:
    """The batch with other columns of targets and labels: ``change`` makes each from the old."""
    return {
        **batch,
        **{
            part: {name: change(column) for name, column in batch[part].items()}
            for part in ("targets", "labels")
        },
    }


def _ragged(values: Any, counts: list[int]) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_lengths(values, np.array(counts, np.int64))
