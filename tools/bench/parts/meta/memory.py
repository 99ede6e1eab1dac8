"""Peak memory of a training step, measured in a separate process.

Tasks are large and the network small, so that most of it is what the inner steps keep for the outer gradient.
A small batch first traces the graph and lets the libraries allocate their own memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from parts.meta.batches import Batch, Field, split
from parts.meta.case import Case

FIELDS, DIM, HIDDEN, VOCABULARY = 4, 16, (64, 64), 100


def peak_mib(**settings: Any) -> float:
    """MiB of a step above the process's memory before.

    Args:
      **settings: ``tasks``, ``support``, ``steps``, ``recompute``, ``threads``.
    """
    words = [sys.executable, "-m", "parts.meta.memory", json.dumps(settings)]
    run = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed:\n{run.stderr[-2000:]}")
    return float(json.loads(run.stdout.splitlines()[-1]))


def batch(tasks: int, support: int) -> Batch:
    """Tasks of one size, with an eighth as many query samples."""
    rng, each = np.random.default_rng(0), support + support // 8
    columns = {f"field{number}": rng.integers(0, VOCABULARY, tasks * each) for number in range(FIELDS)}
    labels = rng.random((tasks * each, 1), np.float32)
    return Batch(columns, labels, *split(np.full(tasks, support), np.full(tasks, each - support)))


def status_kib(name: str) -> int:
    """A figure of this process's status, such as ``VmHWM``, its peak resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    """Reset this process's peak to its present memory: proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """In the process: warm up, reset the peak, take a step."""
    settings = json.loads(sys.argv[1])
    from parts.meta.gmeta_form import GMeta, set_threads

    set_threads(settings["threads"])
    batches = [batch(2, 8), batch(settings["tasks"], settings["support"])]
    fields = [Field(name, VOCABULARY) for name in batches[0].columns]
    case = Case("memory", fields, batches, DIM, HIDDEN, "mse", steps=settings["steps"])
    form = GMeta(case, recompute=settings["recompute"])
    for _ in range(3):
        form.step(0)
    before = status_kib("VmRSS")
    forget_peak()
    form.step(1)
    print(json.dumps((status_kib("VmHWM") - before) / 1024))


if __name__ == "__main__":
    main()
