"""Masks as three numbers a token, against the rules that they stand for."""

from itertools import pairwise

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.ops import AttentionMask
from gmeta.testing import sees

MASKS = {
    "causal": AttentionMask(),
    "all": AttentionMask(causal=False),
    "contexts see history": AttentionMask(contexts_see="history"),
    "window": AttentionMask(window=2),
    "window of all": AttentionMask(causal=False, window=1),
    "full tail": AttentionMask(window=2, full_tail=2),
    "full tail of all": AttentionMask(causal=False, window=1, full_tail=2),
    "by time": AttentionMask(by_time=True),
    "by time in a window": AttentionMask(by_time=True, window=2, full_tail=1),
}


def matrices(visible, offsets):
    """(length, length) bool of each sequence, out of three numbers a token."""
    found = []
    for begin, end in pairwise(offsets):
        places = np.arange(end - begin)
        first, start, stop = (visible[begin:end, part, None] for part in range(3))
        found.append(
            (places < first) | ((places >= start) & (places < stop)) | np.eye(len(places), dtype=bool)
        )
    return found


@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=10, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 3)), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_token_sees_what_the_rules_say(name, sequences, seed):
    mask, random = MASKS[name], np.random.default_rng(seed)
    contexts, history, targets = np.array(sequences, int).reshape(-1, 3).T
    offsets = np.cumsum([0, *(contexts + history + targets)])
    times = [
        # Ties, and targets from before the history's end.
        [*random.integers(-9, 99, c), *np.sort(random.integers(10, 16, h)), *random.integers(9, 18, t)]
        for c, h, t in sequences
    ]
    flat = np.array([time for each in times for time in each], np.int64)
    visible = mask.visible(offsets, contexts, targets, flat if mask.by_time else None).numpy()
    assert visible.dtype == np.int32
    found = matrices(visible, offsets)
    for ours, (c, h, t), own in zip(found, sequences, times, strict=True):
        np.testing.assert_array_equal(ours, sees(mask, c + h + t, c, t, own))


def test_in_a_graph_without_sizes():
    traced = tf.function(AttentionMask(by_time=True).visible)
    offsets, times = tf.constant([0, 3, 3]), tf.constant([5, 5, 6], tf.int64)
    expected = AttentionMask(by_time=True).visible(offsets, None, [1, 0], times)
    np.testing.assert_array_equal(traced(offsets, None, tf.constant([1, 0]), times), expected)


def test_a_history_that_runs_backwards_is_refused():
    mask = AttentionMask(by_time=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must not decrease"):
        mask.visible([0, 3], times=tf.constant([5, 4, 6], tf.int64))
    # From one sequence to the next they may.
    mask.visible([0, 2, 4], times=tf.constant([5, 6, 1, 2], tf.int64))


def test_times_that_an_integer_cannot_hold_for_all_sequences_are_refused():
    """They would wrap around, and tokens see others than they may."""
    with pytest.raises(tf.errors.InvalidArgumentError, match="too far apart"):
        AttentionMask(by_time=True).visible([0, 1, 2, 3], times=tf.constant([0, 2**62, 2**62], tf.int64))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"full_tail": 2}, "full_tail=2, window=None"),
        ({"contexts_see": "targets"}, "'targets'"),
        ({"by_time": True, "causal": False}, "needs causal=True"),
    ],
)
def test_rules_that_make_no_sense_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        AttentionMask(**settings)


def test_by_time_needs_times():
    with pytest.raises(ConfigError, match="needs the times"):
        AttentionMask(by_time=True).visible([0, 1])
