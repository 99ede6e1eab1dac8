"""Draws docs/images/online.png: the way of an event to a served answer, and what a checkpoint holds.

python tools/dev/draw_online.py docs/images/online.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# (left, bottom, width, title, what it does)
BOXES = (
    (0.0, 2.0, 1.75, "log", "a folder that grows,\nKafka, Redis"),
    (2.2, 2.0, 1.75, "stream", "partitions in order\nof event time"),
    (4.4, 2.0, 1.75, "join", "exposures wait for\ntheir late labels"),
    (6.6, 2.0, 1.75, "train", "evaluates a batch,\nthen trains on it"),
    (8.8, 2.0, 1.75, "publish", "changed rows, by\ntable and id"),
    (11.0, 2.0, 1.75, "servers", "TensorFlow Serving,\nRedis, RocksDB"),
)
STEPS = ("rows", "rows", "batches", "rows, weights", "deltas")
LATER = "no label yet: waits until its window closes"
HELD = (
    2.2,
    0.25,
    6.15,
    "checkpoint",
    "place in each partition, open exposures, untrained examples, rows, weights, metrics",
)
COLORS = ("#f3d3a4", "#d8d8d8", "#d8d8d8", "#9fc5ea", "#a9d5a0", "#a9d5a0")
LINE = "#2f6db5"


def draw(path: Path) -> None:
    """Draw the boxes and arrows into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(12, 3.6), layout="constrained")
    axis.set_xlim(-0.1, 12.85)
    axis.set_ylim(0.0, 3.75)
    axis.axis("off")
    for (left, bottom, width, title, text), color in zip(BOXES, COLORS, strict=True):
        _box(axis, left, bottom, width, 1.05, color, title, text)
    for (left, bottom, width, *_), step in zip(BOXES, STEPS, strict=False):
        _arrow(axis, left + width + 0.03, bottom + 0.5, left + width + 0.42, bottom + 0.5)
        axis.text(left + width + 0.22, bottom + 1.16, step, ha="center", fontsize=8, color=LINE)
    _loop(axis, 5.27, 3.08, LATER)
    left, bottom, width, title, text = HELD
    _box(axis, left, bottom, width, 0.8, "#f6f6f6", title, text)
    for middle in (3.07, 5.27, 7.47):
        _arrow(axis, middle, 1.97, middle, 1.08)
    axis.text(
        8.5,
        0.65,
        "all of one moment: killed and resumed,\neach row is trained once, to the same bits",
        fontsize=9,
        va="center",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _box(
    axis: Any, x: float, y: float, width: float, height: float, color: str, title: str, text: str
) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", fc=color, ec="#888888"
    )
    axis.add_patch(shape)
    middle = x + width / 2
    axis.text(middle, y + height - 0.22, title, ha="center", va="center", fontsize=10.5, fontweight="bold")
    axis.text(middle, y + (height - 0.36) / 2, text, ha="center", va="center", fontsize=8.5, linespacing=1.3)


def _arrow(axis: Any, x: float, y: float, to_x: float, to_y: float) -> None:
    style = {"arrowstyle": "-|>", "color": LINE, "linewidth": 1.4}
    axis.annotate("", xy=(to_x, to_y), xytext=(x, y), arrowprops=style)


def _loop(axis: Any, x: float, y: float, text: str) -> None:
    style = {"arrowstyle": "-|>", "color": LINE, "linewidth": 1.2, "connectionstyle": "arc3,rad=-1.1"}
    axis.annotate("", xy=(x + 0.3, y), xytext=(x - 0.3, y), arrowprops=style)
    axis.text(x, y + 0.42, text, ha="center", fontsize=8, color=LINE)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
