"""How the ids of several tables become keys of one physical table, and keys ids again.

MTGenRec section 3.2: with ``k = ceil(log2(m + 1))`` for m tables, table i's id x becomes the key
``(i << (63 - k)) | x``, so the top bit stays 0 and x has ``63 - k`` bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.core.json_values import items, text

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MergedKeys:
    """The tables that are merged into a physical one.

    Attributes:
      tables: The tables' names; a table's position is its number i.
      hashed: The names of those whose ids are hashed.

    Example:
      >>> keys = MergedKeys(("user", "item"))
      >>> keys.prefix_of("item") == 1 << keys.id_bits == 1 << 61
      True
      >>> of_item, ids = keys.ids_of("item", np.array([5, (1 << 61) + 5]))
      >>> of_item.tolist(), ids.tolist()
      ([False, True], [5])
    """

    tables: tuple[str, ...]
    hashed: tuple[str, ...] = ()

    @property
    def id_bits(self) -> int:
        """The number of bits that an id may have: 63 - ceil(log2(m + 1))."""
        return 63 - len(self.tables).bit_length()

    def prefix_of(self, table: str) -> int:
        """Return the bits of a table's keys that are or-ed into its ids."""
        return self.tables.index(table) << self.id_bits

    def ids_of(self, table: str, keys: Ints) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Find the keys of a table, and the ids in them.

        Args:
          table: The table's name.
          keys: (n,) int64, keys of the physical table.

        Returns:
          (n,) bool, which keys are the table's; and their ids, in the same order.
        """
        own = (keys >> self.id_bits) == self.tables.index(table)
        return own, keys[own] & ((1 << self.id_bits) - 1)

    def id_of(self, key: int) -> tuple[str, int]:
        """Return the table that a key of the physical table is of, and the id in it."""
        return self.tables[key >> self.id_bits], key & ((1 << self.id_bits) - 1)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {"tables": list(self.tables)} | ({"hashed": list(self.hashed)} if self.hashed else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MergedKeys:
        """Restore from JSON values: the inverse of `to_json`.

        Raises:
          ValueError: The values aren't what `to_json` returns.
        """
        tables = tuple(text(name, "a table") for name in items(value["tables"], "tables"))
        hashed = tuple(text(name, "a hashed table") for name in items(value.get("hashed", []), "hashed"))
        if not tables or len(set(tables)) < len(tables) or not set(hashed) <= set(tables):
            raise ValueError(f"tables {list(tables)}, of which {list(hashed)} are hashed")
        return cls(tables, hashed)
