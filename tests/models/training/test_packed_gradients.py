"""Small gradients travel as one vector, and come out as they went in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.training import mean_gradients
from gmeta.training.mean_gradients import pack_gradients

SHAPES = st.lists(st.integers(0, 4), max_size=3)
KINDS = st.sampled_from(["none", "float32", "float64", "float16", "slices"])


def gradient_of(kind: str, shape: list[int], start: int) -> Any:
    if kind == "none":
        return None
    if kind == "slices":
        return tf.IndexedSlices(tf.fill([2, 3], float(start)), tf.constant([1, 0]), tf.constant([4, 3]))
    size = int(np.prod(shape))
    return tf.constant(np.arange(start, start + size).reshape(shape), tf.as_dtype(kind))


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if one is None:
        return
    for a, b in zip(*(tf.nest.flatten(each, expand_composites=True) for each in (one, other)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@given(st.lists(st.tuples(KINDS, SHAPES), max_size=8))
def test_what_is_packed_comes_out_as_it_was(drawn: list[tuple[str, list[int]]]) -> None:
    gradients = [gradient_of(kind, shape, 10 * n) for n, (kind, shape) in enumerate(drawn)]
    packed = pack_gradients(gradients)
    for gradient, came in zip(gradients, packed.unpack(packed.parts), strict=True):
        assert_same(gradient, came)


def test_small_gradients_of_a_dtype_are_one_part() -> None:
    tensors = [tf.ones([3, 3]), None, tf.zeros([2]), tf.ones([4], tf.float64), tf.ones([])]
    parts = pack_gradients(tensors).parts
    assert [None if part is None else part.shape.as_list() for part in parts] == [[12], None, [4]]


def test_what_is_done_to_the_parts_is_done_to_all() -> None:
    gradients = [tf.ones([3, 3]), None, tf.fill([2], 2.0), tf.fill([4], tf.constant(3.0, tf.float64))]
    packed = pack_gradients(gradients)
    doubled = packed.unpack([None if part is None else 2 * part for part in packed.parts])
    for gradient, twice in zip(gradients, doubled, strict=True):
        assert_same(None if gradient is None else 2 * gradient, twice)


def test_large_gradients_and_those_of_unknown_shape_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_gradients, "MOST_NUMBERS", 6)
    counts: list[int] = []

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def pack(unknown: tf.Tensor) -> list[tf.Tensor]:
        packed = pack_gradients([tf.ones([7]), tf.ones([6]), unknown, tf.zeros([2, 2])])
        counts.append(len(packed.parts))
        return packed.unpack(packed.parts)

    found = pack(tf.constant([1.0, 2.0]))
    assert counts == [3]
    for gradient, came in zip([tf.ones([7]), tf.ones([6]), [1.0, 2.0], tf.zeros([2, 2])], found, strict=True):
        np.testing.assert_array_equal(gradient, came)
