"""What an engine reads from: records that are rows already, and where each came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gmeta.preprocess.bad_records import BadRecords
from gmeta.preprocess.columns import Columns, Ints
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.progress import Progress
from gmeta.preprocess.table_spec import TableSpec

NUMBER = "_gmeta_number"
"""A column that sources add: the number of the record, by which `Source.where` finds it. It isn't written."""


class Named(Protocol):
    """What the account of a run says of its input.

    Attributes:
      name: What it is called in the summary and the manifest.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - above

    def holds_rows(self, file: str) -> bool:
        """Whether a file of this name holds records, not attributes."""


class Source(Named, Protocol):
    """Rows to prepare.

    Attributes:
      path: What errors about all of it name.
      spec: The columns, decided (`TableSpec.resolve`).
      defaults: The settings that `PrepareConfig.resolve` fills in.
      rows_read: Records that `chunks` has read so far, bad ones included.
    """

    @property
    def path(self) -> Path: ...  # noqa: D102 - above

    @property
    def spec(self) -> TableSpec: ...  # noqa: D102

    @property
    def defaults(self) -> PlanConfig: ...  # noqa: D102

    @property
    def rows_read(self) -> int: ...  # noqa: D102

    def parts(self) -> Sequence[Source]:
        """Sources that are prepared apart, one for each of `PlanConfig.partitions`; itself without any."""

    def digests(self) -> Mapping[str, str]:
        """File name -> SHA-256, of every file that is read."""

    def start_digests(self) -> None:
        """Begin to digest the files, beside other work."""

    def stamps(self) -> Mapping[str, Any]:
        """File name -> JSON values that change when the file does, had at a glance."""

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """The rows, in parts of some ten thousands: the spec's columns, without the batch, and `NUMBER`."""

    def where(self, number: int) -> tuple[Path, int | None, str]:
        """A record's file, its line in a text file, and words for its place where there is no line."""

    def check(self, tasks: Ints, bad: BadRecords) -> None:
        """Say what can be said when all is read; ``tasks`` (T,) are the tasks that have rows, ascending."""
