from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from support.reference.balance import prefix_batches

# Whole numbers, so that sums are exact and ties are ties.
COSTS = st.lists(st.integers(1, 40), max_size=40)


def closest_prefix(costs: list[int], target: int, max_tokens: int | None) -> int:
    """By trying all of them; the longest of equally close ones."""
    sums = list(itertools.accumulate(costs))
    allowed = [
        n for n in range(1, len(sums) + 1) if n == 1 or max_tokens is None or sums[n - 1] <= max_tokens
    ]
    return max(allowed, key=lambda n: (-abs(sums[n - 1] - target), n))


@given(costs=COSTS, target=st.integers(1, 90), max_tokens=st.none() | st.integers(1, 90))
def test_a_batch_is_the_prefix_closest_to_the_target(costs, target, max_tokens):
    batches = list(prefix_batches([(c, c) for c in costs], target=target, max_tokens=max_tokens))
    assert sum(batches) == len(costs)
    left = costs
    for count in batches:
        assert count == closest_prefix(left, target, max_tokens)
        left = left[count:]


def test_no_more_is_read_than_the_target_asks_for():
    def stream():
        yield from ((5.0, 5), (5.0, 5))
        raise AssertionError("read on")

    assert next(prefix_batches(stream(), target=10.0)) == 2


def test_a_sequence_above_the_target_is_a_batch_of_its_own():
    assert list(prefix_batches([(1, 1), (100, 100), (1, 1)], target=4, max_tokens=50)) == [1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: list(prefix_batches([], target=0)), "target=0 must be above 0"),
        (lambda: list(prefix_batches([], target=1, max_tokens=0)), "max_tokens=0 at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        wrong()
