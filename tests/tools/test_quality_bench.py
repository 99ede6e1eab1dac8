"""What the benchmark of quality compares: models that saw the same batches, at the same seed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture(scope="module")
def quality():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCH))
        yield importlib.import_module("quality")
    for name in [each for each in sys.modules if each.split(".")[0] in ("harness", "parts", "quality")]:
        sys.modules.pop(name)


def row(model, way, seed, **metrics):
    return {
        "case": {"model": model, "way": way, "seed": seed},
        "metrics": {name: [0.5, value] for name, value in metrics.items()},
    }


def test_ranks_are_compared_with_one_rank_at_the_same_seed_and_on_the_same_batches(quality):
    rows = {
        "own": [row("grm", "plain", 0, gauc_ctr=0.66)],
        "np1": [
            *(row("grm", "plain", seed, gauc_ctr=0.6 + 0.1 * seed) for seed in (0, 1)),
            row("grm", "balance", 0, gauc_ctr=0.8),
        ],
        "np2": [
            row("grm", "plain", 1, gauc_ctr=0.703),
            row("grm", "plain", 0, gauc_ctr=0.601),
            row("grm", "balance", 0, gauc_ctr=0.81),
            row("grm", "pipeline", 0, gauc_ctr=0.62),
        ],
    }
    found = {result.name: result for result in quality.results_of(rows)}
    assert {result.unit for result in found.values()} == {"GAUC"}
    assert {name: pytest.approx(result.value) for name, result in found.items()} == {
        "quality/grm/own/gauc_ctr": 0.66,
        "quality/grm/own/gauc_ctr/delta": 0.06,
        "quality/grm/np1/gauc_ctr": 0.65,
        "quality/grm/np1/gauc_ctr/spread": 0.1 / 2**0.5,
        "quality/grm/np1/balance/gauc_ctr": 0.8,
        "quality/grm/np2/gauc_ctr": 0.652,
        "quality/grm/np2/gauc_ctr/spread": 0.102 / 2**0.5,
        "quality/grm/np2/gauc_ctr/delta": 0.003,
        "quality/grm/np2/balance/gauc_ctr": 0.81,
        "quality/grm/np2/balance/gauc_ctr/delta": 0.01,
        "quality/grm/np2/pipeline/gauc_ctr": 0.62,
        "quality/grm/np2/pipeline/gauc_ctr/delta": 0.02,
    }


def test_one_rank_trains_in_the_ways_that_give_other_batches_alone(quality):
    given = SimpleNamespace(ways=list(quality.WAYS), models=list(quality.MODELS), seeds=[0, 1, 2])
    jobs = quality.jobs_of([1, 2, 4])
    assert jobs == {"own": (1, 1), "np1": (1, 4), "np2": (2, 4), "np4": (4, 4)}
    ways = {
        job: {(case["model"], case["way"]) for case in quality.cases_of(job, size, given)}
        for job, (size, _) in jobs.items()
    }
    plain = {(model, "plain") for model in quality.MODELS}
    assert ways["own"] == plain
    assert ways["np1"] == plain | {(model, "balance") for model in quality.VARIED}
    assert ways["np4"] == plain | {(model, way) for model in quality.VARIED for way in quality.WAYS}
