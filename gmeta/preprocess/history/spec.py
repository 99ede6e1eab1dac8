"""The description of a store of histories: its columns, their groups, and how it is divided."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gmeta.core.data_manifest import hash_text
from gmeta.core.errors import ConfigError
from gmeta.core.history_manifest import BIRTH
from gmeta.core.schema import Column
from gmeta.core.settings import from_mapping, load_toml
from gmeta.preprocess.history.shard_reader import MAX_EVENTS
from gmeta.preprocess.table_spec import ColumnSpec, CsvForm, TableSpec
from gmeta.preprocess.tables.prepared_source import prepared_roles

MAX_SHARDS = 1 << 16
EVENTS = "events"
"""The group of all columns, if a spec names no groups."""


@dataclass(frozen=True)
class HistorySpec:
    """The columns of events, and how a store keeps them.

    Attributes:
      user: The column of users; text is hashed.
      time: The column of times, int64 in any unit; dates and timestamps become microseconds since 1970.
      columns: Name -> column: how columns are read. Without groups, these are the columns that are kept, and
        empty means all columns of numbers and text. The user and the time are always kept.
      groups: Group -> names of its columns, which are kept; each column is in one group. A reader that needs
        one group doesn't read the others. Empty: one group, ``"events"``, of all columns.
      shards: The number of files of a generation; a shard's events of one append must fit in memory.
      stripe_events: The largest number of events of a stripe, 1 to 65,536. Longer stripes take fewer bytes
        per event, but cost more bytes to read if only some events are wanted.
      csv: The format of CSV files.

    Raises:
      ConfigError: A value is outside its range, or a group names a missing column.

    Example:
      >>> spec = HistorySpec("user", "ts", groups={"item": ("item", "action"), "rest": ("price",)})
      >>> HistorySpec("user", "ts", stripe_events=0)
      Traceback (most recent call last):
      gmeta.core.errors.ConfigError: stripe_events must lie in [1, 65536], got 0
    """

    user: str
    time: str
    columns: Mapping[str, ColumnSpec] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shards: int = 16
    stripe_events: int = 256
    csv: CsvForm = field(default_factory=CsvForm)

    def __post_init__(self) -> None:
        for name, value, most in (
            ("shards", self.shards, MAX_SHARDS),
            ("stripe_events", self.stripe_events, MAX_EVENTS),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name} must lie in [1, {most}], got {value}")
        if self.user == self.time:
            raise ConfigError(f"user and time are both column {self.user!r}")
        own = [name for names in self.groups.values() for name in names]
        twice = sorted({name for name in own if own.count(name) > 1 or name in (self.user, self.time)})
        if twice:
            raise ConfigError(
                f"groups: {', '.join(twice)}: each column is in one group, the user and the time in all"
            )

    @classmethod
    def load(cls, path: Path) -> HistorySpec:
        """Read a TOML file.

        Raises:
          ConfigError: The file can't be read, isn't TOML, or has invalid content.
        """
        return load_toml(cls, path)

    @classmethod
    def of_prepared(cls, path: str | os.PathLike[str], **own: Any) -> HistorySpec:
        """Make the spec of the rows of a prepared data set: its tasks are users, and its time is the time.

        Args:
          path: The data set's folder, or the folder and a split.
          **own: Attributes to set differently.

        Raises:
          ConfigError: The rows have no time, or a value is outside its range.
          DataError: The data set's manifest can't be read.
        """
        roles = prepared_roles(path)
        found: dict[str, Any] = {"user": roles.task, "time": roles.time, **own}
        if found["time"] is None:
            raise ConfigError(f"{path} was prepared without a time: name the column with --time")
        return cls(**found)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HistorySpec:
        """Read a spec from what `to_json` returns."""
        return from_mapping(cls, value, where="the store's spec")

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values."""
        columns = {name: column.to_json() for name, column in self.columns.items()}
        groups = {name: list(names) for name, names in self.groups.items()}
        csv = self.csv.to_json()
        return {**asdict(self), "columns": columns, "groups": groups, "csv": csv}

    def table(self) -> TableSpec:
        """Return the spec of the table that events are read from."""
        grouped = {
            name: self.columns.get(name, ColumnSpec()) for names in self.groups.values() for name in names
        }
        return TableSpec(
            self.user, time=self.time, columns={**grouped, **self.columns}, csv=self.csv, texts_limit=0
        )

    def resolve(self, table: TableSpec) -> HistorySpec:
        """Return the spec with every column and group named.

        Args:
          table: What `TableSpec.resolve` returned for `table`.

        Raises:
          ConfigError: A column holds lists, the time isn't int64, no group has a column, or a column has a
            name that the store reserves.
        """
        lists = [name for name, column in table.columns.items() if column.is_list]
        if lists:
            raise ConfigError(
                f"column {lists[0]!r} holds lists, and an event has one value in each column: leave it out, "
                "or write an event for each value"
            )
        if table.columns[self.time].dtype != "int64":
            raise ConfigError(
                f"column {self.time!r} is the time and must be an int64, got {table.columns[self.time].dtype}"
            )
        if BIRTH in table.columns:
            raise ConfigError(
                f"column {BIRTH!r} has the name by which readers request the generation that first held an "
                "event: leave it out, by groups that name the others, or keep it by another name"
            )
        own = [name for name in table.columns if name not in (self.user, self.time)]
        groups = dict(self.groups) or {EVENTS: tuple(own)}
        absent = sorted(set(own) - {name for names in groups.values() for name in names})
        if absent:
            raise ConfigError(f"groups: no group has column {', '.join(absent)}")
        return HistorySpec(
            self.user, self.time, dict(table.columns), groups, self.shards, self.stripe_events, self.csv
        )

    @property
    def all_columns(self) -> list[str]:
        """The user, the time, and the columns of all groups; only for a spec that `resolve` returned."""
        return [self.user, self.time, *(name for names in self.groups.values() for name in names)]

    @property
    def group_numbers(self) -> list[list[int]]:
        """The numbers of each group's columns in `all_columns`; only for a spec that `resolve` returned."""
        columns = self.all_columns
        return [[columns.index(name) for name in names] for names in self.groups.values()]

    def user_number(self, user: str) -> int:
        """Return the number of a user in a store; only for a spec that `resolve` returned.

        Raises:
          ConfigError: Users are numbers, and this isn't one that 64 bits hold.
        """
        if self.columns[self.user].hash:
            return hash_text(user)
        try:
            number = int(user)
        except ValueError as error:
            raise ConfigError(f"user {user!r} is no whole number, and users of this store are") from error
        if not -(2**63) <= number < 2**64:
            raise ConfigError(f"user {user} is no number of 64 bits, and users of this store are")
        return number if number < 2**63 else number - 2**64  # as a column of uint64 is stored

    def group_columns(self) -> dict[str, tuple[Column, ...]]:
        """Return group -> its columns; only for a spec that `resolve` returned."""
        return {
            group: tuple(Column(name, self.columns[name].dtype or "int64") for name in names)
            for group, names in self.groups.items()
        }
