"""The digests of the files that are read, computed while they are read."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from gmeta.core.errors import DataError

_BLOCK = 4 << 20


class FileDigests:
    """SHA-256 of some files, under names that tell them apart.

    Args:
      files: The files.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._digests: Future[dict[str, str]] | None = None

    def start(self) -> None:
        """Begin to digest the files, in parallel with other work; a second call does nothing."""
        if self._digests is None:
            self._digests, self._digested = Future(), self.stamps()
            # A daemon: nobody waits for it if the run ends with an error.
            threading.Thread(target=self._digest, args=[self._digests], daemon=True).start()

    def _digest(self, found: Future[dict[str, str]]) -> None:
        try:
            found.set_result({name: sha256(f) for name, f in zip(self._names(), self._files, strict=True)})
        except BaseException as error:
            found.set_exception(error)

    def wait(self) -> Mapping[str, str]:
        """Wait for the digests and return them, file name -> SHA-256.

        Raises:
          DataError: A file can't be read, or has changed since its reading began.
        """
        self.start()
        assert self._digests is not None
        found = self._digests.result()
        for (name, then), now, file in zip(
            self._digested.items(), self.stamps().values(), self._files, strict=True
        ):
            if then != now:
                raise DataError(f"{name} changed while it was read", path=file, advice="begin anew")
        return found

    def stamps(self) -> dict[str, list[int]]:
        """Return file name -> size and time of the last change, which quickly show whether it has changed."""
        found = {}
        for name, file in zip(self._names(), self._files, strict=True):
            try:
                stat = file.stat()
            except OSError as error:
                raise DataError(f"can't read it: {error.strerror}", path=file) from error
            found[name] = [stat.st_size, stat.st_mtime_ns]
        return found

    def _names(self) -> list[str]:
        """Return the files' names: as much of their paths as makes them unique."""
        if len(self._files) == 1:
            return [self._files[0].name]
        folder = Path(os.path.commonpath([file.parent.absolute() for file in self._files]))
        return [str(file.absolute().relative_to(folder)) for file in self._files]


def refuse_equal(files: Sequence[Path], holds_records: Callable[[Path], bool]) -> None:
    """Refuse files of equal content: their rows would be there twice. Only files of one size are read.

    Args:
      files: The files.
      holds_records: Whether a file has records; those that have none may be equal.

    Raises:
      DataError: Two are equal, or a file can't be read.
    """
    by_size: dict[int, list[Path]] = {}
    for file in files:
        by_size.setdefault(file.stat().st_size if file.exists() else 0, []).append(file)
    seen: dict[str, Path] = {}
    for file in (file for alike in by_size.values() if len(alike) > 1 for file in alike):
        if (digest := sha256(file)) in seen and holds_records(file):
            raise DataError(
                f"it is equal to {seen[digest]}: its rows would be there twice",
                path=file,
                advice="leave one of them out",
            )
        seen[digest] = file


def sha256(path: Path) -> str:
    """Compute the digest of a file's bytes, in hexadecimal.

    Raises:
      DataError: The file can't be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise DataError(f"can't read it: {error.strerror}", path=path) from error
    return digest.hexdigest()
