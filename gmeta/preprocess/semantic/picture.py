"""Draws how well the codes of semantic ids are used."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from gmeta.core.data.semantic_ids import SemanticIds
from gmeta.core.files import write_atomically

_BAR, _EVEN, _INK, _MUTED = "#2f6db5", "#c9542b", "#222222", "#666666"


def draw_codes(ids: SemanticIds, path: Path) -> Path:
    """Draw for each level how many items each code has, the most used first, and write it as a PNG.

    Args:
      ids: The semantic ids.
      path: The file to write.

    Returns:
      ``path``.

    Raises:
      OSError: The file can't be written.
    """
    from matplotlib.figure import Figure

    report = ids.report()
    levels = report["levels"]
    figure = Figure(figsize=(2.6 * len(levels) + 1.2, 3.2), dpi=150, facecolor="white", layout="constrained")
    every = figure.subplots(1, len(levels), sharey=True, squeeze=False)[0]
    for number, (axes, level) in enumerate(zip(every, levels, strict=True)):
        counts = np.sort(np.bincount(ids.digits[:, number], minlength=level["codes"]))[::-1]
        axes.bar(np.arange(len(counts)), counts, width=1.0, color=_BAR)
        axes.axhline(len(ids.items) / level["codes"], color=_EVEN, linewidth=1, label="if all had as many")
        axes.set_title(
            f"level {number + 1}: {level['used']:.0%} of {level['codes']} in use\n"
            f"{level['entropy']:.2f} of {np.log2(level['codes']):.2f} bits",
            fontsize=9.5,
            color=_INK,
        )
        axes.set_xlabel("codes, most used first", fontsize=9, color=_MUTED)
        axes.tick_params(colors=_MUTED, labelsize=8.5, length=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    every[0].set_ylabel("items", fontsize=9, color=_MUTED)
    every[0].legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"{report['items']:,} items: {report['alike']:.1%} share all codes with another one, at most "
        f"{report['most_alike']:,}",
        fontsize=10.5,
        color=_INK,
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return write_atomically(path, picture.getvalue())
