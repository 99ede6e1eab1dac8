"""An output of Parquet files that processes write part by part.

::

  FOLDER/_predict.json           the request; other requests are refused
  FOLDER/part-00000.parquet      the rows of the first part

A part appears whole or not at all, and its rows depend on the request alone. So processes divide the parts by
their numbers, without communication, and after an interruption any number of processes can write the missing
parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from gmeta.core.collectives.place import RankPlace
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import explain_write_errors, write_atomically
from gmeta.core.json_values import parse_json
from gmeta.experiment.runs.run_folder import RunFolder

ALONE = RankPlace(0, 1, 0, 1)
"""The place of a process that writes all parts."""


@dataclass(frozen=True)
class Parts:
    """The files of an output.

    Attributes:
      folder: Their folder.
      record: The file beside them that holds the request. Readers of a folder of Parquet files skip names
        that begin with ``_``.
      total: The number of parts.
    """

    folder: Path
    record: str
    total: int

    @classmethod
    def begin(cls, folder: Path, record: str, total: int, asked: Mapping[str, Any]) -> Parts:
        """Record the request, or check that the folder has parts of the same request.

        Args:
          folder: The folder.
          record: The name of the file that holds the request.
          total: The number of parts.
          asked: The request: JSON values that change when the parts do.

        Raises:
          ConfigError: The folder has parts of another request.
          DataError: The record can't be read.
          GmetaError: The folder can't be written.
        """
        file, wanted = folder / record, parse_json(json.dumps(asked))
        parts = sorted(folder.glob("part-*.parquet"))  # before the record, which others write first
        if file.exists():
            held = cls.asked(folder, record)
            if held != wanted:
                differing = sorted(name for name in {*wanted, *held} if wanted.get(name) != held.get(name))
                raise ConfigError(
                    f"{folder} has parts of another request, with other {', '.join(differing)}: name another "
                    "--out, or delete the folder"
                )
        elif parts:
            raise ConfigError(
                f"{folder} has {parts[0].name}, but not {record}, the record of what was asked: name another "
                "--out, or delete the folder"
            )
        else:
            with explain_write_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(file, json.dumps(wanted, indent=1) + "\n")
        return cls(folder, record, total)

    @staticmethod
    def asked(folder: Path, record: str) -> dict[str, Any]:
        """Read the request.

        Raises:
          DataError: The record can't be read.
        """
        file = folder / record
        try:
            held = parse_json(file.read_text())
            if not isinstance(held, dict):
                raise ValueError("not an object")
        except (OSError, ValueError) as error:
            raise DataError(
                f"not what gmeta writes: {error}", path=file, advice="delete the folder"
            ) from error
        return held

    def path(self, number: int) -> Path:
        """Return the path of a part."""
        return self.folder / f"part-{number:05d}.parquet"

    def there(self) -> set[int]:
        """Return the numbers of the parts that are written."""
        return {number for number in range(self.total) if self.path(number).exists()}

    def of(self, place: RankPlace) -> range:
        """Return the numbers of the parts that a process must write, including existing ones."""
        return range(self.total)[place.rank :: place.size]

    @contextlib.contextmanager
    def write(self, number: int, schema: pa.Schema) -> Iterator[parquet.ParquetWriter]:
        """Yield the writer of a part, which exists after the block.

        Raises:
          GmetaError: The part can't be written; then it doesn't exist.
        """
        with _write_whole(self.path(number), schema) as writer:
            yield writer

    def join(self, out: Path) -> int:
        """Write the rows of all parts as one file, delete the folder, and return the number of rows.

        Raises:
          DataError: A part is missing, or can't be read.
          GmetaError: The file can't be written.
        """
        if missing := sorted(set(range(self.total)) - self.there()):
            raise DataError(
                f"{len(missing):,} of {self.total:,} parts are missing",
                path=self.folder,
                advice="run the same command again to write them",
            )
        try:
            schema = parquet.read_schema(self.path(0))
            with _write_whole(out, schema) as writer:
                rows = 0
                for number in range(self.total):
                    with parquet.ParquetFile(self.path(number)) as file:
                        for group in range(file.num_row_groups):
                            writer.write_table(file.read_row_group(group))
                        rows += file.metadata.num_rows
        except pa.ArrowException as error:
            raise DataError(f"a part can't be read: {error}", path=self.folder, advice="delete it") from error
        with explain_write_errors(self.folder):
            for number in range(self.total):  # before the record, without which parts are refused
                self.path(number).unlink()
            shutil.rmtree(self.folder)
        return rows


@contextlib.contextmanager
def _write_whole(path: Path, schema: pa.Schema) -> Iterator[parquet.ParquetWriter]:
    unfinished = path.with_name(f".{path.name}.unfinished")
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with parquet.ParquetWriter(unfinished, schema) as writer:
                yield writer
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def about(run: RunFolder, method: str | None, seed: int | None, files: Sequence[Path]) -> dict[str, Any]:
    """Return values that change when a run's predictions do: the run, and digests of its trained files."""
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (run.path / "config.json", *files)
        if path.exists()
    }
    return {"run": str(run.path.resolve()), "method": method, "seed": seed, "trained": digests}
