"""What forms a feature's ids may have, and what vectors come out."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig

LISTS = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=5)


def make(combiner=None, max_length=None):
    feature = FeatureConfig(
        "x", TableConfig("x", 3, initializer=Normal(0.0, 1.0)), combiner=combiner, max_length=max_length
    )
    return EmbeddingCollection([feature])


def row_of(layer, raw):
    return layer.tables[0].lookup([raw], insert=False).rows[0].numpy()


def ragged(lists):
    return tf.ragged.constant(lists, dtype=tf.int64, ragged_rank=1)


@given(lists=LISTS, gap=st.integers(1, 3), combiner=st.sampled_from(["sum", "mean", "sqrtn", None]))
def test_sparse_ids_serve_as_ragged_ones_wherever_they_stand_in_a_sample(lists, gap, combiner):
    layer = make(combiner)
    indices = [[i, gap * j] for i, ids in enumerate(lists) for j in range(len(ids))]
    sparse = tf.SparseTensor(
        np.array(indices, np.int64).reshape(-1, 2),
        tf.constant([raw for ids in lists for raw in ids], tf.int64),
        [len(lists), 5 * gap],
    )
    expected = layer({"x": ragged(lists)})["x"]
    found = layer({"x": sparse})["x"]
    if combiner is None:
        assert found.row_lengths().numpy().tolist() == [len(ids) for ids in lists]
        found, expected = found.flat_values, expected.flat_values
    np.testing.assert_array_equal(found, expected)


@given(lists=LISTS)
def test_ragged_ids_without_pooling_give_a_vector_for_each_id(lists):
    layer = make()
    vectors = layer({"x": ragged(lists)})["x"]
    assert isinstance(vectors, tf.RaggedTensor)
    assert vectors.shape[-1] == 3
    for ids, found in zip(lists, vectors, strict=True):
        expected = np.array([row_of(layer, raw) for raw in ids]).reshape(-1, 3)
        np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("combiner", [None, "sum", "mean", "sqrtn"])
def test_dense_ids_of_one_length(combiner):
    layer, ids = make(combiner), np.array([[1, 2], [2, 2], [3, 1]])
    vectors = layer({"x": ids})["x"]
    each = np.array([[row_of(layer, raw) for raw in sample] for sample in ids])
    scale = {"sum": 1.0, "mean": 2.0, "sqrtn": 2.0**0.5}
    expected = each if combiner is None else each.sum(axis=1) / scale[combiner]
    np.testing.assert_allclose(vectors, expected, rtol=1e-6)
    if combiner is not None:
        np.testing.assert_allclose(layer({"x": ragged(ids.tolist())})["x"], vectors, rtol=1e-6)


@given(lists=LISTS, length=st.integers(1, 6))
def test_max_length_keeps_the_last_ids(lists, length):
    cut, whole = make("sum", max_length=length), make("sum")
    kept = [ids[-length:] for ids in lists]
    np.testing.assert_array_equal(cut({"x": ragged(lists)})["x"], whole({"x": ragged(kept)})["x"])


def test_max_length_of_dense_ids():
    cut, whole = make("mean", max_length=2), make("mean")
    np.testing.assert_array_equal(cut({"x": [[1, 2, 3]]})["x"], whole({"x": [[2, 3]]})["x"])


def test_ids_that_are_cut_off_get_no_row():
    layer = make("sum", max_length=1)
    layer.lookup({"x": ragged([[1, 2], [3]])})
    assert sorted(layer.tables[0].export().keys.numpy().tolist()) == [2, 3]


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.uint8])
def test_integers_of_any_width(dtype):
    layer = make()
    np.testing.assert_array_equal(layer({"x": tf.constant([5], dtype)})["x"][0], row_of(layer, 5))


@pytest.mark.parametrize(
    ("feature", "ids", "message"),
    [
        ({}, 3, r"of at least one dimension.* shape \(\)"),
        ({"combiner": "sum"}, [1, 2], r"of shape \(samples, length\); got a Tensor of shape \(2,\)"),
        ({"combiner": "sum"}, ragged([[1]])[tf.newaxis], "got a RaggedTensor of shape"),
        ({"max_length": 2}, [1, 2], "of which it keeps the last 2"),
        ({}, tf.sparse.from_dense([[[1]]]), r"takes a SparseTensor of shape \(samples, length\)"),
        ({}, [1.5], r"feature 'x': ids must be integers"),
    ],
)
def test_ids_that_do_not_go_with_the_feature_are_refused(feature, ids, message):
    with pytest.raises(ConfigError, match=message):
        make(**feature).lookup({"x": ids})


def test_vectors_of_several_ids_do_not_stand_side_by_side():
    layer = make()
    with pytest.raises(ConfigError, match=r"feature 'x' has vectors of shape .* give it a combiner"):
        layer.concat(layer.lookup({"x": [[1, 2]]}))


def test_a_length_below_one_is_refused():
    with pytest.raises(ConfigError, match="max_length must be at least 1"):
        FeatureConfig("x", dim=3, max_length=0)
