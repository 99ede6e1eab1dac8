"""The version of gmeta, and the versions of TensorFlow and Python that it supports.

setup.py runs this file by its path, before gmeta is installed: it imports nothing of gmeta.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

__version__ = "0.1.0.dev0"

PYTHONS = ((3, 10), (3, 13))
"""The first and the last Python. TensorFlow 2.16 to 2.21 have no wheels for others."""

TENSORFLOWS = ((2, 16, 2), (2, 21))
"""The first and the last TensorFlow, of which the last stands for all its patch releases.

The native libraries are compiled against TensorFlow's C++ classes, which change with each minor version.
"""

WANTED = ("tensorflow>=2.16.2,<2.22", "tf-keras>=2.16,<2.22")
"""The requirements for these, as pip takes them."""

DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tensorflow-cpu-aws")
"""The names under which TensorFlow is published for Linux."""


def check_python() -> None:
    """Refuse a Python version for which TensorFlow isn't published, before a syntax error occurs.

    Raises:
      ImportError: This process runs such a version.
    """
    first, last = PYTHONS
    if not first <= sys.version_info[:2] <= last:
        found, here = sys.version_info[:2], f"{_text(first)} to {_text(last)}"
        raise ImportError(
            f"gmeta runs on Python {here}, and this is {_text(found)} ({sys.executable}): install one of "
            "these, and gmeta with its pip"
        )


def find_tensorflow(folders: Iterable[str] | None = None) -> tuple[str, str, str] | None:
    """Find the installed TensorFlow without importing it.

    Args:
      folders: Where to look for it; None: Python's module search path.

    Returns:
      The name of its distribution, its version and the folder that contains the package, or None.
    """
    from importlib import metadata

    where = sys.path if folders is None else list(folders)
    for name in DISTRIBUTIONS:
        for found in metadata.distributions(name=name, path=where):
            return name, found.version, str(found.locate_file(""))
    return None


def describe_misfit(version: str) -> str | None:
    """Return why gmeta doesn't support a version of TensorFlow and what to do, or None if it does.

    Args:
      version: TensorFlow's version, such as ``"2.21.0"`` or ``"2.22.0-rc1"``.

    Example:
      >>> describe_misfit("2.15.1").partition(":")[0]
      'TensorFlow 2.15.1 is installed, but gmeta runs on 2.16.2 to 2.21'
    """
    first, last = TENSORFLOWS
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if first <= numbers and numbers[:2] <= last:
        return None
    install = " ".join(f"'{line}'" for line in WANTED)
    return (
        f"TensorFlow {version} is installed, but gmeta runs on {_text(first)} to {_text(last)}: "
        f"pip install {install}"
    )


def _text(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))
