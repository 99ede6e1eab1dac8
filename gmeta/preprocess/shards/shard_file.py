"""The file of a shard, which appears under its name whole, with its index beside it, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from gmeta.core.data.group_index import GroupIndex, checksum_of, index_path
from gmeta.core.files import sync, write_atomically


class ShardFile:
    """A file to which bytes are only appended.

    Bytes go to ``<path>.<process id>.tmp``; `close` flushes that file to the disk and renames it. `discard`
    removes it, and an earlier file at ``path`` stays.

    Args:
      path: The file to write. Its folder must exist.

    Attributes:
      bytes: The number of bytes written so far.
      index: The checksum of the index, once it is written.

    Raises:
      OSError: The file can't be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self.index: int | None = None
        self.closed = True
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._temporary_index = path.with_name(f"{index_path(path).name}.{os.getpid()}.tmp")
        # Open it exclusively: two writers of one path would mix their records.
        self._file = self._temporary.open("xb", buffering=0)
        self.closed = False

    def fileno(self) -> int:
        """Return the descriptor of the temporary file."""
        return self._file.fileno()

    def put(self, block: memoryview) -> None:
        """Append bytes.

        Raises:
          OSError: The disk is full; the error says so, and how many bytes were written.
        """
        try:
            while block:
                written = self._file.write(block) or 0
                self.bytes += written
                block = block[written:]
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full, free some space or write elsewhere" if full else error.strerror
            raise OSError(error.errno, f"{reason} (after {self.bytes} bytes)", str(self.path)) from error

    def close(self, index: Callable[[], GroupIndex] | None = None) -> None:
        """Flush to the disk, and give the file and its index their final names. A second call does nothing.

        Args:
          index: Makes the index. None: no index is written, and an earlier one is removed, because it belongs
            to another file.

        Raises:
          OSError: The disk is full; the file is discarded.
        """
        if self.closed:
            return
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            if index is not None:
                data = index().to_bytes()
                write_atomically(self._temporary_index, data)
                self.index = checksum_of(data)
            # Remove the old index first: a crash then never leaves an index beside another shard's file.
            index_path(self.path).unlink(missing_ok=True)
            self._temporary.replace(self.path)
            if index is not None:
                self._temporary_index.replace(index_path(self.path))
        except OSError:
            self.discard()
            raise
        self.closed = True
        sync(self.path.parent)

    def discard(self) -> None:
        """Drop the written bytes, and leave ``path`` as it was before."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)
        self._temporary_index.unlink(missing_ok=True)
