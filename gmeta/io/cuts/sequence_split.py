"""Cutting groups into sequences: a user's contexts, a history of events, and exposures with labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.schema import Column, Schema
from gmeta.io.cuts.task_choice import About, count_unsound
from gmeta.io.cuts.task_split import After, Flag, Query, check_query, query_rows
from gmeta.io.reader_stats import ReaderStats

# A selection of an element's rows, group by group.


class GroupRows(NamedTuple):
    """A selection of rows of an element's groups, in their order; one gather selects them from a column.

    Attributes:
      numbers: (n,) int64, ascending; row numbers of the element.
      splits: (groups + 1,) int64; group g has ``numbers[splits[g]:splits[g + 1]]``.
    """

    numbers: tf.Tensor
    splits: tf.Tensor

    @classmethod
    def of_marks(cls, marks: tf.Tensor, row_splits: tf.Tensor) -> GroupRows:
        """Select the rows whose mark (rows,) bool is true.

        A group's rows start after all selected rows with smaller numbers than its first row.
        """
        numbers = tf.where(marks)[:, 0]
        return cls(numbers, tf.searchsorted(numbers, row_splits, out_type=tf.int64))

    @property
    def lengths(self) -> tf.Tensor:
        """The number of rows of each group, (groups,) int64."""
        return self.splits[1:] - self.splits[:-1]

    def latest(self, most: int) -> GroupRows:
        """Keep the last ``most`` rows of each group."""
        return self._between(tf.maximum(self.splits[:-1], self.splits[1:] - most), self.splits[1:])

    def of_groups(self, groups: tf.Tensor) -> GroupRows:
        """Keep the rows of some groups (m,) int64, ascending."""
        return self._between(tf.gather(self.splits[:-1], groups), tf.gather(self.splits[1:], groups))

    def of(self, column: Any) -> tf.RaggedTensor:
        """Gather these rows of a column, (rows,) or RaggedTensor (rows, None): one ragged row a group."""
        return tf.RaggedTensor.from_row_splits(tf.gather(column, self.numbers), self.splits, validate=False)

    def _between(self, begins: tf.Tensor, ends: tf.Tensor) -> GroupRows:
        places = tf.ragged.range(begins, ends)
        return GroupRows(tf.gather(self.numbers, places.values), places.row_splits)


LastOut = Literal["train", "validation", "test"]
"""The parts of leave-last-out."""

Unexposed = Literal["leave_out", "keep"]
_PARTS = ("contexts", "history", "targets", "labels")


class _Cut(NamedTuple):
    """The groups of an element that become sequences: their numbers, tasks, first rows and parts."""

    groups: tf.Tensor
    task: tf.Tensor
    first: tf.Tensor
    history: GroupRows
    targets: GroupRows


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """A function from an element of `gmeta.io.groups` to a batch as `gmeta.io.sequences` describes it.

    Use it to insert a step between the two, such as joining features.

    Attributes:
      contexts: As for `gmeta.io.sequences`.
      history: As for `gmeta.io.sequences`.
      targets: As for `gmeta.io.sequences`.
      labels: As for `gmeta.io.sequences`.
      exposed: As for `gmeta.io.sequences`.
      history_of: As for `gmeta.io.sequences`.
      longest: As for `gmeta.io.sequences`.
      unexposed: As for `gmeta.io.sequences`.
      task: The name of the task's column, under which ``contexts`` may name it.
      path: The name of the data in messages.
      stats: Counters of the skipped users.

    Raises:
      ConfigError: An argument is invalid, or names a column that doesn't exist (raised when the split is
        called).

    Example:
      >>> split = SequenceSplit(history=["item"], targets=["item"], labels=["click"], exposed=Flag("shown"))
      >>> for element in groups("data/train", groups_per_element=480):  # doctest: +SKIP
      ...     train(split(element))
    """

    contexts: Sequence[str] = ()
    history: Sequence[str] = ()
    targets: Sequence[str] = ()
    labels: Sequence[str] = ()
    exposed: Query | LastOut | None = None
    history_of: Flag | None = None
    longest: int | None = None
    unexposed: Unexposed = "leave_out"
    task: str = "task"
    path: str = "groups"
    stats: ReaderStats | None = None

    def __post_init__(self) -> None:
        for part in _PARTS:
            names = getattr(self, part)
            if isinstance(names, str) or len(set(names)) < len(names):
                raise ConfigError(f"sequences: {part} must be a list of columns, each once; got {names!r}")
        if not (self.contexts or self.history or self.targets):
            raise ConfigError("sequences: name columns in contexts, history or targets")
        if self.exposed is None and (self.targets or self.labels):
            raise ConfigError(
                "sequences: targets and labels are columns of exposures: define these rows by exposed"
            )
        if self.history_of is not None and not isinstance(self.history_of, Flag):
            raise ConfigError(f"sequences: history_of must be a Flag, got {self.history_of!r}")
        if self.longest is not None:
            whole_number("sequences: longest", self.longest, least=1)
        if self.unexposed not in get_args(Unexposed):
            raise ConfigError(
                f"sequences: unexposed must be one of {', '.join(get_args(Unexposed))}, "
                f"got {self.unexposed!r}"
            )

    def fit_to(self, schema: Schema) -> SequenceSplit:
        """Return the same split for a data set of these columns.

        Raises:
          ConfigError: A column doesn't exist, or is of an unsuitable kind.
        """
        self._check_columns(schema)
        rule = self.exposed
        if isinstance(rule, str):
            if rule not in get_args(LastOut):
                raise ConfigError(
                    f"sequences: exposed must be one of {', '.join(get_args(LastOut))}, or a rule, got "
                    f"{rule!r}"
                )
        elif rule is not None:
            rule = check_query(rule, schema, "sequences: exposed")
        if self.history_of is not None:
            check_query(self.history_of, schema, "sequences: history_of")
        return replace(self, task=schema.task, exposed=rule)

    @tf.autograph.experimental.do_not_convert  # no Python branch on a tensor, so tracing is quicker
    def __call__(self, element: dict[str, Any]) -> dict[str, Any]:
        """Return the batch of an element of groups, or of an element that `rows` returned."""
        cut, columns = self._cut(element), element["columns"]
        return {
            "task": cut.task,
            "contexts": {
                name: cut.task if name == self.task else tf.gather(columns[name], cut.first)
                for name in self.contexts
            },
            "history": {name: cut.history.of(columns[name]) for name in self.history},
            "targets": {name: cut.targets.of(columns[name]) for name in self.targets},
            "labels": {name: tf.cast(cut.targets.of(columns[name]), tf.float32) for name in self.labels},
        }

    def _cut(self, element: dict[str, Any]) -> _Cut:
        columns, splits, task = element["columns"], element["row_splits"], element["task"]
        groups, schema = tf.range(tf.size(task, tf.int64)), _schema(element, self.task)
        fitted = self.fit_to(schema)
        kept = fitted._kept(element)
        exposed = fitted._exposures(element) & kept
        events = kept & ~exposed
        if self.history_of is not None:
            events &= self.history_of.choose(columns[self.history_of.column])
        history, targets = GroupRows.of_marks(events, splits), GroupRows.of_marks(exposed, splits)
        if self.unexposed == "leave_out" and self._leaves_out_users:
            shown = targets.lengths
            about = About(self.path, str(self.exposed), "exposed", "; such users are left out", "unexposed")
            task = count_unsound(element, shown > 0, shown, self.stats, about)["task"]
            groups = tf.where(shown > 0)[:, 0]
            history, targets = history.of_groups(groups), targets.of_groups(groups)
        if self.longest is not None:
            history = history.latest(self.longest)
        return _Cut(groups, tf.gather(task, groups), tf.gather(splits, groups), history, targets)

    @property
    def _leaves_out_users(self) -> bool:
        rule = self.exposed
        return (
            isinstance(rule, Flag)
            or rule in ("validation", "test")
            or (isinstance(rule, After) and rule.asks)
        )

    def _kept(self, element: dict[str, Any]) -> tf.Tensor:
        """Mark the rows of the sequences, both events and exposures, (rows,) bool."""
        columns, splits, rule = element["columns"], element["row_splits"], self.exposed
        if isinstance(rule, After):
            return rule.keeps(columns[rule.column])
        if not isinstance(rule, str):
            return tf.ones([splits[-1]], tf.bool)
        place, long = _from_end(splits)
        return ~long | (place >= 2) if rule == "train" else long & (place >= (rule == "validation"))

    def _exposures(self, element: dict[str, Any]) -> tf.Tensor:
        """Mark the rows that are exposures, (rows,) bool."""
        columns, splits, rule = element["columns"], element["row_splits"], self.exposed
        if isinstance(rule, After | Flag):
            return rule.choose(columns[rule.column])
        if isinstance(rule, str):
            place, long = _from_end(splits)
            return long & (place == {"train": -1, "validation": 1, "test": 0}[rule])
        lengths = splits[1:] - splits[:-1]
        counts = tf.zeros_like(lengths)
        if rule is not None:  # a user with fewer rows has no earlier exposure
            counts = tf.minimum(query_rows(rule, columns, lengths)[0], lengths)
        return tf.range(splits[-1]) >= tf.repeat(splits[1:] - counts, lengths)

    def _check_columns(self, schema: Schema) -> None:
        for part in _PARTS:
            for name in getattr(self, part):
                column = schema[name]
                if name == schema.batch or (name == schema.task and part != "contexts"):
                    advice = "" if name == schema.batch else "; it may be one of contexts"
                    raise ConfigError(f"sequences: {part} names the key {name!r}{advice}")
                if column.is_list and part == "labels":
                    raise ConfigError(
                        f"sequences: {part} must have one value a record, and {name!r} is a list"
                    )


def _from_end(splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return each row's place from its group's end, counted from 0, and whether its group has three rows."""
    lengths = splits[1:] - splits[:-1]
    place = tf.repeat(splits[1:], lengths) - 1 - tf.range(splits[-1])
    return place, tf.repeat(lengths >= 3, lengths)


def _schema(element: dict[str, Any], task: str) -> Schema:
    """Return the schema of an element's columns."""
    columns = [
        Column(name, values.dtype.name, isinstance(values, tf.RaggedTensor))
        for name, values in element["columns"].items()
    ]
    return Schema((Column(task), Column("batch_id"), *columns), task)
