"""Ids out of text and of any 64-bit numbers."""

import hashlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.ops import count_collisions, fold_ids, hash_ids, hash_text, portable_ops
from gmeta.preprocess.plan.column_values import hash_text as hash_of_prepare

TEXTS = st.lists(st.binary(max_size=200), max_size=5)
INT64 = st.integers(-(2**63), 2**63 - 1)


def reference(text):
    return int.from_bytes(hashlib.md5(text).digest()[8:], "little", signed=True)


@given(texts=TEXTS)
@example(texts=[b"", b"x" * 55, b"x" * 56, b"x" * 64, b"\0" * 1000, "Zürich 音楽".encode()])
def test_the_native_op_and_the_portable_form_are_the_low_half_of_md5(texts):
    expected = [reference(text) for text in texts]
    given_texts = tf.constant(texts, tf.string, [len(texts)])
    assert hash_text(given_texts).numpy().tolist() == expected
    with portable_ops():
        assert hash_text(given_texts).numpy().tolist() == expected


def test_texts_have_the_numbers_that_prepare_stores():
    texts = ["sku/7", "", "Zürich"]
    assert hash_text(texts).numpy().tolist() == [hash_of_prepare(text) for text in texts]


@given(numbers=st.lists(INT64, min_size=1, max_size=5), bits=st.integers(1, 63))
def test_numbers_are_folded_into_the_bits(numbers, bits):
    expected = [
        ((n % 2**64) ^ ((n % 2**64) >> bits)) % 2**bits for n in numbers
    ]  # in Python's own integers, which have no end
    found = fold_ids(tf.constant(numbers, tf.int64), bits).numpy().tolist()
    assert found == expected
    assert all(0 <= n < 2**bits for n in found)


@given(number=st.integers(0, 2**61 - 1))
def test_a_number_that_fits_is_its_own_id(number):
    assert int(hash_ids(number, bits=61)) == number


@given(text=st.binary(max_size=40), bits=st.integers(1, 63))
def test_a_text_has_the_id_of_the_number_that_was_prepared_of_it(text, bits):
    assert int(hash_ids(text, bits)) == int(hash_ids(np.int64(reference(text)), bits))


def test_ragged_texts_stay_ragged():
    found = hash_ids(tf.ragged.constant([["a", "b"], [], ["c"]]), 61)
    assert found.row_lengths().numpy().tolist() == [2, 0, 1]
    np.testing.assert_array_equal(found.flat_values, hash_ids(["a", "b", "c"], 61))


@pytest.mark.parametrize("values", [[0.5], [True], [1 + 2j]])
def test_what_is_neither_text_nor_a_whole_number_is_refused(values):
    with pytest.raises(ConfigError, match="hash_ids: values must be integers"):
        hash_ids(values)


@pytest.mark.parametrize("bits", [0, 64, 3.5])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(ConfigError, match="hash_ids: bits must be"):
        hash_ids([1], bits)


def test_collisions_are_counted_among_distinct_values():
    assert count_collisions([0, 9, 9, 1], bits=3) == 1  # 9 folds to 0
    assert count_collisions(tf.ragged.constant([["a"], ["b", "a"]])) == 0
    assert count_collisions([f"{n}" for n in range(100)], bits=1) == 98
    assert count_collisions(tf.constant([], tf.string)) == 0
