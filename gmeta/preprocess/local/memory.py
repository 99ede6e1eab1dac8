"""How much memory a preparation may take."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from gmeta.core.errors import ConfigError

LEAST = 512 << 20
"""Less than this, and there is no room to work beside the libraries."""

_LIBRARIES = 256 << 20  # what Python, NumPy, Arrow and DuckDB take before a row is read

DUCKDB_SHARE, RUN_SHARE, MERGE_SHARE = 0.6, 0.1, 0.3
"""Shares of the remaining memory: for DuckDB, for encoded batches beside it, and for those after it.

Rows on their way and copies of what is being written take the rest.
"""

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def parse_bytes(text: str) -> int:
    """A size such as ``"2GB"``, ``"512 MiB"`` or ``"1000000000"``, in bytes.

    Raises:
      ConfigError: It is something else, or too little.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"memory limit must be a size such as 2GB or 512MiB, got {text!r}")
    unit = (match[2] or "").capitalize()
    size = int(float(match[1]) * {**_UNITS, **_BINARY}[unit])
    if size < LEAST:
        raise ConfigError(f"memory limit must be at least {LEAST >> 20}MiB, got {text!r}")
    return size


def share(limit: int, part: float) -> int:
    """Bytes for a part of the work, such as `DUCKDB_SHARE`, where all is to keep to ``limit`` bytes."""
    return max(int((limit - _LIBRARIES) * part), 1)


def default_limit() -> int:
    """Half of the memory that there is, of the machine or of the container."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        there = min(there, int(_CGROUP.read_text()))
    return max(there // 2, LEAST)
