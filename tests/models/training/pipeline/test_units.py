"""Some units of a batch: what NumPy takes along the first dimension, whatever the form of a column."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.ops import Jagged
from gmeta.training.windows import count_units, even_units, take_units


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=8), st.data())
def test_units_are_taken_of_columns_of_every_form(rows, data):
    chosen = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1))))
    ragged = tf.ragged.constant(rows, dtype=tf.int64, ragged_rank=1)
    dense = np.arange(3 * len(rows), dtype=np.float32).reshape(-1, 3)
    batch = (
        {"ragged": ragged, "sparse": ragged.to_sparse()},
        Jagged(ragged.values, ragged.row_splits),
        dense,
        None,
    )
    assert int(count_units("model", batch)) == len(rows)
    columns, sequences, matrix, nothing = take_units(batch, tf.constant(chosen, tf.int64))
    expected = [rows[unit] for unit in chosen]
    assert columns["ragged"].to_list() == expected
    assert columns["sparse"].dense_shape.numpy()[0] == len(chosen)
    assert tf.RaggedTensor.from_sparse(columns["sparse"]).to_list() == expected
    assert isinstance(sequences, Jagged)
    assert sequences.values.numpy().tolist() == [key for row in expected for key in row]
    assert np.diff(sequences.offsets).tolist() == [len(row) for row in expected]
    np.testing.assert_array_equal(matrix, dense[chosen])
    assert nothing is None


@given(st.integers(0, 40), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_units_are_divided_evenly_and_in_order(count, micro_batches):
    parts = [part.numpy().tolist() for part in even_units(tf.constant(count, tf.int64), micro_batches)]
    assert [unit for part in parts for unit in part] == list(range(count))
    sizes = [len(part) for part in parts]
    assert len(sizes) == micro_batches
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] > 0 or count == 0


def test_a_batch_without_common_first_dimension_is_refused():
    with pytest.raises(ConfigError, match="model: micro_batches divide a batch by its first dimension"):
        count_units("model", {"a": tf.zeros([3]), "b": tf.zeros([2, 3])})
    with pytest.raises(ConfigError, match="this one has no tensors"):
        count_units("model", (None, {}))
