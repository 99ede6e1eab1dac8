"""The checksum of histories: in TensorFlow, in NumPy, and bit by bit in plain Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.io.histories.history_plan import history_crc_of_ragged
from gmeta.preprocess.history.shard_reader import history_crc_of_splits
from support.reference.history import crc_of

INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32)
KINDS = st.lists(st.sampled_from([np.int64, np.float32]), min_size=1, max_size=4)


@given(data=st.data(), lengths=st.lists(st.integers(0, 12), max_size=8), kinds=KINDS)
def test_three_ways_agree(data, lengths, kinds):
    splits = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    columns = []
    for kind in kinds:
        values = st.lists(
            INTEGERS if kind is np.int64 else FLOATS, min_size=int(splits[-1]), max_size=int(splits[-1])
        )
        columns.append(np.array(data.draw(values), kind))
    ours = history_crc_of_splits(splits, columns)
    ragged = [tf.RaggedTensor.from_row_splits(values, splits) for values in columns]
    found = history_crc_of_ragged(ragged)
    assert (ours.dtype, found.dtype, found.shape) == (np.int64, tf.int64, (len(lengths),))
    assert found.numpy().tolist() == ours.tolist()
    for number, (begin, end) in enumerate(itertools.pairwise(splits)):
        assert ours[number] == crc_of([values[begin:end].tolist() for values in columns])


def test_a_history_of_more_floats_than_a_piece_has():
    prices = np.random.default_rng(0).random(700).astype(np.float32)
    expected = [crc_of([prices[:600].tolist()]), crc_of([prices[600:].tolist()])]
    assert history_crc_of_splits([0, 600, 700], [prices]).tolist() == expected
    ragged = tf.RaggedTensor.from_row_splits(prices, [0, 600, 700])
    assert history_crc_of_ragged([ragged]).numpy().tolist() == expected


def test_the_checksum_is_that_of_published_examples():
    # RFC 3720, B.4: 32 bytes of zeros, and of ones.
    assert history_crc_of_splits([0, 4, 8], [np.array([0] * 4 + [-1] * 4)]).tolist() == [
        0x8A9136AA,
        0x62A8AB43,
    ]


def test_it_is_computed_in_a_graph_of_unknown_shapes():
    spec = tf.RaggedTensorSpec((None, None), tf.int64)
    found = tf.function(history_crc_of_ragged, input_signature=[[spec, spec]])
    items = tf.ragged.constant([[1, 2], [], [3]], tf.int64)
    assert found.get_concrete_function().structured_outputs.shape.as_list() == [None]
    assert found([items, items]).numpy().tolist() == [
        crc_of([[1, 2], [1, 2]]),
        0,
        crc_of([[3], [3]]),
    ]


@pytest.mark.parametrize(
    ("splits", "columns", "message"),
    [
        ([1, 2], [np.zeros(2, np.int64)], "ascends from 0"),
        ([0, 2, 1], [np.zeros(1, np.int64)], "ascends from 0"),
        ([], [np.zeros(0, np.int64)], "ascends from 0"),
        ([0, 2], [], "columns is empty"),
        ([0, 2], [np.zeros(2, np.int64), np.zeros(3, np.int64)], r"column 1 must be .* of shape \(2,\)"),
        ([0, 2], [np.zeros(2)], "got float64"),
    ],
)
def test_numbers_that_are_no_histories_are_refused(splits, columns, message):
    with pytest.raises(ConfigError, match=message):
        history_crc_of_splits(np.array(splits), columns)


def test_tensors_that_are_no_histories_are_refused():
    one, two = (tf.ragged.constant([[0] * length], tf.int64) for length in (1, 2))
    with pytest.raises(ConfigError, match="columns is empty"):
        history_crc_of_ragged([])
    for column in (tf.zeros([1, 2], tf.int64), tf.cast(one, tf.float64), tf.expand_dims(one, 2)):
        with pytest.raises(ConfigError, match="column 1 must be a RaggedTensor"):
            history_crc_of_ragged([one, column])
    with pytest.raises(tf.errors.InvalidArgumentError, match="column 1 has 2 values, and row_splits has 1"):
        history_crc_of_ragged([one, two])
