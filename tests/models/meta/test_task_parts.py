"""Micro-batches of whole tasks: each task has its own samples, whatever their numbers are now."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.models.meta.task_model import split_tasks


def batch_of(seed, tasks, samples):
    draw = np.random.default_rng(seed)
    return {
        "features": {"item": tf.range(samples) * 10, "tags": tf.ragged.range(tf.range(samples) % 3)},
        "label": tf.range(samples, dtype=tf.float32),
        "task": tf.range(tasks, dtype=tf.int64) + 100,
        **{
            part: {
                "index": tf.constant(draw.integers(0, samples, [tasks, 2])),
                "mask": tf.constant(draw.integers(0, 2, [tasks, 2]).astype(np.float32)),
            }
            for part in ("support", "query")
        },
    }


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.integers(0, 6), st.integers(1, 12), st.integers(0, 6))
def test_tasks_keep_their_samples_and_every_sample_is_in_a_part(seed, tasks, samples, cut):
    batch = batch_of(seed, tasks, samples)
    cut = min(cut, tasks)
    parts = split_tasks(batch, [tf.range(0, cut, dtype=tf.int64), tf.range(cut, tasks, dtype=tf.int64)])
    assert np.concatenate([part["task"] for part in parts]).tolist() == batch["task"].numpy().tolist()
    seen = set()
    for part, rows in zip(parts, (slice(0, cut), slice(cut, tasks)), strict=True):
        for name in ("support", "query"):
            np.testing.assert_array_equal(part[name]["mask"], batch[name]["mask"][rows])
            for column in (lambda b: b["label"], lambda b: b["features"]["item"]):
                now = np.asarray(column(part))[part[name]["index"].numpy()]
                np.testing.assert_array_equal(now, column(batch).numpy()[batch[name]["index"].numpy()[rows]])
        seen |= set(part["label"].numpy().tolist())
        assert part["features"]["tags"].nrows() == len(part["label"])
    assert seen == set(range(samples))
    named = set(np.ravel([batch[name]["index"].numpy()[cut:] for name in ("support", "query")]).tolist())
    assert set(parts[1]["label"].numpy().tolist()) == named


def test_a_batch_with_more_than_samples_and_tasks_is_refused():
    with pytest.raises(ConfigError, match="can't divide layout of a batch of tasks"):
        split_tasks({**batch_of(0, 2, 5), "layout": tf.zeros([2])}, [])
