"""Shares of the data: who has which, and that a rank's elements of a step become one, in order."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.collectives.shared_data import part_of
from gmeta.core.errors import ConfigError
from gmeta.core.shares import SHARES, Shares, total_shares


@given(size=st.integers(1, 12), total=st.integers(1, 12))
def test_every_share_has_one_rank_and_every_rank_has_one(size, total):
    ranks = [Shares.of(rank, size, total) for rank in range(size)]
    assert [share for r in ranks for share in range(r.first, r.first + r.count)] == list(range(total))
    if size <= total:
        assert {r.count for r in ranks} <= {total // size, -(-total // size)}


def test_the_environment_says_how_many_there_are(monkeypatch):
    assert total_shares(3) == 3
    monkeypatch.setenv(SHARES, "4")
    assert total_shares(3) == 4
    with pytest.raises(ConfigError, match=r"GMETA_SHARES=4, but there are 5 ranks.*start at most 4"):
        total_shares(5)
    for text in ("0", "four"):
        monkeypatch.setenv(SHARES, text)
        with pytest.raises(ConfigError, match=f"GMETA_SHARES='{text}' is no number of shares"):
            total_shares(1)


def element(number):
    """A batch of one to three samples, with every kind of part."""
    rng = np.random.default_rng(number)
    rows = int(rng.integers(1, 4))
    deep = [[[[number, i, j]] * (j + 1) for j in range(rng.integers(0, 3))] for i in range(rows)]
    return {
        "wide": np.full((rows, 2, 3), number, np.float32),
        "text": [f"{number}/{row}" for row in range(rows)],
        "tags": [list(range(number, number + rng.integers(0, 4))) for _ in range(rows)],
        "deep": deep,
        "sparse": rng.integers(0, 2, (rows, 1 + number % 3)),
        "rate": 0.5,
    }


def tensors(batch):
    return {
        "wide": tf.constant(batch["wide"]),
        "text": tf.constant(batch["text"]),
        "tags": tf.ragged.constant(batch["tags"], tf.int64),
        "deep": tf.ragged.constant(batch["deep"], tf.int32, ragged_rank=2, inner_shape=(3,)),
        "sparse": tf.sparse.from_dense(batch["sparse"]),
        "rate": tf.constant(batch["rate"]),
    }


SIGNATURE = {
    "wide": tf.TensorSpec([None, 2, 3]),
    "text": tf.TensorSpec([None], tf.string),
    "tags": tf.RaggedTensorSpec([None, None], tf.int64),
    "deep": tf.RaggedTensorSpec([None, None, None, 3], tf.int32, ragged_rank=2),
    "sparse": tf.SparseTensorSpec([None, None], tf.int64),
    "rate": tf.TensorSpec([], tf.float32),
}


def dense(part):
    """A sparse part as the list of what is there, without the room that isn't used."""
    return [row[: np.max(np.flatnonzero(row), initial=-1) + 1].tolist() for row in part]


@settings(max_examples=3)  # each one traces a few functions
@given(elements=st.integers(0, 9), total=st.integers(2, 4), data=st.data())
def test_the_elements_of_a_step_become_one(elements, total, data):
    size = data.draw(st.integers(1, total))
    batches = [element(number) for number in range(elements)]
    dataset = tf.data.Dataset.from_generator(lambda: map(tensors, batches), output_signature=SIGNATURE)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(elements))
    for rank in range(size):
        shares = Shares.of(rank, size, total)
        own = range(shares.first, shares.first + shares.count)
        steps = [
            [batches[step * total + share] for share in own if step * total + share < elements]
            for step in range(-(-elements // total))
        ]
        expected = [step for step in steps if step]
        part = part_of(dataset, shares)
        assert int(part.cardinality()) == len(expected)
        if shares.count > 1:
            assert all(spec.is_compatible_with(part.element_spec[n]) for n, spec in SIGNATURE.items())
        found = list(part)
        assert len(found) == len(expected)
        for one, step in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one["wide"], np.concatenate([b["wide"] for b in step]))
            assert [t.decode() for t in one["text"].numpy()] == [t for b in step for t in b["text"]]
            for name in ("tags", "deep"):
                assert one[name].to_list() == [row for b in step for row in b[name]]
            sparse = dense(tf.sparse.to_dense(one["sparse"]).numpy())
            assert sparse == [row for b in step for row in dense(b["sparse"])]
            assert float(one["rate"]) == 0.5


def test_data_sets_of_any_form_and_length():
    two = Shares(0, 2, 2)
    whole = tf.data.Dataset.range(8).batch(2)
    pairs = tf.data.Dataset.zip((whole, whole))
    assert [y.numpy().tolist() for _, y in part_of(pairs, two)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert part_of(whole.repeat(), two).cardinality() == tf.data.INFINITE_CARDINALITY
    assert part_of(whole.filter(lambda _: True), two).cardinality() == tf.data.UNKNOWN_CARDINALITY


def test_what_cant_be_joined_is_named():
    two = Shares(0, 2, 2)
    widths = tf.data.Dataset.from_generator(
        lambda: (np.zeros((1, n)) for n in (3, 4)), output_signature=tf.TensorSpec([None, None], tf.float64)
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"part 0 .* has these shapes.*give them one width"
    ):
        list(part_of(widths, two))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"part 0 .* is a scalar, and differs"):
        list(part_of(tf.data.Dataset.range(2), two))
    unknown = tf.data.Dataset.from_generator(lambda: [[1]], output_types=tf.int32)
    for odd in (unknown, tf.data.Dataset.range(4).window(2)):
        with pytest.raises(ConfigError, match=r"part 0 .* can't be joined: .*output_signature"):
            part_of(odd, two)
