"""Publishes a model while it trains: a SavedModel, and deltas that a running server takes.

::

    online/stream.json                    the stream's name, tables and weights
    online/model/1/                       a SavedModel, version 1 (the base path is online/model)
    online/deltas/000000000002.delta      what has changed from version 1 to 2 (`gmeta.export.model_deltas`)
    online/deltas/000000000003.delta
    online/rows/1/                        the rows of external tables at version 1, in many deltas

Each publication gets the next version. A server that loads ``model/1`` has version 1, and takes delta 2
through its signature ``apply_delta``; `gmeta deliver` sends it. If the delta has dense weights, the server
then answers exactly as an export made at that moment, to the last bit. After ``base_every``, and where a
delta can't be made, a new SavedModel is published; TensorFlow Serving loads it automatically.

Rows of external tables (``export={"external": ...}``) aren't in the SavedModel, but in a folder of its
version, which appears before it. If a delta can be made, it is published too, with the same version, so that
a store of rows that follows deltas needn't load all rows.

A delta holds the rows whose last step isn't below the table's step at the last publication: all that
training has read or updated since then, and those of that same step. Removed ids come from the tables'
journals. Checkpoints empty these too, so each side reads a journal before the other empties it. Files appear
whole or not at all, and deltas in the order of their versions; the next delta includes what couldn't be
published.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, GmetaError, NotFiniteError
from gmeta.core.files import (
    explain_write_errors,
    lock_file,
    remove_unfinished,
    stage_folder,
    write_atomically,
)
from gmeta.core.row_formats import RowDtype, RowFormat
from gmeta.core.settings import parse_duration
from gmeta.core.shares import LOGICAL_SHARDS
from gmeta.core.step import StepCallback
from gmeta.export.delta_signatures import Updates, dense_weights, layout_of, named_tables, tables_of
from gmeta.export.external_rows import external_names
from gmeta.export.model_deltas import (
    DELTAS,
    MODEL,
    ROWS,
    STREAM,
    Delta,
    Ints,
    Layout,
    TableChange,
    deltas_in,
    models_in,
    rows_in,
    save_external,
)
from gmeta.export.saved_model import Exported, export_model
from gmeta.ops import HashTable

_LOCK = ".lock"
_SHARDS_AT_A_TIME = 16
_BYTES_OF_ROWS = 64 << 20
"""About how many bytes of rows a delta of all rows has, and how many are in memory at once."""
_NO_IDS: Ints = np.empty(0, np.int64)


@dataclass(frozen=True)
class Published:
    """What was published.

    Attributes:
      version: The version that servers have after they load or apply it.
      path: The delta's file, or the SavedModel's folder.
      rows: The number of rows in it, those of external tables included.
      removed: The number of removed ids in it.
      bytes: The size of the delta's file; 0 for a SavedModel.
      seconds: How long the publication took.
    """

    version: int
    path: Path
    rows: int
    removed: int
    bytes: int
    seconds: float


class Publisher(StepCallback):
    """Keras callback that publishes what training changes, for running servers.

    It requires training in one process; it can't make deltas of tables that are divided among ranks.

    Args:
      model: The model. Values that its exported graph holds, such as vectors of a catalogue, must be those of
        a `gmeta.export.derived.Derived`, and its tables may not cool down (`gmeta.policies.TwoPrecisions`).
      folder: Where to publish. An existing folder of the same model is continued with a new SavedModel,
        written at the end of the first batch. One publisher at a time may use it; ``close()`` releases it.
      every: The time between two deltas, such as ``"60s"``; they are made at the ends of batches.
      dense_every: The time between two deltas with dense weights; the end of `fit` publishes them as well.
      base_every: The time between two SavedModels. The one before the last is deleted, with the deltas that
        only it needs.
      journal: About how many removed ids a table records between two deltas, 8 bytes each. If there are
        more, a SavedModel is published.
      dtype: How servers and deltas hold rows: ``"float32"``, ``"bfloat16"`` or ``"int8"``, as for
        `export_model`. Deltas shrink as the tables do.
      export: Other arguments for `export_model`, such as ``label``.

    Attributes:
      listeners: Functions that are called with what was published, or with None if nothing had changed.
      covered: The time of the last publication, in seconds since 1970: all rows that were trained before it
        are published. 0 before the first one.

    Raises:
      ConfigError: A time or ``dtype`` is invalid; there are several ranks; the folder belongs to another
        model, or has rows of another dtype; or as for `export_model`.
      GmetaError: Another publisher uses the folder, or it can't be written.

    Example:
      ::

        publisher = gmeta.export.Publisher(model, "online", every="10s")
        model.fit(dataset, callbacks=[publisher])       # and: gmeta deliver --from online --to http://...
    """

    def __init__(
        self,
        model: tf.keras.Model,
        folder: str | os.PathLike[str],
        *,
        every: str = "60s",
        dense_every: str = "10m",
        base_every: str = "1d",
        journal: int = 1_000_000,
        dtype: RowDtype = "float32",
        export: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if collectives.world().size > 1:
            raise ConfigError("a Publisher needs all rows in its process, and there are several ranks")
        self._published = model
        self.folder = Path(folder)
        self.limit = journal
        self._every = parse_duration(every, "every")
        self._dense_every = parse_duration(dense_every, "dense_every")
        self._base_every = parse_duration(base_every, "base_every")
        self._export = dict(export or {})
        if "dtype" in self._export:
            raise ConfigError("export has 'dtype', which deltas need too: give Publisher(..., dtype=...)")
        self._dtype: RowDtype = RowFormat(dtype, 1).dtype
        self._has_base = False  # made in this process, and no removal was missed since
        self._since: dict[str, int] = {}  # table -> its step at the last publication
        self._removed: dict[str, list[Ints]] = {}  # keys that its journal has returned since then
        self._absent: dict[str, Ints] = {}  # removed keys in its journal that servers already have
        self._own_journals: set[str] = set()  # tables whose journal this publisher started, not a checkpoint
        self._times = dict.fromkeys(("delta", "dense", "base"), -np.inf)
        self.listeners: list[Callable[[Published | None], Any]] = []
        self.covered = 0.0
        with explain_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        lock = ExitStack()
        refusal = f"{self.folder} is used by another Publisher: close() it, or end its process"
        lock.enter_context(lock_file(self.folder / _LOCK, refusal))
        self.close = weakref.finalize(self, lock.close)
        for part in (self.folder, self.folder / MODEL, self.folder / DELTAS, self.folder / ROWS):
            remove_unfinished(part)
        self._version = max([0, *models_in(self.folder), *deltas_in(self.folder), *rows_in(self.folder)])

    @cached_property
    def _tables(self) -> list[HashTable]:
        return tables_of(self._published)

    @cached_property
    def _layout(self) -> Layout:
        """The stream's layout; the model is built before the first publication."""
        file = self.folder / STREAM
        if not file.exists():
            layout = layout_of(self._published, uuid.uuid4().hex, self._dtype)
            layout.save(file)
            return layout
        held = Layout.load(file)
        if held.rows != self._dtype:
            raise ConfigError(
                f"{self.folder} has rows of {held.rows}: continue it with dtype={held.rows!r}, "
                "or name another folder"
            )
        if held != layout_of(self._published, held.stream, self._dtype):
            raise ConfigError(f"{self.folder} has the deltas of another model: name another folder")
        return held

    @property
    def version(self) -> int:
        """The version that was published last; 0 if there is none."""
        return self._version

    def publish(self, *, dense: bool = True) -> Published | None:
        """Publish what has changed since the last publication: a delta, or a SavedModel if there is none yet.

        Args:
          dense: Whether the delta holds dense weights.

        Returns:
          What was published; None if nothing has changed.

        Raises:
          NotFiniteError: Rows or weights hold NaN or infinity. Nothing is published.
          GmetaError: A file can't be written; the next call includes these changes.
        """
        return self._publish_delta(dense, empty=False) if self._continues() else self.publish_base()

    def _continues(self) -> bool:
        """Return whether a delta can continue the last version."""
        return self._has_base and all(bool(table.journal_whole()) for table in self._tables)

    def _publish_delta(self, dense: bool, *, empty: bool) -> Published | None:
        start, now = time.perf_counter(), time.time()
        steps = {table.name: int(table.step()) for table in self._tables}
        found = {table.name: self._changes(table) for table in self._tables}
        tables = {
            name: _own(named, found[named.physical]) for name, named in named_tables(self._published).items()
        }
        weights = {
            name: variable.numpy() for name, variable in dense_weights(self._published).items() if dense
        }
        delta = Delta(self._version, self._version + 1, self._pack(tables), weights)
        rows, removed = (
            sum(len(getattr(change, kind)) for change in tables.values()) for kind in ("ids", "removed")
        )
        if not rows + removed + len(weights) and not empty:
            return self._done(now, None)
        _check_weights(self._published if dense else None)
        path = self.folder / DELTAS / f"{delta.version:012d}.delta"
        data = delta.encode(self._layout)
        try:
            with explain_write_errors(path):
                write_atomically(path, data)
            self._version = delta.version
            for table in self._tables:
                self._was_published(table, steps[table.name], found[table.name])
        except BaseException:
            if path.exists():  # whose contents are unknown
                self._version, self._has_base = delta.version, False
            raise
        self._note("delta", *(["dense"] if dense else []))
        seconds = time.perf_counter() - start
        return self._done(now, Published(delta.version, path, rows, removed, len(data), seconds))

    def publish_base(self) -> Published:
        """Publish a SavedModel, which servers load as a new version.

        Raises:
          NotFiniteError: As for `publish`.
          GmetaError: The SavedModel can't be written.
        """
        start, now = time.perf_counter(), time.time()
        external = external_names(self._published, self._export.get("external", ()))
        if external and self._continues():
            self._publish_delta(dense=True, empty=True)
            version = self._version
        else:
            version = max([self._version, *rows_in(self.folder)]) + 1
        for table in self._tables:  # before rows are read, so that no later removal is missed
            self._start(table)
        steps = {table.name: int(table.step()) for table in self._tables}
        rows = self._publish_rows(version, external) if external else 0
        exported: Exported = export_model(
            self._published,
            self.folder / MODEL / str(version),
            updates=Updates(self._layout, version),
            dtype=self._dtype,
            **self._export,
        )
        for table in self._tables:
            self._since[table.name], self._removed[table.name] = steps[table.name], []
            self._absent[table.name] = _NO_IDS
        self._version, self._has_base = version, True
        self._note("delta", "dense", "base")
        self._clean()
        seconds = time.perf_counter() - start
        done = Published(version, exported.folder, exported.rows + rows, 0, 0, seconds)
        self._done(now, done)
        return done

    def _publish_rows(self, version: int, external: Mapping[str, str]) -> int:
        """Write all rows of external tables, as deltas from 0 to 1, from 1 to 2, ...; return their number."""
        named = named_tables(self._published)
        empty = {
            name: TableChange(_NO_IDS, np.empty((0, dim), np.float32), _NO_IDS)
            for name, dim in self._layout.tables.items()
        }
        number = rows = 0
        with stage_folder(self.folder / ROWS / str(version)) as staging:
            save_external(staging, external)
            for table in self._tables:
                own = {name: named[name] for name in external if named[name].physical == table.name}
                bytes_of_shard = 1 + int(table.size()) * 4 * table.dim // LOGICAL_SHARDS
                shards = min(max(1, _BYTES_OF_ROWS // bytes_of_shard), LOGICAL_SHARDS)
                for first in range(0, LOGICAL_SHARDS if own else 0, shards):
                    part = table.export_shards(first, min(first + shards, LOGICAL_SHARDS))
                    change = TableChange(np.asarray(part.keys), np.asarray(part.rows), _NO_IDS)
                    found = {name: _own(each, change) for name, each in own.items()}
                    delta = Delta(number, number + 1, self._pack({**empty, **found}), {})
                    number, rows = number + 1, rows + len(change.ids)
                    write_atomically(staging / f"{number:012d}.delta", delta.encode(self._layout))
        return rows

    def _pack(self, tables: Mapping[str, TableChange]) -> dict[str, TableChange]:
        """Check rows, and convert them to the stream's format."""
        _check_finite(tables)
        return {
            name: replace(change, rows=self._layout.format_of(name).encode(change.rows))
            for name, change in tables.items()
        }

    def _done(self, covered: float, published: Published | None) -> Published | None:
        self.covered = covered
        for listener in self.listeners:
            listener(published)
        return published

    def _note(self, *kinds: str) -> None:
        self._times |= dict.fromkeys(kinds, time.monotonic())

    def _clean(self) -> None:
        """Delete all SavedModels but the last two, and the rows and deltas that only earlier ones need."""
        bases = models_in(self.folder)
        for version in bases[:-2]:
            shutil.rmtree(self.folder / MODEL / str(version), ignore_errors=True)
        for version in rows_in(self.folder):
            if version < bases[-2:][0]:
                shutil.rmtree(self.folder / ROWS / str(version), ignore_errors=True)
        for version, path in deltas_in(self.folder).items():
            if version <= bases[-2:][0]:
                with suppress(OSError):
                    path.unlink()

    # The tables' changes.

    def _start(self, table: HashTable) -> None:
        """Make a table's journal record removals, unless a checkpoint already does."""
        table.removal_readers.add(self)
        if not bool(table.journal_whole()):
            table.start_journal(self.limit)
            self._own_journals.add(table.name)

    def note_removals(self, table: HashTable, keys: Ints) -> None:
        """Store removed keys that a table's journal has returned, to a checkpoint or to this publisher."""
        if len(keys) and table.name in self._removed:
            self._removed[table.name].append(keys)

    def journal_emptied(self, table: HashTable, *, lost: bool, by_checkpoint: bool) -> None:
        """Note that a table's journal won't return earlier keys again."""
        if by_checkpoint:
            self._own_journals.discard(table.name)
        if lost:  # for example by a restore: the next publication is a SavedModel
            self._has_base = False
        self._absent[table.name] = _NO_IDS

    def _changes(self, table: HashTable) -> TableChange:
        """Return the rows that have changed since the last publication, by keys of the physical table."""
        keys, rows = [], []
        for first in range(0, LOGICAL_SHARDS, _SHARDS_AT_A_TIME):
            part = table.export_shards(first, first + _SHARDS_AT_A_TIME, self._since[table.name])
            keys.append(np.asarray(part.keys))
            rows.append(np.asarray(part.rows))
        removed = np.concatenate([_NO_IDS, *self._removed[table.name]])  # by these exports, and by others
        gone = np.setdiff1d(removed, self._absent[table.name])
        if len(gone):
            gone = gone[~table.contains(tf.constant(gone)).numpy()]
        return TableChange(np.concatenate(keys), np.concatenate(rows), gone)

    def _was_published(self, table: HashTable, step: int, change: TableChange) -> None:
        self._since[table.name], self._removed[table.name] = step, []
        if table.name not in self._own_journals:  # the journal has these keys until the next checkpoint
            absent = np.union1d(self._absent[table.name], change.removed)
            self._absent[table.name] = np.setdiff1d(absent, change.ids)
        else:
            table.forget_removals()

    # Keras.

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Publish what is due; at first, a SavedModel."""
        now = time.monotonic()
        if not self._has_base or now - self._times["base"] >= self._base_every:
            self._try(self.publish_base)
        elif now - self._times["delta"] >= self._every:
            dense = now - self._times["dense"] >= self._dense_every
            self._try(lambda: self.publish(dense=dense))

    def on_train_end(self, logs: Any = None) -> None:
        """Publish what has changed since the last delta."""
        self._try(self.publish)

    def _try(self, publish: Callable[[], Any]) -> None:
        """Publish; if a file can't be written, warn, and leave the changes to the next delta."""
        try:
            publish()
        except (ConfigError, NotFiniteError):
            raise
        except (GmetaError, OSError) as error:
            self._note("delta")
            warnings.warn(f"not published, the next delta has it: {error}", stacklevel=2)


def _own(named: Any, change: TableChange) -> TableChange:
    """Return the changes of a physical table that belong to a user's table, with that table's ids."""
    rows = named.own({"keys": change.ids, "rows": change.rows})
    removed = named.own({"keys": change.removed})
    return TableChange(rows["keys"], rows["rows"], removed["keys"])


def _check_finite(tables: Mapping[str, TableChange]) -> None:
    for name, change in tables.items():
        bad = ~np.isfinite(change.rows).all(axis=1)
        if bad.any():
            raise NotFiniteError(
                f"table {name!r}: the rows of ids {change.ids[bad][:5].tolist()} hold NaN or infinity: "
                "training has diverged, and nothing is published. Train with a lower rate from an earlier "
                "checkpoint"
            )


def _check_weights(model: tf.keras.Model | None) -> None:
    for name, variable in dense_weights(model).items() if model is not None else ():
        if variable.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(variable))):
            raise NotFiniteError(f"weight {name} holds NaN or infinity: training has diverged")
