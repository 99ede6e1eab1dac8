"""Rows of a prepared data set, cut by a protocol, with ids as numbers.

A protocol decides which rows are trained on:

* ``"random"``: eight in ten rows are trained on, one is for validation and one for the test, by a hash of a
  row's values.
* ``"time"``: the last tenth of the rows is the test, the tenth before it validation.
* ``"tasks"``: the rows of a tenth of the tasks are the test, those of another tenth validation, by a hash of
  a task's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import DataError
from gmeta.core.schema import OnBad
from gmeta.core.shares import splitmix64
from gmeta.experiment.baselines.task_rows import Floats, Ints
from gmeta.experiment.plan.experiment_config import NEGATIVES_ADVICE
from gmeta.experiment.plan.ranking_config import Protocol, RankingConfig
from gmeta.experiment.ranking.drawn_data import add_negatives, read_rows
from gmeta.preprocess.source import Columns, Ragged, Values, join_rows, row_count, single, take

SHARE = 10
"""One in so many rows, or tasks, is for the test, and as many for validation."""
GAP = -(2.0**53)
"""What `gmeta prepare` stores for a gap in a column of whole numbers."""
FARTHEST = 5.0
"""Scaled numbers are clipped at so many deviations."""

_WIDE = 100.0  # from this ratio of largest number to median on, numbers are on a logarithmic scale


def cut(columns: Columns, protocol: Protocol, *, task: str | None, time: str | None) -> list[Ints]:
    """Divide rows by a protocol.

    Args:
      columns: Column -> values.
      protocol: The protocol.
      task: The column of tasks, for the protocol ``"tasks"``.
      time: The column of times, for the protocol ``"time"``.

    Returns:
      The places of the rows in training, in validation and in the test, each ascending.

    Raises:
      DataError: A part is empty.
    """
    if protocol == "time":
        assert time is not None  # the plan checks it
        times = single(columns, time)
        begin, end = np.quantile(times, [1 - 2 / SHARE, 1 - 1 / SHARE], method="higher")
        part = (times >= begin).astype(np.int64) + (times >= end)
    else:
        if protocol == "tasks":
            assert task is not None
            key = splitmix64(single(columns, task).astype(np.uint64))
        else:
            key = row_keys(columns)
        share = (key >> np.uint64(11)).astype(np.float64) * 2.0**-53 * SHARE
        part = np.clip(np.floor(share).astype(np.int64) - (SHARE - 3), 0, 2)
    found = [np.flatnonzero(part == each) for each in range(3)]
    if not all(map(len, found)):
        train, validation, test = map(len, found)
        raise DataError(
            f"protocol {protocol!r} leaves {train:,} rows to train on, {validation:,} for validation and "
            f"{test:,} for the test",
            advice="give more data, or another protocol",
        )
    return found


def row_keys(columns: Columns) -> NDArray[np.uint64]:
    """Return a hash of each row's values, (rows,); equal rows are numbered, so that their hashes differ.

    The orders of rows and of columns have no influence. For lists, only their lengths count.
    """
    key = np.zeros(row_count(columns), np.uint64)
    for name in sorted(columns):
        values = columns[name]
        if isinstance(values, tuple):
            bits = np.diff(values[1]).astype(np.uint64)
        elif values.dtype == np.float32:
            bits = values.view(np.uint32).astype(np.uint64)
        else:
            bits = values.astype(np.uint64)
        key = splitmix64(key + splitmix64(bits))
    order = np.argsort(key, kind="stable")
    ranked = key[order]
    first = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    begin = np.flatnonzero(first)
    again = np.arange(len(key)) - np.repeat(begin, np.diff(np.append(begin, len(key))))
    found = np.empty_like(key)
    found[order] = splitmix64(ranked + again.astype(np.uint64))
    return found


@dataclass(frozen=True)
class Scale:
    """How a column of numbers is standardised.

    Attributes:
      mean: The mean in training, of logarithms if ``log``.
      deviation: The deviation in training.
      log: Whether values are first replaced by the logarithm of 1 + the absolute value, with the sign.
    """

    mean: float
    deviation: float
    log: bool

    @classmethod
    def of(cls, values: NDArray[Any]) -> Scale:
        """Choose the scale from training values, without NaN."""
        found = values.astype(np.float64)
        found = found[np.isfinite(found) & (found > GAP)]
        size = np.abs(found)
        log = bool(len(found)) and size.max() > _WIDE * max(float(np.median(size)), 1.0)
        found = _log(found) if log else found
        deviation = float(found.std()) if len(found) else 0.0
        return cls(float(found.mean()) if len(found) else 0.0, deviation or 1.0, log)

    def __call__(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Scale values; a missing one becomes the mean."""
        found = values.astype(np.float64)
        missing = ~np.isfinite(found) | (found <= GAP)
        found = _log(found) if self.log else found
        scaled = np.where(missing, 0.0, (found - self.mean) / self.deviation)
        return np.clip(scaled, -FARTHEST, FARTHEST).astype(np.float32)


def _log(values: Floats) -> Floats:
    return np.sign(values) * np.log1p(np.abs(values))


@dataclass(frozen=True)
class Examples:
    """Rows in the form that models and baselines take.

    Attributes:
      ids: Feature -> the numbers of its ids, from 1; 0 is an id that isn't in training. A list has only the
        numbers of ids that are in training.
      numbers: (rows, columns) float32, scaled.
      labels: (rows,) float64; NaN where unknown.
      users: (rows,) ids; all 0 without users.
      times: (rows,); all 0 without times.
    """

    ids: Mapping[str, Values]
    numbers: NDArray[np.float32]
    labels: Floats
    users: Ints
    times: Ints

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Ints) -> Examples:
        """Return some rows."""
        return Examples(
            take(self.ids, rows),
            self.numbers[rows],
            self.labels[rows],
            self.users[rows],
            self.times[rows],
        )

    def join(self, more: Examples) -> Examples:
        """Return these rows followed by others."""
        return Examples(
            join_rows([self.ids, more.ids]),
            *(
                np.concatenate([getattr(self, name), getattr(more, name)])
                for name in ("numbers", "labels", "users", "times")
            ),
        )

    def by_user(self, user: str) -> Ints:
        """Return the order of rows by user, then time, (rows,).

        Args:
          user: The feature of users.
        """
        return np.lexsort((self.times, np.asarray(self.ids[user])))

    def median_gap(self, user: str) -> float:
        """Return the median gap between consecutive, different times of a user; 1 if there are none.

        Args:
          user: The feature of users.
        """
        order = self.by_user(user)
        users, times = np.asarray(self.ids[user])[order], self.times[order]
        gaps = np.diff(times)[users[1:] == users[:-1]]
        return float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 1.0


@dataclass(frozen=True)
class Encoding:
    """The ids and the scales of training rows.

    Attributes:
      config: The roles of columns.
      ids: Feature -> the ids of training rows and of events, ascending; the first has the number 1.
      lists: The features that are lists.
      scales: Column of numbers -> its scale.
      mean: The mean label in training.
      deviation: The labels' deviation in training; 1 if labels are 0 and 1.

    Example:
      >>> config = RankingConfig("click", ("user",))
      >>> found = Encoding.of(config, {"user": np.array([7, 9]), "click": np.array([0.0, 1.0])})
      >>> found({"user": np.array([9, 8, 7])}).ids["user"]
      array([2, 0, 1])
    """

    config: RankingConfig
    ids: Mapping[str, Ints]
    lists: tuple[str, ...]
    scales: Mapping[str, Scale]
    mean: float
    deviation: float

    @classmethod
    def of(cls, config: RankingConfig, columns: Columns, events: Columns | None = None) -> Encoding:
        """Collect the ids and scales of training rows, and the ids of events."""
        ids = {}
        for name in config.encoded:
            known = [part[name] for part in (columns, events) if part is not None]
            flat = [values[0] if isinstance(values, tuple) else values for values in known]
            ids[name] = np.unique(np.concatenate(flat))
        labels = single(columns, config.label).astype(np.float64)
        return cls(
            config,
            ids,
            tuple(name for name in ids if isinstance(columns[name], tuple)),
            {name: Scale.of(single(columns, name)) for name in config.numbers},
            float(labels.mean()),
            1.0 if config.binary else max(float(labels.std()), 1e-9),
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Feature -> one more than the largest number of its ids."""
        return {name: len(known) + 1 for name, known in self.ids.items()}

    def __call__(self, columns: Columns) -> Examples:
        """Encode rows; ids of absent columns are unknown, numbers the mean, and labels NaN."""
        config, rows = self.config, row_count(columns)
        nothing = np.zeros(rows, np.int64)
        ids: dict[str, Values] = {}
        for name, known in self.ids.items():
            values = columns.get(name)
            if values is None:
                ids[name] = (nothing[:0], np.zeros(rows + 1, np.int64)) if name in self.lists else nothing
            else:
                ids[name] = _known(values, known) if isinstance(values, tuple) else _number(values, known)
        gaps = np.full(rows, np.nan)
        numbers = [scale(np.asarray(columns.get(name, gaps))) for name, scale in self.scales.items()]
        labels = columns.get(config.label)
        return Examples(
            ids,
            np.stack(numbers, axis=1) if numbers else np.zeros((rows, 0), np.float32),
            np.full(rows, np.nan) if labels is None else np.asarray(labels, np.float64),
            np.asarray(columns.get(config.user or "", nothing)),
            np.asarray(columns.get(config.time, nothing)),
        )


def _number(values: Ints, known: Ints) -> Ints:
    if not len(known):
        return np.zeros(len(values), np.int64)
    place = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.where(known[place] == values, place + 1, 0).astype(np.int64)


def _known(values: Ragged, known: Ints) -> Ragged:
    """Number the elements of lists, and leave out unknown ones."""
    flat, splits = values
    found = _number(flat, known)
    before = np.concatenate([[0], np.cumsum(found > 0)])
    return found[found > 0], before[splits].astype(np.int64)


@dataclass(frozen=True)
class Parts:
    """The three parts of a data set that a protocol cuts.

    Attributes:
      encoding: The encoding of the training rows.
      train: The part to which models and baselines are fitted.
      validation: The part that chooses settings, epochs and weights.
      test: The part whose results are reported.
      history: The rows that a GRM reads as histories: the training rows, and events, whose labels are NaN.
    """

    encoding: Encoding
    train: Examples
    validation: Examples
    test: Examples
    history: Examples

    @classmethod
    def read(cls, config: RankingConfig, data: Path, on_bad: OnBad = "raise") -> Parts:
        """Read the data set of an experiment, cut and encode it.

        Raises:
          DataError: The data set can't be read, a part is empty, or a label isn't finite, or not 0 or 1.
        """
        manifest = Manifest.load(data)
        roles = manifest.roles
        # All columns, so that the protocol "random" makes the same cut for any features.
        names = [column.name for column in manifest.schema if column.name != manifest.schema.batch]
        columns = read_rows(data, names, on_bad)
        if config.label not in names:  # with implicit feedback, each row is positive
            columns[config.label] = np.ones(row_count(columns), np.float32)
        events: Columns | None = None
        if config.exposed:
            shown = single(columns, config.exposed) != 0
            events, columns = (take(columns, np.flatnonzero(rows)) for rows in (~shown, shown))
        if not row_count(columns):
            raise DataError(
                f"no row to predict: {config.exposed!r} is 0 in all rows",
                path=data,
                advice="name another column",
            )
        labels = single(columns, config.label).astype(np.float64)
        bad = ~(np.isin(labels, (0.0, 1.0)) if config.binary else np.isfinite(labels))
        if bad.any():
            wanted = "0 or 1" if config.binary else "finite"
            raise DataError(
                f"row {int(np.argmax(bad)):,}: the label {config.label!r} is {labels[bad][0]:g}, and must be "
                f"{wanted}",
                path=data,
                advice="prepare the data set again, with --label 'COLUMN >= NUMBER' for 0 and 1",
            )
        own = {name: values for name, values in columns.items() if name != config.label}
        rows = cut(own, config.protocol, task=config.user or roles.task, time=config.time or roles.time)
        if config.negatives is not None:
            assert config.user is not None  # checked in the settings
            assert config.item is not None
            roles_of = {"user": config.user, "item": config.item, "label": config.label}
            times = {name for name in (config.time, roles.time) if name}
            columns, rows = add_negatives(columns, rows, config.negatives, **roles_of, apart=times)
            labels = single(columns, config.label).astype(np.float64)
        if config.binary:
            for name, part in zip(("train on", "validate on"), rows[:2], strict=True):
                ones = int(labels[part].sum())
                if ones in (0, len(part)):
                    raise DataError(
                        f"of {len(part):,} rows to {name}, {ones:,} have the label 1: both labels are needed",
                        path=data,
                        advice=f"if every row is a positive, draw negatives: {NEGATIVES_ADVICE}; else give "
                        "more data, or another protocol",
                    )
        encoding = Encoding.of(config, take(columns, rows[0]), events)
        whole = encoding(columns)
        train, validation, test = (whole.take(part) for part in rows)
        history = train
        if events is not None:
            past = encoding({name: values for name, values in events.items() if name != config.label})
            history = train.join(past)
        return cls(encoding, train, validation, test, history)

    def under(self, config: RankingConfig) -> Parts:
        """Return the parts with other settings of methods."""
        return replace(self, encoding=replace(self.encoding, config=config))
