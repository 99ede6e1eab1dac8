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

On several ranks, each rank finds the changes of its own rows, and rank 0 receives and writes all of them
(`gmeta.export.table_changes`). The clock of rank 0 decides what is due, and all ranks raise an error of one.
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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives.place import as_one_rank
from gmeta.core.collectives.rank_group import Ranks
from gmeta.core.errors import CollectiveError, ConfigError, GmetaError, NotFiniteError
from gmeta.core.files import (
    explain_write_errors,
    lock_file,
    remove_unfinished,
    stage_folder,
    write_atomically,
)
from gmeta.core.row_formats import RowDtype, RowFormat
from gmeta.core.settings import parse_duration
from gmeta.core.step import StepCallback
from gmeta.export.delta_signatures import Updates, dense_weights, layout_of, named_tables
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
from gmeta.export.saved_model import export_model
from gmeta.export.table_changes import (
    Changes,
    changes_on_first,
    no_changes,
    rows_on_first,
    tables_on_first,
)

_LOCK = ".lock"
_SHARDS_AT_A_TIME = 16
_ASK_MOST = 8
"""The most batches between two looks of several ranks at the clock of rank 0."""
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

    On several ranks, all ranks make it and call its methods together. Rank 0 writes the files, so only it
    needs the folder, and memory for a delta, or for a SavedModel, of all rows.

    Args:
      model: The model. Its exported graph may not hold values computed at export, as the graphs of next-item
        models do, and its tables may not cool down (`gmeta.policies.TwoPrecisions`).
      folder: Where to publish. An existing folder of the same model is continued with a new SavedModel,
        written at the end of the first batch. One publisher at a time may use it; ``close()`` releases it.
      every: The time between two deltas, such as ``"60s"``; they are made at the ends of batches, and by
        `publish_due`.
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
      ConfigError: A time or ``dtype`` is invalid; the folder belongs to another model, or has rows of another
        dtype; or as for `export_model`.
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
        self._published = model
        self._ranks = Ranks.of()
        self.folder = Path(folder)
        self._period = {
            "delta": parse_duration(every, "every"),
            "dense": parse_duration(dense_every, "dense_every"),
            "base": parse_duration(base_every, "base_every"),
        }
        self._export = dict(export or {})
        if "dtype" in self._export:
            raise ConfigError("export has 'dtype', which deltas need too: give Publisher(..., dtype=...)")
        self._dtype: RowDtype = RowFormat(dtype, 1).dtype
        self._changes = Changes(model, self._ranks, journal, self._dtype)
        self._times = dict.fromkeys(("delta", "dense", "base"), -np.inf)
        self._behind = {*self._times}  # what doesn't include the last batches
        self._asked, self._batches, self._ask_after = time.monotonic(), 0, 1
        self.listeners: list[Callable[[Published | None], Any]] = []
        self.covered = 0.0
        lock = ExitStack()
        self.close = weakref.finalize(self, lock.close)
        self._version = self._ranks.from_first(lambda: self._claim(lock))

    def _claim(self, lock: ExitStack) -> int:
        """Lock the folder, and return its last version."""
        with explain_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        refusal = f"{self.folder} is used by another Publisher: close() it, or end its process"
        lock.enter_context(lock_file(self.folder / _LOCK, refusal))
        for part in (self.folder, self.folder / MODEL, self.folder / DELTAS, self.folder / ROWS):
            remove_unfinished(part)
        return max([0, *models_in(self.folder), *deltas_in(self.folder), *rows_in(self.folder)])

    @cached_property
    def _layout(self) -> Layout:
        """The stream's layout, on rank 0; the model is built before the first publication."""
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
        """Return whether a delta can continue the last version, on all ranks."""
        found = collectives.allgather_objects((self._changes.can_continue(), self._version))
        self._version = found[0][1]
        return all(each for each, _ in found)

    def _merge_averages(self) -> None:
        """Give all ranks the same moving averages, as before a checkpoint."""
        merge = getattr(self._published, "merge_moving_averages", None)
        if merge is not None:
            merge()

    def _publish_delta(self, dense: bool, *, empty: bool) -> Published | None:
        start, now = time.perf_counter(), time.time()
        if dense:
            self._merge_averages()
        with self._ranks.together():
            _check_weights(self._published if dense else None)
            found = self._changes.find()
        tables = changes_on_first(found.by_user)
        written = self._ranks.from_first(lambda: self._write_delta(tables, dense, empty))
        if written is None:
            self._note("delta")
            return self._done(now, None)
        version, path, rows, removed, size = written
        try:
            with self._ranks.together():
                self._changes.published(found)
        except BaseException:
            self._version, self._changes.whole = version, False
            raise
        self._version = version
        self._note("delta", *(["dense"] if dense else []))
        seconds = time.perf_counter() - start
        return self._done(now, Published(version, Path(path), rows, removed, size, seconds))

    def _write_delta(
        self, tables: Mapping[str, TableChange], dense: bool, empty: bool
    ) -> tuple[int, str, int, int, int] | None:
        """Write a delta; return its version, path, rows, removed ids and bytes. None: nothing has changed."""
        layout = self._layout
        weights = {
            name: variable.numpy() for name, variable in dense_weights(self._published).items() if dense
        }
        delta = Delta(self._version, self._version + 1, tables, weights)
        rows, removed = (
            sum(len(getattr(change, kind)) for change in tables.values()) for kind in ("ids", "removed")
        )
        if not rows + removed + len(weights) and not empty:
            return None
        path = self.folder / DELTAS / f"{delta.version:012d}.delta"
        data = delta.encode(layout)
        try:
            with explain_write_errors(path):
                write_atomically(path, data)
        except BaseException:
            if path.exists():  # whose contents are unknown
                self._version, self._changes.whole = delta.version, False
            raise
        return delta.version, str(path), rows, removed, len(data)

    def publish_base(self) -> Published:
        """Publish a SavedModel, which servers load as a new version.

        Raises:
          NotFiniteError: As for `publish`.
          GmetaError: The SavedModel can't be written.
        """
        start, now = time.perf_counter(), time.time()
        external = external_names(self._published, self._export.get("external", ()))
        continues = self._continues()
        if external and continues:
            self._publish_delta(dense=True, empty=True)
            version = self._version
        else:
            version = self._ranks.from_first(lambda: max([self._version, *rows_in(self.folder)]) + 1)
        self._merge_averages()
        with self._ranks.together():
            steps = self._changes.start()  # before rows are read, so that no later removal is missed
        rows = self._publish_rows(version, external) if external else 0
        named = named_tables(self._published)
        left = {named[name].physical for name in external}
        inside = [table for table in self._changes.tables if table.name not in left]
        gathered = tables_on_first(inside, self._ranks) if self._ranks.size > 1 else {}
        folder = self.folder / MODEL / str(version)
        rows += self._ranks.from_first(lambda: self._write_model(folder, version, gathered))
        self._changes.all_published(steps)
        self._version = version
        self._note("delta", "dense", "base")
        self._ranks.from_first(self._clean)
        done = Published(version, folder, rows, 0, 0, time.perf_counter() - start)
        self._done(now, done)
        return done

    def _write_model(self, folder: Path, version: int, gathered: dict[str, tuple[Any, Any]]) -> int:
        """Write a SavedModel of all ranks' rows; return their number."""
        with as_one_rank():
            return export_model(
                self._published,
                folder,
                updates=Updates(self._layout, version, gathered),
                dtype=self._dtype,
                **self._export,
            ).rows

    def _publish_rows(self, version: int, external: Mapping[str, str]) -> int:
        """Write all rows of external tables, as deltas from 0 to 1, from 1 to 2, ...; return their number."""
        named = named_tables(self._published)
        physical = {named[name].physical for name in external}
        tables = self._changes.tables
        empty = self._changes.by_user({table.name: no_changes(table) for table in tables})
        number = rows = 0
        with ExitStack() as stack:
            folder = self.folder / ROWS / str(version)

            def begin() -> str:
                staging = stack.enter_context(stage_folder(folder))
                save_external(staging, external)
                return str(staging)

            staging = Path(self._ranks.from_first(begin))
            for table in tables:
                for keys, values in rows_on_first(table, self._ranks) if table.name in physical else ():
                    change = {table.name: TableChange(keys, values, keys[:0])}

                    def write(change: Mapping[str, TableChange] = change, number: int = number) -> None:
                        delta = Delta(number, number + 1, {**empty, **self._changes.by_user(change)}, {})
                        write_atomically(staging / f"{number:012d}.delta", delta.encode(self._layout))

                    self._ranks.from_first(write)
                    number, rows = number + 1, rows + len(keys)
            self._ranks.from_first(stack.close)
        return rows

    def _done(self, covered: float, published: Published | None) -> Published | None:
        self.covered = covered
        for listener in self.listeners:
            listener(published)
        return published

    def _note(self, *kinds: str) -> None:
        self._times |= dict.fromkeys(kinds, time.monotonic())
        self._behind -= {*kinds}

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

    # Keras.

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Publish what is due; at first, a SavedModel."""
        self._behind = {*self._times}
        self._batches += 1
        if self._ranks.size == 1 or self._batches >= self._ask_after:
            self.publish_due()

    def publish_due(self) -> None:
        """Publish what the last batches make due, by the clock of rank 0, for example while no data come.

        Callbacks publish at the ends of batches by this function. If a file can't be written, it warns, and
        the next delta includes the changes.
        """
        now, pause = time.monotonic(), min(self._period["delta"] / 16, 1.0)
        batches = pause * self._batches / max(now - self._asked, 1e-6)
        wait = int(min(max(batches, 1), _ASK_MOST))
        due, self._ask_after = collectives.broadcast_object((self._due(now), wait))
        if due == "base":
            self._try(self.publish_base)
        elif due:
            self._try(lambda: self.publish(dense=due == "dense"))
        self._asked, self._batches = time.monotonic(), 0

    def _due(self, now: float) -> str:
        """Return what is due: ``"base"``, ``"dense"``, ``"delta"`` or nothing."""
        over = {kind for kind, period in self._period.items() if now - self._times[kind] >= period}
        if "base" in over & self._behind or not self._changes.whole:
            return "base" if "delta" in over else ""
        if "dense" in over & self._behind and "delta" in over:
            return "dense"
        return "delta" if "delta" in over & self._behind else ""

    def on_train_end(self, logs: Any = None) -> None:
        """Publish what has changed since the last delta."""
        self._try(self.publish)

    def _try(self, publish: Callable[[], Any]) -> None:
        """Publish; if a file can't be written, warn, and leave the changes to the next delta."""
        try:
            publish()
        except (CollectiveError, ConfigError, NotFiniteError):
            raise
        except (GmetaError, OSError) as error:
            self._times["delta"] = time.monotonic()
            warnings.warn(f"not published, the next delta has it: {error}", stacklevel=2)


def _check_weights(model: tf.keras.Model | None) -> None:
    for name, variable in dense_weights(model).items() if model is not None else ():
        if variable.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(variable))):
            raise NotFiniteError(f"weight {name} holds NaN or infinity: training has diverged")
