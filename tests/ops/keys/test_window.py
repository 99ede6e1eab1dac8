"""The keys and units of micro-batches: the native ops do what plain Python does."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.ops.distinct import classify_keys, cluster_units, collect_keys, move_places
from support.reference import messages as reference

KEYS = st.lists(st.integers(-5, 40) | st.integers(-(2**63), 2**63 - 1), max_size=40)


def vectors(lists: list[list[int]], dtype: tf.DType) -> list[tf.Tensor]:
    return [tf.constant(each, dtype) for each in lists]


def lists(tensors: tuple[tf.Tensor, ...]) -> list[list[int]]:
    return [each.numpy().tolist() for each in tensors]


@given(keys=st.lists(KEYS, min_size=1, max_size=8))
def test_keys_are_classified_as_in_plain_python(keys: list[list[int]]) -> None:
    by_class, places = reference.classify_keys(keys)
    found = classify_keys(vectors(keys, tf.int64))
    assert lists(found.by_class) == by_class
    assert lists(found.places) == places


@given(keys=st.lists(KEYS, min_size=1, max_size=8), seed=st.integers(0, 99))
def test_places_follow_their_keys(keys: list[list[int]], seed: int) -> None:
    draw = np.random.default_rng(seed)
    found = classify_keys(vectors(keys, tf.int64))
    within = [draw.permutation(len(each)) for each in found.by_class]
    moved = move_places([tf.constant(each, tf.int32) for each in within], found.places)
    shuffled = [each.numpy()[np.argsort(own)] for each, own in zip(found.by_class, within, strict=True)]
    number = len(keys)
    classes = [(first, last) for first in range(number) for last in range(first, number)]
    for i, part in enumerate(keys):
        open_ = [own for (f, last), own in zip(classes, shuffled, strict=True) if f <= i <= last]
        np.testing.assert_array_equal(np.concatenate(open_)[moved[i].numpy()], np.array(part, np.int64))


@given(keys=st.lists(KEYS, min_size=1, max_size=9), seed=st.integers(0, 99))
def test_collected_keys_are_distinct_and_found_again(keys: list[list[int]], seed: int) -> None:
    draw = np.random.default_rng(seed)
    positions = [draw.integers(0, len(each), 2 * len(each)) if each else np.empty(0) for each in keys]
    found = collect_keys(vectors(keys, tf.int64), [tf.constant(each, tf.int32) for each in positions])
    assert found.distinct.numpy().tolist() == list(dict.fromkeys(key for each in keys for key in each))
    for each, own, places in zip(keys, positions, found.places, strict=True):
        asked = np.array(each, np.int64)[own.astype(int)]
        np.testing.assert_array_equal(found.distinct.numpy()[places.numpy()], asked)


@given(data=st.data(), sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_units_are_clustered_as_in_plain_python(data: st.DataObject, sizes: list[int]) -> None:
    total = sum(sizes)
    pairs = st.tuples(st.integers(0, 12), st.integers(0, max(total - 1, 0)))
    drawn = data.draw(st.lists(pairs, max_size=60 if total else 0))
    keys, units = [key for key, _ in drawn], [unit for _, unit in drawn]
    order = cluster_units(tf.constant(keys, tf.int64), tf.constant(units, tf.int64), sizes).numpy().tolist()
    assert order == reference.cluster_units(keys, units, sizes)
    assert sorted(order) == list(range(total))


def test_clusters_hold_fewer_keys_than_the_order_of_the_batch() -> None:
    draw = np.random.default_rng(3)
    topics = draw.integers(0, 32, 512)
    keys = (topics[:, None] * 100 + draw.integers(0, 20, [512, 6])).reshape(-1)
    units, sizes = np.repeat(np.arange(512), 6), [128] * 4
    order = cluster_units(tf.constant(keys), tf.constant(units), sizes).numpy()
    before = reference.inflation(keys, units, np.arange(512), sizes)
    assert reference.inflation(keys, units, order, sizes) < 0.7 * before


def test_what_is_no_key_and_no_unit_is_refused() -> None:
    keys = vectors([[1, 2], [2]], tf.int64)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a place isn't that of a key"):
        move_places(vectors([[0], [0], []], tf.int32), vectors([[0, 2], [0]], tf.int32))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"position of vector 1 must lie in \[0, 1\)"):
        collect_keys(keys, vectors([[0], [1]], tf.int32))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"unit 2 of key 1 must lie in \[0, 2\)"):
        cluster_units(keys[0], tf.constant([0, 2], tf.int64), [1, 1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most 8 micro-batches, got 9"):
        classify_keys([keys[0]] * 9)
    with pytest.raises(tf.errors.InvalidArgumentError, match="1 to 8 sizes, got 9"):
        cluster_units(keys[0], tf.constant([0, 1], tf.int64), [1] * 9)
