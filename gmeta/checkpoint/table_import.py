"""Imports a table from files into a model, on all ranks that hold its rows."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.checkpoint.chain import Columns
from gmeta.checkpoint.column_files import ColumnSource, Piece, open_source
from gmeta.checkpoint.table_description import VOCABULARY, TableDescription
from gmeta.checkpoint.table_part import export_ranges
from gmeta.core.collectives.rank_group import Gather, Ranks
from gmeta.core.errors import ConfigError, DataError, rows_not_finite
from gmeta.core.merged_tables import NamedTable, find_table, fold_numbers
from gmeta.core.shares import LOGICAL_SHARDS
from gmeta.ops.distinct import owned_by
from gmeta.ops.id_hash import hash_text
from gmeta.ops.table.followed_optimizer import with_fresh_slots
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.records import Records
from gmeta.ops.table.restored_rows import clear_table, tables_by_name

# Checks rows from a file, and converts them to a table's records.

Array = npt.NDArray[Any]

_MOST = 2**32 - 1  # frequencies and last steps are saved in 32 bits


@dataclass(frozen=True)
class RowsCheck:
    """Requirements on rows that are imported into a table.

    Attributes:
      found: The table.
      dim: Width of its rows.
      slot_floats: Width of their slots.
      finite: Whether NaN and infinite values are refused.
      latest: The highest last step allowed.
    """

    found: NamedTable
    dim: int
    slot_floats: int
    finite: bool
    latest: int

    def read(self, piece: Piece) -> Columns:
        """Return a piece's columns in the dtypes of `gmeta.ops.table.records.Records`, with the table's keys.

        Raises:
          DataError: A column has another dtype or width, or a row has a value that can't be imported.
        """
        read = {"keys": self.keys(piece)}
        for name, column in piece.columns.items():
            if name in ("values", "slots"):
                width = self.dim if name == "values" else self.slot_floats
                read[name] = self._vectors(piece, name, column, width)
            elif name != "keys":
                most = self.latest if name == "last_step" else _MOST
                read[name] = self._counts(piece, name, column, most)
        return read

    def keys(self, piece: Piece) -> npt.NDArray[np.int64]:
        """Return the keys of a piece's ids, hashed and with the table's prefix if it has one.

        Raises:
          DataError: The ids have another dtype, or one can't be an id of the table.
        """
        ids, name = piece.columns["keys"], f"table {self.found.name!r}"
        if ids.dtype.kind in "OSU" and self.found.hashed:
            if ids.dtype.kind == "O" and not all(isinstance(each, str | bytes) for each in ids):
                raise DataError("keys must be whole numbers or text", path=piece.path)
            numbers = np.asarray(hash_text(tf.constant(ids)))
        elif ids.ndim != 1 or ids.dtype.kind not in "iu":
            takes = "whole numbers" + " or text" * self.found.hashed
            advice = "cast them to int64" if ids.dtype.kind == "f" else "a feature with hash=True takes text"
            raise DataError(
                f"keys are {_form(ids)}, but {name} takes {takes}, one for each row",
                path=piece.path,
                advice="" if self.found.hashed and ids.dtype.kind != "f" else advice,
            )
        else:
            numbers = ids.astype(np.int64)  # uint64 as the int64 of the same bits, as in batches
        bits = self.found.id_bits
        if bits is None:
            return numbers
        if self.found.fold is not None:
            numbers = fold_numbers(numbers, bits, self.found.fold)
        else:
            outside = (numbers < 0) | (numbers >= 1 << bits)
            _refuse(
                piece,
                outside,
                ids,
                f"key {{}} isn't an id of {name}, whose ids are in [0, 2^{bits}); a feature with hash=True "
                "takes any 64-bit integer",
            )
        return numbers | self.found.prefix

    def _vectors(self, piece: Piece, name: str, column: Array, width: int) -> Array:
        exact = column.dtype.kind == "f" and column.dtype.itemsize <= 4
        if not exact or column.ndim != 2 or column.shape[1] != width:
            form = _form(column) + ", one number a row" * (column.ndim == 1)
            raise DataError(
                f"{name} are {form}, but table {self.found.name!r} takes {width} float32 a row",
                path=piece.path,
                advice="cast them" if column.shape[1:] == (width,) else "",
            )
        if self.finite:
            wrong = np.zeros(len(column), np.bool_)
            wrong[rows_not_finite(column)] = True
            told = f"the {name} of key {{}} of table {self.found.name!r} hold NaN or infinity"
            _refuse(piece, wrong, piece.columns["keys"], f"{told}; finite=False takes them")
        return np.ascontiguousarray(column, np.float32)

    def _counts(self, piece: Piece, name: str, column: Array, most: int) -> Array:
        if column.ndim != 1 or column.dtype.kind not in "iu":
            raise DataError(f"{name} is {_form(column)}, but must be a whole number a row", path=piece.path)
        wrong = (column < 0) | (column > most)
        _refuse(piece, wrong, column, f"{name} {{}} isn't in [0, {most}]{_ADVICE.get(name, '')}")
        return column.astype(np.int64)


_ADVICE = {
    "last_step": ", the steps that the table has made: import it without state, or into a new model, whose "
    "tables take the step of the files"
}


def _form(array: Array) -> str:
    kind = "text" if array.dtype.kind in "OSU" else array.dtype.name
    return kind if array.ndim == 1 else f"{kind} of shape (rows, {', '.join(map(str, array.shape[1:]))})"


def _refuse(piece: Piece, wrong: npt.NDArray[np.bool_], values: Array, message: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(f"row {piece.first + row}: {message.format(values[row])}", path=piece.path)


# Refuses a table with duplicate keys, in bounded memory.

Keys = npt.NDArray[np.int64]

_KEYS = 1 << 24  # in memory at once, in about 32 bytes each

Start = tuple[int, Path, int]
"""Where a piece begins: its first row among those of all files, its file, and its first row in it."""


def refuse_twins(
    keys: Callable[[], Iterator[Keys]], starts: Sequence[Start], rows: int, id_bits: int | None
) -> None:
    """Read all keys, a share of them in each pass, and refuse a duplicate key.

    Args:
      keys: Reads the keys of all pieces.
      starts: Where the pieces begin.
      rows: How many keys there are.
      id_bits: Number of a key's low bits that contain the id; None: all.

    Raises:
      DataError: A key occurs twice; the message names both places.
    """
    passes = max(1, -(-rows // _KEYS))
    for number in range(passes):
        parts, places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        first = 0
        for part in keys():
            own = np.flatnonzero(_mixed(part) % np.uint64(passes) == number)
            parts.append(part[own])
            places.append(own + first)
            first += len(part)
        found, at = np.concatenate(parts), np.concatenate(places)
        order = np.argsort(found, kind="stable")
        twins = np.flatnonzero(np.diff(found[order]) == 0)
        if len(twins):
            place = twins[np.argmin(at[order[twins + 1]])]
            key = int(found[order[place]]) & ((1 << id_bits) - 1 if id_bits is not None else -1)
            one, other = (_place(starts, int(at[order[i]])) for i in (place, place + 1))
            raise DataError(f"key {key} occurs twice, in {one} and in {other}; keep one of them")


def _mixed(keys: Keys) -> npt.NDArray[np.uint64]:
    """Spread keys that follow a pattern over the passes."""
    return (keys.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)


def _place(starts: Sequence[Start], row: int) -> str:
    first, path, inside = starts[bisect_right([start for start, _, _ in starts], row) - 1]
    return f"{path} row {inside + row - first}"


Mode = Literal["merge", "replace"]


@dataclass(frozen=True)
class TableImport:
    """Report on an imported table.

    Attributes:
      rows: How many rows the files have.
      own: How many of them this rank owns and has imported.
      left_out: The columns of the files that weren't imported.
      seconds: How long it took.
    """

    rows: int
    own: int
    left_out: tuple[str, ...]
    seconds: float


def import_table(
    model: Any,
    table: str | None,
    source: str | os.PathLike[str],
    *,
    mode: Mode = "merge",
    state: bool = False,
    columns: Mapping[str, str] | None = None,
    finite: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    gather: Gather | None = None,
) -> TableImport:
    """Import ids with their rows into a table: those that `export_table` wrote, or another program's.

    Nothing changes if anything is wrong with the files: they are read once to check them, and again to import
    them, piece by piece. Every rank reads them and keeps the rows of the keys that it owns. The next save of
    an incremental checkpoint is a full one. Import between two steps.

    Args:
      model: As in `export_table`.
      table: As in `export_table`.
      source: A path: of a folder with ``keys.npy``, ``values.npy`` and perhaps ``frequency.npy``; of an Arrow
        IPC or Feather file; or of a folder of such files. ``keys`` are any integers that are ids of the
        table, or text if its features have ``hash=True``; they are hashed as the features' ids are.
        ``values`` are float32 or float16, (n, dim), in Arrow lists of dim numbers.
      mode: ``"merge"`` adds the rows; for an existing id, the files' row replaces all parts of the table's
        row. ``"replace"`` removes the table's other rows first, and the admission's counts of ids without a
        row. Tables that are merged with it keep their rows; the admission state of all of them is then kept.
      state: Whether to import the optimizer's slots and the last steps, which `export_table` wrote with
        ``state=True``; training then continues as in the exporting model. The table's step becomes that of
        the files if it is empty, or if it is replaced and not merged with others. False: rows start with the
        slots of new rows, and their last step is the table's step.
      columns: Column -> its name in the files, such as ``{"keys": "item_id", "values": "vector"}``.
      finite: Whether to refuse NaN and infinite values.
      rank: As in `gmeta.checkpoint.sharded.load`.
      world_size: As in `gmeta.checkpoint.sharded.load`.
      gather: As in `gmeta.checkpoint.sharded.load`.

    Returns:
      What this rank imported. Rows without a ``frequency`` have 0.

    Raises:
      ConfigError: There is no such table; the files are of another optimizer or another hash; or an argument
        can't be used.
      DataError: A file is missing or damaged, has other dtypes or widths, or has a key twice. The message
        names the file and the row, counted from 0.

    Example:
      ::

        np.save("pretrained/keys.npy", item_ids)                       # (n,) int64
        np.save("pretrained/values.npy", vectors.astype(np.float32))   # (n, dim)
        import_table(model, "item", "pretrained")
    """
    started = time.perf_counter()
    if mode not in ("merge", "replace"):
        raise ConfigError(f"mode must be 'merge' or 'replace', got {mode!r}")
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"source must be the path of files, got {type(source).__name__}: save ids and rows by numpy.save "
            "as keys.npy and values.npy in a folder, and give its path"
        )
    tables = tables_by_name(model)
    merged = {name: each.merged_keys for name, each in tables.items()}
    found = find_table(table, merged, f"{type(model).__name__} {getattr(model, 'name', '')!r}")
    target = tables[found.physical]
    ranks = Ranks.of(rank, world_size, gather)
    sizes = ranks.gather(int(target.size())) if ranks.gather is not None else [int(target.size())]
    clears = (state and not any(sizes)) or (mode == "replace" and found.alone)
    with ranks.together():
        files = open_source(Path(source), columns)
        names = [name for name in files.columns if name in VOCABULARY or state]
        noted, floats = _check_state(files, target, found, Path(source)) if state else (None, 0)
        _check_hash(files.description, found)
        step = noted.step if noted is not None and clears else int(target.step())
        check = RowsCheck(found, target.dim, floats, finite, step)
        rows = _check_rows(files, names, check, Path(source))
    with ranks.together():
        fitted = _fit_slots(target, noted)
        if clears:
            clear_table(target, step)
        elif mode == "replace":
            _remove_rows(target, found)
        target.reserve(int(target.size()) + rows // ranks.owners)
        own = 0
        for piece in files.short_pieces(names):
            read = _owned(check.read(piece), ranks)
            target.import_(fitted(_records(read, step)))
            own += len(read["keys"])
    left_out = tuple(name for name in files.columns if name not in names)
    return TableImport(rows, own, left_out, time.perf_counter() - started)


def _check_state(
    files: ColumnSource, target: HashTable, found: NamedTable, path: Path
) -> tuple[TableDescription, int]:
    """Refuse files whose slots and last steps can't be those of the table; return the width of the slots."""
    noted = files.description
    if noted is None or "last_step" not in files.columns:
        raise DataError(
            "no slots and last steps of an optimizer are here", path=path, advice="export with state=True"
        )
    kind = target.optimizer.kind
    if noted.optimizer != kind and not target.follows:
        raise ConfigError(
            f"{path} was exported with optimizer {noted.optimizer}, but table {found.name!r} has {kind}: "
            "make it with that optimizer, or import without state"
        )
    own = target.optimizer.slot_floats(target.dim)
    floats = own if noted.optimizer == kind else noted.slot_floats
    if floats and "slots" not in files.columns:
        raise DataError("the slots are missing", path=path, advice="export with state=True")
    return noted, floats


def _check_hash(noted: TableDescription | None, found: NamedTable) -> None:
    """Refuse hashes that were folded differently than the table folds them."""
    if noted is None or not noted.hashed or found.merged is None:
        return
    if (noted.fold, noted.id_bits) == (found.fold, found.id_bits):
        return
    own = "no hashes" if found.fold is None else f"hashes of {found.id_bits} bits, folded by {found.fold!r}"
    raise ConfigError(
        f"the keys are hashes of {noted.id_bits} bits, folded by {noted.fold!r}, but table {found.name!r} "
        f"has {own}: import the texts, or make the collection as it was when the keys were exported, with "
        f"the same tables, hash=True and fold={noted.fold!r}"
    )


def _check_rows(files: ColumnSource, names: list[str], check: RowsCheck, path: Path) -> int:
    """Read everything once to check it; return the number of rows."""
    rows, starts = 0, list[Start]()
    for piece in files.short_pieces(names):
        starts.append((rows, piece.path, piece.first))
        rows += len(check.read(piece)["keys"])
    if files.description is not None and files.description.rows != rows:
        raise DataError(f"{rows} rows, but the JSON file there says {files.description.rows}", path=path)

    def keys() -> Iterator[npt.NDArray[np.int64]]:
        for piece in files.short_pieces(["keys"]):
            yield check.keys(piece)

    refuse_twins(keys, starts, rows, check.found.id_bits)
    return rows


def _fit_slots(target: HashTable, noted: TableDescription | None) -> Callable[[Records], Records]:
    """Return the function that adds the table's slots to records."""
    if noted is None:
        return lambda records: with_fresh_slots(records, target.optimizer, target.dim)
    if noted.optimizer != target.optimizer.kind and target.follows:
        return target.take_records_of(noted.optimizer)
    return lambda records: records


def _remove_rows(target: HashTable, found: NamedTable) -> None:
    """Remove a table's rows from a physical table that has other tables' rows too."""
    for _, exported in export_ranges(target, range(LOGICAL_SHARDS)):
        target.remove(found.own({"keys": exported["keys"]})["keys"] | found.prefix)


def _owned(columns: Columns, ranks: Ranks) -> Columns:
    """Keep the rows of the keys that this rank owns."""
    if ranks.owners == 1:
        return columns
    own = owned_by(columns["keys"], ranks.owner, ranks.owners).numpy()
    return {name: values[own] for name, values in columns.items()}


def _records(columns: Columns, step: int) -> Records:
    rows = len(columns["keys"])
    return Records(
        columns["keys"],
        columns["values"],
        columns.get("slots", np.empty((rows, 0), np.float32)),
        columns.get("frequency", np.zeros(rows, np.int64)),
        columns.get("last_step", np.full(rows, step, np.int64)),
        np.int64(step),
    )
