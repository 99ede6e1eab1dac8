"""A histogram of the tasks' numbers of rows, which shows the tasks that the selection keeps."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gmeta.core.files import write_atomically
from gmeta.preprocess.summary import PrepareSummary

FILE_NAME = "task_sizes.png"
_KEPT, _LEFT_OUT, _INK, _MUTED, _RULE = "#0072B2", "#b8bec6", "#1a1a1a", "#5f6670", "#dfe3e8"
_BINS_A_DECADE = 14
_WIDE, _STEEP = 3000, 1000  # largest ratio of sizes, and of numbers of tasks, that a simple scale can show


def draw_task_sizes(summary: PrepareSummary, path: Path) -> Path:
    """Draw the histogram of rows per task, on a logarithmic axis, and write it as a PNG.

    Args:
      summary: The summary, with the sizes of all tasks and the bounds of the selection.
      path: The file to write.

    Returns:
      ``path``.

    Raises:
      OSError: The file can't be written.
    """
    from matplotlib.figure import Figure  # takes a second to import, so only when a picture is drawn
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    sizes = np.array(list(summary.task_sizes), np.float64)
    counts = np.array(list(summary.task_sizes.values()), np.int64)
    least, most = int(sizes.min()), int(sizes.max())
    low, high = summary.min_rows, summary.max_rows or max(most, summary.min_rows)
    edges = bin_edges(least, most, low, high)
    heights, _ = np.histogram(sizes, edges, weights=counts)
    kept = (edges[:-1] >= low - 0.5) & (edges[1:] <= high + 0.5)

    figure = Figure(figsize=(7.2, 3.4), dpi=150, facecolor="white")
    axes = figure.add_axes((0.1, 0.16, 0.87, 0.62))
    colours = [_KEPT if keep else _LEFT_OUT for keep in kept]
    axes.bar(
        edges[:-1], heights, np.diff(edges), align="edge", color=colours, edgecolor="white", linewidth=0.6
    )
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    wide = edges[-1] / edges[0] > _WIDE
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    numbers = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 or not value else "")
    axes.xaxis.set_major_formatter(numbers)
    if steep := heights.max() > _STEEP * heights[heights > 0].min():
        axes.set_yscale("log")  # otherwise most bars would be too low to see
        axes.set_ylim(0.7, None)
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(numbers)
    axes.set_xlabel("rows of a task (logarithmic scale)", fontsize=10, color=_MUTED)
    axes.grid(axis="y", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelsize=9.5, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    title = f"{summary.tasks:,} of {counts.sum():,} tasks have {_bounds(summary)} and are kept"
    if summary.tasks == counts.sum():
        title = f"all {summary.tasks:,} tasks are kept"
    figure.text(0.012, 0.965, title, fontsize=12.5, weight="bold", color=_INK, va="top")
    median = summary.size_quantiles((0.5,))[0]
    about = f"number of tasks by size{' (logarithmic scale)' if steep else ''}; "
    about += f"{summary.source}, median {median:,}, most {most:,} rows a task"
    figure.text(0.012, 0.875, about, fontsize=9.5, color=_MUTED, va="top")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return write_atomically(path, picture.getvalue())


def _bounds(summary: PrepareSummary) -> str:
    if not summary.max_rows:
        return f"at least {summary.min_rows:,} rows"
    return f"{summary.min_rows:,} to {summary.max_rows:,} rows"


def bin_edges(smallest: int, largest: int, low: int, high: int) -> NDArray[np.float64]:
    """Return bin edges of equal width on a logarithmic axis, with one at each bound of the selection.

    Edges lie halfway between whole numbers, and no bin is narrower than one, so that small sizes don't
    leave empty bins between full ones.

    Args:
      smallest: The smallest size.
      largest: The largest size.
      low: The smallest size that is kept.
      high: The largest size that is kept.
    """
    marks = sorted({min(smallest, low) - 0.5, low - 0.5, high + 0.5, max(largest, high) + 0.5})
    edges = [marks[0]]
    for start, end in itertools.pairwise(marks):
        bins = max(1, round(np.log10(end / start) * _BINS_A_DECADE))
        inner = np.floor(np.geomspace(start, end, bins + 1)[1:]) + 0.5
        edges += [*inner[:-1].tolist(), end]
    return np.unique(edges)
