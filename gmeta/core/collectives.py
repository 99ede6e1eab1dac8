"""Horovod, and the one place that imports it.

Horovod is optional: one rank needs none of it. Nothing here is imported or started before it is asked for.
"""

from __future__ import annotations

import importlib.metadata
from types import ModuleType

from gmeta.core.errors import ConfigError

_BACKENDS = ("gloo", "mpi", "nccl", "cuda")


def horovod_version() -> str | None:
    """The installed Horovod's version, or None where there is none. Imports nothing."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None


def import_horovod() -> ModuleType:
    """``horovod.tensorflow``, imported on the first call; not yet initialized.

    Raises:
      ConfigError: Horovod isn't installed, or doesn't load into the installed TensorFlow.
    """
    if horovod_version() is None:
        raise ConfigError(
            "Horovod is not installed: `make setup` builds it, or see 'More than one rank' in the README"
        )
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # an extension built against another TensorFlow fails in many ways
        raise ConfigError(
            f"Horovod {horovod_version()} doesn't load: {error}; build it against the installed TensorFlow: "
            "`make setup`, or `pip install --force-reinstall --no-binary horovod horovod==0.28.1`"
        ) from error
    return hvd


def built_backends() -> dict[str, bool]:
    """Which of Horovod's backends were compiled in: ``gloo``, ``mpi``, ``nccl``, ``cuda``.

    Raises:
      ConfigError: As `import_horovod`.
    """
    hvd = import_horovod()
    return {name: bool(getattr(hvd, f"{name}_built")()) for name in _BACKENDS}
