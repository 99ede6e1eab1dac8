"""Files of events in a store's own form (`gmeta.core.event_file`) as a source of an append."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.event_file import EventForm, event_form, is_event_file, read_events
from gmeta.core.history_manifest import HistoryManifest, current_generation
from gmeta.preprocess.config import Progress
from gmeta.preprocess.history.shard_reader import as_floats
from gmeta.preprocess.history.spec import HistorySpec
from gmeta.preprocess.source import BadRecords, Columns
from gmeta.preprocess.tables.table_files import FileDigests


@dataclass(frozen=True)
class _File:
    path: Path


class EventSource:
    """The events that `gmeta.io.RecentHistories.drain` wrote.

    Args:
      paths: The files.
      store: The store.

    Attributes:
      path: The first file.
      files: The files.
      spec: The store's columns: the rules of a spec were applied when the events arrived.

    Raises:
      ConfigError: There is no store yet, a file has other columns than the store, or one is a table.
      DataError: A file is damaged.
    """

    def __init__(self, paths: Sequence[Path], store: Path) -> None:
        self.path, self.files = paths[0], [_File(path) for path in paths]
        newest = current_generation(store)
        if not newest:
            raise ConfigError(f"{store} isn't the store that the events of {paths[0]} are for: it is empty")
        manifest = HistoryManifest.load(store, newest)
        self.spec, self._form = HistorySpec.from_json(manifest.spec).table(), EventForm.of(manifest)
        for path in paths:
            if not is_event_file(path):
                raise ConfigError(
                    f"{path} is a table, and {paths[0]} has events of a store: append them one by one"
                )
            if (found := event_form(path)) != self._form:
                raise ConfigError(
                    f"{path} has events of a store with {_names(found)}; {store} has {_names(self._form)}"
                )
        self._digests = FileDigests(paths)

    def start_digests(self) -> None:
        """Begin to digest the files, in parallel with other work."""
        self._digests.start()

    def digests(self) -> Mapping[str, str]:
        """Wait for the digests and return them, file name -> SHA-256.

        Raises:
          DataError: A file has changed since reading began.
        """
        return self._digests.wait()

    def chunks(self, bad: BadRecords, progress: Progress) -> Iterator[Columns]:
        """Yield the events of each file; a damaged file ends the reading whatever the rule for records is.

        Raises:
          DataError: A file is damaged, or has no event.
        """
        for number, file in enumerate(self.files, 1):
            words = np.ascontiguousarray(read_events(file.path).T)
            if not words.shape[1]:
                raise DataError("there is no event in it", path=file.path)
            yield {
                column.name: as_floats(own) if column.dtype == "float32" else own
                for column, own in zip(self._form.words, words, strict=True)
            }
            progress("read", number, len(self.files))


def _names(form: EventForm) -> str:
    return ", ".join(f"{column.name} ({column.dtype})" for column in form.words)
