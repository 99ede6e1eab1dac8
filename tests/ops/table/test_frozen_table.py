"""Tables in plain TensorFlow ops: rows as trained, and initial rows as the native table makes them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gmeta import initializers
from gmeta.initializers import portable_initial_rows, portable_round_to_float16
from gmeta.ops.table.portable_tables import FrozenTable
from support.reference.table import initial_rows, round_to_float16

INT64 = np.iinfo(np.int64)
EXTREMES = [INT64.min, INT64.min + 1, -1, 0, 1, INT64.max - 1, INT64.max]
INITIALIZERS = [
    initializers.Zeros(),
    initializers.Constant(7),
    initializers.Uniform(-2, 3.1),
    initializers.Normal(0.1, 0.7),
    initializers.TruncatedNormal(0.5, 2),
]


@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda i: type(i).__name__)
@pytest.mark.parametrize("dim", [1, 4, 37])
@pytest.mark.parametrize("seed", [-3, INT64.max])
def test_portable_initial_rows_are_the_references_to_the_last_bit(initializer, dim, seed):
    random = np.random.default_rng(dim)
    keys = np.array([*EXTREMES, *random.integers(INT64.min, INT64.max, 4_000 // dim)])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def rows(keys):  # in a graph, which the optimizer of graphs rewrites
        return portable_initial_rows(initializer, seed, keys, dim)

    np.testing.assert_array_equal(rows(keys), initial_rows(initializer, seed, keys, dim))
    assert rows(keys[:0]).shape == (0, dim)


def test_portable_rounding_is_the_references_to_the_last_bit():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000).astype(np.uint32).view(np.float32)
    ties = np.arange(2048, 4096, dtype=np.float32) + np.float32(0.5)
    small = np.arange(64, dtype=np.float32) * np.float32(2.0**-26)  # about the smallest float16
    values = np.concatenate([bits[np.isfinite(bits)], ties, -ties, small, [np.inf, -np.inf, -0.0]])
    rounded = tf.function(portable_round_to_float16)(tf.constant(values, tf.float32)).numpy()
    np.testing.assert_array_equal(rounded.view(np.uint32), round_to_float16(values).view(np.uint32))


def minus_key(keys):
    return tf.tile(-tf.cast(keys, tf.float32)[:, tf.newaxis], [1, 3])


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_frozen_table_reads_what_it_was_given_and_asks_for_the_rest(size):
    random = np.random.default_rng(size)
    keys = random.choice(10**6, size, replace=False) * random.choice([-1, 1], size)
    rows = random.normal(size=(size, 3)).astype(np.float32)
    table = FrozenTable(tf.constant(keys, tf.int64), tf.constant(rows), minus_key)
    np.testing.assert_array_equal(table.lookup_keys(tf.constant(keys, tf.int64)), rows)
    absent = np.arange(10**6, 10**6 + 5)
    mixed = random.permutation(np.concatenate([keys, absent, keys, absent]))
    held = dict(zip(keys.tolist(), rows, strict=True))
    expected = [held.get(key, np.full(3, -float(key), np.float32)) for key in mixed.tolist()]
    np.testing.assert_array_equal(table.lookup_keys(tf.constant(mixed, tf.int64)), expected)
    assert table.lookup_keys(tf.zeros([0], tf.int64)).shape == (0, 3)


def test_the_rows_of_unknown_keys_are_made_for_those_alone():
    asked = []

    def note(keys):
        asked.append(keys.numpy().tolist())
        return tf.zeros([tf.size(keys), 1])

    table = FrozenTable(tf.constant([1, 2], tf.int64), tf.ones([2, 1]), note)
    table.lookup_keys(tf.constant([2, 9, 1, 8, 9], tf.int64))
    assert asked == [[9, 8, 9]]


def test_a_saved_frozen_table_holds_no_constant_of_the_tables_size(tmp_path):
    size = 50_000
    table = FrozenTable(tf.range(size, dtype=tf.int64), tf.random.normal([size, 3]), minus_key)
    table.serve = tf.function(table.lookup_keys, input_signature=[tf.TensorSpec([None], tf.int64)])
    tf.saved_model.save(table, tmp_path)
    assert (tmp_path / "saved_model.pb").stat().st_size < 100_000
    # Loaded as TensorFlow Serving does it: variables first, then the initializers of tables.
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        model = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path))
        signature = model.signature_def["serving_default"]
        (given,), (got,) = signature.inputs.values(), signature.outputs.values()
        found = session.run(got.name, {given.name: [7, 49_999]})
    np.testing.assert_array_equal(found, table.lookup_keys(tf.constant([7, 49_999], tf.int64)))
