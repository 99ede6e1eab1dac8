"""A pipeline on several ranks: the numbers are those of depth 0, to the last bit."""

from __future__ import annotations

import os

import pytest

from gmeta.testing.jobs.pipeline_runs import KINDS, differences, train_at_depth
from gmeta.testing.jobs.process_ranks import run_ranks
from gmeta.testing.jobs.tracing import leave_keras_as_it_is

pytestmark = pytest.mark.ranks

# (lane, ranks, kinds of models, depths). Tracing is what takes the time.
CASES = [("horovod", 2, ["towers"], [1]), ("auto", 3, ["ctr"], [2])]
if "GMETA_ALL_CASES" in os.environ:
    CASES = [(lane, ranks, list(KINDS), [1, 2]) for lane in ("horovod", "auto") for ranks in (2, 3, 4)]


def differ(kinds: list[str], depths: list[int]) -> dict[tuple[str, int], list[str]]:
    """Runs on every rank: where depths differ."""
    leave_keras_as_it_is()
    found = {}
    for kind in kinds:
        plain = train_at_depth(kind, 0)
        found |= {(kind, depth): differences(plain, train_at_depth(kind, depth)) for depth in depths}
    return found


@pytest.mark.parametrize(("lane", "np_", "kinds", "depths"), CASES)
def test_all_numbers_are_those_of_depth_0(lane: str, np_: int, kinds: list[str], depths: list[int]) -> None:
    for found in run_ranks(differ, np_, kinds, depths, environment={"GMETA_LANE": lane}, timeout=1800):
        assert found == {(kind, depth): [] for kind in kinds for depth in depths}
