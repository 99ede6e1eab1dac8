"""Reads the vectors of items for ``gmeta semantic-ids``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import DataError


def read_vectors(path: Path, keys: str, values: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Read ids and vectors of items.

    Args:
      path: A ``.npy`` file (n, dim), whose rows are of items 0 to n - 1; a Parquet or Arrow file with a
        column of ids and one of lists; or a folder of `gmeta tables export`.
      keys: The column of ids.
      values: The column of vectors.

    Returns:
      The ids, int64 (n,), and the vectors, (n, dim).

    Raises:
      DataError: There is no such file or column, ids aren't whole numbers, or vectors have different widths.
    """
    if path.suffix == ".npy" and path.is_file():
        vectors = _load(path)
        return np.arange(len(vectors), dtype=np.int64), vectors
    if path.suffix == ".parquet" and path.is_file():
        return _read_parquet(path, keys, values)
    from gmeta.checkpoint.vocabulary.column_source import open_source

    pieces = [
        piece.columns
        for piece in open_source(path, {"keys": keys, "values": values}).pieces(("keys", "values"))
    ]
    if not pieces:
        raise DataError("it holds no rows", path=path)
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in ("keys", "values")}
    return _ids(joined["keys"], path), joined["values"]


def _ids(keys: NDArray[Any], path: Path) -> NDArray[np.int64]:
    if keys.ndim != 1 or keys.dtype.kind not in "iu" or (keys > np.iinfo(np.int64).max).any():
        raise DataError(
            "the items' ids must be whole numbers that fit int64, one a row, but are "
            f"{keys.dtype} of shape {keys.shape}",
            path=path,
            advice="cast them; gmeta.ops.hash_text makes such numbers of texts",
        )
    return keys.astype(np.int64)


def _load(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"not a whole .npy file of numbers: {error}", path=path) from error
    if array.ndim != 2:
        raise DataError(f"it must hold (items, dim) numbers, but its shape is {array.shape}", path=path)
    return array


def _read_parquet(path: Path, keys: str, values: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=[keys, values])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"can't read columns {keys!r} and {values!r}: {error}", path=path) from error
    lists = table.column(values).combine_chunks()
    if not (pa.types.is_list(lists.type) or pa.types.is_fixed_size_list(lists.type)):
        raise DataError(f"column {values!r} must hold lists of numbers, but holds {lists.type}", path=path)
    flat = np.asarray(lists.flatten(), np.float32)
    if (
        len(table) == 0
        or len(flat) % len(table)
        or any(len(each) * len(table) != len(flat) for each in lists)
    ):
        raise DataError(
            f"the lists of column {values!r} must have one length, and there must be some", path=path
        )
    return _ids(np.asarray(table.column(keys)), path), flat.reshape(len(table), -1)
