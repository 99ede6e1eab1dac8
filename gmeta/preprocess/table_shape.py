"""The changes that are made to a table's rows before they are stored, and the short texts that name them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from gmeta.core.errors import ConfigError

_THRESHOLD = re.compile(r"(.+?)\s*(>=|<=|==|!=|>|<)\s*(-?\d+(?:\.\d+)?)")
_VALUES = re.compile(r"(.+?)\s*:\s*(.+)")
_EXPLODE = re.compile(r"(.+?)\s*:\s*(.+?)([^\w\s])([^\W].*)")
_GAP = re.compile(r"(.+?)\s*:\s*(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
BLOCK = "block"
"""The column that numbers blocks of rows, where there is no task."""


@dataclass(frozen=True)
class Join:
    """A side table.

    Attributes:
      path: Its file.
      on: The column of the table that names a row of it.
      key: The column of the side table that ``on`` is equal to; None: the one of the same name.
      names: Its columns, if its first line doesn't name them.
    """

    path: str
    on: str
    key: str | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class LabelRule:
    """How a label is made.

    Attributes:
      column: The column whose values decide it, and which it replaces; None: every row has the same label.
      values: Text of the column -> label; ``"*"`` stands for all other values.
      compare: A comparison in SQL, such as ``">= 4"``: labels are 1 where it holds and 0 elsewhere.
    """

    column: str | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    compare: str | None = None

    @property
    def name(self) -> str:
        """The label's column."""
        return self.column or "label"

    @classmethod
    def parse(cls, text: str) -> LabelRule | None:
        """Read a rule; return None for the name of a column.

        Example:
          >>> LabelRule.parse("rating >= 4").compare
          '>= 4'
          >>> LabelRule.parse("event: buy=1, *=0").values
          {'buy': 1.0, '*': 0.0}
        """
        if re.fullmatch(r"\*\s*=\s*-?\d+(\.\d+)?", text):
            return cls(values={"*": float(text.partition("=")[2])})
        if found := _THRESHOLD.fullmatch(text):
            return cls(found[1], compare=f"{found[2].replace('==', '=')} {found[3]}")
        if (found := _VALUES.fullmatch(text)) and "=" in found[2]:
            return cls(
                found[1], values={key: float(value) for key, value in pairs(found[2], "--label").items()}
            )
        return None


@dataclass(frozen=True)
class TableShape:
    """What is done with rows before they are stored, in this order.

    Attributes:
      null: Texts that stand for no value, in every column.
      lists: Column of text -> the separator of its values.
      explode: Column of lists, whose values become rows of their own; None: rows stay as they are.
      parts: The names of the parts of each value, such as ``("item", "click")`` for ``N1-0``.
      between: What separates the parts.
      times: Column -> the format of its times (strptime's), or ``"s"``, ``"ms"``, ``"us"`` or ``"ns"`` for
        numbers since 1970; fractions count.
      joins: Side tables, whose columns every row gets.
      label: How the label is made.
      where: A condition in SQL that rows fulfil.
      distinct: Columns of which equal values are kept once, in the first row by time; ``("*",)``: all.
      session: The column within which times without a gap make a session; None: no sessions.
      gap: The seconds between two rows that begin a new session.
      core: Column -> how many rows each of its values has at least, after all others have as well.
      blocks: Whether blocks of up to 1,024 rows take the place of tasks, as for rows without a user. Gaps
        then are a value of their own.
    """

    null: tuple[str, ...] = ()
    lists: Mapping[str, str] = field(default_factory=dict)
    explode: str | None = None
    parts: tuple[str, ...] = ()
    between: str = "-"
    times: Mapping[str, str] = field(default_factory=dict)
    joins: tuple[Join, ...] = ()
    label: LabelRule | None = None
    where: str | None = None
    distinct: tuple[str, ...] = ()
    session: str | None = None
    gap: float = 0.0
    core: Mapping[str, int] = field(default_factory=dict)
    blocks: bool = False

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the settings that change something."""
        plain = TableShape()
        names = (one.name for one in fields(self))
        return tuple(name for name in names if getattr(self, name) != getattr(plain, name))


def pairs(text: str, option: str) -> dict[str, str]:
    """Read ``name=value, name=value``.

    Raises:
      ConfigError: It is written otherwise.
    """
    found = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.rpartition("="))
        if not equals or not name or not value:
            raise ConfigError(f"{option}: write NAME=VALUE, NAME=VALUE, got {part.strip()!r}")
        found[name] = value
    return found


def parse_explode(text: str) -> tuple[str, tuple[str, ...], str]:
    """Read ``column`` or ``column: item-click``.

    Returns:
      The column, the names of its values' parts, and what separates them.
    """
    found = _EXPLODE.fullmatch(text)
    if found is None:
        return text, (), "-"
    return found[1], (found[2], found[4]), found[3]


def parse_gap(text: str) -> tuple[str, float]:
    """Read ``column: 30m``: return the column and the seconds.

    Raises:
      ConfigError: It is written otherwise.
    """
    found = _GAP.fullmatch(text)
    if found is None:
        raise ConfigError(f"--sessions: write COLUMN: GAP, such as 'user: 30m', got {text!r}")
    return found[1], float(found[2]) * _SECONDS[found[3]]
