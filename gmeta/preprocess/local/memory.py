"""The memory limit of a preparation."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from gmeta.core.errors import ConfigError

LEAST = 512 << 20
"""The smallest limit: with less memory, the libraries leave no room to work."""

_LIBRARIES = 256 << 20  # bytes that Python, NumPy, Arrow and DuckDB take before a row is read

DUCKDB_SHARE, RUN_SHARE, MERGE_SHARE = 0.6, 0.1, 0.3
"""Shares of the remaining memory: for DuckDB, for encoded batches beside it, and for merging them afterwards.

Rows in transit and copies of the data being written take the rest.
"""

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def parse_bytes(text: str) -> int:
    """Parse a size such as ``"2GB"``, ``"512 MiB"`` or ``"1000000000"``, and return it in bytes.

    Raises:
      ConfigError: The text isn't a size, or the size is too small.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"memory limit must be a size such as 2GB or 512MiB, got {text!r}")
    unit = (match[2] or "").capitalize()
    size = float(match[1]) * {**_UNITS, **_BINARY}[unit]
    if not LEAST <= size < 1 << 62:
        raise ConfigError(f"memory limit must be at least {LEAST >> 20}MiB and below 4EiB, got {text!r}")
    return int(size)


def share(limit: int, part: float) -> int:
    """Return the bytes for a part of the work, such as `DUCKDB_SHARE`, out of ``limit`` bytes in all."""
    return max(int((limit - _LIBRARIES) * part), 1)


def default_limit() -> int:
    """Return half of the memory of the machine, or of the container if that is less."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        there = min(there, int(_CGROUP.read_text()))
    return max(there // 2, LEAST)
