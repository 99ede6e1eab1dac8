"""Encodes what has changed in a model as bytes: deltas, which a stock server applies.

A delta is a vector of little-endian int64 words; every part begins at a word::

    magic  fingerprint  after  version  tables  dense  checksum  words
    for each table:  number of rows, number of removed ids
    for each dense weight:  1 if the delta has it, else 0
    for each table:  removed ids, ids, rows
    for each dense weight that it has:  its values

Rows are in the stream's format (`gmeta.core.row_formats`), as the server's tables hold them. The delta
updates a model from version ``after`` to ``version``. Ids are those of users' tables, without the bits
that separate merged tables, so servers that merge tables differently can read them. The fingerprint is a
hash of the stream's name and format, and of the names and shapes of all tables and weights; it makes
servers refuse the deltas of another training. The last word of the header is the number of all words, and
the checksum is ``sum_i (2 i + 1) w_i`` modulo 2^64 over all other words: any change of one word changes it.

`gmeta.export.delta_signatures` reads a delta in the graph of a server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import explain_write_errors, write_atomically
from gmeta.core.json_values import mapping, parse_json, text, whole, wholes
from gmeta.core.row_formats import RowDtype, RowFormat

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[Any]

STREAM, MODEL, DELTAS, ROWS = "stream.json", "model", "deltas", "rows"
"""What is in the folder of a `gmeta.export.Publisher`: the layout, SavedModels, deltas, and all rows of
external tables."""
_TABLES = "tables.json"

FORMAT = "gmeta-model-deltas"
MAGIC = int.from_bytes(b"gmdelta1", "little")
HEAD = 8
"""The number of words of the header."""
FINGERPRINT, AFTER, VERSION, CHECKSUM, SIZE = 1, 2, 3, 6, 7
"""The places of words in it."""


@dataclass(frozen=True)
class TableChange:
    """The rows of a user's table that have changed.

    Attributes:
      ids: (n,) int64, distinct, without the bits of merged tables.
      rows: (n, width) float32 or int32, their present rows in the stream's format.
      removed: (r,) int64, ids whose rows were deleted. They are removed before rows are set.
    """

    ids: Ints
    rows: Rows
    removed: Ints


@dataclass(frozen=True)
class Layout:
    """The tables and weights that a stream of deltas updates.

    Attributes:
      stream: The name of the stream; each training has a different one.
      tables: Name of a table -> the width of its rows.
      dense: Name of a dense weight -> its shape and dtype.
      rows: The dtype of the tables' rows.
    """

    stream: str
    tables: Mapping[str, int]
    dense: Mapping[str, tuple[tuple[int, ...], str]]
    rows: RowDtype = "float32"

    def format_of(self, table: str) -> RowFormat:
        """Return the format of a table's rows."""
        return RowFormat(self.rows, self.tables[table])

    @property
    def fingerprint(self) -> int:
        """A hash of the layout, int64."""
        value = [self.stream, [*self.tables.items()], [[name, *each] for name, each in self.dense.items()]]
        value += [] if self.rows == "float32" else [self.rows]
        digest = hashlib.sha256(json.dumps(value).encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)

    def save(self, path: Path) -> None:
        """Write the layout as JSON.

        Raises:
          GmetaError: The file can't be written.
        """
        value = {"format": FORMAT, "version": 1, **asdict(self), "fingerprint": self.fingerprint}
        if self.rows == "float32":
            del value["rows"]  # as earlier versions of gmeta write it
        with explain_write_errors(path):
            write_atomically(path, json.dumps(value, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Layout:
        """Read a layout that `save` wrote.

        Raises:
          DataError: There is no such file, or gmeta didn't write it.
        """
        try:
            value = mapping(parse_json(path.read_text()), "the file")
            if value["format"] != FORMAT or value["version"] != 1:
                raise ValueError(f"format {value['format']!r}, version {value['version']!r}")
            tables = mapping(value["tables"], "tables")
            dense = mapping(value["dense"], "dense")
            layout = cls(
                text(value["stream"], "stream"),
                {name: whole(dim, f"the width of {name}", 1) for name, dim in tables.items()},
                {
                    name: (tuple(wholes(shape, name)), text(kind, name))
                    for name, (shape, kind) in dense.items()
                },
                value.get("rows", "float32"),
            )
            for name in layout.tables:
                layout.format_of(name)
            if layout.fingerprint != value["fingerprint"]:
                raise ValueError("its fingerprint differs")
        except OSError as error:
            raise DataError(
                f"can't be read: {error.strerror}", path=path, advice="name the folder of a Publisher"
            ) from error
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise DataError(f"not what gmeta writes: {error}", path=path) from error
        return layout


@dataclass(frozen=True)
class Delta:
    """The changes from one version of a model to a later one.

    Attributes:
      after: The version that it updates.
      version: The version after the update.
      tables: Table -> its changes; every table of the layout.
      dense: Dense weight -> its present values; only those that the delta has.
    """

    after: int
    version: int
    tables: Mapping[str, TableChange]
    dense: Mapping[str, npt.NDArray[Any]]

    def encode(self, layout: Layout) -> bytes:
        """Return the delta's bytes."""
        counts = [(len(change.ids), len(change.removed)) for change in self._of(layout)]
        has = [name in self.dense for name in layout.dense]
        parts = [
            np.array([MAGIC, layout.fingerprint, self.after, self.version, len(counts), len(has), 0, 0]),
            np.array(counts, np.int64).reshape(-1),
            np.array(has, np.int64),
        ]
        for change in self._of(layout):
            parts += [change.removed, change.ids, _words(change.rows)]
        parts += [_words(self.dense[name]) for name in layout.dense if name in self.dense]
        words = np.concatenate([np.asarray(part, np.int64) for part in parts])
        words[SIZE] = len(words)
        words[CHECKSUM] = checksum(words)
        return words.astype("<i8", copy=False).tobytes()

    def _of(self, layout: Layout) -> list[TableChange]:
        return [self.tables[name] for name in layout.tables]

    @classmethod
    def decode(cls, data: bytes, layout: Layout, path: Path | None = None) -> Delta:
        """Read the bytes of a delta.

        Args:
          data: The bytes.
          layout: The stream's layout.
          path: The file that they were read from, for errors.

        Raises:
          DataError: The bytes aren't a delta, are damaged, or are of another layout.
        """
        words = np.frombuffer(data[: len(data) // 8 * 8], "<i8").astype(np.int64)
        if len(data) % 8 or len(words) < HEAD or words[0] != MAGIC:
            raise DataError(f"not a delta of gmeta: {len(data)} bytes", path=path)
        if words[SIZE] != len(words) or words[CHECKSUM] != checksum(words):
            raise DataError("damaged: its checksum differs", path=path, advice="copy it again")
        if words[FINGERPRINT] != layout.fingerprint:
            raise DataError("of another model or training", path=path)
        place = HEAD
        counts = words[place : place + 2 * len(layout.tables)].reshape(-1, 2)
        place += counts.size
        has = words[place : place + len(layout.dense)]
        place += len(has)

        def take(number: int) -> Ints:
            nonlocal place
            place += number
            return words[place - number : place]

        tables = {}
        for name, (rows, removed) in zip(layout.tables, counts.tolist(), strict=True):
            form = layout.format_of(name)
            gone, ids = take(removed), take(rows)
            size = rows * form.width
            values = take(-(-size // 2)).view(form.kind)[:size].reshape(rows, form.width)
            tables[name] = TableChange(ids, values, gone)
        dense = {}
        for (name, (shape, dtype)), there in zip(layout.dense.items(), has.tolist(), strict=True):
            if there:
                kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)  # which NumPy lacks
                size = int(np.prod(shape, dtype=np.int64))
                values = take(-(-size * kind.itemsize // 8)).view(kind)[:size]
                dense[name] = values.reshape(shape)
        return cls(int(words[AFTER]), int(words[VERSION]), tables, dense)


def combine(deltas: Sequence[Delta]) -> Delta:
    """Combine consecutive deltas into one, with the last state of each row and of each weight.

    Args:
      deltas: At least one; each updates the version that the one before produces.
    """
    first, *others = deltas
    for delta in others:
        tables = {name: _then(change, delta.tables[name]) for name, change in first.tables.items()}
        first = Delta(first.after, delta.version, tables, {**first.dense, **delta.dense})
    return first


def _then(one: TableChange, other: TableChange) -> TableChange:
    kept = ~np.isin(one.ids, np.concatenate([other.ids, other.removed]))
    return TableChange(
        np.concatenate([one.ids[kept], other.ids]),
        np.concatenate([one.rows[kept], other.rows]),
        np.setdiff1d(np.union1d(one.removed, other.removed), np.concatenate([one.ids[kept], other.ids])),
    )


def checksum(words: Ints) -> int:
    """Compute the checksum of a delta's words, int64, without the word that holds it."""
    factors = 2 * np.arange(len(words), dtype=np.int64) + 1
    factors[CHECKSUM] = 0
    with np.errstate(over="ignore"):
        return int((words * factors).sum(dtype=np.int64))


def _words(values: npt.NDArray[Any]) -> Ints:
    """Return values as whole words, padded with zeros."""
    data = np.ascontiguousarray(values).tobytes()
    return np.frombuffer(data + bytes(-len(data) % 8), np.int64)


def deltas_in(folder: Path) -> dict[int, Path]:
    """Return the deltas in a publisher's folder by version, in ascending order."""
    found = {int(path.stem): path for path in (folder / DELTAS).glob("*.delta") if path.stem.isdigit()}
    return dict(sorted(found.items()))


def models_in(folder: Path) -> list[int]:
    """Return the versions of the SavedModels in a publisher's folder, in ascending order."""
    return _versions(folder / MODEL)


def rows_in(folder: Path) -> list[int]:
    """Return the versions of which a publisher's folder has all external rows, in ascending order."""
    return _versions(folder / ROWS)


def _versions(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def save_external(folder: Path, names: Mapping[str, str]) -> None:
    """Note which tables' rows are in a folder of rows, before its deltas: name in the layout -> in stores."""
    write_atomically(folder / _TABLES, json.dumps(names, indent=1) + "\n")


def external_in(folder: Path, version: int) -> dict[str, str]:
    """Return the external tables at a version: name in the layout -> name in stores.

    Raises:
      DataError: What `save_external` wrote can't be read.
    """
    found = [each for each in rows_in(folder) if each <= version]
    if not found:
        return {}
    path = folder / ROWS / str(found[-1]) / _TABLES
    try:
        value = mapping(parse_json(path.read_text()), "the file")
        return {table: text(name, table) for table, name in value.items()}
    except (OSError, ValueError, TypeError) as error:  # for example, the publisher deletes it meanwhile
        raise DataError(f"can't be read: {error}", path=path) from error


def parts_in(folder: Path, version: int) -> list[Path]:
    """Return the deltas that together are all external rows of a version, in the order of their numbers."""
    return sorted((folder / ROWS / str(version)).glob("*.delta"))
