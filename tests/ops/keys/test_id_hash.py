"""Ids out of text and of any 64-bit numbers."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.core.merged_tables import fold_numbers
from gmeta.core.shares import splitmix64, splitmix64_tensor
from gmeta.ops import hash_ids, hash_text
from gmeta.ops.id_hash import count_collisions, fold_ids
from gmeta.ops.table.portable_tables import portable_ops
from gmeta.preprocess.plan.column_values import hash_text as hash_of_prepare
from support.reference.table import mix_fold, xor_fold
from support.reference.table import splitmix64 as splitmix64_of_one

TEXTS = st.lists(st.binary(max_size=200), max_size=5)
NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 63).map(lambda bit: (1 << bit) - 2**63 * (bit == 63)),
    st.integers(0, 2**56),
)


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


@given(numbers=st.lists(NUMBERS, max_size=6), bits=st.integers(1, 63), fold=st.sampled_from(["mix", "xor"]))
@example(numbers=[2**56 - 1, 2**56, -1, -(2**63)], bits=56, fold="mix")
def test_all_forms_of_a_fold_give_the_same_ids(numbers, bits, fold):
    given_numbers = np.array(numbers, np.int64)
    of_one = mix_fold if fold == "mix" else xor_fold
    expected = [of_one(number, bits) for number in numbers]
    assert all(0 <= number < 2**bits for number in expected)
    assert fold_ids(given_numbers, bits, fold).numpy().tolist() == expected
    assert fold_numbers(given_numbers, bits, fold).tolist() == expected


@given(x=st.integers(0, 2**64 - 1))
def test_the_mix_can_be_undone_so_no_two_numbers_have_the_same(x):
    mixed = int(splitmix64(np.array([x], np.uint64))[0])
    assert mixed == int(splitmix64_tensor(tf.constant([x], tf.uint64))[0]) == splitmix64_of_one(x)
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9)):
        mixed = unshifted(mixed, shift) * pow(factor, -1, 2**64) % 2**64
    assert (unshifted(mixed, 30) - 0x9E3779B97F4A7C15) % 2**64 == x


def unshifted(mixed, shift):
    """x of x ^ (x >> shift)."""
    x = mixed
    for _ in range(64 // shift):
        x = mixed ^ (x >> shift)
    return x


@given(number=st.integers(0, 2**56 - 1))
def test_a_number_that_fits_is_its_own_id(number):
    assert int(hash_ids(number)) == number


def documented():
    """Run the example of docs/tables.md that clients copy, with its assertions."""
    (block,) = re.findall(r"```python\n(import hashlib\n.*?)```", DOCS.read_text(), re.DOTALL)
    exec(block, names := {})
    return names


DOCS = Path(__file__).resolve().parents[3] / "docs" / "tables.md"
DOCUMENTED = documented()
COUNT = np.arange(2**16)
STRUCTURED = {
    "a slot above bit 54, and a count": (COUNT >> 6 << 54) | COUNT & 63,
    "few slots above bit 54": (COUNT >> 10 << 54) | COUNT & 1023,
    "a region above bit 48": (COUNT >> 8 << 48) | COUNT & 255,
    "multiples of 2^40": COUNT << 40,
    "multiples of 2^47": COUNT << 47,
    "negative": -COUNT - 1,
    "sequential from 2^56": COUNT + 2**56,
    "sequential to the end": 2**63 - 1 - COUNT,
    "snowflakes": (1_288_834_974_657 + COUNT // 8 << 22) | (COUNT % 8 << 12),
    "addresses": 0x7F00_0000_0000 + 16 * COUNT,
    "two halves alike": COUNT << 32 | COUNT,
    "bytes of text": np.frombuffer(b"".join(b"%08d" % n for n in COUNT), np.int64),
    "texts": np.array([hash_of_prepare(f"sku/{n}") for n in COUNT]),
}


@pytest.mark.parametrize("kind", STRUCTURED)
def test_numbers_of_any_structure_share_ids_as_random_ones_do(kind):
    ids = np.unique(STRUCTURED[kind])
    assert count_collisions(ids) == 0  # of 65,536 random ones, 3e-8 are expected
    bits = 22
    expected = len(ids) ** 2 / 2 ** (bits + 1)  # 512 pairs of 65,536
    assert count_collisions(ids, bits) <= expected + 6 * expected**0.5


def test_slots_in_the_upper_bits_collided_before():
    ids = STRUCTURED["few slots above bit 54"]
    assert count_collisions(ids, bits=58, fold="xor") == 65536 - 16384  # in a collection of 30 tables


@given(text=st.binary(max_size=40), bits=st.integers(1, 63))
def test_a_text_has_the_id_of_the_number_that_was_prepared_of_it(text, bits):
    assert int(hash_ids(text, bits)) == int(hash_ids(np.int64(reference(text)), bits))


def test_ragged_texts_stay_ragged():
    found = hash_ids(tf.ragged.constant([["a", "b"], [], ["c"]]))
    assert found.row_lengths().numpy().tolist() == [2, 0, 1]
    np.testing.assert_array_equal(found.flat_values, hash_ids(["a", "b", "c"]))


@pytest.mark.parametrize("values", [[0.5], [True], [1 + 2j]])
def test_what_is_neither_text_nor_a_whole_number_is_refused(values):
    with pytest.raises(ConfigError, match="hash_ids: values must be integers"):
        hash_ids(values)


@pytest.mark.parametrize("bits", [0, 64, 3.5])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(ConfigError, match="hash_ids: bits must be"):
        hash_ids([1], bits)


def test_an_unknown_fold_is_refused():
    with pytest.raises(ConfigError, match="hash_ids: fold must be 'mix' or 'xor', got 'md5'"):
        hash_ids([1], fold="md5")


def test_collisions_are_counted_among_distinct_values():
    assert count_collisions([0, 9, 9, 1], bits=3, fold="xor") == 1  # 9 folds to 0
    assert count_collisions(tf.ragged.constant([["a"], ["b", "a"]])) == 0
    assert count_collisions([f"{n}" for n in range(100)], bits=1) == 98
    assert count_collisions(tf.constant([], tf.string)) == 0


@given(value=st.one_of(st.text(max_size=40), NUMBERS))
def test_the_documented_function_computes_the_same_id(value):
    assert DOCUMENTED["hashed_id"](value) == int(hash_ids(value))
