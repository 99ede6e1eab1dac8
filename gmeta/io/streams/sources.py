"""What a stream is made of: one log, or two that are joined, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from gmeta.io.streams.late_labels import LabelJoin, added_columns
from gmeta.io.streams.merge import Reader
from gmeta.io.streams.records import Columns, Format, Ints, Rows, StreamCounts, arrow_schema, event_times


class Log(Protocol):
    """A source of rows, in partitions."""

    @property
    def name(self) -> str:
        """The log, for messages."""
        ...

    @property
    def unit(self) -> str | None:
        """The unit of the rows' own times; None if they have none."""
        ...

    def partitions(self) -> Sequence[str]:
        """Return the names of the partitions."""
        ...

    def infer(self, form: Format | None) -> dict[str, str] | None:
        """Infer the columns from the first rows; None if there are none yet."""
        ...

    def open(
        self, partition: str, place: Any, columns: Columns, form: Format | None, counts: StreamCounts | None
    ) -> Reader:
        """Read a partition from a place on; None is where a new reader begins."""
        ...

    def from_first(self) -> Log:
        """Return the log with new readers that begin at the first row."""
        ...


@dataclass(frozen=True)
class Source:
    """A log and how its rows are read.

    Attributes:
      log: The log.
      columns: The columns.
      time: The column of event times; None: the log's own times.
      unit: Its unit.
      form: The form of a row.
      skips: Whether bad rows are skipped.
      counts: Counters.
    """

    log: Log
    columns: Columns
    time: str | None
    unit: str
    form: Format | None
    skips: bool
    counts: StreamCounts

    def times(self, rows: Rows) -> Ints:
        """Return the event times of rows; 0 for a single partition without times."""
        if self.time is not None:
            return event_times(rows.batch, self.time, self.unit)
        return np.zeros(rows.batch.num_rows, np.int64) if rows.times is None else rows.times


@dataclass(frozen=True)
class Joining:
    """The arguments of `join`, in microseconds and bytes."""

    key: Sequence[str]
    within: int
    lateness: int
    corrections: int
    label: str
    outcome: str | None
    negatives: float
    memory: int
    spill: Path | None

    def start(self) -> LabelJoin:
        """Return a join without exposures."""
        return LabelJoin(
            key=self.key,
            within=self.within,
            lateness=self.lateness,
            corrections=self.corrections,
            label=self.label,
            outcome=self.outcome,
            negatives=self.negatives,
            memory=self.memory,
            spill=self.spill,
        )


@dataclass(frozen=True)
class Described:
    """What a stream is made of.

    Attributes:
      sources: The logs.
      joining: How they are joined; None for a single log.
      follow: Whether to wait for further rows at the end.
      idle: After how many seconds at its end a partition no longer holds up others; None: never.
      poll: Seconds between two looks for new rows.
    """

    sources: Sequence[Source]
    joining: Joining | None
    follow: bool
    idle: float | None
    poll: float

    @property
    def counts(self) -> Sequence[StreamCounts]:
        """What was read from each log."""
        return [source.counts for source in self.sources]

    @property
    def schema(self) -> pa.Schema:
        """The columns of the examples."""
        schema = arrow_schema(self.sources[0].columns)
        if self.joining is None:
            return schema
        extra = [self.joining.label, *added_columns(self.joining.negatives, self.joining.corrections)]
        return pa.schema([*schema, *(pa.field(name, pa.float32()) for name in extra)])
