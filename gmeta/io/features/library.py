"""Optional packages that a single store needs, imported when such a source is made."""

from __future__ import annotations

import importlib
from types import ModuleType

from gmeta.core.errors import ConfigError


def import_for(source: str, package: str) -> ModuleType:
    """Import a package of the extra ``stores``.

    Raises:
      ConfigError: The package isn't installed, or doesn't load.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{source} needs {package} ({error}): pip install 'gmeta[stores]'") from error
