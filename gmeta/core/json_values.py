"""Reads JSON or TOML files from untrusted sources, and checks their values.

Each value must have its type and lie within its bounds; otherwise, an error names it. A manifest names the
files to open, and may come with a folder from elsewhere. Every value is therefore checked before use, and no
name in it can refer to a path outside the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from abc import abstractmethod
from pathlib import Path, PurePosixPath
from typing import Any

from gmeta.core.errors import DataError
from gmeta.core.files import ReadablePath, write_atomically

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST = 2**63 - 1
_TOO_DEEP = "its values are nested too deeply"


def parse_json(content: str | bytes) -> Any:
    """Parse JSON like ``json.loads``.

    Raises:
      ValueError: It isn't JSON, isn't UTF-8, or is nested too deeply.
    """
    try:
        value = json.loads(content)
        _check_depth(value)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    return value


def parse_toml(content: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
      ValueError: It isn't TOML, or is nested too deeply.
    """
    try:
        value = tomllib.loads(content)
        _check_depth(value)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    return value


def _check_depth(value: Any, left: int = 64) -> None:
    """Raise an error for values that are nested too deeply for other functions."""
    if not left:
        raise RecursionError
    inner = value.values() if type(value) is dict else value if type(value) is list else ()
    for one in inner:
        if type(one) in (dict, list):
            _check_depth(one, left - 1)


def whole(value: Any, what: str, least: int = 0, most: int = MOST) -> int:
    """Check that a value is a whole number within bounds, and return it.

    Args:
      value: The value that was read.
      what: What to call it in the error.
      least: The smallest number allowed.
      most: The largest number allowed.

    Raises:
      ValueError: The value is something else, such as a string, a fraction, true or NaN.

    Example:
      >>> whole(3, "rows")
      3
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} must be a whole number from {least} to {most}, got {short(value)}")
    return value


def wholes(values: Any, what: str, most: int = MOST) -> list[int]:
    """Check that a value is a list of whole numbers from 0 on, and return it.

    Raises:
      ValueError: The value is something else.
    """
    if type(values) is not list:
        raise ValueError(f"{what} must be a list, got {short(values)}")
    for value in values:
        if type(value) is not int or not 0 <= value <= most:
            whole(value, f"a number in {what}", 0, most)
    return values


def text(value: Any, what: str) -> str:
    """Check that a value is a string, and return it.

    Raises:
      ValueError: The value is something else.
    """
    if type(value) is not str:
        raise ValueError(f"{what} must be a text, got {short(value)}")
    return value


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Check that a value is a JSON object, and return it.

    Raises:
      ValueError: The value is something else.
    """
    if type(value) is not dict:
        raise ValueError(f"{what} must be an object, got {short(value)}")
    return value


def items(value: Any, what: str) -> list[Any]:
    """Check that a value is a list, and return it.

    Raises:
      ValueError: The value is something else.
    """
    if type(value) is not list:
        raise ValueError(f"{what} must be a list, got {short(value)}")
    return value


def inner_path(value: Any, what: str) -> str:
    """Check that a value is a relative path of a file inside a folder, and return it.

    Raises:
      ValueError: The value is something else, or would lead out of the folder.

    Example:
      >>> inner_path("item/rows.arrow", "a file")
      'item/rows.arrow'
      >>> inner_path("../rows.arrow", "a file")
      Traceback (most recent call last):
      ValueError: a file must be a path inside the folder, got '../rows.arrow'
    """
    path = PurePosixPath(text(value, what))
    leads_out = path.is_absolute() or {".", ".."} & {value, *path.parts}
    if leads_out or str(path) != value or not value.isprintable() or not _can_name_files(path):
        raise ValueError(f"{what} must be a path inside the folder, got {short(value)}")
    return str(value)


def _can_name_files(path: PurePosixPath) -> bool:
    return len(path.parts) < 16 and all(len(os.fsencode(part)) < 256 for part in path.parts)


def folder_name(value: Any, what: str) -> str:
    """Check that a value is the plain name of a folder or file, without slashes, and return it.

    Raises:
      ValueError: The value is something else.
    """
    if "/" in inner_path(value, what):
        raise ValueError(f"{what} must be a name without slashes, got {short(value)}")
    return str(value)


def short(value: Any) -> str:
    """Format a value in one line for errors."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


# A manifest's file: a JSON object with a digest of its content.

FILE_NAME = "manifest.json"


class SealedManifest:
    """A manifest with a digest of its content."""

    @abstractmethod
    def _body(self) -> dict[str, Any]:
        """Return the content, as JSON values."""

    @property
    def digest(self) -> str:
        """SHA-256 over all attributes, and thereby over all files that it names with a checksum."""
        return hashlib.sha256(json.dumps(self._body(), sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path, name: str = FILE_NAME) -> Path:
        """Write the file ``name`` into ``folder`` atomically."""
        content = json.dumps({**self._body(), "digest": self.digest}, indent=1)
        return write_atomically(folder / name, content + "\n")


def load_manifest_file(
    path: ReadablePath, kind: str, version: int, *, advice: str, older: str
) -> dict[str, Any]:
    """Read a manifest, and check its kind and version.

    Args:
      path: The file.
      kind: What its ``format`` must be.
      version: What its ``version`` must be.
      advice: What to do if it is missing or damaged.
      older: What to do if it has another version.

    Raises:
      DataError: It is missing, isn't JSON, or is of another kind or version.
    """
    try:
        value = parse_json(path.read_text())
    except OSError as error:
        raise DataError(f"no manifest: {error.strerror}", path=path, advice=advice) from error
    except ValueError as error:
        raise DataError(f"not JSON: {error}", path=path, advice=advice) from error
    if not isinstance(value, dict) or value.get("format") != kind:
        raise DataError(f"not a {kind} manifest", path=path, advice=advice)
    if value.get("version") != version:
        raise DataError(
            f"a manifest of version {short(value.get('version'))}, this gmeta reads version {version}",
            path=path,
            advice=older,
        )
    return value
