"""Completes the settings of an experiment on rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.schema import Column, OnBad
from gmeta.core.settings import from_mapping
from gmeta.experiment.plan.experiment_config import NEGATIVES_ADVICE, budget_seconds, describe_negatives
from gmeta.experiment.plan.own_columns import Survey, likeliest_item, survey
from gmeta.experiment.plan.ranking_config import RankingConfig
from gmeta.experiment.ranking.drawn_data import read_rows
from gmeta.experiment.ranking.examples import Parts, cut
from gmeta.io.cuts.task_choice import TaskChoice
from gmeta.preprocess.source import Columns, single

IMPLICIT = "interaction"
"""The label of data of positive rows alone, which have none."""
BUDGET = "2m"
"""The time in which settings of methods are chosen, if no methods are given."""

_MANY, _UNIQUE = 1000, 0.9  # with this many rows and nearly all ids distinct, ids number events
_ALIKE = 1.05  # with at most this many pairs per id of either column, one is another name of the other
_COUNTED = 20  # more distinct whole numbers, some of them negative or missing, are quantities too


@dataclass(frozen=True)
class PlannedRanking:
    """An experiment, its data, and sentences that describe_negatives the decisions made for it."""

    config: RankingConfig
    parts: Parts
    notes: tuple[str, ...] = ()


def plan_ranking(
    given: Mapping[str, Any], data: Path, where: str = "config", on_bad: OnBad = "raise"
) -> PlannedRanking:
    """Decide the settings that aren't given.

    Args:
      given: Keys of `RankingConfig` and values, without ``for``.
      data: A prepared data set.
      where: The name of the settings in error messages.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.

    Raises:
      ConfigError: A key or a value is unknown; a column is missing, or can't have the role that the settings
        assign; or there is no label.
      DataError: The data set can't be read, or a part is empty.
    """
    if "methods" in given and budget_seconds(str(given.get("budget", "0"))):
        raise ConfigError(
            f"{where}: budget is for the choice of methods' settings, and methods are given: leave out either"
        )
    chosen = _Choice(given, data, where, on_bad)
    own = {
        "label": chosen.label,
        "item": chosen.item,
        "user": chosen.user,
        "time": chosen.time,
        "exposed": chosen.exposed,
        "features": chosen.features,
        "numbers": chosen.numbers,
        "protocol": chosen.protocol,
        "binary": chosen.binary,
        "budget": "0" if "methods" in given else BUDGET,
    }
    config = from_mapping(RankingConfig, {**own, **given}, where)
    parts = Parts.read(config, data, on_bad)
    methods = {name: method.complete(len(parts.train)) for name, method in config.methods.items()}
    kind = "probability" if config.binary else "value"
    notes = (
        f"predicts the {kind} of {config.label}"
        + (f" for {config.user}" if config.user else "")
        + (f" and {config.item}" if config.item else ""),
        f"features: {', '.join(config.features)}",
        *([f"numbers: {', '.join(config.numbers)}"] if config.numbers else []),
        *chosen.notes,
        *([] if config.negatives is None else [describe_negatives(config.negatives)]),
        *(
            [f"{len(parts.history) - len(parts.train):,} events, of which a GRM makes histories"]
            if config.exposed
            else []
        ),
        f"protocol {config.protocol}: {len(parts.train):,} rows to train on, {len(parts.validation):,} in "
        f"validation, {len(parts.test):,} in the test",
    )
    return PlannedRanking(replace(config, methods=methods), parts, notes)


class _Choice:
    """The roles of columns, from the settings or else from the data set."""

    def __init__(self, given: Mapping[str, Any], data: Path, where: str, on_bad: OnBad) -> None:
        self._given, self._where, self.notes = given, where, list[str]()
        manifest = Manifest.load(data)
        self._schema, roles = manifest.schema, manifest.roles
        table = manifest.config.get("table") or {}
        implicit = given.get("negatives") is not None and IMPLICIT not in self._schema
        label = None
        if not (implicit and given.get("label", roles.label) in (None, IMPLICIT)):
            label = self._column("label", roles.label, lists=False)
        if label is None and not implicit:
            raise ConfigError(
                f"{data} was prepared without a label, and there is nothing to predict: prepare it with "
                f"--label, or name a column, --set 'label=\"COLUMN\"', or, if every row is a positive, draw "
                f"negatives, {NEGATIVES_ADVICE}; the columns are {self._names}"
            )
        self.label = label or IMPLICIT
        self.user = self._column("user", None if table.get("blocks") else roles.task, "int64", lists=False)
        self.time = given.get("time", roles.time) or ""
        if self.time:
            self._check("time", self.time, "int64", lists=False)
        self.exposed = given.get("exposed", "")
        if self.exposed:
            self._check("exposed", self.exposed, "int64", lists=False)
        self.protocol = given["protocol"] if "protocol" in given else self._protocol(data, on_bad)
        times = self.time or roles.time
        for protocol, needed, option in (("time", times, "--time"), ("tasks", self.user, "--task")):
            if self.protocol == protocol and needed is None:
                raise ConfigError(
                    f"{where}: protocol {protocol!r} needs a column that {data} lacks: prepare it with "
                    f"{option} COLUMN"
                )
        blocks = roles.task if table.get("blocks") else None
        self._apart = {roles.batch, roles.time, self.time, roles.label, self.label, blocks, self.exposed}
        found = survey(data / next(iter(manifest.splits)), self._schema, label or "", TaskChoice())
        labels = found.numbers.get(self.label)
        usual = labels is None or (labels.zero_or_one and not labels.not_finite)
        if self.exposed and labels is not None:  # events may have any label
            rows = read_rows(data, [self.label, self.exposed], on_bad)
            usual = bool(np.isin(single(rows, self.label)[single(rows, self.exposed) != 0], (0, 1)).all())
        self.binary = given.get("binary", usual)
        self._hashed = roles.hashed
        self.item = self._item(found)
        self._names_of = self._same(data, manifest.splits, found, on_bad)
        self.features = given.get("features") or self._features(found)
        self.numbers = given["numbers"] if "numbers" in given else self._numbers(found)
        for key, lists in (("features", True), ("numbers", False)):
            for name in getattr(self, key):
                self._check(key, name, "int64" if key == "features" else None, lists=lists)

    @property
    def _names(self) -> str:
        return ", ".join(column.name for column in self._schema if column.name != self._schema.batch)

    def _column(
        self, key: str, usual: str | None, dtype: str | None = None, *, lists: bool = True
    ) -> str | None:
        name = self._given.get(key, usual)
        if name is not None:
            self._check(key, name, dtype, lists=lists)
        return None if name is None else str(name)

    def _check(self, key: str, name: Any, dtype: str | None, *, lists: bool) -> None:
        if not isinstance(name, str) or name not in self._schema or name == self._schema.batch:
            raise ConfigError(
                f"{self._where}: {key} names {name!r}, which isn't there; the columns are {self._names}"
            )
        column = self._schema[name]
        if column.is_list and not lists:
            raise ConfigError(f"{self._where}: {key} names {name!r}, which holds lists")
        if dtype is not None and column.dtype != dtype:
            raise ConfigError(
                f"{self._where}: {key} names {name!r}, which holds floats, and it takes ids: name it among "
                "numbers"
            )

    def _protocol(self, data: Path, on_bad: OnBad) -> str:
        if not self.time:
            return "random"
        try:
            cut(read_rows(data, [self.time], on_bad), "time", task=None, time=self.time)
        except DataError:  # for example, all times are equal
            self.notes.append(
                "the rows can't be divided by their times: validation and the test are random rows"
            )
            return "random"
        return "time"

    def _ids(self) -> list[Column]:
        """Return the columns of ids that may be features."""
        apart = {*self._apart, self.user}
        return [column for column in self._schema if column.dtype == "int64" and column.name not in apart]

    def _item(self, found: Survey) -> str | None:
        if "item" in self._given or self.user is None:
            return self._column("item", None, "int64", lists=False)
        return likeliest_item(found, [each.name for each in self._ids() if each.name in found.ids])

    def _same(self, data: Path, splits: Mapping[str, Any], found: Survey, on_bad: OnBad) -> dict[str, str]:
        """Return the columns whose ids are other names of another column's -> that column."""
        known = found.ids
        names = sorted(
            (each.name for each in self._ids() if each.name in known and known[each.name].distinct > 1),
            key=lambda name: (name != self.item, name in self._hashed),
        )
        pairs = [
            (one, other)
            for place, one in enumerate(names)
            for other in names[place + 1 :]
            if max(known[one].distinct, known[other].distinct)
            <= _ALIKE * min(known[one].distinct, known[other].distinct)
            and known[one].distinct > _COUNTED
        ]
        if not pairs:
            return {}
        columns = read_rows(data, [*{name for pair in pairs for name in pair}], on_bad)
        same: dict[str, str] = {}
        for one, other in pairs:
            if one not in same and other not in same and _alike(columns, one, other):
                same[other] = one
        return same

    def _features(self, found: Survey) -> list[str]:
        """Return all columns of ids that may help to predict the label; the user comes first."""
        own = [self.user] if self.user is not None and self.protocol != "tasks" else []
        useless = []
        for column in self._ids():
            name, ids = column.name, found.ids.get(column.name)
            if ids and ids.distinct == 1:
                useless.append(f"{name} (the same in all rows)")
            elif name != self.item and ids and found.rows >= _MANY and ids.distinct > _UNIQUE * found.rows:
                useless.append(f"{name} (another one in nearly every row)")
            elif name in self._names_of:
                useless.append(f"{name} (another name of {self._names_of[name]})")
            else:
                own.append(name)
        if useless:
            self.notes.append(f"left out: {', '.join(useless)}")
        if not own:
            raise ConfigError(
                f"{self._where}: no column of ids is left to be a feature: prepare columns of text, or name "
                f"features; the columns are {self._names}"
            )
        return own

    def _numbers(self, found: Survey) -> list[str]:
        """Return the columns of numbers: floats, and whole numbers if some are negative or missing."""
        own = []
        for column in self._schema:
            name = column.name
            if column.is_list or name in self._apart or name == self.user:
                continue
            numbers, ids = found.numbers.get(name), found.ids.get(name)
            usable = numbers is not None and column.dtype == "float32" and numbers.deviation > 0
            if ids is not None and name not in self._hashed:
                usable = ids.least < 0 and ids.distinct > _COUNTED
            if usable:
                own.append(name)
        return own


def _alike(columns: Columns, one: str, other: str) -> bool:
    """Return whether two columns name the same things: few pairs of ids differ in only one of them."""
    pair = np.stack([np.asarray(columns[one]), np.asarray(columns[other])])
    distinct: Sequence[int] = [len(np.unique(each)) for each in pair]
    return bool(np.unique(pair, axis=1).shape[1] <= _ALIKE * min(distinct))
