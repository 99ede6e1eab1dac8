"""A cache of recently fetched rows, which drops the least recently used rows to make room.

Each row has a slot. An ordered dict maps (key, as_of) to the slot, and the values are in arrays, one for each
column, so that rows are copied by indexing, not one by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.core.data.schema import Column
from gmeta.io.features.cells import arrow_schema, list_array

Ints = npt.NDArray[np.int64]
Place = tuple[int, int]
_FIRST = 1024  # slots to begin with


class RowCache:
    """Rows of some columns by (key, as_of); not safe for several threads at once.

    Args:
      capacity: The most rows.
      columns: The columns of a row.
    """

    def __init__(self, capacity: int, columns: Sequence[Column]) -> None:
        self._capacity, self._columns = capacity, columns
        self._slots: OrderedDict[Place, int] = OrderedDict()
        self._values = [np.zeros(0, object if column.is_list else column.dtype) for column in columns]
        self._there = [np.zeros(0, bool) for _ in columns]
        self._until = np.zeros(0)

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, places: Sequence[Place], now: float) -> tuple[npt.NDArray[np.bool_], Any]:
        """Return which of the requested rows are cached, and these rows.

        Args:
          places: (key, as_of) of each row, no two alike.
          now: The present time; rows that count as the newest only until before it are dropped.

        Returns:
          (n,) bool, and a RecordBatch with one row for each True.
        """
        slots = np.fromiter((self._slots.get(place, -1) for place in places), np.int64, len(places))
        if len(self):
            slots[(slots >= 0) & (self._until[slots] < now)] = -1  # `put` writes into the same slot
        here = slots >= 0
        for place, hit in zip(places, here.tolist(), strict=True):
            if hit:
                self._slots.move_to_end(place)
        return here, self._rows(slots[here])

    def put(self, places: Sequence[Place], rows: Any, until: float) -> None:
        """Cache rows, a RecordBatch, which count as the newest ones until the time ``until``."""
        first = max(0, len(places) - self._capacity)  # if not all fit, the last ones are kept
        slots = np.fromiter(map(self._slot, places[first:]), np.int64, len(places) - first)
        if len(slots) == 0:
            return
        self._grow(int(slots.max()) + 1)
        self._until[slots] = until
        for column, values, there, array in zip(
            self._columns, self._values, self._there, rows.columns, strict=True
        ):
            array = array.slice(first)
            there[slots] = array.is_valid().to_numpy(zero_copy_only=False)
            if column.is_list:
                starts = array.offsets.to_numpy().tolist()
                numbers = array.values.to_numpy(zero_copy_only=False)
                for row, slot in enumerate(slots.tolist()):  # copied, so that the batch isn't kept in memory
                    values[slot] = numbers[starts[row] : starts[row + 1]].copy()
            else:
                values[slots] = array.fill_null(0).to_numpy(zero_copy_only=False)

    def _slot(self, place: Place) -> int:
        """Return the slot to write a row into; if all are taken, that of the least recently used row."""
        slot = self._slots.pop(place, None)
        if slot is None:
            full = len(self._slots) == self._capacity
            slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
        self._slots[place] = slot
        return slot

    def _grow(self, least: int) -> None:
        size = len(self._until)
        if least <= size:
            return
        more = min(self._capacity, max(least, 2 * size, _FIRST)) - size

        def grow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([array, np.zeros(more, array.dtype)])

        self._values, self._there = list(map(grow, self._values)), list(map(grow, self._there))
        self._until = grow(self._until)

    def _rows(self, slots: Ints) -> Any:
        arrays = []
        for column, values, there in zip(self._columns, self._values, self._there, strict=True):
            found, valid = values[slots], there[slots]
            if column.is_list:
                lengths = np.fromiter(map(len, found), np.int64, len(found))
                numbers = np.concatenate([np.zeros(0, column.dtype), *found])
                arrays.append(list_array(numbers, lengths, valid))
            else:
                arrays.append(pa.array(found, mask=~valid))
        return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(self._columns))
