"""Measures steps of meta-training by several pipelines, on one rank and on several."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Result
from parts.jobs import run_job
from scaling import MODELS, SIZES

CASES = {
    f"{model}{tasks}": {**SIZES, **own, "tasks": tasks, "keep_rows": False}
    for model, own, tasks in (
        ("small", MODELS["small"], 64),
        ("small", MODELS["small"], 512),
        ("dlrm", MODELS["dlrm"], 256),
        ("dlrm", MODELS["dlrm"], 512),
        ("wide", {"dim": 256, "hidden": [64]}, 64),  # much to send, little to compute
    )
}
ALONE: dict[str, dict[str, Any]] = {"depth0": {}, "depth1": {"depth": 1}}
TOGETHER: dict[str, dict[str, Any]] = {
    **ALONE,
    "depth2": {"depth": 2},
    "micro2": {"depth": 1, "micro_batches": 2},
    "micro8": {"depth": 1, "micro_batches": 8},
    "clusters8": {"depth": 1, "micro_batches": 8, "cluster": True},
    "still": {"depth": 1, "stand_still": True},
}
IN_GROUPS: dict[str, dict[str, Any]] = {"groups2": TOGETHER["clusters8"]}


def measure(cases: Sequence[str], ranks: int, given: Mapping[str, Any], gbit: float | None) -> list[Result]:
    """Return the steps' times, and the speed-up of several ranks as a share of ideal.

    Args:
      cases: Some of `CASES`.
      ranks: The number of ranks.
      given: Settings that replace the cases' own.
      gbit: The rate of the wires between the ranks' machines, if each has its own.
    """
    results = []
    for case in cases:
        settings = {**CASES[case], **given}
        alone = _medians(1, {**settings, "variants": ALONE})
        together = _medians(ranks, {**settings, "variants": TOGETHER}, gbit)
        if ranks % 2 == 0:
            together |= _medians(ranks, {**settings, "variants": IN_GROUPS}, gbit, GMETA_GROUPS="2")
        synchronous = {**settings, "variants": {"depth0": {}}}
        (plain,) = _medians(ranks, synchronous, gbit, GMETA_LANE="horovod").values()
        where = f"np{ranks}" if gbit is None else f"np{ranks}/{gbit:g}Gbit"
        results += [Result(f"pipeline/step/{case}/{name}/np1", ms, "ms") for name, ms in alone.items()]
        results += [Result(f"pipeline/step/{case}/{name}/{where}", ms, "ms") for name, ms in together.items()]
        results.append(Result(f"pipeline/step/{case}/horovod/{where}", plain, "ms"))
        best = min(ms for name, ms in together.items() if name != "still")
        for name, ms in alone.items():
            results.append(Result(f"pipeline/speed_up/{case}/{where}/of_{name}", ms / best, "of ideal"))
        results.append(Result(f"pipeline/speed_up/{case}/{where}", min(alone.values()) / best, "of ideal"))
        if gbit is not None:
            results += _exposed(case, where, together, _medians(ranks, {**settings, "variants": TOGETHER}))
        exposed = 100 * (together["depth1"] - together["still"]) / together["depth1"]
        results.append(Result(f"pipeline/exposed/keys/{case}/{where}", exposed, "% of a step"))
    return results


def _exposed(case: str, where: str, wired: Mapping[str, float], free: Mapping[str, float]) -> list[Result]:
    """Return the share of the wire's time for which each variant waits; depth 0 waits for all of it.

    With N micro-batches that compute for K in all and exchange for C, it is at least max(C / N, C - K).
    """
    wire = wired["depth0"] - free["depth0"]
    found = [Result(f"pipeline/step/{case}/{name}/without_wires", ms, "ms") for name, ms in free.items()]
    found.append(Result(f"pipeline/communication/{case}/{where}", wire, "ms"))
    for name, ms in wired.items():
        if name in free and name != "still":
            exposed = 100 * (ms - free[name]) / wire
            found.append(Result(f"pipeline/exposed/{name}/{case}/{where}", exposed, "% of communication"))
    least = 100 * max(1 / 8, 1 - free["micro8"] / wire)
    found.append(Result(f"pipeline/exposed/least_of_micro8/{case}/{where}", least, "% of communication"))
    return found


def _medians(
    ranks: int, settings: Mapping[str, Any], gbit: float | None = None, **environment: str
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        found = run_job("meta.paces", ranks, settings, out, environment, gbit if ranks > 1 else None)
    return {name: statistics.median(paces) for name, paces in found["paces"].items()}
