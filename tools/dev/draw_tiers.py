"""Draws docs/images/tiers.png: where the rows of a table are, and what moves while batches compute.

    python tools/dev/draw_tiers.py docs/images/tiers.png

Sizes and rates of memory are those of the parts' data sheets.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# (name, size, rate of reads)
TIERS = (
    ("GPU memory (HBM)", "80 to 141 GB", "3 to 5 TB/s"),
    ("host memory", "0.5 to 2 TB", "0.3 to 0.6 TB/s"),
    ("drive (NVMe)", "2 to 30 TB", "3 to 14 GB/s"),
)
BUS = "bus (PCIe 5):\n64 GB/s each way"
# (title, setting, what is in each tier, what moves rows up and down below each tier)
TABLES = (
    ("HBM alone", 'device="gpu"', (("index", "all rows"), (), ()), {}),
    (
        "HBM over host memory",
        'device="gpu"\nTiers(hbm_rows=n)',
        (("index", "n rows"), ("the others, pinned",), ()),
        {0: ("prefetch", "clock")},
    ),
    (
        "HBM, host memory, drive",
        'device="gpu"\nTiers(b, folder, n)',
        (("index", "n rows"), ("b bytes, pinned",), ("the others, in segments",)),
        {0: ("prefetch", "clock"), 1: ("prefetch,\nlookup", "least\nlately used")},
    ),
    (
        "host memory over a drive",
        'device="cpu"\nTiers(b, folder)',
        ((), ("index", "b bytes"), ("the others, in segments",)),
        {1: ("prefetch,\npeek, lookup", "clock, after\nthe update")},
    ),
)
WHEN = "HBM over host memory with Pipeline(depth=2): rows move while the two batches before theirs compute"
NOTE = (
    "Victims are rows that were not used since the clock last came by, and that the last `lookahead` "
    "prefetches did not ask for.\nRows change their place only at an install, in the table's turn. Until "
    "then, and if they find no room, kernels reach them over the bus."
)
UP, DOWN, INDEX, ROWS, SLOW = "#2f6db5", "#c9542b", "#d8d8d8", "#9fc5ea", "#f3d3a4"
BATCHES = ("#9fc5ea", "#a9d5a0", "#f3d3a4", "#cdb4dd")


def draw(path: Path) -> None:
    """Draw both parts into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (places, times) = plt.subplots(
        2, 1, figsize=(10, 7.4), height_ratios=(4.2, 2.6), layout="constrained"
    )
    _draw_places(places)
    _draw_times(times)
    for axis in (places, times):
        axis.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _draw_places(axis: Any) -> None:
    axis.set_xlim(0, 10)
    axis.set_ylim(0, 4.3)
    heights = (2.72, 1.36, 0.0)
    for (name, size, rate), y in zip(TIERS, heights, strict=True):
        _box(axis, 0.0, y, 10.0, 0.86, "#f6f6f6", "", edge="#cccccc")
        axis.text(0.1, y + 0.43, f"{name}\n{size}\n{rate}", va="center", fontsize=9, linespacing=1.4)
    axis.text(0.1, 2.47, BUS, va="center", fontsize=7.5, color="#555555")
    for number, (title, setting, held, moves) in enumerate(TABLES):
        left, width = 1.75 + 2.08 * number, 1.93
        axis.text(left + width / 2, 4.1, title, ha="center", va="center", fontsize=9.5, fontweight="bold")
        axis.text(left + width / 2, 3.8, setting, ha="center", va="center", fontsize=8, family="monospace")
        fast = next(tier for tier, parts in enumerate(held) if parts)
        for tier, parts in enumerate(held):
            shares = (0.3, 0.7) if len(parts) == 2 else (1.0,)
            x = left
            for part, share in zip(parts, shares, strict=False):
                color = INDEX if part == "index" else ROWS if tier == fast else SLOW
                _box(axis, x, heights[tier] + 0.14, share * width - 0.04, 0.58, color, part)
                x += share * width
        for tier, (up, down) in moves.items():
            low, high = heights[tier + 1] + 0.8, heights[tier] + 0.06
            middle = (low + high) / 2
            _arrow(axis, left + 0.84, low, left + 0.84, high, UP)
            axis.text(left + 0.77, middle, up, ha="right", va="center", fontsize=7.5, color=UP)
            _arrow(axis, left + 1.07, high, left + 1.07, low, DOWN)
            axis.text(left + 1.14, middle, down, ha="left", va="center", fontsize=7.5, color=DOWN)


def _draw_times(axis: Any) -> None:
    axis.set_xlim(0, 10)
    axis.set_ylim(-0.6, 3.1)
    axis.text(0.1, 2.95, WHEN, fontsize=9, va="center", fontweight="bold")
    for y, name in ((2.0, "compute"), (1.2, "rows to HBM"), (0.4, "rows to host memory")):
        axis.text(0.1, y + 0.25, name, va="center", fontsize=9)
    for step in range(4):
        x = 1.85 + 2.03 * step
        now, later = BATCHES[step % 4], BATCHES[(step + 2) % 4]
        _box(axis, x, 2.0, 1.97, 0.5, now, f"batch {step + 1}: lookup, step, update")
        _box(axis, x + 0.35, 1.2, 1.15, 0.5, later, f"missing of {step + 3}")
        _box(axis, x + 0.6, 0.4, 0.95, 0.5, "#eeeeee", "victims")
        axis.plot([x + 0.25] * 2, [0.3, 2.0], color="#888888", linewidth=1, linestyle=":")
        axis.text(x + 0.27, 1.85, f"prefetch({step + 3})", fontsize=7.5, va="center", color=UP)
        axis.plot([x + 1.72] * 2, [0.3, 2.0], color=DOWN, linewidth=1.2)
        axis.text(x + 1.69, 0.14, "install", fontsize=7.5, ha="center", va="center", color=DOWN)
    axis.text(0.1, -0.35, NOTE, fontsize=8, va="center", color="#555555", linespacing=1.4)


def _box(
    axis: Any, x: float, y: float, width: float, height: float, color: str, text: str, edge: str = "#777777"
) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=0.8))
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)


def _arrow(axis: Any, x: float, y: float, to_x: float, to_y: float, color: str) -> None:
    axis.annotate(
        "", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.8}
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
