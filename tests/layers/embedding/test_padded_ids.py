"""-1, or an empty text, in a dense matrix of pooled ids is no id; ids of wrong types are refused by name."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig

DENSE = st.lists(st.lists(st.integers(-1, 9), min_size=3, max_size=3), min_size=1, max_size=5)


def make(hash=False, combiner=None, max_length=None):
    start = Normal(0.0, 1.0)
    return EmbeddingCollection(
        [
            FeatureConfig(
                "x",
                TableConfig("x", 4, initializer=start),
                combiner=combiner,
                max_length=max_length,
                hash=hash,
            )
        ]
    )


def vectors(layer, ids):
    return layer({"x": ids})["x"].numpy()


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@given(rows=DENSE, text=st.booleans())
@pytest.mark.shown_by(case="mean")
def test_padding_is_left_out_of_what_is_pooled(combiner, rows, text):
    layer = make(combiner=combiner, hash=text)
    kept = [[each for each in row if each != -1] for row in rows]
    flat = [each for row in kept for each in row]
    if text:
        dense = tf.constant([["" if each == -1 else str(each) for each in row] for row in rows])
        values = tf.constant([str(each) for each in flat], tf.string)
    else:
        dense, values = tf.constant(rows, tf.int64), tf.constant(flat, tf.int64)
    ragged = tf.RaggedTensor.from_row_lengths(values, [len(row) for row in kept])
    np.testing.assert_array_equal(vectors(layer, dense), vectors(layer, ragged))


def test_padding_doesnt_count_among_the_last_ids():
    layer = make(combiner="sum", max_length=2)
    expected = vectors(layer, tf.constant([[2, 3]], tf.int64))
    np.testing.assert_array_equal(vectors(layer, tf.constant([[1, 2, 3, -1, -1]], tf.int64)), expected)


def test_other_negative_ids_are_no_padding():
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature 'x': id -2"):
        vectors(make(combiner="sum"), tf.constant([[1, -2]], tf.int64))


@pytest.mark.parametrize("ids", [tf.constant([[1, -1]], tf.int64), tf.constant([["a", ""]])])
def test_padding_of_hashed_ids_without_pooling_is_refused(ids):
    with pytest.raises(ConfigError, match=r"feature 'x': .* stands for no id where ids are pooled"):
        vectors(make(hash=True), ids)


@pytest.mark.parametrize("ids", [tf.constant([-1], tf.int64), tf.constant([[1, -1]], tf.int64)])
def test_padding_without_pooling_is_refused(ids):
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature 'x': id -1 at position"):
        vectors(make(), ids)


@pytest.mark.parametrize("hash", [True, False])
@pytest.mark.parametrize("values", [[1.0, 2.0], [True, False]])
def test_other_types_are_refused_by_name(values, hash):
    with pytest.raises(ConfigError, match=r"feature 'x': ids must be integers .*(float32|bool)"):
        vectors(make(hash), tf.constant(values))


def test_features_of_one_table_agree_on_the_hash():
    with pytest.raises(ConfigError, match="feature 'b' shares table 'a' with hash=False"):
        EmbeddingCollection([FeatureConfig("a", dim=4, hash=True), FeatureConfig("b", TableConfig("a", 4))])


def test_hash_must_be_a_truth_value():
    with pytest.raises(ConfigError, match="hash must be True or False"):
        FeatureConfig("a", dim=4, hash="yes")


def test_a_checkpoint_isnt_read_into_tables_that_hash_otherwise(tmp_path):
    path = tf.train.Checkpoint(layer=make(hash=False)).write(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="ids of x hashed"):
        tf.train.Checkpoint(layer=make(hash=True)).read(path).assert_consumed()
    tf.train.Checkpoint(layer=make(hash=False)).read(path).assert_consumed()


def test_the_plan_says_which_features_are_hashed():
    said = []
    make(hash=True, combiner="mean").plan(said.append)
    assert "x (mean, hashed)" in said[0]
