"""A catalogue numbers ids of any kind, and the best of all are found block by block."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.models.catalogue import Catalogue, top_items


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


@pytest.mark.parametrize(
    "ids", [[5, -(2**63), 2**62], ["a", "ü", "b c"], np.array([4, 9], np.int32), np.array(["x", "y"])]
)
def test_ids_are_numbered_and_come_back(ids):
    catalogue = Catalogue(ids, "model")
    assert catalogue.numbers(catalogue.all_ids).numpy().tolist() == [*range(len(ids))]
    assert Catalogue(catalogue.config, "model").all_ids.numpy().tolist() == catalogue.all_ids.numpy().tolist()
    strange = tf.constant(["z"]) if catalogue.dtype == tf.string else tf.constant([77])
    assert catalogue.find(strange).numpy().tolist() == [-1]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"the item (z|77) is not in the catalogue"):
        catalogue.numbers(strange)


def test_ids_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match="the catalogue's ids are texts, got int32"):
        Catalogue(["a"], "model").numbers(tf.constant([1]))
    with pytest.raises(ConfigError, match="the catalogue's ids are integers, got string"):
        Catalogue(3, "model").numbers(tf.constant(["a"]))
