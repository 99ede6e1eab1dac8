"""A catalogue numbers ids of any kind, and the best of all are found block by block."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.layers import FeatureConfig
from gmeta.models.sequence.catalogue import Catalogue, top_items
from gmeta.preprocess.plan.column_values import hash_text as prepared


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**20),
    size=st.integers(1, 9),
    users=st.integers(0, 4),
    block=st.integers(1, 10),
    data=st.data(),
)
def test_the_best_of_all_are_those_of_a_sort(seed, size, users, block, data):
    random = np.random.default_rng(seed)
    k = data.draw(st.integers(1, size))
    queries, vectors = random.integers(-2, 3, (users, 2)), random.integers(-2, 3, (size, 2))
    hidden = [random.integers(-1, size, random.integers(0, size + 2)) for _ in range(users)]
    ragged = tf.RaggedTensor.from_row_lengths(
        np.concatenate([np.zeros(0, np.int64), *hidden]), [len(each) for each in hidden]
    )
    numbers, scores = top_items(
        tf.constant(queries, tf.float32), tf.constant(vectors, tf.float32), k, without=ragged, block=block
    )
    expected = (queries @ vectors.T).astype(np.float64)
    for row, each in zip(expected, hidden, strict=True):
        row[each[each >= 0]] = -np.inf
    order = np.argsort(-expected, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(expected, order, axis=1)
    np.testing.assert_array_equal(scores, best)
    np.testing.assert_array_equal(numbers, np.where(np.isinf(best), -1, order))


ANY = FeatureConfig("item", dim=2, hash=True)


@pytest.mark.parametrize(
    "ids", [[5, -(2**63), 2**62], ["a", "ü", "b c"], np.array([4, 9], np.int32), np.array(["x", "y"])]
)
def test_ids_are_numbered_and_come_back(ids):
    catalogue = Catalogue(ids, "model", ANY)
    every = catalogue.ids(tf.range(len(ids)))
    assert catalogue.numbers(every).numpy().tolist() == [*range(len(ids))]
    assert catalogue.numbers(catalogue.all_keys).numpy().tolist() == [*range(len(ids))]
    again = Catalogue(catalogue.config, "model", ANY)
    assert again.ids(tf.range(len(ids))).numpy().tolist() == every.numpy().tolist()
    for strange in (tf.constant(["z"]), tf.constant([77])):
        assert catalogue.find(strange).numpy().tolist() == [-1]
        with pytest.raises(ConfigError, match=r"model: item (z|77) is not in the catalogue"):
            catalogue.numbers(strange)


def test_a_text_and_its_prepared_hash_are_one_item():
    texts, hashes = ["red", "grün"], [prepared("red"), prepared("grün")]
    for items in (texts, hashes):
        catalogue = Catalogue(items, "model", ANY)
        for given_ids in (tf.constant(texts), tf.constant(hashes)):
            assert catalogue.numbers(given_ids[::-1]).numpy().tolist() == [1, 0]


def test_ids_that_the_feature_does_not_take_are_refused():
    plain = FeatureConfig("item", dim=2)
    with pytest.raises(ConfigError, match=r"items holds b'a': make the feature 'item' with hash=True"):
        Catalogue(["a"], "model", plain)
    with pytest.raises(ConfigError, match=r"items holds .*-5.*: make the feature 'item' with hash=True"):
        Catalogue([3, -5], "model", plain)
    with pytest.raises(ConfigError, match="item must be integers, got string: make the feature with hash"):
        Catalogue(3, "model", plain).numbers(tf.constant(["a"]))
    with pytest.raises(ConfigError, match="item must be integers or texts, got float32"):
        Catalogue([3], "model", ANY).numbers(tf.constant([1.0]))
