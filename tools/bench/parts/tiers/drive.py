"""The rate of the drive of a folder: random reads of 4 KiB, by threads that each wait for one."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from pathlib import Path

BLOCK = 4096
DEPTH = 32
"""Threads: reads that wait in the drive's queue."""


class Drive:
    """A file of random bytes, read past the page cache.

    Args:
      folder: The file's folder; the file has no name and ends with the process.
      size: The bytes of the file.
    """

    def __init__(self, folder: Path, size: int) -> None:
        path = folder / "drive.bin"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        path.unlink()
        piece = mmap.mmap(-1, 1 << 20)
        piece.write(os.urandom(1 << 20))
        for at in range(0, size, 1 << 20):
            os.pwrite(self._file, piece, at)
        self._blocks = size // BLOCK

    def reads(self, count: int) -> float:
        """Read random blocks, and return the rate: reads a second."""

        def read(seed: int) -> None:
            block, draw = mmap.mmap(-1, BLOCK), random.Random(seed)
            for _ in range(count // DEPTH):
                os.preadv(self._file, [block], draw.randrange(self._blocks) * BLOCK)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(DEPTH)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count // DEPTH * DEPTH / (time.perf_counter() - start)


def written_bytes() -> int:
    """Return the bytes that this process has written to drives."""
    return _count("write_bytes")


def read_bytes() -> int:
    """Return the bytes that this process has read from drives."""
    return _count("read_bytes")


def _count(name: str) -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines[name])
