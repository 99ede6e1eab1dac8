"""Horovod itself: whether a job uses it, whether it is installed, how it is built, and the import of it.

Horovod is optional: gmeta's launcher connects ranks without it. ``GMETA_RANKS`` is one of

* ``auto``, the default: Horovod if it is installed, else gmeta's own store and lanes;
* ``horovod``: Horovod;
* ``gmeta``: gmeta's own, whether or not Horovod is installed;
* ``one``: each process is a job of one rank, even if a launcher has started several.

The launcher and its ranks read it. This module imports Horovod only when a function needs it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from collections.abc import Mapping
from types import ModuleType

from gmeta.core.errors import ConfigError
from gmeta.core.version import find_tensorflow

LAST_TENSORFLOW = (2, 18)
"""The last minor version of TensorFlow that Horovod 0.28.1 builds against."""

RANKS = "GMETA_RANKS"
ONE = "one"
CHOICES = ("auto", "horovod", "gmeta", ONE)
DEFAULT = "auto"

_BACKENDS = ("gloo", "mpi", "nccl", "cuda")


def horovod_advice() -> str:
    """Explain how to build Horovod against the installed TensorFlow, or list those that it supports."""
    found = find_tensorflow()
    if found is not None and tuple(map(int, found[1].split(".")[:2])) > LAST_TENSORFLOW:
        last = ".".join(map(str, LAST_TENSORFLOW))
        return f"take TensorFlow {last} or older: Horovod 0.28.1 doesn't build against {found[1]}"
    # Plain pip builds it without TensorFlow.
    return (
        "build it by `make setup` in a checkout; elsewhere `pip install 'setuptools<70' wheel 'cmake<4'`, "
        "then `HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 pip install --no-cache-dir --no-build-isolation "
        "--force-reinstall horovod==0.28.1`"
    )


def horovod_version() -> str | None:
    """Return the installed Horovod's version, or None if it isn't installed, without importing it."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None


def uses_horovod(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher should connect ranks by Horovod, as ``GMETA_RANKS`` chooses.

    Args:
      environment: That of the ranks.

    Raises:
      ConfigError: It is none of the choices, or chooses Horovod, which isn't installed.
    """
    name = choice(environment)
    if name == ONE:
        raise ConfigError(f"{RANKS}={ONE} makes each process a job of one rank: unset it to start several")
    if name == "horovod" and horovod_version() is None:
        raise ConfigError(f"{RANKS}=horovod, but Horovod is not installed: unset it, or {horovod_advice()}")
    return name == "horovod" or (name == "auto" and horovod_version() is not None)


def check_launcher(*, own: bool) -> None:
    """Refuse to be a rank of another launcher than ``GMETA_RANKS`` chooses.

    Args:
      own: Whether gmeta's launcher started this rank without Horovod.

    Raises:
      ConfigError: The choice doesn't fit, or is none.
    """
    name = choice()
    if name in (ONE, "horovod" if own else "gmeta"):
        by = "gmeta's launcher without Horovod" if own else "a launcher of Horovod's or MPI's"
        raise ConfigError(
            f"{RANKS}={name}, but {by} started this rank: unset it, or start the job by `gmeta launch`"
        )


def choice(environment: Mapping[str, str] = os.environ) -> str:
    """Return the value of ``GMETA_RANKS``.

    Raises:
      ConfigError: It is none of the choices.
    """
    name = environment.get(RANKS, DEFAULT)
    if name not in CHOICES:
        raise ConfigError(f"{RANKS}={name!r}: give one of {', '.join(CHOICES)}")
    return name


@functools.cache
def import_horovod() -> ModuleType:
    """Import ``horovod.tensorflow`` on the first call and return it, without initializing it.

    Raises:
      ConfigError: Horovod isn't installed, or doesn't load into the installed TensorFlow.
    """
    if horovod_version() is None:
        raise ConfigError(
            "Horovod is not installed: start ranks by `gmeta launch`, which doesn't need it, or "
            f"{horovod_advice()}"
        )
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # an extension built against another TensorFlow fails in many ways
        raise ConfigError(f"Horovod {horovod_version()} doesn't load: {error}; {horovod_advice()}") from error
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
