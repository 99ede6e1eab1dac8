"""A gmeta step for the model: bytes and seconds that its benchmarks measured, on measured wires.

A rank's batch has 4,096 samples of 26 features with the vocabularies of Criteo.

Measured: the bytes that leave a rank of 8 with rows of 64 floats, and the seconds of one rank's
deduplication, reading and update (``docs/results/exchange-cpu.json``); latency and bandwidth of the lane
between two machines (``docs/results/exchange-wires-2-cores.json``).

Assumed: the computation, the refresh, the size of the dense gradients, the latency of each further peer, and
the jitter.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from parts.pipeline_model.events import Jitter, simulate
from parts.pipeline_model.schedules import Schedule, Work
from parts.pipeline_model.wires import Wires, measured_wires

COMPUTE = 0.1
DENSE_BYTES = 4e6
A_PEER = 5e-6
REFRESH = 1e-3
JITTER = 0.1
RESULTS = Path(__file__).resolve().parents[4] / "docs" / "results"
_MEASURED, _CASE = 8, "criteo/dim64"
_ROW, _KEY = 4 * 64, 8
_BATCHES, _WARM_UP = 20, 6


def wires(gbit: float) -> Wires:
    """Return the wires measured at a rate."""
    results = json.loads((RESULTS / "exchange-wires-2-cores.json").read_text())
    return replace(measured_wires(results, f"tcp/np2/{gbit:g}Gbit"), per_peer=A_PEER)


def own_work(over: Wires, ranks: int) -> Work:
    """Return the seconds of the stages of a step on this many ranks."""
    found = json.loads((RESULTS / "exchange-cpu.json").read_text())[0]["found"]
    away = found[str(_MEASURED)]["ways"][_CASE]["both"]["bytes"]
    whole = away * _MEASURED / (_MEASURED - 1)  # of keys, rows and gradients, including the local share
    rows, keys = (whole * size / (2 * _ROW + _KEY) for size in (_ROW, _KEY))
    local = found["1"]["ways"][_CASE]["both"]["seconds"] / 3
    return Work(
        route=local,
        keys=over.start(ranks) + over.carry(keys, ranks),
        fetch=local,
        refresh=REFRESH,
        rows=over.carry(rows, ranks),
        compute=COMPUTE,
        gradients=over.carry(rows, ranks),
        reduce=over.reduce(DENSE_BYTES, ranks),
        update=local,
        latency=over.start(ranks),
    )


def efficiency(schedule: Schedule, gbit: float, ranks: int, sigma: float = JITTER, seed: int = 1) -> float:
    """Return the part of a step in which a rank computes, on this many ranks with jitter."""
    program = schedule.program(own_work(wires(gbit), ranks), _BATCHES)
    jitter = Jitter(sigma, seed=seed) if sigma else None
    return COMPUTE / simulate(program, ranks, jitter=jitter).step(_WARM_UP)
