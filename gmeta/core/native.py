"""Finds, checks and loads the compiled libraries.

A library that was compiled against another TensorFlow fails, if at all, with a mangled symbol. This module
therefore first reads the library's build information from the file (written by ``ops/common/build_info.cc``),
and refuses a mismatch with an error that names both versions.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from gmeta.core.errors import NativeLibraryError
from gmeta.core.version import describe_misfit

_PACKAGE = Path(__file__).resolve().parents[1]
_APART = os.environ.get("GMETA_LIBRARIES")
_MARKER, _END = b"@gmeta-build-info@", b"@end@"
_FOLDERS = {"ops": "ops", "io": "io", "records": "preprocess"}
LIBRARIES = {
    name: (Path(_APART) if _APART else _PACKAGE / folder) / f"_gmeta_{name}.so"
    for name, folder in _FOLDERS.items()
}
"""Library name -> file. ``ops`` and ``io`` are TensorFlow op libraries; ``records`` knows no TensorFlow.

They lie in the package. Where several TensorFlows use one checkout, the environment variable
``GMETA_LIBRARIES`` names the folder of those that were compiled against the one in use.
"""

FunctionTypes: TypeAlias = Mapping[str, tuple[Any, Sequence[Any]]]
"""The end of a C function's name -> the types of its result and of its arguments, as ctypes has them."""


def library_path(name: str) -> Path:
    """Return the file of a compiled library, after checking that it exists and is complete.

    Raises:
      NativeLibraryError: The file isn't built, or is truncated.
    """
    path = LIBRARIES[name]
    if not path.exists():
        raise NativeLibraryError(
            f"{path} is missing: build it with `make setup` in a checkout, or reinstall with `pip install .`"
        )
    if not _is_whole(path):
        raise NativeLibraryError(f"{path} is cut short or is no library: rebuild it with `make setup`")
    return path


def load_functions(name: str, prefix: str, types: FunctionTypes) -> ctypes.CDLL:
    """Load a library that doesn't use TensorFlow, and set the types of some of its C functions.

    Args:
      name: The library's name.
      prefix: The prefix of the functions' names.
      types: The required functions, with their types.

    Raises:
      NativeLibraryError: The library isn't built, or lacks a function.
    """
    path = library_path(name)
    library = ctypes.CDLL(str(path))
    for rest, (result, arguments) in types.items():
        try:
            function = getattr(library, prefix + rest)
        except AttributeError as error:
            raise NativeLibraryError(f"{path} is of another version: rebuild it with `make setup`") from error
        function.restype, function.argtypes = result, arguments
    return library


def _is_whole(path: Path) -> bool:
    """Return whether an ELF file reaches the end that its header states.

    The dynamic linker doesn't check this: it maps the file, and the process dies of SIGBUS.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":  # 2: 64 bits
        return False
    (table,) = struct.unpack_from("<Q", header, 0x28)  # the section headers, which linkers write last
    entry_size, entries = struct.unpack_from("<HH", header, 0x3A)
    return table + entry_size * entries <= path.stat().st_size


def build_info(path: Path) -> dict[str, str]:
    """Read the versions with which an op library was compiled from its bytes, without loading it.

    Returns:
      The keys ``tensorflow``, ``cxx11_abi``, ``compiler`` and ``cuda``.

    Raises:
      NativeLibraryError: The file contains no build information.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        start = image.find(_MARKER)
        end = image.find(_END, start)
        if start < 0 or end < 0:
            raise NativeLibraryError(
                f"{path} carries no build information: it isn't one of gmeta's libraries"
            )
        text = image[start + len(_MARKER) : end].decode()
    return dict(field.split("=", 1) for field in text.split(";"))


def check_build(path: Path) -> None:
    """Refuse a library that was compiled against a TensorFlow other than the one in use.

    Raises:
      NativeLibraryError: The versions differ, and the message names both; or gmeta doesn't support this
        TensorFlow.
    """
    import tensorflow as tf

    misfit = describe_misfit(tf.__version__)
    if misfit is not None:
        raise NativeLibraryError(misfit)
    info = build_info(path)
    if info["tensorflow"] != tf.__version__:
        raise NativeLibraryError(
            f"{path} was built against TensorFlow {info['tensorflow']}, but TensorFlow {tf.__version__} is "
            f"installed: rebuild it for that: {_how_to_rebuild()}"
        )
    if info["cxx11_abi"] != str(tf.sysconfig.CXX11_ABI_FLAG):
        raise NativeLibraryError(
            f"{path} was built with _GLIBCXX_USE_CXX11_ABI={info['cxx11_abi']}, but TensorFlow "
            f"{tf.__version__} here uses {tf.sysconfig.CXX11_ABI_FLAG}: rebuild it: {_how_to_rebuild()}"
        )


def _how_to_rebuild() -> str:
    """Return the command that compiles the libraries for the installed TensorFlow without replacing it."""
    checkout = _PACKAGE.parent
    if (checkout / "setup.py").exists():
        return f"`{sys.executable} setup.py build_ext --inplace` in {checkout}"
    return "`pip install --force-reinstall --no-deps .` in gmeta's source"


@functools.cache
def load_op_library(name: str) -> ModuleType:
    """Load the op library ``"ops"`` or ``"io"``, once per process, and return its generated wrappers.

    Raises:
      NativeLibraryError: The library is missing, was built against another TensorFlow, or doesn't load.
    """
    import tensorflow as tf

    path = library_path(name)
    check_build(path)
    try:
        return tf.load_op_library(str(path))
    except (tf.errors.NotFoundError, OSError) as error:
        raise NativeLibraryError(f"{path} doesn't load: {error}; rebuild it with `make setup`") from error
