"""Loads the names that a package exports when they are first used (PEP 562), and those that have moved."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def load_lazily(
    package: str, where: Mapping[str, str], moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's ``__getattr__`` and ``__dir__``.

    A name that has moved is found under its old name for one release, with a `DeprecationWarning` that names
    the new place and points at the line that uses the old name. ``__dir__`` doesn't list it.

    Args:
      package: The package's ``__name__``.
      where: Exported name -> the module that defines it.
      moved: Old name -> the module that has it now, or ``"module:new name"`` where the name has changed.

    Returns:
      The two functions.

    Example:
      >>> __getattr__, __dir__ = load_lazily("gmeta", {"Manifest": "gmeta.core.data_manifest"})
      >>> __getattr__("Manifest").__name__
      'Manifest'
    """
    moved = moved or {}

    def get(name: str) -> Any:
        if name in where:
            return getattr(importlib.import_module(where[name]), name)
        if name not in moved:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, new = moved[name].partition(":")
        # `from package import name` looks twice: the import system, whether it is a submodule, then the line.
        if sys._getframe(1).f_globals.get("__name__") != "importlib._bootstrap":
            change = f"{package}.{name} has moved to {module}.{new or name}"
            warnings.warn(
                f"{change}; the old name goes in the next release", DeprecationWarning, stacklevel=2
            )
        return pkgutil.resolve_name(f"{module}:{new or name}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return get, names
