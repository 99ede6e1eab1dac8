"""Micro-batches on several ranks: every row and gradient travels once, in time, and a step is the batch's."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gmeta.core import collectives
from gmeta.layers.exchange import frozen_window
from gmeta.layers.exchange.window_keys import key_classes
from support.pipeline_runs import KINDS, STEPS, collections_of, distances, make_model, train_to_compare_sums
from support.process_ranks import run_ranks

pytestmark = pytest.mark.ranks

STRICT = 1e-6
Cases = dict[str, tuple[tuple[int, int], ...]]  # kind -> micro-batches and depths
CASES: dict[tuple[int, str], Cases] = {  # ranks and lane
    (2, "tcp"): {"ctr": ((3, 2),)},
}
# Quick: ctr on two ranks, and for the steps of other models tests/models/training/test_windows.py.
ALL = "GMETA_ALL_CASES" in os.environ
if ALL:
    every = tuple((micro_batches, depth) for micro_batches in (2, 4, 8) for depth in (0, 1, 2))
    CASES = {
        (np_, lane): dict.fromkeys((*KINDS, "next item of users"), every)
        for np_ in (2, 3)
        for lane in ("horovod", "tcp")
    }
    CASES[3, "tcp"]["ctr"] += ((3, 2),)


def differ(cases: Cases) -> dict[str, Any]:
    """Runs on every rank: where micro-batches differ from the undivided batch."""
    found: dict[str, Any] = {}
    for kind, of_kind in cases.items():
        whole = train_to_compare_sums(kind)
        for micro_batches, depth in of_kind:
            apart = distances(whole, train_to_compare_sums(kind, depth, micro_batches))
            found[f"{kind} {micro_batches} {depth}"] = {k: v for k, v in apart.items() if not v <= STRICT}
    return found


@pytest.mark.parametrize(("np_", "lane"), CASES)
def test_a_step_of_micro_batches_is_the_step_of_the_batch(np_: int, lane: str) -> None:
    cases = CASES[np_, lane]
    for found in run_ranks(differ, np_, cases, environment={"GMETA_LANE": lane}, timeout=900):
        assert found == {f"{kind} {n} {depth}": {} for kind, of_kind in cases.items() for n, depth in of_kind}


def measure() -> dict[str, Any]:
    """Runs on every rank: bytes of exchanges, their order in the trace, and a step that sends too early."""
    found: dict[str, Any] = {"bytes": {}}
    for micro_batches in (1, 2):
        with collectives.count_collectives() as counts:
            whole = train_to_compare_sums("towers", 0, micro_batches)
        found["bytes"][micro_batches] = counts.bytes["alltoall"]
        found.setdefault("whole", whole)
    names: list[str] = []
    plain = collectives.alltoall

    def note(*args: Any, name: str, **kwargs: Any) -> Any:
        names.append(name)
        return plain(*args, name=name, **kwargs)

    collectives.alltoall = note
    train_to_compare_sums("ctr", 1, 3)
    collectives.alltoall = plain
    found["names"] = names[2:]  # before training, all ranks run the model once
    whole = found.pop("whole")
    if ALL:  # quick: of one rank, test_windows.py, test_gradients_that_leave_too_early_are_noticed[ctr]
        frozen_window.leaves_after = lambda keys: keys.first  # type: ignore[assignment]
        found["early"] = max(distances(whole, train_to_compare_sums("towers", 0, 2)).values())
    model, _ = make_model("towers")
    # Its second collection is looked up twice a step.
    lookups = [each for each in collections_of(model) for _ in range(1 + (each.name == "other"))]
    found["tables"] = sum(len(each.tables) for each in lookups)
    return found


@pytest.mark.shown_by("test_a_step_of_micro_batches_is_the_step_of_the_batch")
def test_every_row_and_gradient_travels_once_and_in_time() -> None:
    for found in run_ranks(measure, 2, environment={"GMETA_LANE": "tcp"}, timeout=900):
        # The data of rank 0 has STEPS batches, and a step more finds that it has ended. In each, messages to
        # the other rank say for each table how many keys of each class follow, not how many keys.
        counts = 8 * found["tables"] * (len(key_classes(2)) - 1) * (STEPS + 1)
        assert found["bytes"][2] == found["bytes"][1] + counts
        assert found["names"] == [
            "collection/keys",  # of the first batch
            "collection/0/values",
            "collection/1/values",
            "collection/keys",  # of the next batch
            "step/0/gradients",
            "collection/2/values",
            "step/1/gradients",
            "step/2/gradients",
        ]
        assert not ALL or found["early"] > 1e-3
