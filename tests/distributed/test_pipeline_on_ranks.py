"""A pipeline on several ranks: the numbers are those of depth 0, to the last bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from gmeta.policies import Tiers
from support.pipeline_runs import KINDS, differences, take_moves, train_at_depth
from support.process_ranks import run_ranks
from support.tables import give_tiers

pytestmark = pytest.mark.ranks

# (lane, ranks, kinds of models, depths). Tracing is what takes the time.
# Quick: towers, with two lookups, on two ranks; other models in tests/models/training/test_pipeline.py.
CASES = [("auto", 2, ["towers"], [1])]
if "GMETA_ALL_CASES" in os.environ:
    CASES = [(lane, ranks, list(KINDS), [1, 2]) for lane in ("horovod", "auto") for ranks in (2, 3, 4)]


def differ(kinds: list[str], depths: list[int]) -> dict[tuple[str, int], list[str]]:
    """Runs on every rank: where depths differ."""
    found = {}
    for kind in kinds:
        plain = train_at_depth(kind, 0)
        found |= {(kind, depth): differences(plain, train_at_depth(kind, depth)) for depth in depths}
    return found


def differ_on_a_drive(folder: str, like_gpu: bool) -> tuple[list[str], int]:
    """Runs on every rank: where training with rows on a drive differs, and how many rows came back."""
    plain = train_at_depth("by chance", 0)
    with pytest.MonkeyPatch.context() as patch:
        give_tiers(patch, Tiers(host_bytes=600, ssd=folder), like_gpu=like_gpu)
        tiered = train_at_depth("by chance", 2 if like_gpu else 1)
    take_moves(plain)
    moved = take_moves(tiered)
    return differences(plain, tiered), moved


# Quick: prefetches, and of one rank test_tiers.py, test_a_training_is_that_of_tables_in_memory.
@pytest.mark.parametrize(
    "like_gpu", [pytest.param(False, marks=pytest.mark.slow), True], ids=["peeks", "prefetches"]
)
@pytest.mark.shown_by(
    "distributed/test_windows_on_ranks.py::test_a_step_of_micro_batches_is_the_step_of_the_batch"
)
def test_rows_on_a_drive_are_read_ahead_on_ranks(tmp_path: Path, like_gpu: bool) -> None:
    for different, moved in run_ranks(differ_on_a_drive, 2, str(tmp_path), like_gpu, timeout=600):
        assert different == []
        assert moved > 0


@pytest.mark.parametrize(("lane", "np_", "kinds", "depths"), CASES)
@pytest.mark.shown_by(
    "distributed/test_windows_on_ranks.py::test_a_step_of_micro_batches_is_the_step_of_the_batch"
)
def test_all_numbers_are_those_of_depth_0(lane: str, np_: int, kinds: list[str], depths: list[int]) -> None:
    for found in run_ranks(differ, np_, kinds, depths, environment={"GMETA_LANE": lane}, timeout=1800):
        assert found == {(kind, depth): [] for kind in kinds for depth in depths}


class Renumber(tf.keras.callbacks.Callback):
    """Sets the number of the next step, now and then, on all ranks."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch % 4 == 1:
            self.model.optimizer.iterations.assign_add(100 * (batch + 1))


def differ_where_predictions_are_wrong(kind: str, depths: list[int], divided: list[int]) -> list[list[str]]:
    """Runs on every rank: where depths differ if the number of a step is often not as predicted."""
    settings: dict[str, Any] = {"accumulate_steps": 3, "fit": {"steps_per_epoch": 5}}
    of_all = []
    for micro_batches in divided:
        plain, *others = (
            train_at_depth(kind, depth, micro_batches=micro_batches, callbacks=[Renumber()], **settings)
            for depth in (0, *depths)
        )
        of_all += [differences(plain, other) for other in others]
    return of_all


# Quick: auto, and of one rank tests/models/training/pipeline/test_step_number.py, with micro-batches.
@pytest.mark.parametrize(
    ("lane", "divided"), [("auto", [1]), pytest.param("horovod", [1, 2], marks=pytest.mark.slow)]
)
@pytest.mark.shown_by(
    "distributed/test_windows_on_ranks.py::test_a_step_of_micro_batches_is_the_step_of_the_batch"
)
def test_all_ranks_fetch_a_batch_anew_together(lane: str, divided: list[int]) -> None:
    every = "GMETA_ALL_CASES" in os.environ
    kind, depths, divided = ("next item", [1, 2], [1, 2]) if every else ("drawn", [2], divided)
    job = kind, depths, divided
    of_all = run_ranks(
        differ_where_predictions_are_wrong, 2, *job, environment={"GMETA_LANE": lane}, timeout=900
    )
    assert of_all == [[[]] * len(divided) * len(depths)] * 2
