"""The texts of a prepared data set: what each number of a column stands for.

`gmeta prepare` stores a text as a number, its hash, and an item often has a title. The folder ``texts/`` of a
data set has a Parquet file for each such column: ``value`` int64, ascending, each once, and ``text``. The
manifest names the files, with their digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data_manifest import Manifest, TextFile
from gmeta.core.errors import DataError
from gmeta.core.files import ReadablePath

FOLDER = "texts"
"""The folder of the files, in that of the data set."""
VALUE, TEXT = "value", "text"
"""The columns of a file."""


def file_name(column: str) -> str:
    """Return the path of a column's file in the data set.

    Example:
      >>> file_name("movie/id")
      'texts/movie%2Fid.parquet'
    """
    name = quote(column, safe=" ")
    if len(name) > 200:
        name = f"{name[:100]}-{hashlib.sha256(column.encode()).hexdigest()[:16]}"
    return f"{FOLDER}/{name}.parquet"


class Texts:
    """What the numbers of a data set's columns stand for: the text that was hashed, or a title.

    A column's file is read and compared with its digest when it is first needed.

    Args:
      data: The folder of the data set.
      files: Column -> its file, as the manifest has it.

    Example:
      >>> texts = Texts.of(Path("data/clicks"))  # doctest: +SKIP
      >>> texts.name("item", [8250560606382298838, 7])  # doctest: +SKIP
      ['abc', '7']
    """

    def __init__(self, data: ReadablePath, files: Mapping[str, TextFile]) -> None:
        self._data, self.files = data, files
        self._tables: dict[str, tuple[NDArray[np.int64], Any]] = {}

    @classmethod
    def of(cls, data: ReadablePath) -> Texts:
        """Open the texts of a data set; one that was prepared without texts has none for any column.

        Raises:
          DataError: The manifest is missing or was edited, or a file is missing or of another size.
        """
        return cls(data, Manifest.load(data, check_shards=False).texts)

    def __contains__(self, column: str) -> bool:
        """Return whether texts of a column are kept."""
        return column in self.files

    def table(self, column: str) -> tuple[NDArray[np.int64], Any]:
        """Return a column's values (N,) int64, ascending, and their texts, (N,) ``pyarrow.StringArray``.

        Raises:
          KeyError: No texts of the column are kept.
          DataError: The file is damaged.
        """
        if column not in self._tables:
            self._tables[column] = self._read(self.files[column])
        return self._tables[column]

    def _read(self, file: TextFile) -> tuple[NDArray[np.int64], Any]:
        import pyarrow as pa
        from pyarrow import parquet

        path, advice = self._data / file.name, "prepare the data again with --overwrite"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"can't read texts: {error.strerror}", path=path, advice=advice) from error
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise DataError("damaged: its digest isn't that of the manifest", path=path, advice=advice)
        try:
            table = parquet.read_table(pa.BufferReader(content), columns=[VALUE, TEXT]).combine_chunks()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"not a Parquet file of texts: {error}", path=path, advice=advice) from error
        texts = table[TEXT].combine_chunks()
        return table[VALUE].to_numpy(), texts.chunk(0) if isinstance(texts, pa.ChunkedArray) else texts

    def find(self, column: str, values: Sequence[int] | NDArray[np.int64]) -> list[str | None]:
        """Return the text of each value (N,); None where none is kept.

        Raises:
          DataError: The column's file is damaged.
        """
        asked = np.asarray(values, np.int64)
        if column not in self.files or not len(asked):
            return [None] * len(asked)
        known, texts = self.table(column)
        place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        found: list[str | None] = texts.take(place).to_pylist()
        return [text if own else None for text, own in zip(found, known[place] == asked, strict=True)]

    def name(self, column: str, values: Sequence[int] | NDArray[np.int64]) -> list[str]:
        """Return the text of each value (N,), and its digits where no text is kept.

        Raises:
          DataError: The column's file is damaged.
        """
        found = self.find(column, values)
        return [str(int(value)) if text is None else text for value, text in zip(values, found, strict=True)]
