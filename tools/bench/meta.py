"""Meta-learning: training steps a second, beside a loop over tasks and beside PyTorch.

    python tools/bench/meta.py --json FILE
    python tools/bench/meta.py --data FOLDER/warm        (a prepared ML-1M instead of generated rows)

melu     MeLU's network on ML-1M's shapes: 8 fields, three of them with several ids, dim 32, layers of 64, 64
         and 1; 32 users a step, with 3 to 90 support rows and 10 query rows each
ali_ccp  23 fields, five of them with several ids, dim 16, layers of 128, 64 and 2, for click and conversion;
         8 scenarios a step, with 128 to 512 support rows and 256 query rows each

A step goes from a batch of ids to the end of all updates, embedding rows and their Adam included; reading is
not timed. Peers, each on the same weights, batches and number of threads; before anything is timed, their
outer losses and all outer gradients are compared with gmeta's to float32 rounding:

loop over tasks  TensorFlow as users write it: see parts/meta_loop.py
torch.func       `vmap` over padded tasks: see parts/meta_vmap.py; eager or by `torch.compile`, the faster
learn2learn      a clone for each task: see parts/meta_learn2learn.py

second_over_first  time of a second-order step over that of a first-order one
padding            of the computed support rows, the share that pads tasks to the longest of their group: with
                   one group, and with the two groups in which several steps are taken
memory             peak resident memory of a step of 32 tasks of 512 support samples, in a separate process

Neither PyTorch nor learn2learn is a dependency. To measure them, install them in a separate environment
beside gmeta:
pip install torch==2.13.0 sympy 'mpmath<1.4' networkx filelock fsspec
pip download --no-deps learn2learn==0.2.0, unpack it and put its folder on PYTHONPATH: only its Python code is
needed, and its C sources come from a Cython older than Python 3.11
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# On shared cores, OpenMP threads that spin for each other slow down everything, PyTorch most of all.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from harness import Result, parser, report
from parts.meta import data_sets as meta_sets
from parts.meta.case import Case
from parts.meta.contenders import COMPILED, LEARN2LEARN, LOOP, VMAP, contenders, seconds_a_step, versions
from parts.meta.gmeta_form import set_threads
from parts.meta.memory import peak_mib


def data_sets(given: Any) -> list[dict[str, Any]]:
    """The arguments of `Case` except those of the inner loop."""
    if given.smoke:
        users, scenarios = meta_sets.melu(3, 2), meta_sets.ali_ccp(2, 16, 2, shrink=1000)
    else:
        users, scenarios = meta_sets.melu(32, 8), meta_sets.ali_ccp(8, 512, 4)
    if given.data is not None:
        users = meta_sets.prepared(given.data, 32, 8)
    return [
        {**_name("melu", *users), "dim": 32, "hidden": (64, 64), "loss": "mse"},
        {**_name("ali_ccp", *scenarios), "dim": 16, "hidden": (128, 64), "loss": "bce"},
    ]


def _name(name: str, batches: Any, fields: Any) -> dict[str, Any]:
    return {"name": name, "batches": batches, "fields": fields}


def results_of(case: Case, seconds: dict[str, float]) -> list[Result]:
    """A case's figures."""
    where = f"{case.name}/{{}}/order{case.order}/steps{case.steps}"
    tasks = case.batches[0].tasks
    samples = sum(len(batch.labels) for batch in case.batches) / len(case.batches)
    func = min((name for name in (VMAP, COMPILED) if name in seconds), key=seconds.__getitem__, default=VMAP)
    results = [
        Result(
            f"meta/{where.format('tasks')}",
            tasks / seconds["gmeta"],
            "tasks/s",
            peer,
            tasks / seconds[peer] if peer in seconds else None,
        )
        for peer in (LOOP, func, LEARN2LEARN)
    ]
    return [*results, Result(f"meta/{where.format('samples')}", samples / seconds["gmeta"], "samples/s")]


def padding(data: dict[str, Any]) -> list[Result]:
    """The shares of a set's batches."""
    rows: dict[int, list[int]] = {1: [], 2: []}
    real = 0
    for batch in data["batches"]:
        sizes = np.sort(batch.support.mask.astype(bool).sum(axis=1))
        real += int(sizes.sum())
        for groups, padded in rows.items():
            padded += [len(part) * int(part[-1]) for part in np.array_split(sizes, groups)]
    return [
        Result(f"meta/{data['name']}/padding/groups{groups}", 100 * (1 - real / sum(padded)), "%")
        for groups, padded in rows.items()
    ]


def memory(threads: int, smoke: bool) -> list[Result]:
    """Peaks with and without recomputing."""
    results = []
    shape = {"tasks": 2, "support": 16} if smoke else {"tasks": 32, "support": 512}
    for steps in [1] if smoke else [1, 5, 20]:
        kept, again = (peak_mib(**shape, steps=steps, recompute=r, threads=threads) for r in (False, True))
        results.append(Result(f"meta/memory/kept/steps{steps}", kept, "MiB"))
        results.append(Result(f"meta/memory/recompute/steps{steps}", again, "MiB", "all steps kept", kept))
    return results


def main() -> None:
    """All sets, orders and numbers of steps."""
    options = parser(__doc__)
    options.add_argument("--data", type=Path, help="a prepared ML-1M and its split, FOLDER/warm")
    options.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each contender")
    options.add_argument("--sets", nargs="+", default=["melu", "ali_ccp"], choices=["melu", "ali_ccp"])
    options.add_argument("--steps", type=int, nargs="+", default=[1, 5])
    options.add_argument("--no-memory", action="store_true", help="leave out the peaks of memory")
    given = options.parse_args()
    peaks = [] if given.no_memory else memory(given.threads, given.smoke)  # in separate processes
    set_threads(given.threads)
    results = []
    for data in data_sets(given):
        if data["name"] not in given.sets:
            continue
        results += padding(data)
        for steps in [1] if given.smoke else given.steps:
            ours = {}
            for order in (2,) if given.smoke else (1, 2):
                case = Case(**data, steps=steps, order=order)
                seconds = seconds_a_step(contenders(case, given.threads, not given.smoke), given.rounds)
                results += results_of(case, seconds)
                ours[order] = seconds["gmeta"]
                took = ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in seconds.items())
                print(f"{case.name}, order {order}, {steps} inner steps: {took}", flush=True)
            if len(ours) == 2:
                name = f"meta/{data['name']}/second_over_first/steps{steps}"
                results.append(Result(name, ours[2] / ours[1], "times"))
    report("Meta-learning", [*results, *peaks], given.json, threads=given.threads, peers=versions())


if __name__ == "__main__":
    main()
