"""Attributes by id: one row a user or an item, in columns, so that joining them to ratings is a gather."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gmeta.preprocess.columns import Ints, Ragged, gather_ragged

IntColumn: TypeAlias = "Ints | Ragged"


@dataclass(frozen=True)
class AttributeTable:
    """Columns of attributes, one row an id.

    Rows are sorted by id, so that the order of the lines in the raw file is of no consequence.

    Attributes:
      ids: (N,) int64, ascending, each once.
      lines: (N,) int64, the line that each row was read from.
      columns: Name -> (N,) int64, or for a list attribute ``(values, row_splits)``.
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
        """The ids, for asking one at a time whether they are known."""
        return frozenset(self.ids.tolist())

    def take(self, ids: Ints) -> dict[str, IntColumn]:
        """The attributes of ``ids``, an (M,) int64 array of known ids in any order: columns of M rows."""
        rows = np.searchsorted(self.ids, ids)
        return {
            name: gather_ragged(column, rows) if isinstance(column, tuple) else column[rows]
            for name, column in self.columns.items()
        }
