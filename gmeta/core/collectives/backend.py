"""Horovod itself: whether it is installed, how it is built, and the import of it.

Horovod is optional: a job of one rank doesn't need it. This module imports it only when a function needs it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from types import ModuleType

from gmeta.core.errors import ConfigError

HOW_TO_BUILD = (
    "`make setup` in a checkout; elsewhere `pip install 'setuptools<70' wheel 'cmake<4'`, then "
    "`HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 pip install --no-cache-dir --no-build-isolation "
    "--force-reinstall horovod==0.28.1`"
)
"""How to build Horovod against the installed TensorFlow; plain pip builds it without TensorFlow."""

_BACKENDS = ("gloo", "mpi", "nccl", "cuda")


def horovod_version() -> str | None:
    """Return the installed Horovod's version, or None if it isn't installed, without importing it."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def import_horovod() -> ModuleType:
    """Import ``horovod.tensorflow`` on the first call and return it, without initializing it.

    Raises:
      ConfigError: Horovod isn't installed, or doesn't load into the installed TensorFlow.
    """
    if horovod_version() is None:
        raise ConfigError(f"Horovod is not installed: {HOW_TO_BUILD}")
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # an extension built against another TensorFlow fails in many ways
        raise ConfigError(
            f"Horovod {horovod_version()} doesn't load: {error}; build it anew: {HOW_TO_BUILD}"
        ) from error
    return hvd


def built_backends() -> dict[str, bool]:
    """Return which of Horovod's backends were compiled in: ``gloo``, ``mpi``, ``nccl``, ``cuda``.

    Raises:
      ConfigError: As `import_horovod`.
    """
    hvd = import_horovod()
    return {name: bool(getattr(hvd, f"{name}_built")()) for name in _BACKENDS}


def node_name(name: str) -> str:
    """Return the name of a collective's op, which errors show.

    Horovod matches the ranks' ops by what follows the last slash of their names, so the name has none: with
    one, the exchanges of two collections would be taken for the same.

    Example:
      >>> node_name("items/keys")
      'gmeta_items_keys'
    """
    return re.sub(r"[^A-Za-z0-9_]", "_", f"gmeta_{name}")
