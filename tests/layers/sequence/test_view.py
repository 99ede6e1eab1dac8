"""When tokens look from, by a loop over them, and views that can't be."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.layers.sequence.reading import sequence_view
from gmeta.ops import AttentionMask
from support.drawn_batches import draw_sequences


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 2)), max_size=4),
    by_time=st.booleans(),
)
def test_tokens_look_from_when_the_next_item_came(seed, sizes, by_time):
    mask = AttentionMask(by_time=by_time)
    drawn = draw_sequences(seed, sizes, 1, mask)
    view = sequence_view(mask, tf.constant(drawn.offsets), **drawn.arguments)
    np.testing.assert_array_equal(view.row_times, drawn.row_times)
    np.testing.assert_array_equal(view.column_times, drawn.times)
    np.testing.assert_array_equal(view.visible, mask.visible(drawn.offsets, **drawn.arguments))


def test_without_contexts_and_targets_all_is_history():
    view = sequence_view(AttentionMask(), [0, 3, 3, 5], times=[1, 5, 9, 2, 4])
    assert view.row_times.numpy().tolist() == [5, 9, 9, 4, 4]
    assert sequence_view(AttentionMask(), [0, 3]).row_times is None


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        ({"times": [1, 2]}, "tokens.*3.*times.*2"),
        ({"contexts": [2, 0], "targets": [1, 0]}, r"don't fit into lengths"),
        ({"targets": [0, -1]}, r"don't fit into lengths"),
    ],
)
def test_what_does_not_fit_is_refused(refused, told):
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s){told}"):
        sequence_view(AttentionMask(), [0, 2, 3], **refused)


def test_times_are_a_vector():
    with pytest.raises(ConfigError, match=r"got shape \(1, 3\)"):
        sequence_view(AttentionMask(), [0, 3], times=[[1, 2, 3]])
