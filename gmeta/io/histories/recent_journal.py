"""The files of recent events: the journal that restores them, and the files that a store appends.

::

    journal/
      manifest.json               the name of these recent events, and their columns
      00000007.events.parquet     a segment that is complete; what `RecentHistories.drain` copies
      00000008.log                a segment in the form of ``io/history/event_log.h``

A segment has the events between two drains. It is a log first. A drain writes its file and then removes the
log, and the file goes when the store has the segment. So a process that is killed anywhere finds each event
once, and a segment's file has the same bytes however often it is copied, by which a store recognises it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.event_file import SUFFIX, EventForm, write_events
from gmeta.core.files import explain_write_errors, lock_file, sync
from gmeta.core.json_values import FILE_NAME, SealedManifest, load_manifest_file, mapping, text

FORMAT, VERSION = "gmeta-recent-events", 1


@dataclass
class Segment:
    """A complete segment, whose events are in memory.

    Attributes:
      number: Its number, ascending.
      begin: The sequence number of its first event.
      end: The sequence number after its last event.
      digest: SHA-256 of its file; None: it isn't written yet.
    """

    number: int
    begin: int
    end: int
    digest: str | None = None


@dataclass(frozen=True)
class _JournalManifest(SealedManifest):
    name: str
    form: EventForm

    def _body(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "name": self.name, "columns": self.form.to_json()}

    @classmethod
    def load(cls, folder: Path) -> _JournalManifest:
        path, advice = folder / FILE_NAME, "restore the file: it names the events of the journal"
        value = load_manifest_file(path, FORMAT, VERSION, advice=advice, older="use the gmeta that wrote it")
        try:
            found = cls(
                text(value["name"], "name"), EventForm.from_json(mapping(value["columns"], "columns"))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(" ".join(str(error).split()), path=path, advice=advice) from error
        if found.digest != value.get("digest"):
            raise DataError("its digest doesn't match its content: it was edited", path=path, advice=advice)
        return found


class Journal:
    """A folder of segments, which one process at a time has open.

    Args:
      folder: The folder, which is made if it is missing; None: there is none, and segments are in memory.
      form: The columns of events.

    Attributes:
      folder: The folder.
      name: The name of these recent events, which no others have.

    Raises:
      ConfigError: The folder has events with other columns.
      DataError: Its manifest is damaged.
      GmetaError: The folder can't be written, or another process has it open.
    """

    def __init__(self, folder: Path | None, form: EventForm) -> None:
        self.folder, self.form, self.name = folder, form, secrets.token_hex(8)
        self._open = ExitStack()
        if folder is None:
            return
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._open.enter_context(
                lock_file(folder / ".lock", f"another process has the journal {folder} open: end it first")
            )
            for path in folder.glob(".*.tmp"):  # of a killed process
                path.unlink()
            if (folder / FILE_NAME).exists():
                manifest = _JournalManifest.load(folder)
                self.name = manifest.name
                if manifest.form != form:
                    raise ConfigError(
                        f"the journal {folder} has events with columns {_show(manifest.form)}, and the store "
                        f"has {_show(form)}: name another folder"
                    )
            else:
                _JournalManifest(self.name, form).save(folder)

    def numbers(self) -> list[int]:
        """Return the numbers of the segments in the folder, ascending."""
        if self.folder is None:
            return []
        names = [path.name for path in self.folder.iterdir()]
        return sorted({int(name[:8]) for name in names if name[:8].isdecimal() and name[8:9] == "."})

    def log(self, number: int) -> Path:
        """Return the path of a segment's log; only with a folder."""
        assert self.folder is not None
        return self.folder / f"{number:08d}.log"

    def file(self, number: int) -> Path:
        """Return the path of a segment's file; only with a folder."""
        assert self.folder is not None
        return self.folder / f"{number:08d}{SUFFIX}"

    def has_file(self, number: int) -> bool:
        """Return whether a segment's file is in the folder."""
        return self.folder is not None and self.file(number).exists()

    def new_log(self, number: int) -> Path | None:
        """Make an empty log, and return its path; None without a folder."""
        if self.folder is None:
            return None
        path = self.log(number)
        with explain_write_errors(path):
            path.touch()
            sync(self.folder)
        return path

    def copy(self, segment: Segment, words: NDArray[np.int64] | None, folder: Path) -> Path:
        """Put a segment's file into a folder, and return its path there; set the segment's digest.

        Args:
          segment: The segment.
          words: Its events, as `write_events` takes them; None: the journal has the file.
          folder: The folder; an existing file is kept.

        Raises:
          DataError: Without a journal, the file would have other bytes than before.
          GmetaError: The disk is full, or the folder can't be written.
        """
        target = folder / f"recent-{self.name}-{segment.number:08d}{SUFFIX}"
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if words is not None and self.folder is not None:
                with _complete(self.file(segment.number)) as path:
                    self._write(path, segment, words)
                self.log(segment.number).unlink(missing_ok=True)
                words = None
            if segment.digest is not None and target.exists() and digest_of(target) == segment.digest:
                return target
            with _complete(target) as path:
                if words is None:
                    shutil.copyfile(self.file(segment.number), path)
                else:
                    self._write(path, segment, words)
                digest = digest_of(path)
                if segment.digest not in (None, digest):
                    raise DataError(
                        f"segment {segment.number} has changed since it was drained first",
                        path=target,
                        advice="append the file that was written first",
                    )
                segment.digest = digest
        return target

    def remove(self, number: int) -> None:
        """Remove a segment that the store has."""
        if self.folder is not None:
            for path in (self.log(number), self.file(number)):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes open the folder; a second call does nothing."""
        self._open.close()

    def _write(self, path: Path, segment: Segment, words: NDArray[np.int64]) -> None:
        write_events(path, self.form, words, f"{self.name} {segment.number}")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _complete(target: Path) -> Iterator[Path]:
    """Fill a hidden file beside ``target``, and rename it to ``target`` at the end."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield partial
        sync(partial)
        partial.replace(target)
        sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def _show(form: EventForm) -> str:
    return ", ".join(f"{column.name} ({column.dtype})" for column in form.words)
