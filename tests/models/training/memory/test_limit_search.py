"""The largest batch within a budget, by invented measures of memory."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.training.token_limit import MemoryLine, find_limit

SIZES = (1000, 2000, 4000)


class Device:
    """Counts what is measured, and runs out of memory at a limit."""

    def __init__(self, peak, runs_out=math.inf):
        self._peak, self._runs_out, self.sizes = peak, runs_out, []

    def __call__(self, tokens):
        assert tokens not in self.sizes
        self.sizes.append(tokens)
        peak = self._peak(tokens)
        return peak if peak <= self._runs_out else None


@given(base=st.floats(0, 1e9), per_token=st.floats(1, 1e6), most=st.integers(4001, 30_000))
def test_a_line_is_found_exactly_and_verified_by_one_step(base, per_token, most):
    device = Device(lambda tokens: base + per_token * tokens)
    found = find_limit(device, SIZES, base + per_token * (most + 0.5))
    assert found.tokens == most
    assert device.sizes == [*SIZES, most]
    assert found.refused == ()
    np.testing.assert_allclose(found.line.per_token, per_token, rtol=1e-3)


def test_a_batch_far_larger_than_any_measured_comes_in_steps():
    device = Device(lambda tokens: 100 + tokens)
    assert find_limit(device, SIZES, 1_000_100.5).tokens == 1_000_000
    assert device.sizes == [*SIZES, 32_000, 256_000, 1_000_000]


@given(
    seed=st.integers(0, 2**32 - 1),
    noise=st.floats(0, 0.02),
    power=st.sampled_from([0.8, 1.0, 1.5, 2.0, 3.0]),
    most=st.integers(1000, 300_000),
    runs_out=st.sampled_from([1.0, 1.05, math.inf]),
)
def test_what_is_found_fits_whatever_the_form_and_the_noise(seed, noise, power, most, runs_out):
    def peak(tokens):
        rng = np.random.default_rng([seed, tokens])
        return 1e6 + 100 * tokens**power * (1 + noise * rng.uniform(-1, 1))

    budget = 1e6 + 100 * most**power * (1 + noise)
    device = Device(peak, runs_out * budget)
    found = find_limit(device, SIZES, budget)
    assert peak(found.tokens) == found.peak <= budget
    assert all(peak(tokens) > budget for tokens in found.refused)
    assert len(device.sizes) <= 16
    assert found.tokens >= 1000
    if power == 1 and noise < 0.001:
        assert found.tokens >= 0.95 * most or most < 4000


def test_squares_are_bounded_by_chords():
    device = Device(lambda tokens: 1e6 + tokens**2)
    found = find_limit(device, SIZES, 1e6 + 10_000**2)
    assert found.tokens <= 10_000 < min(found.refused)
    assert found.tokens > 5_000


def test_memory_that_ran_out_is_halved():
    device = Device(lambda tokens: tokens, runs_out=9_000)
    found = find_limit(device, SIZES, 20_000)
    assert found.refused == (20_000, 12_000)
    assert found.tokens == 8_000


@pytest.mark.parametrize("peak", [lambda _: 5.0, lambda tokens: 5 - 1e-6 * tokens, lambda t: 5 + 1e-9 * t])
def test_memory_that_does_not_grow_is_refused(peak):
    device = Device(peak)
    with pytest.raises(ConfigError, match=r"don't grow with tokens .*give larger sizes in tokens="):
        find_limit(device, SIZES, 6.0)
    assert max(device.sizes) <= 8**4 * SIZES[-1]


@pytest.mark.parametrize(("runs_out", "says"), [(0, "ran out of memory"), (9e9, "took 7,000 bytes")])
def test_a_budget_without_room_is_refused(runs_out, says):
    with pytest.raises(ConfigError, match=f"a batch of 1000 tokens {says}, and the budget is 6,999"):
        find_limit(Device(lambda tokens: 7 * tokens, runs_out), SIZES, 6999)


def test_a_line_through_one_size_begins_at_zero():
    assert MemoryLine.through({4: 12.0}) == MemoryLine(0.0, 3.0)
    assert MemoryLine(10.0, 3.0).tokens_at(20.0) == 3


def test_a_line_that_a_fit_has_rounded_loses_no_token():
    assert MemoryLine(1000.0000000001, 20.0).tokens_at(9500.0) == 425
    assert MemoryLine(1000.0001, 20.0).tokens_at(9500.0) == 424
