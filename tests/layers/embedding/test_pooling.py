import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.layers.embedding.pooling import gather_rows, pool

LISTS = st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=6)
POOLINGS = ["sum", "mean", "sqrtn"]


def reference(rows, lists, combiner):
    """A product with the matrix of what each row counts for in each sample."""
    shares = np.zeros((len(lists), len(rows)))
    for sample, ids in enumerate(lists):
        for place in ids:
            shares[sample, place] += {"sum": 1, "mean": 1 / len(ids), "sqrtn": len(ids) ** -0.5}[combiner]
    return tf.constant(shares) @ rows


@pytest.mark.parametrize("combiner", POOLINGS)
@settings(max_examples=15)
@given(lists=LISTS)
@pytest.mark.shown_by(case="mean")
def test_lists_are_pooled_and_differentiated_twice(lists, combiner):
    rows = tf.constant(np.random.default_rng(0).normal(size=(5, 3)))
    ids = tf.ragged.constant(lists, dtype=tf.int64, ragged_rank=1)

    def one_step(pooled):
        """Rows after a gradient step, and how a second loss then depends on the first rows."""
        with tf.GradientTape() as outer:
            outer.watch(rows)
            with tf.GradientTape() as inner:
                inner.watch(rows)
                loss = tf.reduce_sum(pooled(rows) ** 3)
            adapted = rows - 0.1 * inner.gradient(loss, rows)
            after = tf.reduce_sum(pooled(adapted) ** 2)
        return adapted, outer.gradient(after, rows)

    found = one_step(lambda values: pool(values, ids, combiner))
    expected = one_step(lambda values: reference(values, lists, combiner))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_vectors_side_by_side_are_those_of_each_feature():
    collection = EmbeddingCollection(
        [
            FeatureConfig("tags", dim=4, combiner="mean"),
            FeatureConfig("user", dim=4),
            FeatureConfig("wide", dim=6),
            FeatureConfig("item", dim=4),
            FeatureConfig("pair", dim=4, combiner="sum"),
        ]
    )
    ids = {
        "tags": tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64),
        "user": tf.constant([1, 2, 1], tf.int64),
        "wide": tf.constant([5, 6, 7], tf.int64),
        "item": tf.constant([2, 1, 9], tf.int64),
        "pair": tf.constant([[1, 2], [3, 4], [5, 5]], tf.int64),
    }
    lookup = collection.lookup(ids)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(lookup.rows)
        together = collection.concat(lookup)
        apart = tf.concat([collection.embed(lookup)[name] for name in ids], axis=1)
        losses = [tf.reduce_sum(vectors**3) for vectors in (together, apart)]
    np.testing.assert_array_equal(together, apart)
    for one, other in zip(*(tape.gradient(loss, lookup.rows) for loss in losses), strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(one), tf.convert_to_tensor(other), rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("shape", [[6], [2, 3]])
def test_gradients_of_gathered_rows_are_those_of_tf_gather(compiled, shape):
    """Also where the vectors are gathered again, and of gradients of gradients."""
    rows = tf.random.normal([9, 4])
    positions = tf.reshape(tf.constant([8, 1, 1, 3, 8, 5]), shape)

    def gradients(gather):
        with tf.GradientTape() as outer:
            outer.watch(rows)
            with tf.GradientTape() as inner:
                inner.watch(rows)
                vectors = gather(rows, positions)
                loss = tf.reduce_sum(tf.gather(vectors, [1, 0, 1]) ** 3) + tf.reduce_sum(
                    gather(rows, tf.constant([0, 7])) ** 2
                )
            first = tf.convert_to_tensor(inner.gradient(loss, rows))
            squares = tf.reduce_sum(first**2)
        return first, tf.convert_to_tensor(outer.gradient(squares, rows))

    of = tf.function(gradients) if compiled else gradients
    for ours, theirs in zip(of(gather_rows), of(tf.gather), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
