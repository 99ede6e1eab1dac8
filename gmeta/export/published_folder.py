"""The folder of a publisher: the names of its files, who may read and change them, and its compaction.

::

    stream.json                              the stream's name, tables and weights
    model/<b>/saved_model.pb, ...            a SavedModel of version b
    rows/<b>/tables.json, ...                all rows of external tables at version b, in many deltas
    deltas/<b>.delta                         what has changed from version b - 1 to b
    deltas/<a>-<b>.delta                     what has changed from version a to b

The folder may be local or in an object store (`gmeta.core.file_systems`). One publisher writes it; readers
list it, and then read. A file is written once and never changes. Folders are complete if they have
``saved_model.pb`` or ``tables.json``, which are written last and removed first.

**Invariant.** A delta from a to b holds, for each id whose row was set or removed after a and up to b, the
row as of b, or that it is removed; and the last values of the dense weights that changed with one of these
versions. Let a replica have any version v with a <= v < b. Ids that the delta doesn't have didn't change
between v and b; those that it has get their state of b. **So a delta from a to b updates every replica of
version a, a + 1, ..., b - 1 to exactly version b.** Two consequences:

- Consecutive deltas from a to b and from b to c may be replaced by their combination, from a to c, at any
  time: replicas between a and c continue with it. A reader prefers the delta that begins closest to its
  version, but any that has the version will do. So files may overlap. The combination appears before the
  deltas in it are removed; the next compaction removes those that a killed process has left.
- If a delta couldn't be written, or perhaps was, the next one begins at the last version that is surely
  there, and gets a new number. Replicas that have received the doubtful one continue too.

The graph of a server checks that a delta begins at the server's version (`gmeta.export.delta_signatures`), so
a reader sends the delta with its beginning set to v.

**Compaction.** A delta that spans n versions has level floor(log_8 n). If a level has 16 consecutive deltas,
the older eight become one of the next level; there is one such step for each publication. So N versions are
in at most 16 log_8 N files (88 after a day of one delta a second), and each version is rewritten log_8 N
times. The eight newest deltas of a level stay, so that a replica that is d versions behind reads O(log d)
deltas, which span O(d) versions. Deltas aren't combined to more than `LARGEST` bytes.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.file_systems import StoredFiles, open_files
from gmeta.core.files import LocalFiles, NamedPath, write_atomically
from gmeta.core.json_values import mapping, parse_json, text
from gmeta.export.model_deltas import Delta, Layout, combine

STREAM, MODEL, DELTAS, ROWS = "stream.json", "model", "deltas", "rows"
"""What is in the folder: the layout, SavedModels, deltas, and all rows of external tables."""
LARGEST = 256 << 20
"""About how many bytes a delta has at most. Servers take up to 2 GB, and REST adds a third."""
_MODEL_FILE, _TABLES = "saved_model.pb", "tables.json"
_FANOUT = 8
_TRIES = 8  # to read what a compaction replaces meanwhile
_PAUSE = 0.002  # seconds after the first try; twice, three times … as long after the next ones


@dataclass(frozen=True)
class Span:
    """A delta's file.

    Attributes:
      after: The first version that it updates.
      version: The version after the update.
      name: The file's name in the folder.
      bytes: Its size.
    """

    after: int
    version: int
    name: str
    bytes: int


@dataclass(frozen=True)
class Contents:
    """What is in a publisher's folder.

    Attributes:
      deltas: The deltas by version, in ascending order.
      models: The versions of complete SavedModels, in ascending order.
      rows: The versions that have all rows of external tables -> the names of their deltas, in order.
      incomplete: The names of folders that a killed publisher has left.
      has_layout: Whether the stream's layout is there.
    """

    deltas: tuple[Span, ...]
    models: tuple[int, ...]
    rows: Mapping[int, tuple[str, ...]]
    incomplete: tuple[str, ...]
    has_layout: bool

    @property
    def version(self) -> int:
        """The newest version; 0 if there is none."""
        return max([0, *self.models, *(span.version for span in self.deltas)])

    def following(self, version: int) -> Iterator[Span]:
        """Return the deltas that update a version one after another, as far as they go."""
        while found := [span for span in self.deltas if span.after <= version < span.version]:
            span = max(found, key=lambda each: (each.after, each.version))
            yield span
            version = span.version


def span_name(after: int, version: int) -> str:
    """Return the name of a delta's file."""
    single = version == after + 1
    return f"{DELTAS}/{version:012d}.delta" if single else f"{DELTAS}/{after:012d}-{version:012d}.delta"


class PublishedFolder:
    """The folder of a `gmeta.export.Publisher`.

    Args:
      folder: A local path, or an address such as ``"s3://bucket/prefix"``.

    Raises:
      ConfigError: As for `gmeta.core.file_systems.open_files`.
    """

    def __init__(self, folder: str | os.PathLike[str] | LocalFiles | StoredFiles) -> None:
        self._files = folder if isinstance(folder, LocalFiles | StoredFiles) else open_files(folder)
        self._too_large: set[tuple[str, ...]] = set()  # names of two deltas whose combination is
        self._compaction: Future[Span | None] | None = None

    def __str__(self) -> str:
        return str(self._files)

    def path(self, name: str) -> NamedPath:
        """Return the path or address of a file or folder."""
        return self._files.path(name)

    # Reading.

    def contents(self) -> Contents:
        """List the folder.

        Raises:
          DataError: It can't be listed.
        """
        files = self._list()
        spans = []
        for name, size in files.items():
            if found := re.fullmatch(rf"{DELTAS}/(?:(\d+)-)?(\d+)\.delta", name):
                version = int(found[2])
                spans.append(Span(int(found[1]) if found[1] else version - 1, version, name, size))
        folders = {
            (found[1], int(found[2])): found[0].rstrip("/")
            for name in files
            if (found := re.match(rf"({MODEL}|{ROWS})/(\d+)/", name))
        }
        ends = {MODEL: _MODEL_FILE, ROWS: _TABLES}
        whole = {key: name for key, name in folders.items() if f"{name}/{ends[key[0]]}" in files}
        parts: dict[int, list[str]] = {version: [] for kind, version in sorted(whole) if kind == ROWS}
        for name in sorted(files):
            found = re.fullmatch(rf"{ROWS}/(\d+)/\d+\.delta", name)
            if found and int(found[1]) in parts:
                parts[int(found[1])].append(name)
        return Contents(
            tuple(sorted(spans, key=lambda span: (span.version, -span.after))),
            tuple(version for kind, version in sorted(whole) if kind == MODEL),
            {version: tuple(names) for version, names in parts.items()},
            tuple(name for key, name in folders.items() if key not in whole),
            STREAM in files,
        )

    def _list(self) -> dict[str, int]:
        try:
            return self._files.list()
        except OSError as error:
            raise DataError(f"can't be listed: {error.strerror or error}", path=str(self)) from error

    def layout(self) -> Layout:
        """Read the stream's layout.

        Raises:
          DataError: As for `Layout.load`.
        """
        return Layout.load(self.path(STREAM))

    def read(self, name: str, layout: Layout) -> Delta:
        """Read a delta.

        Raises:
          FileNotFoundError: It has been removed.
          DataError: It can't be read, or is damaged.
        """
        try:
            return Delta.decode(self._files.read(name), layout, self.path(name))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"can't be read: {error}", path=self.path(name)) from error

    def changes(self, layout: Layout, version: int, at_once: int) -> Delta | None:
        """Return what updates a version: a delta, or several that are combined.

        Args:
          layout: The stream's layout.
          version: The version.
          at_once: Deltas are combined up to this number of bytes.

        Returns:
          A delta from the version on; None if no delta continues it.

        Raises:
          DataError: A delta can't be read, or is damaged.
        """
        found: list[Delta] = []
        for number in range(_TRIES):  # a listing may lack both a delta and what replaces it meanwhile
            time.sleep(_PAUSE * number)
            contents = self.contents()
            try:
                size = 0
                for span in contents.following(version):
                    size += span.bytes
                    if found and size > at_once:
                        break
                    found.append(self._read_span(span, layout))
            except FileNotFoundError:  # it has been replaced since it was listed
                pass
            if found or version >= contents.version:
                break
        return replace(combine(found), after=version) if found else None

    def _read_span(self, span: Span, layout: Layout) -> Delta:
        delta = self.read(span.name, layout)
        if (delta.after, delta.version) != (span.after, span.version):
            raise DataError(
                f"has the changes from version {delta.after} to {delta.version}, unlike its name",
                path=self.path(span.name),
                advice="restore the name",
            )
        return delta

    def external(self, version: int) -> dict[str, str]:
        """Return the external tables at a version: name in the layout -> name in stores.

        Raises:
          DataError: The file can't be read.
        """
        found = [each for each in self.contents().rows if each <= version]
        if not found:
            return {}
        name = f"{ROWS}/{found[-1]}/{_TABLES}"
        try:
            value = mapping(parse_json(self._files.read(name).decode()), "the file")
            return {table: text(own, table) for table, own in value.items()}
        except (OSError, ValueError, TypeError) as error:  # for example, the publisher deletes it meanwhile
            raise DataError(f"can't be read: {error}", path=self.path(name)) from error

    # Writing, by one publisher.

    def claim(self) -> Callable[[], None]:
        """Become the folder's only publisher, and remove what killed ones have left.

        Returns:
          A function that waits for the thread that compacts, and ends the claim.

        Raises:
          GmetaError: Another publisher uses the local folder; or a file can't be written.
        """
        release = self._files.claim(f"{self} is used by another Publisher: close() it, or end its process")
        for name in self.contents().incomplete:
            self._files.remove(name)
        self._worker = ThreadPoolExecutor(1, "gmeta-compaction")

        def end() -> None:
            self._worker.shutdown()
            release()

        return end

    def first_free(self) -> int:
        """Return the first version that nothing in the folder has, or may get by an earlier publisher."""
        contents = self.contents()
        left = [int(name.rpartition("/")[2]) for name in contents.incomplete]
        return max([contents.version, *contents.rows, *left]) + 1 + self._files.may_follow

    def save_layout(self, layout: Layout) -> None:
        """Write the stream's layout."""
        self._files.write(STREAM, layout.to_json().encode())

    def write(self, delta: Delta, layout: Layout) -> tuple[NamedPath, int]:
        """Write a delta, and return its path and size.

        Raises:
          GmetaError: It can't be written. It may appear nevertheless.
          ConfigError: Another publisher has taken over.
        """
        data, name = delta.encode(layout), span_name(delta.after, delta.version)
        self._files.write(name, data)
        return self.path(name), len(data)

    def model(self, version: int) -> AbstractContextManager[Path]:
        """Yield a local path at which the caller makes the SavedModel of a version.

        Raises:
          GmetaError: It can't be written.
          ConfigError: Another publisher has taken over.
        """
        return self._files.folder(f"{MODEL}/{version}", _MODEL_FILE)

    def rows(self, version: int) -> AbstractContextManager[Path]:
        """Yield a local path at which the caller makes the folder of external rows of a version."""
        return self._files.folder(f"{ROWS}/{version}", _TABLES)

    def clean(self, kept: int = 2) -> None:
        """Remove SavedModels but the last ones, and the rows and deltas that only earlier ones need."""
        contents = self.contents()
        if not contents.models:
            return
        first = contents.models[-kept:][0]
        for version in (each for each in contents.models if each < first):
            self._files.remove(f"{MODEL}/{version}", _MODEL_FILE)
        for version in (each for each in contents.rows if each < first):
            self._files.remove(f"{ROWS}/{version}", _TABLES)
        for span in (each for each in contents.deltas if each.version <= first):
            self._files.remove(span.name)

    def compact_beside(self, layout: Layout) -> None:
        """Take a step of `compact` in a thread, unless one is running; warn if the one before failed."""
        if self._compaction is not None:
            if not self._compaction.done():
                return
            error = self._compaction.exception()
            if isinstance(error, GmetaError | OSError):
                warnings.warn(f"deltas not compacted, tried again later: {error}", stacklevel=4)
            elif error is not None:
                raise error
        self._compaction = self._worker.submit(self.compact, layout)

    def compact(self, layout: Layout, fanout: int = _FANOUT, largest: int = LARGEST) -> Span | None:
        """Remove deltas that a longer one contains, and replace some by their combination.

        Args:
          layout: The stream's layout.
          fanout: How many deltas become one.
          largest: The maximum bytes of a combination.

        Returns:
          The combination; None if nothing was to be combined.

        Raises:
          DataError: A delta can't be read, or is damaged.
          GmetaError: A file can't be written.
          ConfigError: Another publisher has taken over.
        """
        spans = list(self.contents().deltas)
        for span in spans.copy():
            others = [each for each in spans if each is not span]
            if any(each.after <= span.after and span.version <= each.version for each in others):
                self._files.remove(span.name)
                spans.remove(span)
        for some in _to_combine(spans, fanout, 2 * largest):
            names = [span.name for span in some]
            if tuple(names[:2]) in self._too_large:
                continue
            delta, count = self.read(names[0], layout), 1
            for name in names[1:]:
                longer = combine([delta, self.read(name, layout)])
                if longer.size > largest:
                    break
                delta, count = longer, count + 1
            if count == 1:
                self._too_large.add(tuple(names[:2]))
                return None
            _, size = self.write(delta, layout)
            for name in names[:count]:
                self._files.remove(name)
            return Span(delta.after, delta.version, span_name(delta.after, delta.version), size)
        return None


def _to_combine(spans: Sequence[Span], fanout: int, most: int) -> Iterator[list[Span]]:
    """Return runs of consecutive deltas that may be combined, of the lowest level and oldest first.

    The level of a delta is at least that of each newer one, so that levels decrease with time also where
    failed publications have made a long delta among short ones.

    Args:
      spans: Deltas in ascending order, none of which contains another.
      fanout: How many are combined, or fewer if they have too many bytes.
      most: The maximum of their bytes.
    """
    levels: dict[int, list[Span]] = {}
    level = 0
    for span in reversed(spans):
        while fanout ** (level + 1) <= span.version - span.after:
            level += 1
        levels.setdefault(level, []).insert(0, span)
    for level in sorted(levels):
        old = levels[level][: max(len(levels[level]) - fanout, 0)]
        for first in range(len(old)):
            some: list[Span] = []
            for span in old[first : first + fanout]:
                if some and (
                    some[-1].version != span.after or sum(each.bytes for each in some) + span.bytes > most
                ):
                    break
                some.append(span)
            if len(some) == fanout or (len(some) > 1 and first + len(some) < len(old)):
                yield some


def save_external(folder: Path, names: Mapping[str, str]) -> None:
    """Note which tables' rows are in a folder of rows: name in the layout -> in stores."""
    write_atomically(folder / _TABLES, json.dumps(names, indent=1) + "\n")
