"""Draws docs/images/freshness.png: AUC by the freshness of what is served, and by the hour.

python tools/dev/draw_freshness.py docs/results/freshness-2-cores.json docs/images/freshness.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

COLORS = ("#2f6db5", "#4fa3a5", "#7fb069", "#e0a030", "#c9542b", "#8c3f5d", "#555555")


def draw(
    path: Path,
    auc: Mapping[str, float],
    by_hour: Mapping[str, Sequence[float]],
    *,
    best: float,
    spread: Mapping[str, float] | None = None,
) -> None:
    """Draw a PNG of two parts.

    Args:
      path: The file.
      auc: Freshness -> AUC of the day, from the freshest on.
      by_hour: Freshness -> AUC of each hour.
      best: The AUC of the true probabilities.
      spread: Freshness -> the deviation of `auc`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(1, 1.5), layout="constrained")
    names = [*auc]
    errors = [spread.get(name, 0.0) for name in names] if spread else None
    left.errorbar(
        range(len(names)), [auc[name] for name in names], errors, color="#999999", marker="", capsize=3
    )
    for number, name in enumerate(names):
        left.plot(number, auc[name], "o", color=COLORS[number], markersize=7)
        left.annotate(f"{auc[name]:.3f}", (number, auc[name]), (6, 6), textcoords="offset points", fontsize=8)
        right.plot(range(1, len(by_hour[name]) + 1), by_hour[name], color=COLORS[number], label=name)
    left.axhline(best, color="#222222", linestyle=":", linewidth=1)
    left.text(0, best, f"true probabilities: {best:.3f}", fontsize=8, va="bottom")
    left.set_xticks(range(len(names)), names, rotation=30, ha="right")
    left.margins(x=0.17, y=0.12)
    left.set_title("AUC of the last day, by the time between refreshes", fontsize=9.5)
    right.set_title("AUC of each hour of that day", fontsize=9.5)
    right.set_xlabel("hour")
    figure.legend(*right.get_legend_handles_labels(), fontsize=8, loc="outside lower right", ncols=len(names))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def main(results: Path, path: Path) -> None:
    """Draw what `tools/bench/freshness.py` wrote."""
    about, *found = json.loads(results.read_text())
    values = {each["name"].removeprefix("freshness/"): each["value"] for each in found}
    hours = {
        name: each for name, each in about["auc_by_hour"].items() if name != "oracle" and "/" not in name
    }
    draw(
        path,
        {name: values[f"{name}/auc"] for name in hours},
        hours,
        best=values["oracle/auc"],
        spread={name: values.get(f"{name}/auc/spread", 0.0) for name in hours},
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
