"""Reads the vectors of items for ``gmeta semantic-ids``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import DataError, first_line

if TYPE_CHECKING:
    import pyarrow as pa


def read_vectors(path: Path, keys: str, values: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Read ids and vectors of items.

    Args:
      path: A ``.npy`` file (n, dim), whose rows are of items 0 to n - 1; a Parquet or Arrow file with a
        column of ids and one of lists; or a folder of `gmeta tables export`.
      keys: The column of ids: whole numbers, or text, which is hashed as `gmeta prepare` hashes it.
      values: The column of vectors.

    Returns:
      The ids, int64 (n,), and the vectors, (n, dim).

    Raises:
      DataError: There is no such file or column, an id is null, no id or given twice, or vectors have
        different widths.
    """
    from gmeta.checkpoint.vocabulary.column_source import open_source

    if path.suffix == ".npy" and path.is_file():
        vectors = _load(path)
        return np.arange(len(vectors), dtype=np.int64), vectors
    parquet = path.suffix in (".parquet", ".pq")
    # Of a file it only looks for the columns: it reads no text.
    source = None if parquet and path.is_file() else open_source(path, {"keys": keys, "values": values})
    if source is None or path.is_file():
        table = _read_table(path, parquet, keys, values)
        return _ids(table.column(keys), keys, path), _vectors(table.column(values), values, path)
    pieces = [piece.columns for piece in source.pieces(("keys", "values"))]
    if not pieces:
        raise DataError("it holds no rows", path=path)
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in ("keys", "values")}
    return _ids(joined["keys"], keys, path), joined["values"]


def _load(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"not a whole .npy file of numbers: {error}", path=path) from error
    if array.ndim != 2:
        raise DataError(f"it must hold (items, dim) numbers, but its shape is {array.shape}", path=path)
    return array


def _read_table(path: Path, parquet: bool, keys: str, values: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet as pq

    try:
        if parquet:
            return pq.read_table(path, columns=[keys, values])
        return pa.feather.read_table(path, columns=[keys, values])
    except (pa.ArrowException, OSError) as error:
        reason = f"can't read columns {keys!r} and {values!r}: {first_line(error)}"
        raise DataError(reason, path=path) from error


def _ids(keys: Any, name: str, path: Path) -> NDArray[np.int64]:
    """Return ids as `gmeta prepare` stores them: whole numbers as they are, and text hashed."""
    import pyarrow as pa

    from gmeta.preprocess.plan.column_values import is_text, numbers
    from gmeta.preprocess.table_spec import ColumnSpec

    given = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else pa.array(keys)
    if pa.types.is_dictionary(given.type):
        given = given.dictionary_decode()
    column = ColumnSpec(hash=True) if is_text(given.type) else ColumnSpec(dtype="int64")
    parsed = numbers(given, column, hashed=False)
    for _, wrong, expected in parsed.faults:
        row = int(np.argmax(wrong))
        raise DataError(f"row {row + 1}: {name} must be {expected}, got {given[row].as_py()!r}", path=path)
    order = np.argsort(parsed.values, kind="stable")
    again = np.flatnonzero(np.diff(parsed.values[order]) == 0)
    if len(again):
        first, second = sorted(order[again[0] : again[0] + 2].tolist())
        raise DataError(
            f"rows {first + 1} and {second + 1} are both of {name} {given[first].as_py()!r}",
            path=path,
            advice="give each item once",
        )
    ids: NDArray[np.int64] = parsed.values
    return ids


def _vectors(lists: pa.ChunkedArray, name: str, path: Path) -> NDArray[np.float32]:
    import pyarrow as pa
    import pyarrow.compute as pc

    array = lists.combine_chunks()
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_kind(array.type) for is_kind in kinds):
        raise DataError(f"column {name!r} must hold lists of numbers, but holds {array.type}", path=path)
    widths = pc.unique(pc.list_value_length(array)).to_pylist()
    if len(widths) != 1 or not widths[0]:
        raise DataError(
            f"the lists of column {name!r} must have one length, and there must be some", path=path
        )
    with _readable(path):
        flat = np.asarray(array.flatten(), np.float32)
    return flat.reshape(len(array), -1)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise DataError(f"its vectors aren't lists of numbers: {first_line(error)}", path=path) from error
