"""Rows in 8 and 16 bits, as exported tables and deltas hold them."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings

from gmeta.core.errors import ConfigError
from gmeta.core.row_formats import RowFormat
from gmeta.ops.table.portable_tables import FrozenTable, LiveTable
from support.reference.table import read_as

LARGEST = np.finfo(np.float32).max
TABLES = (FrozenTable, LiveTable)


def minus_key(dim):
    return lambda keys: tf.tile(-tf.cast(keys, tf.float32)[:, tf.newaxis], [1, dim])


rows_strategy = hnp.arrays(
    np.float32,
    st.tuples(st.integers(0, 5), st.integers(1, 9)),
    elements=st.one_of(
        st.floats(-2, 2, width=32, allow_subnormal=False),
        st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False, width=32),
        st.sampled_from([0.0, -0.0, 2.0**-125, 127.0, 0.5, 1.5, 2.5, -63.5, float(LARGEST), -float(LARGEST)]),
    ),
)


@settings(max_examples=40)
@given(rows=rows_strategy, dtype=st.sampled_from(["float32", "bfloat16", "int8"]))
@example(rows=np.zeros((2, 3), np.float32), dtype="int8")
@example(rows=np.float32([[127, 0.5, 1.5, -2.5]]), dtype="int8")
@example(rows=np.full((1, 2), LARGEST), dtype="bfloat16")
def test_tables_read_what_the_formula_says_to_the_last_bit(rows, dtype):
    keys, dim = np.arange(len(rows)) * 7, rows.shape[1]
    expected = [*read_as(rows, dtype), np.full(dim, -3, np.float32)]
    if dtype == "int8" and len(rows):
        errors = np.abs(np.array(expected[:-1]) - rows).max(axis=1)
        largest = np.abs(rows).max(axis=1)
        assert (errors <= np.maximum(largest / 254 * (1 + 1e-5), 127 * np.finfo(np.float32).tiny)).all()
    for kind in TABLES:
        table = kind(tf.constant(keys), tf.constant(rows), minus_key(dim), dtype)
        asked = tf.constant([*keys, 3], tf.int64)
        np.testing.assert_array_equal(table.lookup_keys(asked), expected)  # -0 equals 0
        assert table.contains(asked).numpy().tolist() == [True] * len(rows) + [False]
        assert int(table.size) == len(rows)


@pytest.mark.parametrize(("dtype", "bytes_of_64"), [("float32", 256), ("bfloat16", 128), ("int8", 68)])
def test_rows_take_fewer_bytes_in_memory_and_on_disk(tmp_path, dtype, bytes_of_64):
    form = RowFormat(dtype, 64)
    rows = np.random.default_rng(0).normal(size=(70_000, 64)).astype(np.float32)  # in two parts
    words = form.encode(rows)
    assert words.nbytes == len(rows) * bytes_of_64
    np.testing.assert_array_equal(form.encode(rows[65_530:65_540]), words[65_530:65_540])
    assert form.encode(rows[:0]).shape == (0, form.width)
    for kind in TABLES:
        table = kind(tf.range(2000, dtype=tf.int64), tf.constant(rows[:2000]), minus_key(64), dtype)
        table.serve = tf.function(table.lookup_keys, input_signature=[tf.TensorSpec([None], tf.int64)])
        folder = tmp_path / kind.__name__
        tf.saved_model.save(table, folder)
        on_disk = sum(file.stat().st_size for file in (folder / "variables").iterdir())
        assert on_disk < 2000 * (bytes_of_64 + 8) * 1.05 + 5000
        loaded = tf.saved_model.load(folder)
        asked = tf.constant([5, 10**6, 1999], tf.int64)
        np.testing.assert_array_equal(loaded.serve(asked), table.lookup_keys(asked))


def test_other_dtypes_are_refused():
    with pytest.raises(ConfigError, match="rows must be float32, bfloat16, int8, got dtype='int4'"):
        RowFormat("int4", 8)
