"""Tables that share a physical table: how their ids map to its keys, and where a named table's rows are.

MTGenRec section 3.2: with ``k = ceil(log2(m + 1))`` for m tables, table i's id x becomes the key
``(i << (63 - k)) | x``, so the top bit stays 0 and x has ``63 - k`` bits (`MergedKeys`).

Tables whose ids are hashed accept any 64-bit number and fold it into an id. `fold_numbers` implements both
folds:

* ``"mix"`` returns ids of `HASHED_BITS` bits, regardless of the number of merged tables, so a number has the
  same id in every collection.
* ``"xor"`` is the fold of older tables, from before "mix". It returns ids of as many bits as the merged
  tables leave, and numbers that count in both their upper and lower bits share ids.

Which tables share a physical table, and the key bits that separate them, depend on the set and order of a
collection's features and on their policies. Names don't. Saved rows are therefore matched to tables by name
(`NamedTable`), and `NamedTable.keys_from` converts the keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError, DataError
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

    * ``"mix"``: x if it is below 2^bits, otherwise the low bits of `splitmix64` (x). Among n numbers, of any
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
      hashed: The names of tables whose ids are hashed.
      fold: How hashed tables fold a number into an id.

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
        """Return the bits that are or-ed into a table's ids to form its keys."""
        return self.tables.index(table) << self.id_bits

    def ids_of(self, table: str, keys: Ints) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Find the keys of a table, and the ids in them.

        Args:
          table: The table's name.
          keys: (n,) int64, keys of the physical table.

        Returns:
          (n,) bool, which keys belong to the table; and their ids, in the same order.
        """
        own = (keys >> self.id_bits) == self.tables.index(table)
        return own, keys[own] & ((1 << self.id_bits) - 1)

    def id_of(self, key: int) -> tuple[str, int]:
        """Return the table to which a key of the physical table belongs, and the id in it."""
        return self.tables[key >> self.id_bits], key & ((1 << self.id_bits) - 1)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        fold = {"fold": self.fold} if self.fold != "xor" else {}  # older versions didn't store the name "xor"
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
    """Return the fold in JSON values that describe hashed ids; values from before "mix" contain none.

    Raises:
      ConfigError: They name a fold that this version of gmeta doesn't know.
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


Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]
Physical: TypeAlias = Mapping[str, "MergedKeys | None"]
"""Physical table -> the tables that are merged in it; None: it has keys of its own."""


@dataclass(frozen=True)
class NamedTable:
    """A user's table.

    Attributes:
      name: Its name.
      physical: The name of the physical table that holds its rows.
      merged: The tables that are merged there; None if the physical table isn't merged.
    """

    name: str
    physical: str
    merged: MergedKeys | None

    @property
    def alone(self) -> bool:
        """Whether the physical table contains only this table's rows."""
        return self.merged is None or len(self.merged.tables) == 1

    @property
    def id_bits(self) -> int | None:
        """How many bits an id may have; None: any int64 is an id."""
        if self.merged is None:
            return None
        return self.merged.hashed_bits if self.hashed else self.merged.id_bits

    @property
    def hashed(self) -> bool:
        """Whether ids are hashed."""
        return self.merged is not None and self.name in self.merged.hashed

    @property
    def fold(self) -> Fold | None:
        """How hashed ids are folded; None: ids aren't hashed."""
        return self.merged.fold if self.merged is not None and self.hashed else None

    @property
    def prefix(self) -> int:
        """The bits that are or-ed into an id to form its key."""
        return 0 if self.merged is None else self.merged.prefix_of(self.name)

    def own(self, columns: Columns) -> dict[str, npt.NDArray[Any]]:
        """Return this table's rows among those of the physical table, by id."""
        if self.merged is None:
            return dict(columns)
        own, ids = self.merged.ids_of(self.name, columns["keys"])
        return {name: ids if name == "keys" else values[own] for name, values in columns.items()}

    def why_not_from(self, saved: NamedTable) -> str:
        """Explain why this table's ids don't match a table's saved rows; empty if they match.

        Hashed ids match if this table folds them like the saved one.
        """
        if saved.hashed != self.hashed:
            return f"its features were saved with hash={saved.hashed}, and have hash={self.hashed} now"
        if saved.merged is None or self.merged is None or not saved.hashed:
            return ""
        then, now, bits = len(saved.merged.tables), len(self.merged.tables), self.merged.id_bits
        if saved.fold == "mix" and bits < HASHED_BITS:
            return (
                f"its ids were hashed to {HASHED_BITS} bits, and the {now} tables that are merged now leave "
                f"{bits}: make the collection without fold='xor', which merges fewer"
            )
        if saved.fold == "xor" and saved.id_bits != bits:
            few = "give some of these another width or policy, so that as many are merged as before"
            return (
                f"its ids were hashed to {saved.id_bits} bits by the fold 'xor' with {then} merged tables, "
                f"and the {now} that are merged now leave {bits}: "
                + ("make the collection with fold='xor'" if then > MOST_HASHED else few)
            )
        return ""

    def keys_from(self, saved: NamedTable, keys: Ints) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Find this table's saved keys, and convert them to its current keys.

        Args:
          saved: The table as it was saved; `why_not_from` accepts it.
          keys: (n,) int64, the keys of its physical table.

        Returns:
          (n,) bool, which keys belong to the table; and their keys in this table's physical table.

        Raises:
          DataError: An id exceeds the current limit of ids.
        """
        if saved.merged is None:
            own, ids = np.ones(len(keys), bool), keys
        else:
            own, ids = saved.merged.ids_of(saved.name, keys)
        if self.merged is not None:
            outside = (ids < 0) | (ids >> self.merged.id_bits != 0)
            if outside.any():
                raise DataError(
                    f"table {self.name!r} was saved with the id {ids[outside][0]}, but its ids are below "
                    f"2^{self.merged.id_bits} now that {len(self.merged.tables)} tables are merged: give "
                    "some of them another width or policy, so that fewer are"
                )
        return own, ids | self.prefix


def tables_by_full_name(physical: Physical) -> dict[str, NamedTable]:
    """Return the tables by their full names: ``<collection>/<name>``, or the name of a physical table."""
    found: dict[str, NamedTable] = {}
    for name, merged in physical.items():
        suffix = "" if merged is None else "+".join(merged.tables)
        collection = name.removesuffix(suffix) if name.endswith(suffix) else f"{name}/"
        for table in ("",) if merged is None else merged.tables:
            found[collection + table] = NamedTable(table or name, name, merged)
    return found


def find_table(name: str | None, tables: Physical, where: str) -> NamedTable:
    """Find a table by its name, or by ``<collection>/<name>`` if several collections have one of that name.

    Args:
      name: The name; None: the only table.
      tables: The physical tables.
      where: The owner of the tables, for messages.

    Raises:
      ConfigError: There is no such table, or there are several.
    """
    found = tables_by_full_name(tables)
    counts = Counter(each.name for each in found.values())
    short = {each.name: each for each in found.values() if counts[each.name] == 1}
    names = sorted(each.name if each.name in short else full for full, each in found.items())
    listed = ", ".join(map(repr, names)) or "none"
    if name is None:
        if len(names) != 1:
            raise ConfigError(f"{where} has the tables {listed}: name one of them")
        return next(iter(found.values()))
    if name not in short and name not in found:
        several = " single" if counts[name] else ""
        raise ConfigError(f"{where} has no{several} table {name!r}: it has {listed}")
    return short[name] if name in short else found[name]
