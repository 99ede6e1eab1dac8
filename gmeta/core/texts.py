"""The texts of a prepared data set: the meaning of each number of a column.

`gmeta prepare` stores a text as its hash, a number, and items often have titles. The folder ``texts/`` of a
data set has a Parquet file for each such column: ``value`` int64, ascending, each once; ``text``, what was
hashed; and ``title``. A file may have only one of the last two. The manifest names the files, with their
digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data_manifest import Manifest, TextFile
from gmeta.core.errors import DataError
from gmeta.core.files import ReadablePath

FOLDER = "texts"
"""The folder of the files, in that of the data set."""
Kind = Literal["text", "title"]
VALUE = "value"
TEXT: Kind = "text"
TITLE: Kind = "title"
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
    """The meaning of the numbers in a data set's columns: the text that was hashed, and a title.

    A column's file is read and compared with its digest on first use.

    Args:
      data: The folder of the data set.
      files: Column -> its file, as in the manifest.

    Example:
      >>> texts = Texts.of(Path("data/clicks"))  # doctest: +SKIP
      >>> texts.find("item", [8250560606382298838, 7], "text")  # doctest: +SKIP
      ['abc', None]
      >>> texts.name("item", [8250560606382298838, 7])  # doctest: +SKIP
      ['The first three letters', '7']
    """

    def __init__(self, data: ReadablePath, files: Mapping[str, TextFile]) -> None:
        self._data, self.files = data, files
        self._tables: dict[str, Any] = {}

    @classmethod
    def of(cls, data: ReadablePath) -> Texts:
        """Open the texts of a data set; they are empty if it was prepared without texts.

        Raises:
          DataError: The manifest is missing or was edited.
        """
        return cls(data, Manifest.load(data, check_shards=False).texts)

    def kinds(self, column: str) -> list[Kind]:
        """Return what is stored for a column: its texts, titles, both or nothing.

        Raises:
          DataError: The column's file is damaged.
        """
        return (
            []
            if column not in self.files
            else [n for n in (TEXT, TITLE) if n in self.table(column).schema.names]
        )

    def table(self, column: str) -> Any:
        """Return a column's file as a ``pyarrow.Table``.

        Raises:
          KeyError: Nothing is stored for the column.
          DataError: The file is damaged.
        """
        if column not in self._tables:
            self._tables[column] = self._read(self.files[column])
        return self._tables[column]

    def _read(self, file: TextFile) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        path, advice = self._data / file.name, "prepare the data again with --overwrite"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"can't read texts: {error.strerror}", path=path, advice=advice) from error
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise DataError("damaged: its digest isn't that of the manifest", path=path, advice=advice)
        return parquet.read_table(pa.BufferReader(content)).combine_chunks()

    def find(self, column: str, values: Sequence[int] | NDArray[np.int64], kind: Kind) -> list[str | None]:
        """Return the text or the title of each value (N,); None for missing ones.

        Raises:
          DataError: The column's file is damaged.
        """
        asked = np.asarray(values, np.int64)
        if kind not in self.kinds(column) or not len(asked):
            return [None] * len(asked)
        table = self.table(column)
        known = table[VALUE].to_numpy()
        place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        found = table[kind].take(place).to_pylist()
        return [text if own else None for text, own in zip(found, known[place] == asked, strict=True)]

    def name(self, column: str, values: Sequence[int] | NDArray[np.int64]) -> list[str]:
        """Return a readable name for each value (N,): its title, or else its text, or else its digits.

        Raises:
          DataError: The column's file is damaged.
        """
        titles, texts = (self.find(column, values, kind) for kind in (TITLE, TEXT))
        return [
            text if title is None and text is not None else str(int(value)) if title is None else title
            for value, title, text in zip(values, titles, texts, strict=True)
        ]


def hash_text(text: str) -> int:
    """Hash a text: return the last 8 bytes of the MD5 of its UTF-8, little endian, as a signed number.

    DuckDB's ``md5_number_lower(text)`` gives the same bits.

    Example:
      >>> hash_text("abc")
      8250560606382298838
    """
    return int.from_bytes(
        hashlib.md5(text.encode(), usedforsecurity=False).digest()[8:], "little", signed=True
    )
