"""An account of a preparation: what was read, what was kept, and what was left out and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.manifest import Shard
from gmeta.core.errors import DataError
from gmeta.core.files import write_atomically

FILE_NAME = "summary.json"


@dataclass(frozen=True)
class SplitCount:
    """What a split holds."""

    tasks: int
    batches: int
    rows: int


@dataclass(frozen=True)
class LeftOut:
    """Rows and tasks that the selection leaves out, by a stated rule; they aren't bad."""

    reason: str
    rows: int
    tasks: int


@dataclass(frozen=True)
class BadKind:
    """Bad records of one kind.

    Attributes:
      file: The name of the file that they are in.
      reason: What is wrong with them.
      count: How many there are.
      examples: The first few, each with its file and line, or row.
      of_rows: Whether they are records that would have been rows, not lines of a file of attributes.
    """

    file: str
    reason: str
    count: int
    examples: tuple[str, ...]
    of_rows: bool = True


@dataclass(frozen=True)
class PrepareSummary:
    """What `gmeta.preprocess.prepare` did.

    Every record that was read is accounted for: ``rows_read`` is the sum of the splits' rows, of the rows
    left out, and of the bad ones ``of_rows``.

    Attributes:
      out: The prepared data set.
      source: What was read: the name of a table's file or folder, ``"ml-100k"``, ``"ml-1m"``,
        ``"ml-1m-melu"`` or ``"synthetic"``.
      rows_read: Records of all files; lines of text files that aren't blank.
      splits: Split name -> what it holds.
      left_out: What the selection leaves out.
      bad: Bad records that were skipped.
      task_sizes: Number of rows -> number of tasks that have as many, before the selection.
      min_rows: Fewest rows of a task that the selection keeps.
      max_rows: Most rows of a task that the selection keeps; 0: any number.
      columns: How many columns the table has; 0: not counted.
      columns_left_out: The table's columns that nothing is stored of.
      columns_hashed: The columns of the data set whose text is hashed.
      seconds: Wall time, reading to renaming; 0 if nothing had to be done.
      reused: Whether ``out`` was there already, made from the same input by the same plan.
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
    seconds: float = 0.0
    reused: bool = False

    @property
    def rows(self) -> int:
        """Rows that were kept."""
        return sum(split.rows for split in self.splits.values())

    @property
    def tasks(self) -> int:
        """Tasks that were kept."""
        return sum(split.tasks for split in self.splits.values())

    @property
    def dropped(self) -> dict[str, int]:
        """Reason -> input records left out, for the manifest."""
        bad = {f"{kind.file}: {kind.reason}": kind.count for kind in self.bad}
        return {**{entry.reason: entry.rows for entry in self.left_out}, **bad}

    def with_shards(self, shards: Mapping[str, Sequence[Shard]]) -> PrepareSummary:
        """The summary once the shards are written, split -> shards, which are counted here."""
        counted = {
            name: SplitCount(self.splits[name].tasks, sum(s.groups for s in own), sum(s.rows for s in own))
            for name, own in shards.items()
        }
        return replace(self, splits=counted)

    def size_quantiles(self, at: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)) -> list[int]:
        """Rows of a task, at quantiles over all tasks before the selection.

        Args:
          at: Which quantiles; 0.5 is the median. A quantile between two tasks is the lower one's size.
        """
        sizes = np.array(sorted(self.task_sizes), np.int64)
        upto = np.cumsum([self.task_sizes[int(size)] for size in sizes])
        places = np.floor(np.array(at) * (upto[-1] - 1)).astype(np.int64)
        return [int(size) for size in sizes[np.searchsorted(upto, places, side="right")]]

    def save(self, folder: Path) -> Path:
        """Write ``summary.json`` into ``folder`` without times: the same run gives the same bytes."""
        value = asdict(self)
        for name in ("out", "seconds", "reused"):
            del value[name]
        value["task_sizes"] = {str(size): count for size, count in sorted(self.task_sizes.items())}
        return write_atomically(folder / FILE_NAME, json.dumps(value, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> PrepareSummary:
        """Read the summary of a data set that was prepared before; it is marked as reused.

        Raises:
          DataError: There is none, or it has another form.
        """
        path = folder / FILE_NAME
        advice = "make the folder again with --overwrite"
        try:
            value: dict[str, Any] = json.loads(path.read_text())
            value["splits"] = {name: SplitCount(**split) for name, split in value["splits"].items()}
            value["left_out"] = tuple(LeftOut(**entry) for entry in value["left_out"])
            value["bad"] = tuple(
                BadKind(**{**kind, "examples": tuple(kind["examples"])}) for kind in value["bad"]
            )
            for name in ("columns_left_out", "columns_hashed"):
                value[name] = tuple(value.get(name, ()))
            value["task_sizes"] = {int(size): count for size, count in value["task_sizes"].items()}
            return replace(cls(out=folder, **value), reused=True)
        except OSError as error:
            raise DataError(f"no summary: {error.strerror}", path=path, advice=advice) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"not a summary: {error}", path=path, advice=advice) from error


def count_sizes(sizes: NDArray[np.int64]) -> dict[int, int]:
    """Size -> how often it occurs in ``sizes``, ascending."""
    values, counts = np.unique(sizes, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))
