"""Remote file systems for tests: a folder of this machine behind pyarrow's interface, which can fail."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from gmeta.core.file_systems import StoredFiles


class _Object(io.BytesIO):
    """An object that appears when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(self.getvalue())
        super().close()


class Failing(fs.FileSystemHandler):
    """Calls the file system of a folder, and first a function, which may raise.

    Args:
      folder: The folder.
      objects: Whether files appear whole and make their folders, as in object stores.

    Attributes:
      before: Called with the operation's name and its path.
    """

    def __init__(self, folder: Path, objects: bool) -> None:
        self._folder, self._objects = folder, objects
        self.inner = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
        self.before: Callable[[str, str], None] = lambda operation, path: None

    def get_type_name(self) -> str:
        return "failing"

    def normalize_path(self, path: str) -> str:
        return path

    def _call(self, operation: str, path: str, *rest: Any, **options: Any) -> Any:
        self.before(operation, path)
        return getattr(self.inner, operation)(path, *rest, **options)

    def get_file_info(self, paths: list[str]) -> Any:
        return self.inner.get_file_info(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        self.before("list", selector.base_dir)
        return self.inner.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._call("create_dir", path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._call("delete_dir", path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._call("delete_dir_contents", path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._call("delete_file", path)

    def move(self, source: str, target: str) -> None:
        self.before("move", target)
        self.inner.move(source, target)

    def copy_file(self, source: str, target: str) -> None:
        raise NotImplementedError

    def open_input_stream(self, path: str) -> Any:
        return self._call("open_input_stream", path)

    def open_input_file(self, path: str) -> Any:
        return self._call("open_input_file", path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        if not self._objects:
            return self._call("open_output_stream", path)
        self.before("open_output_stream", path)
        return pa.PythonFile(_Object(self._folder / path), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError


def stored(folder: Path, scheme: str = "s3") -> tuple[StoredFiles, Failing]:
    """Return files as of an object store (``s3``) or of another file system, and what makes them fail."""
    folder.mkdir(exist_ok=True)
    handler = Failing(folder, objects=scheme == "s3")
    return StoredFiles(f"{scheme}://bucket/online", (fs.PyFileSystem(handler), "bucket/online")), handler
