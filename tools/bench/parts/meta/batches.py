"""Tasks for the meta-learning benchmark, in NumPy: each contender converts them to its own form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np


class Lists(NamedTuple):
    """A column of several values per sample: all values in turn, and the number of each sample's."""

    values: np.ndarray
    lengths: np.ndarray


Column: TypeAlias = "np.ndarray | Lists"


@dataclass(frozen=True)
class Field:
    """An id field: its name, its number of ids, whether a sample has several."""

    name: str
    vocabulary: int
    several: bool = False


class Part(NamedTuple):
    """Support or query of all tasks: which rows, (tasks, samples), and 1 where a row is real."""

    index: np.ndarray
    mask: np.ndarray

    def rows(self, task: int) -> np.ndarray:
        """The rows of one task, without padding."""
        return self.index[task][self.mask[task] > 0]


@dataclass(frozen=True)
class Batch:
    """A step's tasks; ``labels`` is (samples, outputs) float32."""

    columns: dict[str, Column]
    labels: np.ndarray
    support: Part
    query: Part

    @property
    def tasks(self) -> int:
        """How many."""
        return len(self.support.index)

    def take(self, rows: np.ndarray) -> dict[str, Column]:
        """The columns of some rows."""
        return {name: take_rows(column, rows) for name, column in self.columns.items()}


def task_batch(element: Any) -> Batch:
    """An element of `gmeta.io.tasks`."""
    columns: dict[str, Column] = {}
    for name, ids in element["features"].items():
        ragged = hasattr(ids, "row_lengths")
        columns[name] = Lists(ids.values.numpy(), ids.row_lengths().numpy()) if ragged else ids.numpy()
    labels = element["label"].numpy()
    parts = [
        Part(element[name]["index"].numpy(), element[name]["mask"].numpy()) for name in ("support", "query")
    ]
    return Batch(columns, labels.reshape(len(labels), -1), *parts)


def numbered(batches: list[Batch]) -> tuple[list[Batch], list[Field]]:
    """Return ids as numbers from 0 on, so that any table can hold them, and the fields with their sizes."""
    fields, columns = [], [dict(batch.columns) for batch in batches]
    for name, first in batches[0].columns.items():
        several = isinstance(first, Lists)
        ids = [each[name].values if several else each[name] for each in columns]
        found, places = np.unique(np.concatenate(ids), return_inverse=True)
        fields.append(Field(name, len(found), several))
        for each, part in zip(columns, np.split(places, np.cumsum([len(i) for i in ids])[:-1]), strict=True):
            each[name] = Lists(part, each[name].lengths) if several else part
    made = [Batch(c, b.labels, b.support, b.query) for c, b in zip(columns, batches, strict=True)]
    return made, fields


def split(supports: np.ndarray, queries: np.ndarray) -> tuple[Part, Part]:
    """Support and query of tasks whose rows follow one another, support first."""
    starts = np.cumsum(supports + queries) - supports - queries
    return _part(starts, supports), _part(starts + supports, queries)


def _part(starts: np.ndarray, sizes: np.ndarray) -> Part:
    place = np.arange(sizes.max())
    real = place < sizes[:, None]
    return Part(np.where(real, starts[:, None] + place, 0), real.astype(np.float32))


def take_rows(column: Column, rows: np.ndarray) -> Column:
    """Some rows of a column."""
    if not isinstance(column, Lists):
        return column[rows]
    starts, lengths = np.cumsum(column.lengths) - column.lengths, column.lengths[rows]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return Lists(column.values[np.repeat(starts[rows], lengths) + within], lengths)
