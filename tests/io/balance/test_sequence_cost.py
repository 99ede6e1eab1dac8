"""What a sequence costs: the formula against the matrix products that it counts, and back to a length."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.io.balance import sequence_cost
from gmeta.io.balance.sequence_cost import SequenceCost


def hstu_products(length: int, dim: int, heads: int, blocks: int) -> None:
    """The matrix products of HSTU's blocks, and nothing else."""
    x, wide, square = (tf.zeros(shape) for shape in ((length, dim), (dim, 4 * dim), (dim, dim)))
    for _ in range(blocks):
        u, v, q, k = tf.split(tf.matmul(x, wide), 4, axis=1)
        for q_head, k_head, v_head in zip(*(tf.split(t, heads, axis=1) for t in (q, k, v)), strict=True):
            tf.matmul(tf.matmul(q_head, k_head, transpose_b=True), v_head)
        tf.matmul(u, square)


@pytest.mark.parametrize(("length", "dim", "heads", "blocks"), [(7, 8, 2, 3), (12, 4, 1, 1)])
def test_the_full_cost_is_what_tensorflow_counts_of_the_products(length, dim, heads, blocks):
    graph = tf.Graph()
    with graph.as_default():
        hstu_products(length, dim, heads, blocks)
    options = tf.compat.v1.profiler.ProfileOptionBuilder(
        tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    )
    options = options.with_empty_output().build()
    counted = tf.compat.v1.profiler.profile(graph, cmd="scope", options=options).total_float_ops
    assert SequenceCost.of_hstu(dim, blocks, causal=False).of(length) == counted


@given(length=st.integers(1, 5000), dim=st.sampled_from([1, 8, 512]), blocks=st.integers(1, 30))
def test_the_causal_half_lacks_half_of_each_tokens_pair_with_itself(length, dim, blocks):
    pairs = length * (length + 1) // 2
    exact = blocks * (10 * dim * dim * length + 4 * dim * pairs)
    halved = float(SequenceCost.of_hstu(dim, blocks).of(length))
    assert exact - halved == blocks * 2 * dim * length
    assert (exact - halved) / (blocks * 10 * dim * dim * length) == pytest.approx(1 / (5 * dim))
    full = SequenceCost.of_hstu(dim, blocks, causal=False)
    projections = SequenceCost(full.linear).of(length)
    assert 2 * (halved - projections) == full.of(length) - projections


def test_costs_of_tokens_and_pairs():
    np.testing.assert_array_equal(SequenceCost().of([3, 7]), [3.0, 7.0])
    np.testing.assert_array_equal(SequenceCost(2.0, 0.5).of([4, 10]), [16.0, 70.0])


@given(linear=st.floats(0, 1e7), quadratic=st.floats(0, 1e4) | st.just(0.0), length=st.floats(1e-3, 1e5))
def test_the_length_of_a_cost_is_the_length_that_costs_it(linear, quadratic, length):
    if max(linear, quadratic) < 1e-3:
        linear += 1.0
    cost = SequenceCost(linear, quadratic)
    assert cost.length(float(cost.of(length))) == pytest.approx(length, rel=1e-12)
    assert cost.length(0) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: SequenceCost(-1.0), r"linear=-1\.0"),
        (lambda: SequenceCost(0.0, 0.0), "one of them above"),
        (lambda: SequenceCost.of_hstu(0), "of_hstu: dim must be a whole number from 1 on, got 0"),
        (lambda: SequenceCost.of_hstu(8, blocks=0), "of_hstu: blocks must be a whole number"),
        (lambda: SequenceCost().length(-1.0), r"at least 0, got -1\.0"),
        (lambda: SequenceCost().length(math.nan), "got nan"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        wrong()


def test_examples():
    assert doctest.testmod(sequence_cost).failed == 0
