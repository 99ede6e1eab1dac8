"""Lends TensorFlow the file systems that it doesn't have: those of pyarrow, and of fsspec if it is installed.

``io/lent_files`` registers each as a file system of TensorFlow that calls the functions below. So readers and
``tf.io.gfile`` open ``s3://`` by the code that opens a local file, a part at a time, without a copy on disk.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import os
import threading
import urllib.parse
from collections import OrderedDict
from typing import Any

from gmeta.core import native
from gmeta.core.errors import first_line

PYARROW = ("abfs", "abfss", "gcs", "gs", "hdfs", "s3", "viewfs")
"""The schemes that pyarrow reads by itself."""

_NOT_FOUND, _FAILED, _FOLDER = -1, -2, -3  # as io/lent_files/kernels.cc has them
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


def has_fsspec() -> bool:
    """Return whether fsspec is installed, without importing it."""
    return importlib.util.find_spec("fsspec") is not None


def lend(scheme: str) -> str | None:
    """Let TensorFlow read the files of a scheme through pyarrow or fsspec.

    Returns:
      None when it can, else which package would read them, in words.

    Example:
      >>> lend("s3")
      >>> lend("odd")
      "pyarrow doesn't know odd://, and fsspec, which knows more, isn't installed: `pip install fsspec`"
    """
    if scheme not in PYARROW:
        if not has_fsspec():
            return (
                f"pyarrow doesn't know {scheme}://, and fsspec, which knows more, isn't installed: "
                "`pip install fsspec`"
            )
        import fsspec

        try:
            fsspec.get_filesystem_class(scheme)
        except ValueError:
            return f"neither pyarrow nor fsspec knows {scheme}://"
        except ImportError as error:  # of the package that fsspec itself needs, which it names
            return f"fsspec needs a package for {scheme}://: {first_line(error)}"
    with _lock:
        if scheme not in lent and _register()(scheme.encode(), _read, _stat):
            lent.add(scheme)
    return None


@functools.cache
def _register() -> Any:
    native.load_op_library("io")  # which brings TensorFlow's symbols
    library = native.load_functions(
        "io",
        "gmeta_lent_files_",
        {"register": (ctypes.c_bool, (ctypes.c_char_p, _READ, _STAT)), "close": (None, ())},
    )
    # Threads of TensorFlow may still read ahead when Python ends, and could wait for it for ever.
    atexit.register(library.gmeta_lent_files_close)
    return library.gmeta_lent_files_register


@functools.cache
def _file_system(scheme: str, authority: str) -> tuple[Any, str]:
    """Return the pyarrow file system of paths ``scheme://authority/...``, and where they begin in it."""
    from pyarrow import fs

    root = f"{scheme}://{authority}/"
    if scheme in PYARROW:
        found, base = fs.FileSystem.from_uri(root + (_s3_options() if scheme == "s3" else ""))
        return found, base.rstrip("/")
    import fsspec

    found, base = fsspec.core.url_to_fs(root)
    return fs.PyFileSystem(fs.FSSpecHandler(found)), base.rstrip("/")


def _s3_options() -> str:
    """Return what the environment says of S3, as pyarrow takes it; it would ask the service for the rest."""
    options = {}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("S3_ENDPOINT")
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        options = {"endpoint_override": host, "scheme": scheme or "https"}
        region = region or "us-east-1"
    if region:
        options["region"] = region
    return f"?{urllib.parse.urlencode(options)}" if options else ""


def _within(path: str) -> tuple[Any, str]:
    """Return a path's file system, and its name there."""
    scheme, _, rest = path.partition("://")
    authority, _, inner = rest.partition("/")
    found, base = _file_system(scheme, authority)
    return found, f"{base}/{inner}"


def _size(path: str) -> int:
    from pyarrow import fs

    with _lock:
        _files.pop(path, None)  # TensorFlow asks before it opens a file, which may be another one by now
    found, name = _within(path)
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
        found, name = _within(path)
        file = found.open_input_file(name)
    with _lock:
        _files[path] = file
        while len(_files) > _OPEN_FILES:
            _files.popitem(last=False)  # a read that is under way keeps it open
    return bytes(file.read_at(count, offset))


def _answer(error: BaseException, out: int) -> int:
    """Write an error's text where TensorFlow reads it, and return which kind it is."""
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
