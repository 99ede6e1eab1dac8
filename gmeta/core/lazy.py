"""Loads the names that a package exports when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def load_lazily(
    package: str, where: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's ``__getattr__`` and ``__dir__``.

    Args:
      package: The package's ``__name__``.
      where: Exported name -> the module that defines it.

    Returns:
      The two functions.

    Example:
      >>> __getattr__, __dir__ = load_lazily("gmeta", {"Manifest": "gmeta.core.data_manifest"})
      >>> __getattr__("Manifest").__name__
      'Manifest'
    """

    def get(name: str) -> Any:
        if name in where:
            return getattr(importlib.import_module(where[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted([*vars(sys.modules[package]), *where])

    return get, names
