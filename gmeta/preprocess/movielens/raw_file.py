"""A raw input file: read once, for its lines and for its digest."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gmeta.core.errors import DataError


@dataclass(frozen=True)
class RawFile:
    """The bytes of a text file.

    The whole file is held in memory: the largest that the local engine is meant for, MovieLens-1M's ratings,
    has 24 MB. So the digest certainly is that of the parsed bytes.

    Attributes:
      path: The path that it was read from.
      data: Its content; for a ``.gz`` file, the unpacked content.
    """

    path: Path
    data: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> RawFile:
        """Read a file.

        Raises:
          DataError: The file can't be read or unpacked, or holds only blank lines.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"can't read it: {error.strerror}", path=path) from error
        if path.suffix == ".gz":
            data = _unpack(data, path)
        if not data.strip():
            raise DataError("the file is empty", path=path, advice="fetch the data set again")
        return cls(path, data)

    @property
    def sha256(self) -> str:
        """The digest of the content, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def line_count(self) -> int:
        """The number of lines, including blank ones."""
        return self.data.count(b"\n") + (not self.data.endswith(b"\n"))

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that aren't blank, without their ends (LF or CRLF), with their numbers from 1."""
        for number, line in enumerate(io.BytesIO(self.data), start=1):
            stripped = line.rstrip(b"\r\n")
            if stripped:
                yield number, stripped


def _unpack(data: bytes, path: Path) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"can't unpack it: {error}", path=path, advice="fetch the data set again") from error
