"""Publishes a model while it trains: a SavedModel, and deltas that a running server takes.

::

    online/stream.json                    the stream's name, tables and weights
    online/model/1/                       a SavedModel, version 1 (the base path is online/model)
    online/deltas/000000000002.delta      what has changed from version 1 to 2 (`gmeta.export.model_deltas`)
    online/deltas/000000000003.delta
    online/rows/1/                        the rows of external tables at version 1, in many deltas

The folder may be in an object store; `gmeta.export.published_folder` describes it, and its compaction.

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
published. Changes of more than `LARGEST` bytes are divided among several versions, of which the last has the
dense weights. Versions between have some rows from before and some from after.

On several ranks, each rank finds the changes of its own rows, and rank 0 receives and writes all of them
(`gmeta.export.table_changes`). The clock of rank 0 decides what is due, and all ranks raise an error of one.
"""

from __future__ import annotations

import os
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
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
from gmeta.core.files import NamedPath, write_atomically
from gmeta.core.row_formats import RowDtype, RowFormat
from gmeta.core.settings import parse_duration
from gmeta.core.step import StepCallback
from gmeta.export.delta_signatures import Updates, dense_weights, layout_of, named_tables
from gmeta.export.external_rows import external_names
from gmeta.export.model_deltas import Delta, Layout, TableChange, split
from gmeta.export.published_folder import (
    LARGEST,
    MODEL,
    STREAM,
    PublishedFolder,
    save_external,
    span_name,
)
from gmeta.export.saved_model import export_model
from gmeta.export.table_changes import (
    Changes,
    changes_on_first,
    no_changes,
    rows_on_first,
    tables_on_first,
)

_ASK_MOST = 8
"""The most batches between two looks of several ranks at the clock of rank 0."""


@dataclass(frozen=True)
class Published:
    """What was published.

    Attributes:
      version: The version that servers have after they load or apply it.
      path: The delta's file, the last one if it was divided, or the SavedModel's folder.
      rows: The number of rows in it, those of external tables included.
      removed: The number of removed ids in it.
      bytes: The size of the delta's files; 0 for a SavedModel.
      seconds: How long the publication took.
    """

    version: int
    path: NamedPath
    rows: int
    removed: int
    bytes: int
    seconds: float


class Publisher(StepCallback):
    """Keras callback that publishes what training changes, for running servers.

    On several ranks, all ranks make it and call its methods together. Rank 0 writes the files, so only it
    needs the folder, and memory for a delta, or for a SavedModel, of all rows.

    Args:
      model: The model. Values that its exported graph holds, such as vectors of a catalogue, must be those of
        a `gmeta.export.derived.Derived`, and its tables may not cool down (`gmeta.policies.TwoPrecisions`).
      folder: Where to publish: a path, or an address such as ``"s3://bucket/prefix"``, ``gs://``, ``hdfs://``
        or one of fsspec. An existing folder of the same model is continued with a new SavedModel, written at
        the end of the first batch. One publisher at a time may use it; ``close()`` releases it. A second one
        is refused; at an address, it takes over, and the first one ends with an error at its next file.
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
      failure: Why the last publication of a callback failed; empty if it didn't.

    Raises:
      ConfigError: A time or ``dtype`` is invalid; the folder belongs to another model, or has rows of another
        dtype; no installed package knows the address; another publisher has taken over; or as for
        `export_model`.
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
        self._folder = folder if isinstance(folder, PublishedFolder) else PublishedFolder(folder)
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
        self._times = dict.fromkeys(("delta", "dense", "base", "failed"), -np.inf)
        self._behind = {*self._period}  # what doesn't include the last batches
        self._owes_dense = False  # a delta with dense weights may have appeared, or not
        self._asked, self._batches, self._ask_after = time.monotonic(), 0, 1
        self.listeners: list[Callable[[Published | None], Any]] = []
        self.covered, self.failure = 0.0, ""
        claim = ExitStack()
        self.close = weakref.finalize(self, claim.close)
        self._number = self._ranks.from_first(lambda: self._claim(claim))  # the last used, on rank 0
        self._version = self._number

    def _claim(self, claim: ExitStack) -> int:
        """Become the folder's publisher, and return its last number; each is for one file alone."""
        claim.callback(self._folder.claim())
        return self._folder.first_free() - 1

    @cached_property
    def _layout(self) -> Layout:
        """The stream's layout, on rank 0; the model is built before the first publication."""
        if not self._folder.contents().has_layout:
            layout = layout_of(self._published, uuid.uuid4().hex, self._dtype)
            self._folder.save_layout(layout)
            return layout
        held = self._folder.layout()
        if held.rows != self._dtype:
            raise ConfigError(
                f"{self._folder} has rows of {held.rows}: continue it with dtype={held.rows!r}, "
                "or name another folder"
            )
        if held != layout_of(self._published, held.stream, self._dtype):
            raise ConfigError(f"{self._folder} has the deltas of another model: name another folder")
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
          ConfigError: The publisher is closed, or another one has taken over.
        """
        self._check_open()
        return self._publish_delta(dense, empty=False) if self._continues() else self.publish_base()

    def _check_open(self) -> None:
        if not self.close.alive:
            raise ConfigError(f"the Publisher of {self._folder} is closed: make another one")

    def _continues(self) -> bool:
        """Return whether a delta can continue the last version, on all ranks."""
        found = collectives.allgather_objects((self._changes.can_continue(), self._version))
        self._version = found[0][1]
        return all(each for each, _ in found) and self._ranks.from_first(self._is_whole)

    def _is_whole(self) -> bool:
        """Return whether the folder still has a SavedModel, and write its layout again if that is gone."""
        contents = self._folder.contents()
        if not contents.has_layout:
            warnings.warn(f"{self._folder} had lost {STREAM}, which is written again", stacklevel=2)
            self._folder.save_layout(self._layout)
        if contents.models:
            return True
        warnings.warn(f"{self._folder} has lost its SavedModels: the next publication is one", stacklevel=2)
        return False

    def _merge_averages(self) -> None:
        """Give all ranks the same moving averages, as before a checkpoint."""
        merge = getattr(self._published, "merge_moving_averages", None)
        if merge is not None:
            merge()

    def _publish_delta(self, dense: bool, *, empty: bool) -> Published | None:
        start, now = time.perf_counter(), time.time()
        dense = dense or self._owes_dense
        if dense:
            self._merge_averages()
        with self._ranks.together():
            _check_weights(self._published if dense else None)
            found = self._changes.find()
        tables = changes_on_first(found.by_user)
        try:
            written = self._ranks.from_first(lambda: self._write(tables, dense, empty))
            if written is None:
                self._note("delta")
                return self._done(now, None)
            with self._ranks.together():
                self._changes.published(found)
        except BaseException:  # servers may have it: the next delta includes it
            self._owes_dense = self._owes_dense or dense
            self._changes.may_be_published(found)
            raise
        name, self._version, rows, removed, size = written
        self._owes_dense = False
        self._note("delta", *(["dense"] if dense else []))
        if self._ranks.rank == 0:
            self._folder.compact_beside(self._layout)
        seconds = time.perf_counter() - start
        return self._done(
            now, Published(self._version, self._folder.path(name), rows, removed, size, seconds)
        )

    def _write(
        self, tables: Mapping[str, TableChange], dense: bool, empty: bool
    ) -> tuple[str, int, int, int, int] | None:
        """Write changes as one delta or several, the last of which has the dense weights.

        Returns:
          The last one's name and version, and the number of rows, of removed ids and of bytes. None: nothing
          has changed.
        """
        layout = self._layout
        weights = {
            name: variable.numpy() for name, variable in dense_weights(self._published).items() if dense
        }
        rows, removed = (
            sum(len(getattr(change, kind)) for change in tables.values()) for kind in ("ids", "removed")
        )
        if not rows + removed + len(weights) and not empty:
            return None
        parts = split(tables, LARGEST, {name: 4 * layout.format_of(name).width for name in tables})
        part, size, name = next(parts, None), 0, ""
        while part is not None:
            packed, part = part, next(parts, None)
            self._number += 1
            delta = Delta(self._version, self._number, packed, weights if part is None else {})
            size += self._folder.write(delta, layout)[1]
            name, self._version = span_name(delta.after, delta.version), delta.version
        return name, self._version, rows, removed, size

    def publish_base(self) -> Published:
        """Publish a SavedModel, which servers load as a new version.

        Raises:
          NotFiniteError: As for `publish`.
          GmetaError: The SavedModel can't be written.
          ConfigError: As for `publish`.
        """
        self._check_open()
        start, now = time.perf_counter(), time.time()
        external = external_names(self._published, self._export.get("external", ()))
        continues = self._continues()
        if external and continues:
            self._publish_delta(dense=True, empty=True)
            version = self._version
        else:
            self._number += 1
            version = self._ranks.from_first(lambda: self._number)
        self._merge_averages()
        with self._ranks.together():
            steps = self._changes.start()  # before rows are read, so that no later removal is missed
        rows = self._publish_rows(version, external) if external else 0
        named = named_tables(self._published)
        left = {named[name].physical for name in external}
        inside = [table for table in self._changes.tables if table.name not in left]
        gathered = tables_on_first(inside, self._ranks) if self._ranks.size > 1 else {}
        rows += self._ranks.from_first(lambda: self._write_model(version, gathered))
        self._changes.all_published(steps)
        self._version, self._owes_dense = version, False
        self._note("delta", "dense", "base")
        self._ranks.from_first(self._folder.clean)
        seconds = time.perf_counter() - start
        done = Published(version, self._folder.path(f"{MODEL}/{version}"), rows, 0, 0, seconds)
        self._done(now, done)
        return done

    def _write_model(self, version: int, gathered: dict[str, tuple[Any, Any]]) -> int:
        """Write a SavedModel of all ranks' rows; return their number."""
        with self._folder.model(version) as staging, as_one_rank():
            return export_model(
                self._published,
                staging,
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

            def begin() -> str:
                staging = stack.enter_context(self._folder.rows(version))
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

    # Keras.

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Publish what is due; at first, a SavedModel."""
        self._behind = {*self._period}
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
        if now - self._times["failed"] < self._period["delta"]:
            return ""
        over = {kind for kind, period in self._period.items() if now - self._times[kind] >= period}
        if "base" in over & self._behind or not self._changes.whole:
            return "base"
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
            self.failure = ""
        except (CollectiveError, ConfigError, NotFiniteError):
            raise
        except (GmetaError, OSError) as error:
            self._note("failed")
            self.failure = str(error)
            warnings.warn(f"not published, the next delta has it: {error}", stacklevel=2)


def _check_weights(model: tf.keras.Model | None) -> None:
    for name, variable in dense_weights(model).items() if model is not None else ():
        if variable.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(variable))):
            raise NotFiniteError(f"weight {name} holds NaN or infinity: training has diverged")
