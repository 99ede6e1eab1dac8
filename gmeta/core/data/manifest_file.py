"""The file of a manifest: a JSON object whose digest covers all of it."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from pathlib import Path
from typing import Any

from gmeta.core.errors import DataError
from gmeta.core.files import ReadablePath, write_atomically
from gmeta.core.json_values import parse_json, short

FILE_NAME = "manifest.json"


class SealedManifest:
    """A manifest that knows the digest of its content."""

    @abstractmethod
    def _body(self) -> dict[str, Any]:
        """Return the content, as JSON values."""

    @property
    def digest(self) -> str:
        """SHA-256 over all attributes, and so over all files that it names with a checksum."""
        return hashlib.sha256(json.dumps(self._body(), sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path, name: str = FILE_NAME) -> Path:
        """Write the file ``name`` into ``folder``, whole or not at all."""
        content = json.dumps({**self._body(), "digest": self.digest}, indent=1)
        return write_atomically(folder / name, content + "\n")


def load_manifest_file(
    path: ReadablePath, kind: str, version: int, *, advice: str, older: str
) -> dict[str, Any]:
    """Read a manifest, and check that it is of a kind and a version.

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
