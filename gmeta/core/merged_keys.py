"""How the ids of several tables become keys of one physical table, and keys ids again.

MTGenRec section 3.2: with ``k = ceil(log2(m + 1))`` for m tables, table i's id x becomes the key
``(i << (63 - k)) | x``, so the top bit stays 0 and x has ``63 - k`` bits.

Tables whose ids are hashed take any 64-bit number and fold it into an id. `fold_numbers` has both folds:

* ``"mix"`` gives ids of `HASHED_BITS` bits, however many tables are merged, so a number's id is the same in
  every collection.
* ``"xor"`` is the fold of tables from before gmeta had "mix". It gives ids of as many bits as the merged
  tables leave, and numbers that count in their upper and in their lower bits share ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError
from gmeta.core.json_values import items, text
from gmeta.core.shares import splitmix64

Ints = npt.NDArray[np.int64]
Fold: TypeAlias = Literal["mix", "xor"]

HASHED_BITS = 56
"""The number of bits of an id that "mix" makes."""

MOST_HASHED = (1 << (63 - HASHED_BITS)) - 1
"""How many tables can be merged so that such ids fit."""


def fold_numbers(numbers: Ints, bits: int, fold: Fold) -> Ints:
    """Fold 64-bit numbers x, taken as unsigned, into ids in [0, 2^bits).

    * ``"mix"``: x if it is below 2^bits, else the low bits of `splitmix64` (x). Of n numbers, of any
      structure, about n² / 2^(bits + 1) pairs share an id.
    * ``"xor"``: the low bits of ``x XOR (x >> bits)``.

    Args:
      numbers: int64 of any shape.
      bits: 1 to 63.
      fold: Which fold.

    Returns:
      int64 of the same shape.
    """
    x = numbers.view(np.uint64)
    most = np.uint64((1 << bits) - 1)
    mixed = x ^ (x >> np.uint64(bits)) if fold == "xor" else np.where(x <= most, x, splitmix64(x))
    return (mixed & most).view(np.int64)


@dataclass(frozen=True)
class MergedKeys:
    """The tables that are merged into a physical one.

    Attributes:
      tables: The tables' names; a table's position is its number i.
      hashed: The names of those whose ids are hashed.
      fold: How these fold a number into an id.

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
    fold: Fold = "mix"

    @property
    def id_bits(self) -> int:
        """The number of bits that an id may have: 63 - ceil(log2(m + 1))."""
        return 63 - len(self.tables).bit_length()

    @property
    def hashed_bits(self) -> int:
        """The number of bits that a hashed id has."""
        return HASHED_BITS if self.fold == "mix" else self.id_bits

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
        fold = {"fold": self.fold} if self.fold != "xor" else {}  # which had no name
        return {"tables": list(self.tables), **({"hashed": list(self.hashed), **fold} if self.hashed else {})}

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
        return cls(tables, hashed, fold_of(value) if hashed else "mix")


def fold_of(value: Mapping[str, Any]) -> Fold:
    """Return the fold of JSON values that describe hashed ids; those from before gmeta had "mix" name none.

    Raises:
      ConfigError: They name a fold that this gmeta doesn't know.
    """
    return check_fold("what was saved", value.get("fold", "xor"))


def check_fold(where: str, fold: Any) -> Fold:
    """Return a fold.

    Raises:
      ConfigError: There is no such fold.
    """
    if fold not in get_args(Fold):
        names = " or ".join(map(repr, get_args(Fold)))
        raise ConfigError(f"{where}: fold must be {names}, got {fold!r}")
    return fold
