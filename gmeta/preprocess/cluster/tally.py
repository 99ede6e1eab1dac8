"""The counts of bad records, kept by each worker and added up; the sum doesn't depend on who read what.

A worker that reads a piece of a file doesn't know its position in the file. So examples show the records'
content, and the first ones in alphabetical order are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from gmeta.preprocess.bad_records import BadRecord, BadRecords, Reason
from gmeta.preprocess.cluster.text_records import Refused
from gmeta.preprocess.columns import Columns, single, take
from gmeta.preprocess.plan.normalisation import normalise
from gmeta.preprocess.plan.outcome import describe_repeated
from gmeta.preprocess.source import NUMBER
from gmeta.preprocess.table_spec import TableSpec

_DESCRIBED = (
    1000  # bad records of a part that are described: so many that the cuts seldom affect the kept examples
)


@dataclass
class Tally:
    """The counts of records read and of bad records.

    Attributes:
      rows_read: The number of records read, bad ones included.
      counts: (file's number, reason) -> how many are bad.
      examples: (file's number, reason) -> what is wrong with the first few.
    """

    rows_read: int = 0
    counts: dict[tuple[int, Reason], int] = field(default_factory=dict)
    examples: dict[tuple[int, Reason], list[str]] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        """The number of bad records."""
        return sum(self.counts.values())

    def add(self, file: int, reason: Reason, messages: Iterable[str], count: int) -> None:
        """Count bad records of a file; ``messages`` describe some of them."""
        key = file, reason
        self.counts[key] = self.counts.get(key, 0) + count
        self.examples[key] = sorted({*self.examples.get(key, ()), *messages})[: BadRecords.EXAMPLES]

    def add_refused(self, file: int, lines: Sequence[Refused]) -> None:
        """Count lines that aren't records."""
        self.rows_read += len(lines)
        for line in lines:
            self.add(file, line.reason, [line.message], 1)

    def add_repeated(self, rows: Columns, spec: TableSpec) -> None:
        """Count rows whose key an earlier row of the task has; `NUMBER` holds each row's file."""
        files = single(rows, NUMBER)
        for file in np.unique(files).tolist():
            own = np.flatnonzero(files == file)
            messages = (message for _, message in describe_repeated(take(rows, own[:_DESCRIBED]), spec))
            self.add(file, Reason.REPEATED_KEY, messages, len(own))

    def merge(self, other: Tally) -> None:
        """Add another worker's tally."""
        self.rows_read += other.rows_read
        for key, count in other.counts.items():
            self.add(*key, other.examples[key], count)

    def to_json(self) -> str:
        """Encode the tally as one line of JSON."""
        kinds = [
            [file, reason.name, count, self.examples[file, reason]]
            for (file, reason), count in sorted(
                self.counts.items(), key=lambda one: (one[0][0], one[0][1].name)
            )
        ]
        return json.dumps([self.rows_read, kinds])

    @classmethod
    def from_json(cls, text: str) -> Tally:
        """Decode what `to_json` encoded."""
        rows_read, kinds = json.loads(text)
        found = cls(rows_read)
        for file, reason, count, examples in kinds:
            found.add(file, Reason[reason], examples, count)
        return found

    def report(self, bad: BadRecords, path_of: Callable[[int], Path]) -> None:
        """Apply the rule for bad records to the tally.

        Args:
          bad: The rule; it counts the records, or raises at the first one.
          path_of: A file's number -> the file.

        Raises:
          DataError: The rule is ``"raise"``, and there is a bad record.
        """
        for (file, reason), count in sorted(self.counts.items(), key=lambda one: (one[0][0], one[0][1].name)):
            examples = self.examples[file, reason]
            for place, message in enumerate(examples):
                rest = count - len(examples) if place + 1 == len(examples) else 0
                bad.add(BadRecord(reason, message, of_table=True), path_of(file), None, 1 + rest)


def good_rows(batch: pa.RecordBatch, spec: TableSpec, file: int, tally: Tally) -> Columns | None:
    """Return the good rows of some records, or None if there are none, and count the bad records.

    Args:
      batch: Records.
      spec: The columns, as `TableSpec.resolve` decided them.
      file: The number of the records' file.
      tally: Counts all records.
    """
    tally.rows_read += batch.num_rows
    if not batch.num_rows:
        return None
    found = normalise(batch, spec)
    for fault in found.faults:
        messages = {fault.describe(row) for row in fault.rows[:_DESCRIBED].tolist()}
        tally.add(file, fault.reason, messages, len(fault.rows))
    return found.columns if len(found.rows) else None
