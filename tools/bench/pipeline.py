"""Pipelined steps: what lookups ahead and micro-batches save, measured, or simulated on any number of ranks.

    python tools/bench/pipeline.py --json FILE
    python tools/bench/pipeline.py --cases small64 --ranks 2 --gbit 1
    python tools/bench/pipeline.py --simulate --json FILE
    python tools/bench/pipeline.py --simulate --plot FILE
    python tools/bench/pipeline.py --check --ranks 8 --json FILE
    python tools/bench/pipeline.py --clusters

step         ms of a step of meta-training (of `tools/bench/scaling.py`), by the pipeline's depth, with
             micro-batches, also of samples that share keys ("clusters"), in groups of ranks, with steps whose
             fetch ahead costs nothing ("still"), and through Horovod
speed_up     one rank's time over that of several ranks, each in its best pipeline: 1 is ideal
exposed      the part of a step at depth 1 that the fetch ahead still takes; with --gbit also the part of the
             wire's time for which each pipeline waits, as a share of the wait at depth 0

simulated    what a model of a step's stages (`parts/pipeline_model`) predicts for NestPipe's cluster, beside
             the published number; `parts/pipeline_model/paper.py` lists what the model takes from the paper
ablation     a simulated step on 1,536 ranks by depth of the lookup and number of micro-batches
own          the part of a gmeta step in which a rank computes, with measured wires and bytes

check        a step of the model beside one with real exchanges, between machines on wires of .1 Gbit/s, and
             with a sleep as its computation; on 2, 4 and 8 ranks

clusters     how many of 8 micro-batches use a row, with samples in their order, and with samples that share
             keys together

The JSON's first object lists which of the numbers were fitted or given; the others are predictions.
"""

from __future__ import annotations

from pathlib import Path

from harness import Result, parser, report
from parts.cluster_shares import cluster_shares
from parts.pipeline_model import own, paper
from parts.pipeline_model.check import KIB, check
from parts.pipeline_model.figure import SIZES, plot
from parts.pipeline_model.schedules import Schedule
from parts.pipeline_steps import CASES, measure

PAPER = "NestPipe's paper"


def simulated(checks: list[paper.Check]) -> list[Result]:
    """Each published number beside the simulated one."""
    return [
        Result(f"pipeline/simulated/{one.name}", one.simulated, one.unit, PAPER, one.published)
        for one in checks
    ]


def ablation() -> list[Result]:
    """A step of the cluster of 1,536 ranks by both parts of the pipeline."""
    ranks, work = paper.RANKS[-1], paper.work_of("NestPipe", paper.RANKS[-1])
    return [
        Result(
            f"pipeline/ablation/depth{depth}/micro{micro}/ranks{ranks}",
            paper.step_of(Schedule(depth, micro), work)[0],
            "ms",
        )
        for depth in (0, 1, 2)
        for micro in (1, paper.MICRO)
    ]


def own_steps(sizes: list[int]) -> list[Result]:
    """Steps of gmeta over two wires."""
    return [
        Result(
            f"pipeline/own/depth{depth}/micro{micro}/{gbit}Gbit/ranks{ranks}",
            100 * own.efficiency(Schedule(depth, micro), gbit, ranks),
            "% of a step",
        )
        for gbit in (1, 10)
        for depth, micro in ((0, 1), (1, 1), (1, 4))
        for ranks in sizes
    ]


def main() -> None:
    """Measure, or simulate."""
    options = parser(__doc__)
    options.add_argument("--cases", nargs="+", choices=CASES, default=["small64"])
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--gbit", type=float, help="give each rank its own machine, on wires of this rate")
    options.add_argument("--steps", type=int, default=50, help="steps of an epoch")
    options.add_argument("--dim", type=int, help="width of rows, instead of the cases' own")
    options.add_argument("--tables", choices=("cpu", "gpu"), default="cpu")
    options.add_argument("--simulate", action="store_true", help="simulate instead")
    options.add_argument("--check", action="store_true", help="simulate beside measured steps instead")
    options.add_argument("--kib", type=int, default=KIB, help="with --check: what a rank sends at once")
    options.add_argument("--clusters", action="store_true", help="count the micro-batches of a row instead")
    options.add_argument("--plot", type=Path, help="draw efficiency against ranks into this PNG")
    given = options.parse_args()
    if given.clusters:
        report("Micro-batches of samples that share keys", cluster_shares(), given.json)
        return
    if given.check:
        results = [
            one
            for ranks in (2, 4, 8)
            if ranks <= given.ranks
            for one in check(ranks, given.rounds, given.kib)
        ]
        report("Pipelined steps", results, given.json, rounds=given.rounds)
        return
    if not (given.simulate or given.plot):
        sizes = {"rounds": given.rounds, "tables": given.tables, "steps": given.steps}
        if given.dim:
            sizes["dim"] = given.dim
        if given.smoke:
            sizes |= {"tasks": 4, "hidden": [8], "features": 3, "steps": 4, "distinct_steps": 2}
        results = measure(given.cases, given.ranks, sizes, given.gbit)
        report("Pipelined steps", results, given.json, settings=sizes)
        return
    checks = list(paper.checks())
    kinds = {how: [one.name for one in checks if one.how == how] for how in ("fitted", "given")}
    results = [*simulated(checks), *ablation(), *own_steps(SIZES[:1] if given.smoke else SIZES)]
    report("Pipelined steps", results, given.json, **kinds)
    far = [one for one in checks if one.how == "checked" and one.off > 0.03]
    print(f"{sum(one.how == 'checked' for one in checks)} predictions; off by more than 3 %:")
    for one in far:
        print(f"  {one.name}: {one.simulated:.4g} for {one.published:.4g} {one.unit}, {100 * one.off:.1f} %")
    if given.plot:
        plot(given.plot)


if __name__ == "__main__":
    main()
