"""Pipelines, micro-batches and groups of ranks with a GPU each: `make test-gpu-ranks`."""

from __future__ import annotations

from typing import Any

import pytest

from gmeta.core.collectives.lane import lane_kind
from support.gpu.cuda_library import count_gpus_apart
from support.pipeline_runs import differences, distances, train_at_depth, train_to_compare_sums
from support.process_ranks import run_ranks

_GPUS = count_gpus_apart()
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(_GPUS < 2, reason=f"needs 2 GPUs, there are {_GPUS}"),
]
EXACT = {"TF_DETERMINISTIC_OPS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
CLOSE = 1e-5  # of sums in another order, relative to an array's largest number


def differ_by_depth(kind: str) -> list[str]:
    """Runs on every rank: where a pipeline's numbers differ from depth 0's."""
    plain = train_at_depth(kind, 0)
    return [d for depth in (1, 2) for d in differences(plain, train_at_depth(kind, depth))]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["ctr", "recent", "rows"])
def test_a_pipeline_changes_no_bit(kind: str, device: str) -> None:
    # Dropout is in the first two: a function made anew for arguments elsewhere would drop the same again.
    environment = {"GMETA_TABLE_DEVICE": device, **EXACT}
    assert run_ranks(differ_by_depth, 2, kind, environment=environment, timeout=900) == [[], []]


def differ_by_parts(kind: str) -> dict[str, float]:
    """Runs on every rank: how far micro-batches are from the undivided batch."""
    whole = train_to_compare_sums(kind)
    far: dict[str, float] = {}
    for micro_batches, depth in ((2, 1), (4, 0), (8, 2)):
        for path, distance in distances(whole, train_to_compare_sums(kind, depth, micro_batches)).items():
            if not distance <= CLOSE:
                far[f"{micro_batches}{path}"] = distance
    return far


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["ctr", "frequent", "rows"])
def test_a_step_of_micro_batches_is_the_step_of_the_batch(kind: str, device: str) -> None:
    environment = {"GMETA_TABLE_DEVICE": device, **EXACT}
    assert run_ranks(differ_by_parts, 2, kind, environment=environment, timeout=900) == [{}, {}]


def train_in_groups(kind: str) -> list[Any]:
    return [lane_kind("gpu"), train_to_compare_sums(kind), train_to_compare_sums(kind, 1, 2)]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["ctr", "rows"])
def test_groups_have_copies_that_are_equal_to_the_last_bit(kind: str, device: str) -> None:
    environment = {"GMETA_TABLE_DEVICE": device, "GMETA_GROUPS": "2", **EXACT}
    first, second = run_ranks(train_in_groups, 2, kind, environment=environment, timeout=900)
    assert first[0] == second[0] == "nccl"
    for own, copy in zip(first[1:], second[1:], strict=True):
        for name in ("dense", "records", "statistics"):
            assert differences(own[name], copy[name]) == []
    for name in ("history", "dense", "records", "statistics"):
        assert {p: d for p, d in distances(first[1][name], first[2][name]).items() if not d <= CLOSE} == {}
