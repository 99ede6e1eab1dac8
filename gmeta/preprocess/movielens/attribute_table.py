"""Attributes by id, in columns with a row for each user or item, so that a gather joins them to ratings."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gmeta.preprocess.columns import Ints, Ragged, gather_ragged

IntColumn: TypeAlias = "Ints | Ragged"


@dataclass(frozen=True)
class AttributeTable:
    """Columns of attributes, with one row for each id.

    Rows are sorted by id, so the order of the lines in the raw file doesn't matter.

    Attributes:
      ids: (N,) int64, ascending, each once.
      lines: (N,) int64, the line that each row was read from.
      columns: Name -> (N,) int64, or ``(values, row_splits)`` for a list attribute.
    """

    ids: Ints
    lines: Ints
    columns: Mapping[str, IntColumn]

    @classmethod
    def build(
        cls,
        names: Sequence[str],
        rows: Mapping[int, tuple[int | tuple[int, ...], ...]],
        lines: Mapping[int, int],
    ) -> AttributeTable:
        """Make a table from parsed rows.

        Args:
          names: The attributes' names, in the order of a row's values.
          rows: Id -> its attributes: an int, or a tuple of ints for a list attribute.
          lines: Id -> the line it was read from.
        """
        ids = sorted(rows)
        columns: dict[str, IntColumn] = {}
        for place, name in enumerate(names):
            cells = [rows[key][place] for key in ids]
            if cells and isinstance(cells[0], tuple):
                lists = [cell for cell in cells if isinstance(cell, tuple)]
                splits = np.cumsum([0, *(len(cell) for cell in lists)], dtype=np.int64)
                columns[name] = np.array([value for cell in lists for value in cell], np.int64), splits
            else:
                columns[name] = np.array(cells, np.int64)
        return cls(np.array(ids, np.int64), np.array([lines[key] for key in ids], np.int64), columns)

    def id_set(self) -> Container[int]:
        """Return the ids as a set, for testing single ids."""
        return frozenset(self.ids.tolist())

    def take(self, ids: Ints) -> dict[str, IntColumn]:
        """Return the attributes of ``ids``, (M,) int64, known ids in any order: columns of M rows."""
        rows = np.searchsorted(self.ids, ids)
        return {
            name: gather_ragged(column, rows) if isinstance(column, tuple) else column[rows]
            for name, column in self.columns.items()
        }
