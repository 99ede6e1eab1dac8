"""The look of the report's figures: colours, axes, and labels beside the lines instead of a legend.

Colours are Okabe and Ito's, which colour-blind readers can distinguish; every method also has a different
marker, so that a black-and-white print is readable. Artists are styled one by one, without matplotlib's
global settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gmeta.experiment.results.evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 7.2, 200  # inches; 1440 pixels, shown at half that
INK, MUTED, RULE = "#1a1a1a", "#5f6670", "#dfe3e8"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
BASELINES = ("#b0b0b0", "#969696", "#7d7d7d", "#606060", "#404040")
DASHES = ((0, (1, 2)), (0, (5, 3)), (0, (5, 2, 1, 2)), (0, (9, 3)), (0, (9, 2, 1, 2, 1, 2)))
MARKERS = ("o", "s", "D", "v", "P", "X")


@dataclass(frozen=True)
class Look:
    """A method's colour and marker, and a baseline's dashes, the same in every figure."""

    colour: str
    marker: str
    dashes: tuple[int, tuple[int, ...]] = DASHES[0]


def looks(evaluation: Evaluation) -> dict[str, Look]:
    """Assign a look to each method name: colours for methods that take steps, greys for fixed baselines."""
    adapting = [name for name, method in evaluation.methods.items() if method.adapts]
    fixed = [name for name in evaluation.methods if name not in adapting]
    return {
        name: Look(colours[i % len(colours)], MARKERS[i % len(MARKERS)], DASHES[i % len(DASHES)])
        for names, colours in ((adapting, PALETTE), (fixed, BASELINES))
        for i, name in enumerate(names)
    }


def canvas(
    title: str, subtitle: str, height: float, *, panels: int = 1, label: str = "", headings: bool = False
) -> tuple[Figure, list[Axes]]:
    """Create a figure with a title for its content, a subtitle for its measurement, and axes.

    Args:
      title: The title, in bold at the top left.
      subtitle: The line below the title.
      height: Height of the figure in inches.
      panels: Number of axes, side by side.
      label: The longest text that `label_lines` will write to the right of the last axes.
      headings: Whether each of the axes has a title.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    figure.text(
        0.004,
        1 - 0.12 / height,
        title,
        fontsize=12.5 * min(1, 66 / len(title)),
        weight="bold",
        color=INK,
        va="top",
    )
    figure.text(0.004, 1 - 0.40 / height, subtitle, fontsize=9.5, color=MUTED, va="top")
    grid = figure.subplots(1, panels, squeeze=False)
    for axes in grid[0]:
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(MUTED)
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", colors=MUTED, labelsize=9.5, length=0)
        axes.tick_params(axis="x", length=3)
    figure.subplots_adjust(
        left=0.58 / WIDTH,
        right=1 - (0.25 + 0.085 * min(len(label), 34)) / WIDTH,  # 0.085 inches a letter, bold at 10 points
        top=1 - (1.0 if headings else 0.8) / height,
        bottom=0.58 / height,
        wspace=0.24,
    )
    return figure, list(grid[0])


def ceiling(means: Sequence[float], tops: Sequence[float]) -> float | None:
    """Choose where to cut the axis so that a few far values don't flatten the rest; None for no cut.

    The values are cut at their widest gap, if the values below it fill less than a fifth of the whole range
    and are at least two thirds of all. For example, a start at MAE 2 is cut if the rest lies between 0.75 and
    0.82; a start at 1.00 is kept if the rest lies between 0.92 and 0.95.

    Args:
      means: The values that are drawn.
      tops: Their upper ends (mean + spread), aligned with ``means``.

    Returns:
      The highest kept value of ``tops``.
    """
    pairs = sorted((m, t) for m, t in zip(means, tops, strict=True) if math.isfinite(m))
    if len(pairs) < 3:
        return None
    gap, cut = max((pairs[i + 1][0] - pairs[i][0], i + 1) for i in range(len(pairs) - 1))
    kept, whole = pairs[cut - 1][0] - pairs[0][0], pairs[-1][0] - pairs[0][0]
    if gap <= 0 or kept >= whole / 5 or 3 * cut < 2 * len(pairs):
        return None
    return max(top for _, top in pairs[:cut])


def label_lines(axes: Axes, labels: Sequence[tuple[str, str, float]]) -> None:
    """Write each line's name beside its end; names that would collide are pushed apart.

    Call it when the axis limits are final.

    Args:
      axes: The axes of the lines; the text is to their right.
      labels: Text, colour, and the line's last y in data units.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    x = axes.get_xlim()[1]
    gap = 14 / (axes.get_window_extent().height * 72 / DPI)  # a line takes 14 points
    placed = sorted(
        (
            (min(max(float(to_axes.transform((x, y))[1]), 0.0), 1.0), text, colour)
            for text, colour, y in labels
        ),
    )
    heights = [height for height, _, _ in placed]
    for _ in range(len(heights) * 20):  # relaxation: two names that collide each move half the overlap
        for i in range(len(heights) - 1):
            lack = gap - (heights[i + 1] - heights[i])
            if lack > 1e-6:
                heights[i] -= lack / 2
                heights[i + 1] += lack / 2
    for height, (_, text, colour) in zip(heights, placed, strict=True):
        axes.annotate(
            text,
            (1.0, height),
            xycoords="axes fraction",
            xytext=(8, 0),
            textcoords="offset points",
            color=colour,
            fontsize=10,
            weight="bold",
            va="center",
            annotation_clip=False,
        )


def logarithmic(axes: Axes, low: float, high: float) -> None:
    """Make the y axis logarithmic, with plain numbers at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.set_ylim(low / 1.1, high * 1.1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def whole_numbers(axes: Axes) -> None:
    """Place ticks on the x axis at whole numbers only, as for epochs."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def draw_groups(
    heading: str,
    subtitle: str,
    groups: Sequence[str],
    lines: Sequence[tuple[str, bool, Sequence[float]]],
    bottom: float | None = None,
) -> Figure:
    """Draw a line over groups for each method, and a dashed one for each of at most two baselines.

    Args:
      heading: The title of the figure.
      subtitle: The line below it.
      groups: The names of the groups.
      lines: Label, whether it is a method, and a value for each group.
      bottom: Where the axis of values begins; None: below the least value.
    """
    figure, (axes,) = canvas(heading, subtitle, 3.6, label=max((label for label, *_ in lines), key=len))
    labels = []
    for place, (label, own, values) in enumerate(lines):
        colour = PALETTE[place % len(PALETTE)] if own else BASELINES[-1 - 2 * (place % 2)]
        marker, dashes = MARKERS[place % len(MARKERS)], "-" if own else "--"
        axes.plot(range(len(groups)), values, color=colour, marker=marker, linestyle=dashes, linewidth=1.6)
        labels.append((label, colour, values[-1]))
    axes.set_xticks(range(len(groups)), groups)
    if bottom is not None:
        axes.set_ylim(bottom=bottom)
    label_lines(axes, labels)
    return figure
