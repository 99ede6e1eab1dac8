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
from gmeta.io.readers import balance
from gmeta.io.readers.balance import SequenceCost

APART = [[1, 1, 1, 1], [2, 2, 2], [5, 2], [1]]
"""Batches that tell tokens from squared lengths."""


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


def varied_batches(seed: int) -> list[np.ndarray]:
    """Batches as data gives them, and of short and of long sequences, and small ones."""
    rng = np.random.default_rng(seed)
    drawn = [rng.lognormal(6.0, 0.9, 80).clip(20, 3000).astype(np.int64) for _ in range(8)]
    sided = [one[keep] for one in drawn[:4] for keep in (one < 600, one >= 600)]
    return [*drawn, *sided, *(one[:40] for one in drawn[4:])]


def seconds_of(batches: list[np.ndarray], linear: float, quadratic: float, constant: float) -> np.ndarray:
    return np.array([constant + linear * b.sum() + quadratic * (b * b).sum() for b in batches])


@given(
    seed=st.integers(0, 2**20),
    linear=st.floats(1e-7, 1e-4),
    pair=st.floats(1e-5, 1e-1) | st.just(0.0),
    constant=st.floats(0, 0.1),
)
def test_a_fit_finds_the_cost_that_made_the_times(seed, linear, pair, constant):
    batches = varied_batches(seed)
    found = SequenceCost.of_steps(batches, seconds_of(batches, linear, pair * linear, constant))
    assert found.linear == pytest.approx(linear, rel=1e-6)
    assert found.quadratic == pytest.approx(pair * linear, rel=1e-6, abs=1e-9 * linear)


@given(seed=st.integers(0, 2**20))
def test_a_fit_to_noisy_times_is_near(seed):
    batches = varied_batches(seed)
    exact = seconds_of(batches, 2e-6, 1.5e-9, 0.01)
    noisy = exact * np.random.default_rng(seed).uniform(0.995, 1.005, len(exact))
    found = SequenceCost.of_steps(batches, noisy)
    assert found.quadratic / found.linear == pytest.approx(1.5e-9 / 2e-6, rel=0.15)


@given(seed=st.integers(0, 2**20), late=st.permutations(range(20)))
def test_late_steps_change_no_fit(seed, late):
    batches = varied_batches(seed)
    seconds = seconds_of(batches, 2e-6, 1.5e-9, 0.01)
    seconds[late[:2]] *= 1.25
    found = SequenceCost.of_steps(batches, seconds)
    assert found.quadratic / found.linear == pytest.approx(1.5e-9 / 2e-6, rel=1e-5)


@given(unit=st.floats(1e-3, 1e3), order=st.permutations(range(20)))
def test_a_fit_depends_on_the_unit_alone(unit, order):
    batches = varied_batches(0)
    seconds = seconds_of(batches, 2e-6, 1.5e-9, 0.01)
    found = SequenceCost.of_steps([batches[i].tolist() for i in order], unit * seconds[list(order)])
    assert found.linear == pytest.approx(2e-6 * unit, rel=1e-6)
    assert found.quadratic == pytest.approx(1.5e-9 * unit, rel=1e-6)


def test_no_part_of_a_fit_is_below_zero():
    batches = [[10] * 40, [20] * 20, [40] * 10, [80] * 5, [10] * 20]  # long sequences that seem to save time
    found = SequenceCost.of_steps(batches, [0.5, 0.49, 0.48, 0.47, 0.25])
    assert found.quadratic == 0
    assert found.linear > 0


@pytest.mark.parametrize(
    "batches",
    [
        [[3, 4]] * 5,
        [[3, 4], [4, 3], [3, 4]],
        [[7] * count for count in (1, 2, 5, 9)],  # pairs are 7 times the tokens
        [[3, 4], [5, 6], [3, 4]],
        [[], [], []],
    ],
)
def test_batches_that_tell_nothing_apart_are_refused(batches):
    with pytest.raises(ConfigError, match=r"too alike: their tokens .* don't vary independently"):
        SequenceCost.of_steps(batches, np.arange(1.0, len(batches) + 1))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: SequenceCost(-1.0), r"linear=-1\.0"),
        (lambda: SequenceCost(0.0, 0.0), "one of them above"),
        (lambda: SequenceCost.of_hstu(0), "of_hstu: dim must be a whole number from 1 on, got 0"),
        (lambda: SequenceCost.of_hstu(8, blocks=0), "of_hstu: blocks must be a whole number"),
        (lambda: SequenceCost().length(-1.0), r"at least 0, got -1\.0"),
        (lambda: SequenceCost().length(math.nan), "got nan"),
        (lambda: SequenceCost.of_steps([[1], [2, 3]], [1.0, 2.0]), "got 2 batches .* at least 3"),
        (lambda: SequenceCost.of_steps(APART, [1.0, 2.0, 3.0]), r"got 4 batches and seconds of shape \(3,\)"),
        (lambda: SequenceCost.of_steps(APART, np.ones([4, 2])), r"shape \(4, 2\)"),
        (lambda: SequenceCost.of_steps(APART, [1.0, 2.0, 0.0, 1.0]), r"batch 2 took 0\.0 seconds"),
        (lambda: SequenceCost.of_steps(APART, [1.0, math.nan, 2.0, 1.0]), "batch 1 took nan seconds"),
        (lambda: SequenceCost.of_steps(APART, [1.0, 2.0, 1.0, math.inf]), "batch 3 took inf seconds"),
        (lambda: SequenceCost.of_steps([*APART[:3], [2, -1]], [1.0] * 4), r"batch 3 must be .* \[2, -1\]"),
        (lambda: SequenceCost.of_steps([*APART[:3], 5], [1.0] * 4), "batch 3 must be a list of lengths.* 5"),
        (
            lambda: SequenceCost.of_steps(APART, [4.0, 3.0, 2.0, 5.0]),
            "steps of more tokens don't take longer",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        wrong()


def test_examples():
    assert doctest.testmod(balance).failed == 0
