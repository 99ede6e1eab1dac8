"""The model beside measured steps: real exchanges, and computation that sleeps (`parts/sleeping_rank`)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness import Result
from parts.jobs import run_job
from parts.pipeline_model.events import simulate
from parts.pipeline_model.own import wires
from parts.pipeline_model.schedules import Schedule, Work
from parts.pipeline_model.wires import Wires

COMPUTE, MICRO = 0.1, (1, 2, 4, 8)
KIB = 256  # so few that data of 7 senders fit into one port's queue: the model has no packet loss
GBIT = 0.1  # so that two cores suffice for 8 ranks
# A computation that sleeps holds a TensorFlow thread, of which there are only as many as cores.
ENVIRONMENT = {"GMETA_LANE": "tcp", "TF_NUM_INTEROP_THREADS": "8"}


def check(ranks: int, rounds: int, kib: int = KIB) -> list[Result]:
    """Return milliseconds of a step on several machines, measured and simulated, by its micro-batches.

    Args:
      ranks: The number of machines.
      rounds: Steps of each kind.
      kib: KiB that a rank sends in an exchange of the whole batch.
    """
    size = kib << 10
    settings = {"compute": COMPUTE, "bytes": size, "micro": MICRO, "rounds": rounds}
    with tempfile.TemporaryDirectory() as folder:
        measured = run_job("sleeping_rank", ranks, settings, Path(folder) / "found.json", ENVIRONMENT, GBIT)
    at_1 = wires(1)
    over = Wires(at_1.latency, at_1.gbit * GBIT, at_1.per_peer)
    results = []
    for micro in MICRO:
        travel = over.carry(size, ranks)
        work = Work(rows=travel, compute=COMPUTE, gradients=travel, latency=over.start(ranks))
        simulated = simulate(Schedule(micro=micro, eager=False).program(work, batches=8), ranks).step(2)
        name = f"pipeline/check/np{ranks}/micro{micro}"
        results += [
            Result(f"{name}/measured", measured[str(micro)], "ms"),
            Result(f"{name}/simulated", 1e3 * simulated, "ms"),
        ]
    return results
