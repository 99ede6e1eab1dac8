"""StepTimes on ranks: exchanges and waiting of models of every family, and one trace of all ranks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gmeta.callbacks import StepTimes
from gmeta.callbacks.step_clock import PARTS
from gmeta.core import collectives
from support.process_ranks import run_ranks
from support.timed_fits import FAMILIES, act_at_stage, fit_timed

pytestmark = pytest.mark.ranks

IN_A_GRAPH = ("ctr", "meta grm")  # others step eagerly, as tracing is what takes the time
# Quick: maml; the exchanges of "ctr" are in the tests below, and of one rank test_timed_models.py has others.
CASES = [("auto", ["maml"])]
PIPELINES, LANES = [(1, 1)], ["horovod"]
if "GMETA_ALL_CASES" in os.environ:
    CASES = [("auto", [family for family in FAMILIES if family != "policy"]), ("horovod", ["ctr", "flat"])]
    PIPELINES, LANES = [(1, 1), (2, 1), (2, 2)], ["auto", "horovod"]


def measure(families: list[str]) -> list[tuple[Any, list[str]]]:
    """Runs on every rank: the times of each family, and what was printed."""
    found = []
    for family in families:
        shown: list[str] = []
        times = StepTimes(every=2, print_fn=shown.append)
        fit_timed(family, times, steps=5, run_eagerly=family not in IN_A_GRAPH)
        found.append((times.times, shown))
    return found


@pytest.mark.parametrize(("lane", "families"), CASES)
@pytest.mark.shown_by("test_the_rank_that_comes_first_waits")
def test_a_model_of_each_family_tells_exchanges_from_waiting(lane: str, families: list[str]) -> None:
    first, second = run_ranks(measure, 2, families, environment={"GMETA_LANE": lane}, timeout=900)
    for family, (times, shown), (other, hidden) in zip(families, first, second, strict=True):
        has = {"data", *FAMILIES[family], "exchange", "wait", "update"}
        assert list(times.seconds) == [part for part in PARTS if part in has], family
        assert times == other
        assert times.steps % 2 == 0  # those of both
        assert len(times.waits) == 2
        assert sum(times.waits) == pytest.approx(times.seconds["wait"])
        assert times.seconds["exchange"] > 0
        assert min(times.seconds.values()) >= 0
        assert len(shown) == 1
        assert "is the one that is waited for" in shown[0]
        assert hidden == []


def draw(folder: str, depth: int, micro_batches: int) -> None:
    """Runs on every rank."""
    times = StepTimes(every=1, trace=Path(folder) / "trace.json", print_fn=str)
    fit_timed("ctr", times, depth=depth, micro_batches=micro_batches)


@pytest.mark.parametrize(("depth", "micro_batches"), PIPELINES)
@pytest.mark.shown_by("test_the_rank_that_comes_first_waits")
def test_the_trace_shows_the_exchange_of_later_batches_within_a_step(
    tmp_path: Path, depth: int, micro_batches: int
) -> None:
    run_ranks(draw, 2, str(tmp_path), depth, micro_batches)
    drawn = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in drawn)
    assert {event["pid"] for event in drawn} == {0, 1}
    assert {"collection/keys", "step/dense"} <= {e["name"] for e in drawn if e["cat"] == "exchange"}
    for rank in (0, 1):
        own = [event for event in drawn if event["pid"] == rank]
        steps: dict[int, tuple[float, float]] = {}
        for event in own:
            if event["cat"] == "step":
                begin, end = steps.get(event["args"]["batch"], (event["ts"], 0.0))
                steps[event["args"]["batch"]] = min(begin, event["ts"]), max(end, event["ts"] + event["dur"])
        sent = [event for event in own if event["name"] == "collection/keys"]
        overlaps = 0
        for event in sent:
            begin, end = steps.get(event["args"]["batch"] - depth, (0.0, 0.0))
            overlaps += begin <= event["ts"] and event["ts"] + event["dur"] <= end + 0.01
        assert overlaps == len(sent) > 5


def be_late(folder: str) -> tuple[float, ...]:
    """Runs on every rank: in one step, rank 1 comes to the exchange of gradients when rank 0 is there."""
    arrived = Path(folder) / "arrived"

    def come_late() -> None:
        while not arrived.exists():
            time.sleep(0.01)
        time.sleep(1.0)

    act_at_stage("gradients", 5, arrived.touch if collectives.world().rank == 0 else come_late)
    times = StepTimes(every=1, print_fn=str)
    fit_timed("ctr", times, steps=5, run_eagerly=True)
    return times.times.waits


@pytest.mark.parametrize("lane", LANES)
def test_the_rank_that_comes_first_waits(tmp_path: Path, lane: str) -> None:
    waits, others = run_ranks(be_late, 2, str(tmp_path), environment={"GMETA_LANE": lane})
    assert waits == others
    assert waits[0] > waits[1]
    assert waits[0] > 0.5
