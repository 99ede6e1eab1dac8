"""Packages that one store alone needs: an extra, imported when such a source is made."""

from __future__ import annotations

import importlib
from types import ModuleType

from gmeta.core.errors import ConfigError


def import_for(source: str, package: str) -> ModuleType:
    """A package of the extra ``stores``.

    Raises:
      ConfigError: It isn't installed, or doesn't load.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{source} needs {package} ({error}): pip install 'gmeta[stores]'") from error
