"""What happens to a record that breaks the stated form: the first one ends the run, or each is counted.

A function that reads a record knows what is wrong with it but not where it stands; the engine that feeds it
knows where, but not what. So the function raises a `BadRecord` without a place, and the engine hands it with
the place to a `BadRecords`, which alone knows the rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from gmeta.core.data.on_bad import OnBad
from gmeta.core.errors import DataError


class Reason(Enum):
    """The ways in which a record can be bad; the values are what reports and manifests print."""

    MISSING_FIELD = "missing field"
    EXTRA_FIELD = "extra field"
    NOT_A_NUMBER = "not a number"
    OUT_OF_RANGE = "out of range"
    UNKNOWN_CODE = "unknown code"
    UNKNOWN_USER = "unknown user id"
    UNKNOWN_ITEM = "unknown item id"
    REPEATED_ID = "id given twice"
    REPEATED_KEY = "key given twice in a task"
    EMPTY_TASK = "empty task"
    NULL = "null"
    NAN = "NaN"
    WRONG_TYPE = "wrong type"
    MISSING_COLUMN = "missing column"
    MALFORMED = "malformed line"


WHOLE_NUMBER = "a whole number"
"""What an int64 column is expected to hold, in messages; text in one is most often an id."""
_TEXT_ID = re.compile(rf"{WHOLE_NUMBER}, got (?!'-?[0-9.]+')")


class BadRecord(Exception):  # noqa: N818 - it is caught and counted, and seldom an error of the run
    """One record breaks the form.

    Args:
      reason: Which rule it breaks.
      message: What was received and what was expected; the place is added by who knows it.
      of_table: Whether a spec describes its columns, which may then be what has to be mended.
    """

    def __init__(self, reason: Reason, message: str, *, of_table: bool = False) -> None:
        super().__init__(message)
        self.reason, self.of_table = reason, of_table


@dataclass
class BadRecords:
    """Applies the rule for bad records and keeps count.

    Attributes:
      on_bad: The rule.
      counts: (file name, reason) -> records left out.
      examples: (file name, reason) -> messages with file and line, of the first `EXAMPLES` left out.
    """

    EXAMPLES = 3

    on_bad: OnBad = "raise"
    counts: dict[tuple[str, Reason], int] = field(default_factory=dict)
    examples: dict[tuple[str, Reason], list[str]] = field(default_factory=dict)

    def add(self, error: BadRecord, path: Path, line: int | None, count: int = 1) -> None:
        """Raise ``error`` with its place, or count it.

        Args:
          error: What is wrong.
          path: The file that the record is in.
          line: Its line, counted from 1; None where the message says where it is.
          count: How many records are bad in this way.

        Raises:
          DataError: The rule is ``"raise"``.
        """
        if self.on_bad == "raise":
            advice = "mend it, or leave such records out with --on-bad skip"
            if error.of_table and error.reason is Reason.NULL:
                advice = f'say a default for its column in --spec, default = "unknown" for text, {advice}'
            if error.of_table and error.reason is Reason.NOT_A_NUMBER and _TEXT_ID.search(str(error)):
                advice = (
                    "if it is an id, say hash = true for its column in --spec, which stores text and numbers "
                    "alike; if not, mend it"
                )
            raise DataError(f"{error.reason.value}: {error}", path=path, line=line, advice=advice) from error
        key = (path.name, error.reason)
        self.counts[key] = self.counts.get(key, 0) + count
        examples = self.examples.setdefault(key, [])
        if len(examples) < self.EXAMPLES:
            examples.append(str(DataError(str(error), path=path, line=line)))
