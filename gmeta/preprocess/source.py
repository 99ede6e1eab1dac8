"""The interface of an engine's input: records as rows, and the place that each came from."""

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
"""A column that sources add: the record's number, by which `Source.where` finds it. It isn't stored."""


class Named(Protocol):
    """The part of an input that a run's summary needs.

    Attributes:
      name: The input's name in the summary and the manifest.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - above

    def holds_rows(self, file: str) -> bool:
        """Return whether a file of this name holds records, not attributes."""


class Source(Named, Protocol):
    """Rows to prepare.

    Attributes:
      path: The path that errors about the whole source name.
      spec: The columns, as `TableSpec.resolve` decided them.
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
        """Return the sources to prepare separately: one per partition, or itself without partitions."""

    def digests(self) -> Mapping[str, str]:
        """Return file name -> SHA-256, for every file that is read."""

    def start_digests(self) -> None:
        """Begin to digest the files, in parallel with other work."""

    def stamps(self) -> Mapping[str, Any]:
        """Return file name -> JSON values that change when the file does, found without reading it."""

    def count(self) -> int:
        """Return how many records there are at most, bad ones included, without parsing them."""

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield parts of some ten thousand rows: the spec's columns, without the batch, and `NUMBER`."""

    def where(self, number: int) -> tuple[Path, int | None, str]:
        """Return a record's file, its line in a text file, and words for its place if it has no line."""

    def check(self, tasks: Ints, bad: BadRecords) -> None:
        """Make the checks that need all rows; ``tasks`` (T,) are the tasks that have rows, ascending."""
