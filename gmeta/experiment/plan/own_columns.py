"""The choice of columns that an experiment takes from the user's own data set, and their roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gmeta.core.data.manifest import Manifest
from gmeta.core.data.merged_keys import HASHED_BITS
from gmeta.core.errors import ConfigError
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.experiment.plan.column_settings import FeatureSettings
from gmeta.experiment.plan.column_survey import Survey, likeliest_item

_MANY, _UNIQUE = 1000, 0.9  # if nearly all of so many rows have a distinct id, the ids number events
_ID_LIMIT = 1 << HASHED_BITS
"""Columns with ids of this size or larger are hashed. Smaller ids are their own hashes."""


class ColumnPlan:
    """The roles of columns, taken from the settings, or else from the data set.

    Args:
      given: The settings.
      data: The data set.
      manifest: Its manifest.
      where: The name of the settings in error messages.

    Attributes:
      notes: Sentences that describe the decisions.
    """

    def __init__(self, given: Mapping[str, Any], data: Path, manifest: Manifest, where: str) -> None:
        self.given, self.data, self.schema, self.where = dict(given), data, manifest.schema, where
        self.table: Mapping[str, Any] = manifest.config.get("table") or {}
        self.notes: list[str] = []

    def features(self, found: Survey, label: str) -> dict[str, dict[str, Any]]:
        """Decide which columns to embed -> their settings; only the width may stay open."""
        given = self.given.get("features")
        if given is None:
            own: dict[str, Any] = {name: {} for name in self._usable_ids(found, label)}
        elif isinstance(given, list | tuple):
            own = {name: {} for name in given}
        else:
            own = dict(given)
        self.check("features", list(own), dtype="int64")
        settings = {}
        for name, values in own.items():
            where = f"{self.where}.features.{name}"
            settings[name] = self._feature(name, from_mapping(FeatureSettings, values, where), found)
        if not settings:
            raise ConfigError(
                f"{self.data} has no column of ids to embed: prepare columns of text with hash = true; its "
                f"columns are {self.names}"
            )
        shown = (
            f"{name} ({each['combiner']})" if each["combiner"] else name for name, each in settings.items()
        )
        self.notes.append(f"features: {', '.join(shown)}")
        return settings

    def _feature(self, name: str, settings: FeatureSettings, found: Survey) -> dict[str, Any]:
        column = self.schema[name]
        prepared = bool((self.table.get("columns") or {}).get(name, {}).get("hash"))
        ids = found.ids.get(name)
        far = ids is not None and not (ids.least >= 0 and ids.most < _ID_LIMIT)
        if settings.hash is False and (prepared or far):
            why = "was hashed when it was prepared" if prepared else f"holds {ids.least if ids else ''}"
            raise ConfigError(
                f"{self.where}: features.{name}: hash = false, but the column {why}: leave hash out"
            )
        combiner = settings.combiner or ("sqrtn" if column.is_list else None)
        hashed = prepared or far if settings.hash is None else settings.hash
        return to_mapping(replace(settings, hash=hashed, combiner=combiner))

    def _usable_ids(self, found: Survey, label: str) -> list[str]:
        """Return all columns of ids that may help to predict the label."""
        usable, useless = [], []
        for column in self.schema:
            if column.dtype != "int64" or column.name in (*self._roles, label):
                continue
            ids = found.ids.get(column.name)
            if ids and ids.distinct == 1:
                useless.append(f"{column.name} (the same in all rows)")
            elif ids and found.rows >= _MANY and ids.distinct > _UNIQUE * found.rows:
                useless.append(f"{column.name} (another one in nearly every row)")
            else:
                usable.append(column.name)
        if useless:
            self.notes.append(f"left out: {', '.join(useless)}")
        return usable

    def numbers(self, found: Survey, label: str, features: Mapping[str, Any]) -> dict[str, Any]:
        """Decide on the columns of numbers -> their scales."""
        given = self.given.get("numbers")
        if given is None:
            taken = (*self._roles, label, *features)
            floats = [c for c in self.schema if c.dtype == "float32" and c.name not in taken]
            if lists := [column.name for column in floats if column.is_list]:
                self.notes.append(f"left out: {', '.join(lists)} (lists of floats)")
            given = [column.name for column in floats if not column.is_list]
            constant = [name for name in given if not found.numbers[name].deviation > 0]
            if constant:
                self.notes.append(f"left out: {', '.join(constant)} (the same in all rows)")
            given = [name for name in given if name not in constant]
        self.check("numbers", list(given), lists=False, dtype="float32")
        if label in given:
            raise ConfigError(f"{self.where}: numbers names {label!r}, which is the label: leave it out")
        if given:
            self.notes.append(f"numbers: {', '.join(given)}")
        if isinstance(given, Mapping):
            return dict(given)
        scales = {}
        for name in given:
            values = found.numbers[name]
            if not values.deviation > 0:
                raise ConfigError(
                    f"{self.where}: numbers names {name!r}, which is the same in all rows: leave it out"
                )
            scales[name] = {"mean": values.mean, "deviation": values.deviation}
        return scales

    def item(self, found: Survey, features: Mapping[str, Any]) -> str | None:
        """Choose the column whose means the baselines use; None if no column looks like an item."""
        item = self.given.get("item")
        if item is not None:
            self.check("item", [item], lists=False, dtype="int64")
            return str(item)
        item = likeliest_item(found, [name for name in features if name in found.ids])
        self.notes.append(
            f"item, whose mean is a baseline: {item}"
            if item
            else "no column looks like an item's id, so the baseline is the mean of all: name one as item"
        )
        return item

    def task_columns(self, found: Survey, columns: Sequence[str], item: str | None) -> tuple[str, ...]:
        """Find the features that are the same in all rows of a task."""
        same = [
            name
            for name in columns
            if name in found.ids and name != item and found.ids[name].of_tasks == found.tasks
        ]
        if same:
            self.notes.append(f"the same in all rows of a task: {', '.join(same)}")
        return tuple(same)

    @property
    def _roles(self) -> tuple[str | None, ...]:
        return self.schema.task, self.schema.batch, self.table.get("time")

    @property
    def names(self) -> str:
        """The names of the columns, for error messages."""
        return ", ".join(column.name for column in self.schema if column.name != self.schema.batch)

    def check(self, key: str, names: Sequence[str], *, lists: bool = True, dtype: str | None = None) -> None:
        """Raise an error if a column doesn't exist, or can't have the role that ``key`` gives it."""
        for name in names:
            if not isinstance(name, str) or name not in self.schema:
                raise ConfigError(
                    f"{self.where}: {key} names {name!r}, which {self.data} doesn't have; "
                    f"its columns are {self.names}"
                )
            column = self.schema[name]
            if column.name in (self.schema.task, self.schema.batch):
                raise ConfigError(
                    f"{self.where}: {key} names {name!r}, which tells tasks or batches: leave it out"
                )
            if column.is_list and not lists:
                raise ConfigError(
                    f"{self.where}: {key} names {name!r}, which holds lists: name a column of one value a row"
                )
            if dtype is not None and column.dtype != dtype:
                use = "features take ids, numbers take floats"
                raise ConfigError(f"{self.where}: {key} names {name!r}, which is {column.dtype}: {use}")
