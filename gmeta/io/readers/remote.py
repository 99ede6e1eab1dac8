"""Paths of remote file systems: which ones TensorFlow can read, and what they require.

``tf.io.gfile`` reads ``gs://`` itself, and ``hdfs://``, ``s3://`` and others through tensorflow-io if it is
installed, otherwise through pyarrow or fsspec (`lend`). For an unreachable file, it may report that the file
doesn't exist, and an incomplete Hadoop installation ends the process on first use. These requirements are
therefore checked before a path is opened, and a missing one is reported in one line. Local paths are
unchanged, and import nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import importlib
import importlib.util
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core import native
from gmeta.core.errors import ConfigError, DataError, first_line
from gmeta.core.file_systems import (
    PYARROW,
    SCHEME,
    check_requirements,
    has_fsspec,
    lacks,
    local_path,
    within,
)

# Lends TensorFlow the file systems that it lacks: those of pyarrow, and of fsspec if it is installed.
#
# ``io/lent_files`` registers each as a TensorFlow file system that calls the functions below. Readers and
# ``tf.io.gfile`` therefore open ``s3://`` with the code that opens local files, and read part by part,
# without a copy on disk.

_NOT_FOUND, _FAILED, _FOLDER = -1, -2, -3  # as in io/lent_files/kernels.cc
_ERROR_BYTES = 512
_OPEN_FILES = 256
_READ = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
)
_STAT = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p)

lent: set[str] = set()
"""The schemes that TensorFlow has from here."""

_lock = threading.Lock()
_files: OrderedDict[str, Any] = OrderedDict()


def lend(scheme: str) -> str | None:
    """Make TensorFlow read the files of a scheme through pyarrow or fsspec.

    Returns:
      None on success, otherwise a message that names the package that would read them.

    Example:
      >>> lend("s3")
      >>> lend("odd")
      "pyarrow doesn't know odd://, and fsspec, which knows more, isn't installed: `pip install fsspec`"
    """
    if (why := lacks(scheme)) is not None:
        return why
    with _lock:
        if scheme not in lent and _register()(scheme.encode(), _read, _stat):
            lent.add(scheme)
    return None


@functools.cache
def _register() -> Any:
    native.load_op_library("io")  # resolves TensorFlow's symbols
    library = native.load_functions(
        "io",
        "gmeta_lent_files_",
        {"register": (ctypes.c_bool, (ctypes.c_char_p, _READ, _STAT)), "close": (None, ())},
    )
    # Threads of TensorFlow may still read ahead when Python ends, and could wait for it forever.
    atexit.register(library.gmeta_lent_files_close)
    return library.gmeta_lent_files_register


def _size(path: str) -> int:
    from pyarrow import fs

    with _lock:
        _files.pop(path, None)  # TensorFlow calls this before it opens a file, which may have changed
    found, name = within(path)
    info = found.get_file_info(name)
    if info.type == fs.FileType.NotFound:
        raise FileNotFoundError("No such file or directory")
    if info.type == fs.FileType.Directory:
        return _FOLDER
    if info.size is None:
        raise OSError("the file system doesn't say how long the file is")
    return int(info.size)


def _part(path: str, offset: int, count: int) -> bytes:
    with _lock:
        file = _files.pop(path, None)
    if file is None:
        found, name = within(path)
        file = found.open_input_file(name)
    with _lock:
        _files[path] = file
        while len(_files) > _OPEN_FILES:
            _files.popitem(last=False)  # a read in progress keeps it open
    return bytes(file.read_at(count, offset))


def _answer(error: BaseException, out: int) -> int:
    """Write an error's text where TensorFlow reads it, and return the kind of error."""
    text = first_line(error).encode()[: _ERROR_BYTES - 1].decode(errors="ignore").encode()
    ctypes.memmove(out, text + b"\0", len(text) + 1)
    return _NOT_FOUND if isinstance(error, FileNotFoundError) else _FAILED


@_READ
def _read(path: bytes, offset: int, count: int, out: int, error: int) -> int:
    try:
        data = _part(path.decode(), offset, count)
        ctypes.memmove(out, data, len(data))
        return len(data)
    except BaseException as raised:
        return _answer(raised, error)


@_STAT
def _stat(path: bytes, error: int) -> int:
    try:
        return _size(path.decode())
    except BaseException as raised:
        return _answer(raised, error)


# Last, because its libraries are built for this TensorFlow and load into no other.
_TENSORFLOW_IO = ("tensorflow-io==0.37.*", "2.16.")


class _Size(NamedTuple):
    st_size: int


class RemotePath:
    """A path in a file system that TensorFlow supports, with the subset of `pathlib.Path` that gmeta uses.

    Args:
      path: ``"<scheme>://<host or bucket>/<path>"``.
    """

    def __init__(self, path: str) -> None:
        self._path = path.rstrip("/")

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._path}/{name}")

    def __fspath__(self) -> str:
        return self._path

    __str__ = __fspath__

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The part before the last slash."""
        return RemotePath(self._path.rpartition("/")[0])

    def read_text(self) -> str:
        """Return the content of the UTF-8 file.

        Raises:
          OSError: There is no such file, or it can't be read.
        """
        return self.read_bytes().decode()

    def read_bytes(self) -> bytes:
        """Return the content of the file.

        Raises:
          OSError: There is no such file, or it can't be read.
        """
        try:
            with tf.io.gfile.GFile(self._path, "rb") as file:
                return bytes(file.read())
        except tf.errors.NotFoundError as error:
            # The missing file may be a library of the file system; only the message shows that.
            why = _reason(error, self._path) if error.message else os.strerror(errno.ENOENT)
            raise FileNotFoundError(errno.ENOENT, why, self._path) from error
        except tf.errors.OpError as error:
            raise OSError(errno.EIO, _reason(error, self._path), self._path) from error

    def exists(self) -> bool:
        """Return whether the file exists; raise an error if the file system doesn't answer.

        Raises:
          DataError: The file system doesn't answer.
        """
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def stat(self) -> _Size:
        """Return the size of the file.

        Raises:
          FileNotFoundError: There is no such file.
          DataError: The file system doesn't answer.
        """
        try:
            return _Size(tf.io.gfile.stat(self._path).length)
        except tf.errors.NotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path) from error
        except tf.errors.OpError as error:
            raise DataError(
                f"can't be read: {_reason(error, self._path)}",
                path=self._path,
                advice="check the file system",
            ) from error


def locate(path: str | os.PathLike[str]) -> Path | RemotePath:
    """Return a path object, local or remote, and check that a remote path can be read (`preflight`).

    Args:
      path: A local path, with or without the prefix ``file://``, or a path of another scheme.

    Raises:
      ConfigError: As for `preflight`.
    """
    text = os.fspath(path)
    if (local := local_path(text)) is not None:
        return local
    preflight(text)
    return RemotePath(text)


def preflight(path: str) -> None:
    """Check that this process has what a path's file system requires, without accessing it.

    Args:
      path: ``"<scheme>://..."``; a path without a scheme is local, and isn't checked.

    Raises:
      ConfigError: None of TensorFlow, tensorflow-io, pyarrow and fsspec supports the scheme; or a requirement
        is missing: for ``hdfs``, Java, a Hadoop with libhdfs.so, and a CLASSPATH; for ``s3``, complete
        credentials. The error is one line that names what to install or set.
    """
    found = SCHEME.match(path)
    if found is None:
        return
    scheme = found["scheme"]
    check_requirements(path)
    if scheme in tf.io.gfile.get_registered_schemes():
        return
    why = _import_tensorflow_io()
    if scheme in (known := tf.io.gfile.get_registered_schemes()):
        return
    missing = lend(scheme)
    if missing is None:
        return
    names = ", ".join(sorted(f"{name}://" for name in {*known, *PYARROW} if name not in ("", "file")))
    raise ConfigError(
        f"{path}: no file system for {scheme}://, but for {names}: {why}; {missing}; or copy the data"
    )


def readable() -> dict[str, list[str]]:
    """Return which package reads which schemes here, without importing more than TensorFlow.

    The list of fsspec is empty: what it reads depends on other packages. Packages that aren't installed have
    no entry.
    """
    own = sorted(set(tf.io.gfile.get_registered_schemes()) - {"", "file", "ram"} - lent)
    found = {"TensorFlow": own, "pyarrow": sorted(set(PYARROW) - set(own))}
    if importlib.util.find_spec("tensorflow_io") is not None:
        found["tensorflow-io"] = ["hdfs", "s3"]
    if has_fsspec():
        found["fsspec"] = []
    return found


def _import_tensorflow_io() -> str:
    """Let tensorflow-io register its file systems, if it is installed; return the outcome, for a message."""
    package, version = _TENSORFLOW_IO
    try:
        importlib.import_module("tensorflow_io")
    except ModuleNotFoundError:
        if tf.__version__.startswith(version):
            return f"tensorflow-io isn't installed: `pip install '{package}'`"
        return f"tensorflow-io isn't installed, and the last one serves TensorFlow {version}*"
    except Exception as error:  # a library for another TensorFlow fails in many ways
        return f"tensorflow-io can't be imported ({first_line(error)})"
    return "tensorflow-io has none"


def _reason(error: tf.errors.OpError, path: str) -> str:
    """Return an error's message on one line, without the path that precedes it."""
    text = str(error.message or type(error).__name__).removeprefix(f"{path}; ")
    return " ".join(text.split())
