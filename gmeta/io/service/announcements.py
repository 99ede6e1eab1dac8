"""A folder in which workers say where they are, and the key that they share with those who train."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from gmeta.core.errors import ConfigError

KEY = "GMETA_WORKERS_KEY"
"""Environment variable: what workers and those who train must both know, if no folder holds it."""

_SUFFIX = ".worker"
_KEY_FILE = "key"


def announce(folder: Path, address: str) -> Path:
    """Write down that a worker is at an address, ``"host:port"``; return the file, to remove at the end."""
    path = folder / f"{address.replace(':', '-')}{_SUFFIX}"
    beside = path.with_suffix(".new")
    beside.write_text(address)
    beside.replace(path)
    return path


def announced(folder: Path) -> list[str]:
    """Return the addresses that were announced and not taken back, in order."""
    found = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):  # just taken back
            found.append(path.read_text().strip())
    return found


def key_of(folder: Path | None) -> bytes:
    """Return the key: `KEY`'s if it is set, or else that of the folder, which is made if it has none.

    Only the folder's owner can read a key that is made. Whoever knows it can run any program on workers.

    Raises:
      ConfigError: There is no folder, and the variable isn't set.
    """
    given = os.environ.get(KEY)
    if given:
        return given.encode()
    if folder is None:
        raise ConfigError(
            f"{KEY} isn't set: workers run programs for whoever knows their key, so give the same long "
            "random text to workers and training, or let them share a folder (`gmeta workers FOLDER`), which "
            "keeps one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _KEY_FILE
    if not path.exists():
        beside = folder / f".{secrets.token_hex(8)}"
        beside.touch(mode=0o600)
        beside.write_text(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # another one was first
            os.link(beside, path)
        beside.unlink()
    return path.read_bytes()
