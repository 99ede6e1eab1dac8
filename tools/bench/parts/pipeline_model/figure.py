"""Draws the efficiency of the schedules against the number of ranks."""

from __future__ import annotations

from pathlib import Path

from parts.pipeline_model import own, paper
from parts.pipeline_model.schedules import SYNCHRONOUS, Schedule

SIZES = [2**power for power in range(4, 13)]
GBIT = 10


def plot(path: Path) -> None:
    """Draw NestPipe's cluster with its published points, and a gmeta step, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (theirs, ours) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for number, method in enumerate(paper.SCHEDULES):
        color, schedule = f"C{number}", paper.SCHEDULES[method]
        steps = [paper.step_of(schedule, paper.work_of(method, ranks))[0] for ranks in SIZES]
        theirs.plot(SIZES, [paper.COMPUTE / step for step in steps], color=color, label=method)
        if method in paper.STEP:
            points = [paper.COMPUTE / paper.published_step(method, ranks) for ranks in paper.RANKS]
            theirs.plot(paper.RANKS, points, "o", color=color, markersize=4)
    one_ahead = Schedule(depth=1, micro=paper.MICRO)
    steps = [paper.step_of(one_ahead, paper.work_of("NestPipe", ranks))[0] for ranks in SIZES]
    label = "NestPipe, 1 batch ahead"
    theirs.plot(SIZES, [paper.COMPUTE / step for step in steps], ":", color="C3", label=label)
    theirs.set_title("HSTU on NPUs: lines simulated, points published", loc="left", fontsize=10)
    schedules = {
        "synchronous": SYNCHRONOUS,
        "1 batch ahead": Schedule(depth=1),
        "4 micro-batches": Schedule(micro=4),
        "both": Schedule(depth=1, micro=4),
    }
    for number, (name, schedule) in enumerate(schedules.items()):
        for sigma, style in ((0.0, "--"), (own.JITTER, "-")):
            shares = [own.efficiency(schedule, GBIT, ranks, sigma) for ranks in SIZES]
            ours.plot(SIZES, shares, style, color=f"C{number}", label=name if sigma else None)
    ours.plot([], [], "--", color="gray", label="without jitter")
    ours.set_title(f"a step of gmeta's, lane over {GBIT} Gbit/s: simulated", loc="left", fontsize=10)
    for axis in (theirs, ours):
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
        axis.set_xlabel("ranks")
        axis.set_ylim(0, 1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8, loc="lower left")
    theirs.set_ylabel("part of a step in which a rank computes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
