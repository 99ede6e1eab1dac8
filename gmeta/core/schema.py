"""The columns of a prepared data set, which preprocessing writes and readers expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from gmeta.core.errors import ConfigError
from gmeta.core.json_values import items, text

DType = Literal["int64", "float32"]


@dataclass(frozen=True)
class Column:
    """One column of a record.

    Attributes:
      name: Its name, also the feature's name in a ``tf.train.Example``.
      dtype: ``"int64"`` or ``"float32"``.
      is_list: Whether a record has any number of values (a ragged column) or exactly one.
    """

    name: str
    dtype: DType = "int64"
    is_list: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("int64", "float32"):
            raise ConfigError(f"column {self.name!r}: dtype must be int64 or float32, got {self.dtype!r}")


@dataclass(frozen=True)
class Schema:
    """Named columns in a fixed order, two of which define the group of a record.

    Attributes:
      columns: All columns.
      task: The column of the task's id; records of a task are contiguous.
      batch: The column that numbers the batches of a task.
    """

    columns: tuple[Column, ...]
    task: str = "task"
    batch: str = "batch_id"

    def __post_init__(self) -> None:
        names = Counter(column.name for column in self.columns)
        if twice := sorted(name for name, times in names.items() if times > 1):
            raise ConfigError(f"schema names a column twice: {', '.join(twice)}")
        for role in (self.task, self.batch):
            if self[role] != Column(role):
                raise ConfigError(f"schema: column {role!r} must be a single int64, got {self[role]}")

    @cached_property
    def _by_name(self) -> Mapping[str, Column]:
        return {column.name: column for column in self.columns}

    def __getitem__(self, name: str) -> Column:
        if name not in self._by_name:
            raise ConfigError(f"schema has no column {name!r}; it has {', '.join(self._by_name)}")
        return self._by_name[name]

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON objects, in the manifest's form."""
        return {
            "task": self.task,
            "batch": self.batch,
            "columns": [{"name": c.name, "dtype": c.dtype, "is_list": c.is_list} for c in self.columns],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Schema:
        """Read a schema from what `to_json` returns.

        Raises:
          ValueError: A value has another type. KeyError and TypeError are possible too.
        """
        columns: Sequence[Mapping[str, Any]] = items(value["columns"], "columns")
        for column in columns:
            text(column["name"], "a column's name")
            if type(column["is_list"]) is not bool:
                raise ValueError(f"is_list of column {column['name']!r} must be true or false")
        return cls(tuple(Column(**column) for column in columns), value["task"], value["batch"])


# Roles of a prepared data set's columns: the label, the time, and the hashed columns.

_USUAL_LABELS = ("label", "rating")
_USUAL_TIME = "timestamp"


@dataclass(frozen=True)
class Roles:
    """Roles of a prepared data set's columns, as passed to `gmeta prepare`.

    Attributes:
      task: The column of tasks.
      batch: The column that numbers the batches of a task.
      time: The column by which a task's rows are sorted; None if there is none.
      label: The column to predict; if none was named, ``label`` or ``rating``; None if there is neither.
      hashed: The columns of hashed text.

    Example:
      >>> Manifest.load(Path("data/clicks")).roles  # doctest: +SKIP
      Roles(task='user', batch='batch_id', time='ts', label='click', hashed=('user', 'item'))
    """

    task: str
    batch: str
    time: str | None = None
    label: str | None = None
    hashed: tuple[str, ...] = ()

    @classmethod
    def of(cls, schema: Schema, config: Mapping[str, Any]) -> Roles:
        """Read the roles from a manifest's schema and settings.

        If the settings don't describe a table, ``timestamp`` is the time.

        Args:
          schema: The columns.
          config: The settings that `gmeta prepare` stored, `gmeta.core.data_manifest.Manifest.config`.
        """
        table = config.get("table")
        usual = next((name for name in _USUAL_LABELS if name in schema), None)
        if not isinstance(table, Mapping):
            return cls(schema.task, schema.batch, _USUAL_TIME if _USUAL_TIME in schema else None, usual)

        def column(role: str) -> str | None:
            name = table.get(role)
            return name if isinstance(name, str) and name in schema else None

        columns = table.get("columns")
        hashed = tuple(
            name
            for name, spec in (columns.items() if isinstance(columns, Mapping) else ())
            if name in schema and isinstance(spec, Mapping) and spec.get("hash") is True
        )
        return cls(schema.task, schema.batch, column("time"), column("label") or usual, hashed)


# The rule for bad records in all packages.

OnBad = Literal["raise", "skip"]
"""The rule for bad records: ``"raise"`` ends the run at the first one, ``"skip"`` counts it and continues."""

ON_BAD: tuple[OnBad, ...] = get_args(OnBad)


def check_on_bad(on_bad: str) -> OnBad:
    """Return ``on_bad`` if it is one of the two rules.

    Raises:
      ConfigError: It is something else.
    """
    for rule in ON_BAD:
        if on_bad == rule:
            return rule
    raise ConfigError(f"on_bad must be 'raise' or 'skip', got {on_bad!r}")
