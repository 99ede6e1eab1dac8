"""The summary of a preparation: counts of rows that were read, kept and left out, with reasons.

`draw_task_sizes` draws the histogram of the tasks' numbers of rows, which shows the tasks that the selection
keeps.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data_manifest import Shard
from gmeta.core.errors import DataError
from gmeta.core.files import write_atomically
from gmeta.core.json_values import parse_json

FILE_NAME = "summary.json"


@dataclass(frozen=True)
class SplitCount:
    """The numbers of tasks, batches and rows of a split."""

    tasks: int
    batches: int
    rows: int


@dataclass(frozen=True)
class LeftOut:
    """Rows and tasks that the selection leaves out for a reason; they aren't bad."""

    reason: str
    rows: int
    tasks: int


@dataclass(frozen=True)
class BadKind:
    """Bad records of one kind.

    Attributes:
      file: The name of the file that they are in.
      reason: What is wrong with them.
      count: Their number.
      examples: The first few, each with its file and line, or row.
      of_rows: True: they are records that would have been rows. False: they are lines of an attribute file.
    """

    file: str
    reason: str
    count: int
    examples: tuple[str, ...]
    of_rows: bool = True


@dataclass(frozen=True)
class PrepareSummary:
    """The result of `gmeta.preprocess.prepare`.

    Every record that was read is accounted for: ``rows_read`` is the sum of the splits' rows, the rows left
    out, and the bad records ``of_rows``.

    Attributes:
      out: The prepared data set.
      source: The input: the name of a table's file or folder, ``"ml-100k"``, ``"ml-1m"``, ``"ml-1m-melu"`` or
        ``"synthetic"``.
      rows_read: Records of all files; in text files, lines that aren't blank.
      splits: Split name -> its counts.
      left_out: The rows and tasks that the selection leaves out.
      bad: Bad records that were skipped.
      task_sizes: Number of rows -> number of tasks with that many rows, before the selection.
      min_rows: The smallest number of rows of a task that the selection keeps.
      max_rows: The largest number of rows of a task that the selection keeps; 0: any number.
      columns: The number of the table's columns; 0: not counted.
      columns_left_out: The table's columns that aren't stored.
      columns_hashed: The columns of the data set whose text is hashed.
      notes: Decisions about columns, made from the values, that may surprise (`TableSpec.notes`).
      seconds: Wall time, from reading to renaming; 0 if there was nothing to do.
      reused: Whether ``out`` existed already, made from the same input by the same plan.
    """

    out: Path
    source: str
    rows_read: int
    splits: Mapping[str, SplitCount]
    left_out: tuple[LeftOut, ...]
    bad: tuple[BadKind, ...]
    task_sizes: Mapping[int, int]
    min_rows: int = 1
    max_rows: int = 0
    columns: int = 0
    columns_left_out: tuple[str, ...] = ()
    columns_hashed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    reused: bool = False

    @property
    def rows(self) -> int:
        """The number of rows that were kept."""
        return sum(split.rows for split in self.splits.values())

    @property
    def tasks(self) -> int:
        """The number of tasks that were kept."""
        return sum(split.tasks for split in self.splits.values())

    @property
    def dropped(self) -> dict[str, int]:
        """Reason -> number of input records left out, for the manifest."""
        bad = {f"{kind.file}: {kind.reason}": kind.count for kind in self.bad}
        return {**{entry.reason: entry.rows for entry in self.left_out}, **bad}

    def with_shards(self, shards: Mapping[str, Sequence[Shard]]) -> PrepareSummary:
        """Return the summary with the batches and rows of the written shards, split -> shards."""
        counted = {
            name: SplitCount(self.splits[name].tasks, sum(s.groups for s in own), sum(s.rows for s in own))
            for name, own in shards.items()
        }
        return replace(self, splits=counted)

    def size_quantiles(self, at: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)) -> list[int]:
        """Return quantiles of the rows of a task, over all tasks before the selection.

        Args:
          at: The quantiles; 0.5 is the median. A quantile between two tasks is the size of the lower one.
        """
        sizes = np.array(sorted(self.task_sizes), np.int64)
        upto = np.cumsum([self.task_sizes[int(size)] for size in sizes])
        places = np.floor(np.array(at) * (upto[-1] - 1)).astype(np.int64)
        return [int(size) for size in sizes[np.searchsorted(upto, places, side="right")]]

    def save(self, folder: Path) -> Path:
        """Write ``summary.json`` into ``folder``, without times, so that equal runs give equal bytes."""
        value = asdict(self)
        for name in ("out", "seconds", "reused"):
            del value[name]
        value["task_sizes"] = {str(size): count for size, count in sorted(self.task_sizes.items())}
        return write_atomically(folder / FILE_NAME, json.dumps(value, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> PrepareSummary:
        """Read the summary of a data set that was prepared before, and mark it as reused.

        Raises:
          DataError: There is no summary, or it has another form.
        """
        path = folder / FILE_NAME
        advice = "make the folder again with --overwrite"
        try:
            value: dict[str, Any] = parse_json(path.read_text())
            value["splits"] = {name: SplitCount(**split) for name, split in value["splits"].items()}
            value["left_out"] = tuple(LeftOut(**entry) for entry in value["left_out"])
            value["bad"] = tuple(
                BadKind(**{**kind, "examples": tuple(kind["examples"])}) for kind in value["bad"]
            )
            for name in ("columns_left_out", "columns_hashed", "notes"):
                value[name] = tuple(value.get(name, ()))
            value["task_sizes"] = {int(size): count for size, count in value["task_sizes"].items()}
            return replace(cls(out=folder, **value), reused=True)
        except OSError as error:
            raise DataError(f"no summary: {error.strerror}", path=path, advice=advice) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"not a summary: {error}", path=path, advice=advice) from error


def count_sizes(sizes: NDArray[np.int64]) -> dict[int, int]:
    """Count how often each size occurs in ``sizes``: size -> count, ascending."""
    values, counts = np.unique(sizes, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


HISTOGRAM = "task_sizes.png"
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
