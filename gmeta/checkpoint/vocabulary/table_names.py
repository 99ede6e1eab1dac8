"""Finds a user's table among the physical tables that hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gmeta.checkpoint.files.chain import Columns
from gmeta.core.data.merged_keys import Fold, MergedKeys
from gmeta.core.errors import ConfigError


@dataclass(frozen=True)
class FoundTable:
    """A user's table.

    Attributes:
      name: Its name.
      physical: The name of the physical table that holds its rows.
      merged: The tables that are merged there; None if the physical table has keys of its own.
    """

    name: str
    physical: str
    merged: MergedKeys | None

    @property
    def alone(self) -> bool:
        """Whether the physical table has no other table's rows."""
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
        """The bits of a key that are or-ed into the id."""
        return 0 if self.merged is None else self.merged.prefix_of(self.name)

    def own(self, columns: Columns) -> Columns:
        """Return the rows of this table among those of the physical one, by their ids."""
        if self.merged is None:
            return columns
        own, ids = self.merged.ids_of(self.name, columns["keys"])
        return {name: ids if name == "keys" else values[own] for name, values in columns.items()}


def find_table(name: str | None, tables: Mapping[str, MergedKeys | None], where: str) -> FoundTable:
    """Find a table by its name, or by ``<collection>/<name>`` if several collections have one of that name.

    Args:
      name: The name; None: the only table that there is.
      tables: Physical table -> what is merged there, or None.
      where: What has the tables, for messages.

    Raises:
      ConfigError: There is no such table, or there are several.
    """
    found: dict[str, FoundTable] = {}
    for physical, merged in tables.items():
        collection = "" if merged is None else physical.removesuffix("+".join(merged.tables))
        for table in (physical,) if merged is None else merged.tables:
            found[collection + table] = FoundTable(table, physical, merged)
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
