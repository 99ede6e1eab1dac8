"""Draws the share of a batch's ids in memory, and the time of a step, by the share of rows in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import Result

_COLORS = ("#2f6db5", "#e8871e", "#5a9e4b", "#8d5fb0")


def plot(path: Path, results: Sequence[Result], caches: Sequence[int], skews: Sequence[float]) -> None:
    """Draw the results of `tools/bench/tiers.py` into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {result.name: result for result in results}
    figure, (hits, steps) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for skew, color in zip(skews, _COLORS, strict=False):
        of = [f"zipf{skew:g}/cache{cache}" for cache in caches]
        held = [found[f"tiers/hits/{each}"] for each in of]
        hits.plot(caches, [each.value for each in held], "o", color=color, label=f"Zipf {skew:g}")
        hits.plot(caches, [each.peer_value for each in held], "--", color=color, linewidth=1)
        times = [found[f"tiers/cpu/step/{each}"].value for each in of]
        steps.plot(caches, times, "o-", color=color, label=f"Zipf {skew:g}")
    hits.set_ylabel("distinct ids of a batch in memory, %")
    hits.set_ylim(0, 100)
    hits.set_title("points: measured; dashed: Che's approximation", fontsize=9)
    steps.set_ylabel("step, ms")
    steps.set_ylim(bottom=0)
    for axis in (hits, steps):
        axis.set_xlabel("rows in memory, %")
        axis.set_xlim(left=0)
        axis.legend(frameon=False, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
