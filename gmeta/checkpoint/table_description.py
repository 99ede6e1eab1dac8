"""``_table.json``, which describes the columns of an exported folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gmeta.core.errors import DataError
from gmeta.core.files import beside_data
from gmeta.core.json_values import items, mapping, parse_json, text, whole
from gmeta.core.merged_tables import Fold, NamedTable, fold_of

_NAME, ARROW_NAME = "table.json", "table.arrow"
FORMAT, VERSION = "gmeta-table", 1

Format = Literal["arrow", "npy"]
VOCABULARY = ("keys", "values", "frequency")
STATE = ("slots", "last_step")
COLUMNS = (*VOCABULARY, *STATE)
DTYPES: Mapping[str, type[np.generic]] = {
    "keys": np.int64,
    "values": np.float32,
    "frequency": np.uint32,
    "slots": np.float32,
    "last_step": np.uint32,
}
"""Column -> its dtype in exported files; ``values`` and ``slots`` have a row for each key."""


def description_path(folder: Path) -> Path:
    """Return where the description of a folder is."""
    return beside_data(folder, _NAME)


@dataclass(frozen=True)
class TableDescription:
    """What the columns in a folder are.

    Attributes:
      table: The table's name.
      rows: Number of rows.
      dim: Width of ``values``.
      columns: The columns that were written, some of `COLUMNS`.
      optimizer: The kind of the table's optimizer.
      slots: Names of the optimizer's slots, in their order in the column ``slots``.
      slot_floats: Width of that column.
      step: The table's step.
      id_bits: How many bits an id may have; None for an unmerged table, whose keys are any int64.
      hashed: Whether the keys are hashes, of text or of larger numbers.
      fold: How they were folded into ``id_bits`` (`gmeta.core.merged_tables`); None without hashes.
    """

    table: str
    rows: int
    dim: int
    columns: tuple[str, ...]
    optimizer: str
    slots: tuple[str, ...]
    slot_floats: int
    step: int
    id_bits: int | None
    hashed: bool
    fold: Fold | None = None

    @classmethod
    def of(cls, found: NamedTable, layout: Mapping[str, Any], *, step: int, state: bool) -> TableDescription:
        """Describe a table that is to be exported.

        Args:
          found: The table.
          layout: Its ``dim``, ``optimizer``, ``slots`` and ``slot_floats``.
          step: Its step.
          state: Whether slots and last steps are exported too.
        """
        has_slots = layout["slot_floats"] > 0
        state_columns = tuple(name for name in STATE if name != "slots" or has_slots)
        columns = VOCABULARY + (state_columns if state else ())
        return cls(
            table=found.name,
            rows=0,
            columns=columns,
            step=step,
            id_bits=found.id_bits,
            hashed=found.hashed,
            fold=found.fold,
            **layout,
        )

    def width_of(self, column: str) -> int | None:
        """Return the width of a column's rows; None for a column of numbers."""
        return {"values": self.dim, "slots": self.slot_floats}.get(column)

    def save(self, folder: Path) -> None:
        """Write ``_table.json`` into a folder."""
        value = {"format": FORMAT, "version": VERSION, **asdict(self)}
        description_path(folder).write_text(json.dumps(value, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> TableDescription | None:
        """Read the description of a folder; None if it has none because gmeta didn't write its files.

        Raises:
          DataError: It is damaged.
        """
        path = description_path(folder)
        try:
            value = mapping(parse_json(path.read_bytes()), path.name)
            if (value.pop("format", None), value.pop("version", None)) != (FORMAT, VERSION):
                raise ValueError(f"it isn't a {FORMAT} of version {VERSION}")
            return cls._from_json(value)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"can't be read: {error.strerror}", path=path) from error
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise DataError(
                f"not what gmeta writes: {reason}",
                path=path,
                advice="export the table again; without this file the columns are read as another program's",
            ) from error

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> TableDescription:
        lists = {
            name: tuple(text(v, name) for v in items(value[name], name)) for name in ("columns", "slots")
        }
        made = cls(**{**value, **lists})
        for name, least in (("rows", 0), ("dim", 1), ("slot_floats", 0), ("step", 0)):
            whole(getattr(made, name), name, least)
        for name in ("table", "optimizer"):
            text(getattr(made, name), name)
        if made.id_bits is not None:
            whole(made.id_bits, "id_bits", 0, 63)
        if type(made.hashed) is not bool:
            raise ValueError(f"hashed must be true or false, got {made.hashed!r}")
        return replace(made, fold=fold_of(value) if made.hashed else None)
