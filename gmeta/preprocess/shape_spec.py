"""How a table's rows are made from the files' rows: side tables, exploded lists, and filters.

The parts of a `Shape` are applied in the order of its attributes, on one machine: side tables see exploded
rows, and filters see the columns of side tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gmeta.core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_]\w*")
_GAP = re.compile(r"([0-9.]+) ?(s|min|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
SESSION = "session"
"""The column of sessions."""


@dataclass(frozen=True)
class Explode:
    """A column of lists, each element of which becomes a row.

    Attributes:
      column: The column; its name isn't kept.
      into: The columns that an element becomes: their names, joined by the separators of their values, such
        as ``"item-click"`` for ``N1-0``. Elements are split at the last separators.
      separator: The separator of a text's elements; None: spaces.
    """

    column: str
    into: str
    separator: str | None = None

    def __post_init__(self) -> None:
        names = self.names
        if not names or len(set(names)) < len(names) or not re.fullmatch(self.pattern, self.into):
            raise ConfigError(
                f"explode {self.column!r} into {self.into!r}: name columns with what separates their values, "
                "such as item-click"
            )

    @property
    def names(self) -> list[str]:
        """The columns that an element becomes."""
        return _NAME.findall(self.into)

    @property
    def pattern(self) -> str:
        """The form of an element, with a group for each column."""
        between = [re.escape(part) for part in _NAME.split(self.into)]
        groups = ["(.+)"] + ["([^" + part.replace("^", r"\^") + "]+)" for part in between[1:-1]]
        if any(not part for part in between[1:-1]) or any(between[:1] + between[-1:]):
            return "(?!)"
        return groups[0] + "".join(
            part + group for part, group in zip(between[1:-1], groups[1:], strict=True)
        )


@dataclass(frozen=True)
class Join:
    """A side table, whose columns are joined to the rows by a key.

    Attributes:
      file: The table's file, in any format that rows may have.
      on: The column of the key, ``"movieId"``, or its names in the rows and in the file, ``"item=movieId"``.
      columns: The columns' names, if the file's first line doesn't name them.
    """

    file: str
    on: str
    columns: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, str]:
        """The key's column in the rows, and in the file."""
        own, _, other = self.on.partition("=")
        return own.strip(), (other or own).strip()


@dataclass(frozen=True)
class Shape:
    """How rows are made from files.

    Attributes:
      explode: A column of lists, each element of which becomes a row.
      joins: Side tables.
      where: A condition in SQL, such as ``"rating >= 3 AND city <> 'x'"``; rows that fail it are left out.
      distinct: Columns of which each combination of values is kept once, in the first row in time.
      core: Column -> the fewest rows that each of its values must have; rows of rarer values are left out
        until all remaining values have that many.
      session_gap: A time, such as ``"30m"``: a user's rows with a longer gap between them are in different
        sessions, and the sessions are the tasks.
    """

    explode: Explode | None = None
    joins: tuple[Join, ...] = ()
    where: str | None = None
    distinct: tuple[str, ...] = ()
    core: Mapping[str, int] = field(default_factory=dict)
    session_gap: str | None = None

    def __post_init__(self) -> None:
        if wrong := [f"{name}={least}" for name, least in self.core.items() if least < 1]:
            raise ConfigError(f"core {wrong[0]}: at least one row")
        if self.session_gap is not None and not self.gap_seconds:
            raise ConfigError(f"session_gap={self.session_gap!r} must be a time such as 30m, 2h or 1d")

    @property
    def gap_seconds(self) -> float:
        """The session gap in seconds; 0: there is none."""
        found = _GAP.fullmatch(self.session_gap or "")
        return float(found[1]) * _SECONDS[found[2]] if found else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return what is set, as JSON values."""
        found = {name: value for name, value in asdict(self).items() if value}
        own: dict[str, Any] = json.loads(json.dumps(found))  # tuples become lists, as in a manifest
        return own
