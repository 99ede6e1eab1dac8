"""Checks rows that come from a file, and gives them the form of a table's records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.checkpoint.files.chain import Columns
from gmeta.checkpoint.vocabulary.column_source import Piece
from gmeta.core.arguments import rows_not_finite
from gmeta.core.data.merged_keys import fold_numbers
from gmeta.core.data.named_tables import NamedTable
from gmeta.core.errors import DataError
from gmeta.ops.keys.id_hash import hash_text

Array = npt.NDArray[Any]

_MOST = 2**32 - 1  # frequencies and last steps are saved in 32 bits


@dataclass(frozen=True)
class RowsCheck:
    """What rows must be to be imported into a table.

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
          DataError: A column has another dtype or width, or a row a value that can't be imported.
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
