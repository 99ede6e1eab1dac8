"""A catalogue numbers ids of any kind, and the best of all are found block by block."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.layers import FeatureConfig
from gmeta.models.sequence.catalogue import Catalogue, top_items, top_of_ranking
from gmeta.preprocess.plan.column_values import hash_text as prepared


def ragged(rows):
    values = np.concatenate([np.zeros(0, np.int64), *rows])
    return tf.RaggedTensor.from_row_lengths(values, tf.constant([len(each) for each in rows], tf.int64))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**20),
    size=st.one_of(st.integers(1, 9), st.integers(60, 700)),  # several groups of 64 in a block
    users=st.integers(0, 4),
    block=st.one_of(st.none(), st.integers(1, 10), st.integers(60, 700)),
    share=st.sampled_from([None, 0.0, 0.3, 0.8]),
    bias=st.integers(-2, 2),
    data=st.data(),
)
def test_the_best_of_all_are_those_of_a_sort(seed, size, users, block, share, bias, data):
    random = np.random.default_rng(seed)
    k = data.draw(st.integers(1, min(size, 9)) | st.integers(1, size))
    block = block if block is None else max(block, size // 20)  # a loop of a few rounds
    queries, vectors = random.integers(-2, 3, (users, 2)), random.integers(-2, 3, (size, 2))
    hidden, raised = (
        [random.integers(-1, size, random.integers(0, size + 2)) for _ in range(users)] for _ in range(2)
    )
    allow = None if share is None else random.random(size) < share
    numbers, scores = top_items(
        tf.constant(queries, tf.float32),
        tf.constant(vectors, tf.float32),
        k,
        leave_out=ragged(hidden),
        allow=allow,
        again=ragged(raised),
        bias=tf.constant(bias, tf.float32),
        block=block,
    )
    expected = (queries @ vectors.T).astype(np.float64)
    for row, each, more in zip(expected, hidden, raised, strict=True):
        row[list(set(more[more >= 0]))] += bias
        row[each[each >= 0]] = -np.inf
    if allow is not None:
        expected[:, ~allow] = -np.inf
    order = np.argsort(-expected, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(expected, order, axis=1)
    np.testing.assert_array_equal(scores, best)
    np.testing.assert_array_equal(numbers, np.where(np.isinf(best), -1, order))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**20), size=st.integers(1, 9), users=st.integers(0, 4), data=st.data())
def test_the_first_of_a_ranking_are_those_that_a_user_does_not_leave_out(seed, size, users, data):
    random, k = np.random.default_rng(seed), data.draw(st.integers(1, size))
    catalogue = Catalogue(size, "model", FeatureConfig("item", dim=2))
    counts, allow = random.integers(0, 3, size), random.random(size) < 0.7
    catalogue.load({"keys": np.arange(size), "counts": counts, "marks": np.zeros(0, int)})
    hidden = [random.integers(-1, size, random.integers(0, size + 2)) for _ in range(users)]
    ranking = catalogue.most_popular(size, allow)
    numbers, scores = top_of_ranking(ranking, k, ragged(hidden))
    order = [number for number in np.argsort(-counts, kind="stable") if allow[number]]
    for found, score, each in zip(numbers.numpy(), scores.numpy(), hidden, strict=True):
        left = [number for number in order if number not in each][:k]
        assert found.tolist() == [*left, *[-1] * (k - len(left))]
        shares = (counts[left] + 1) / (counts[allow] + 1).sum()
        np.testing.assert_allclose(np.exp(score), [*shares, *[0] * (k - len(left))], rtol=1e-5)


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
