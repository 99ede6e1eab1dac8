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
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import NamedPath
from gmeta.core.json_values import mapping, parse_json, text, whole, wholes
from gmeta.core.row_formats import RowDtype, RowFormat

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[Any]

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


Tables = Mapping[str, TableChange]
"""Table -> its changes."""


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

    def to_json(self) -> str:
        """Return the layout as JSON, which `load` reads."""
        value = {"format": FORMAT, "version": 1, **asdict(self), "fingerprint": self.fingerprint}
        if self.rows == "float32":
            del value["rows"]  # as earlier versions of gmeta write it
        return json.dumps(value, indent=1) + "\n"

    @classmethod
    def load(cls, path: NamedPath) -> Layout:
        """Read the file of a layout.

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
                f"can't be read: {error.strerror or error}",
                path=path,
                advice="name the folder of a Publisher",
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

    @property
    def size(self) -> int:
        """About how many bytes it has when it is encoded."""
        of_tables = sum(
            change.ids.nbytes + change.removed.nbytes + change.rows.nbytes for change in self.tables.values()
        )
        return of_tables + sum(values.nbytes for values in self.dense.values())

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
    def decode(cls, data: bytes, layout: Layout, path: os.PathLike[str] | None = None) -> Delta:
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


def split(tables: Mapping[str, TableChange], limit: int, row_bytes: Mapping[str, int]) -> Iterator[Tables]:
    """Divide changes into parts, each of which has at most about ``limit`` bytes in a delta.

    Args:
      tables: Table -> its changes.
      limit: In bytes.
      row_bytes: Table -> the bytes of a row in a delta.

    Yields:
      Changes of every table, at least once. Together they have each row and each removed id once.
    """
    none = {
        name: TableChange(change.ids[:0], change.rows[:0], change.removed[:0])
        for name, change in tables.items()
    }
    part, size = dict(none), 0
    for name, change in tables.items():
        each = 8 + row_bytes[name]
        gone = done = 0
        while gone < len(change.removed) or done < len(change.ids):
            room = max(limit - size, 0)
            removed = min(len(change.removed) - gone, room // 8)
            rows = min(len(change.ids) - done, (room - 8 * removed) // each)
            if removed + rows == 0 and size:
                yield part
                part, size = dict(none), 0
                continue
            if removed + rows == 0:  # one is larger than the limit
                removed, rows = (1, 0) if gone < len(change.removed) else (0, 1)
            end, last = done + rows, gone + removed
            part[name] = TableChange(change.ids[done:end], change.rows[done:end], change.removed[gone:last])
            done, gone, size = end, last, size + each * rows + 8 * removed
    yield part


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
