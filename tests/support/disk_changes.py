"""The functions by which Python changes a drive, for tests in which a process ends at any of the changes."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

NAMES = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")

# Up to Python 3.10 a Path calls functions that pathlib itself stores.
OWNERS = [owner for owner in (os, getattr(pathlib, "_normal_accessor", None)) if owner is not None]


def wrap_changes(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    put: Callable[[Any, str, Any], None] = setattr,
) -> None:
    """Replace each function by the result of ``wrap``.

    Args:
      wrap: Takes a function and returns its replacement.
      put: Sets an attribute; a test that continues passes its monkeypatch's `setattr`.
    """
    for owner in OWNERS:
        for name in NAMES:
            if hasattr(owner, name):
                put(owner, name, wrap(getattr(owner, name)))
