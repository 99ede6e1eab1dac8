"""Draws the results of `tools/bench/gpu_attention.py`: rates by length, ours and the peers'.

python tools/bench/parts/attention/figure.py FILE.json FILE.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gmeta  # noqa: F401  before TensorFlow: it selects Keras
from gmeta.experiment.report.style import BASELINES, MARKERS, MUTED, PALETTE, canvas, label_lines

LENGTHS, DIM = ("jagged", "length512", "length1024", "length2048", "length4096"), 128
BIASED = "gmeta with rab"  # dashed, hollow
LOOKS = {
    "gmeta": (PALETTE[0], MARKERS[0]),
    BIASED: (PALETTE[0], MARKERS[0]),
    "Triton": (PALETTE[1], MARKERS[1]),
    "FlexAttention": (PALETTE[2], MARKERS[2]),
    "torch.compile": (BASELINES[0], MARKERS[3]),
}


def series(results: list[dict[str, Any]], which: str) -> dict[str, list[float | None]]:
    """Name -> rates by length; None where there is none."""
    found: dict[str, list[float | None]] = {name: [None] * len(LENGTHS) for name in LOOKS}
    for result in results:
        for place, length in enumerate(LENGTHS):
            if result.get("name") == f"gpu_attention/{which}/dim{DIM}/{length}":
                found["gmeta"][place] = result["value"]
                found[result["peer"]][place] = result["peer_value"]
            if result.get("name") == f"gpu_attention/{which}/dim{DIM}/{length}/rab":
                found[BIASED][place] = result["value"]
    return found


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Two panels: forward and backward."""
    figure, panels = canvas(
        "HSTU attention on one H200, TFLOP/s over pairs that are seen",
        "By length; 131,072 tokens, 4 heads of 128, bfloat16, causal. FlexAttention computes softmax",
        4.0,
        panels=2,
        label="torch.compile",
        headings=True,
    )
    top = 0.0
    for axes, which in zip(panels, ("forward", "backward"), strict=True):
        axes.set_title(which, loc="left", fontsize=10, color=MUTED)
        axes.set_xticks(range(len(LENGTHS)), [length.removeprefix("length") for length in LENGTHS])
        axes.set_xlim(-0.3, len(LENGTHS) - 0.7)
        for name, rates in series(results, which).items():
            colour, marker = LOOKS[name]
            known = [(place, rate) for place, rate in enumerate(rates) if rate is not None]
            if not known:
                continue
            # The jagged set has no single length: it is separate from the line.
            alone = [point for point in known if point[0] == 0]
            line = [point for point in known if point[0] > 0]
            style = {"color": colour, "marker": marker}
            if name == BIASED:
                style |= {"linestyle": "--", "markerfacecolor": "white"}
            axes.plot(*zip(*line, strict=True), linewidth=2, markersize=5, **style)
            if alone:
                axes.plot(*zip(*alone, strict=True), markersize=6, **style)
            top = max(top, *(rate for _, rate in known))
    for axes in panels:
        axes.set_ylim(0, 1.06 * top)
    last = series(results, "backward")
    labels = [(name, look[0], rates[-1]) for name, look in LOOKS.items() for rates in [last[name]]]
    label_lines(panels[-1], [(name, colour, end) for name, colour, end in labels if end is not None])
    figure.savefig(path)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
