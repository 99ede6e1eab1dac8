"""A store of users' histories, read by a native op in any graph (versioned late materialization)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, DataError, whole_number
from gmeta.core.history_manifest import HistoryManifest, dropping, newest_generation
from gmeta.core.native import load_op_library
from gmeta.core.schema import OnBad, check_on_bad
from gmeta.io.reader_stats import ReaderStats
from gmeta.io.readers.remote import locate

_LONGEST = 2**63 - 1


class HistoryStore:
    """A generation of a store that `gmeta history append` made, on any file system that TensorFlow reads.

    `read` works in eager code, in a ``tf.function`` and in a dataset's ``map``, including on workers of
    tf.data service, where it requires no Python. The index of a shard is loaded when its first user is read,
    and stays in memory, up to 2 GiB per process.

    Args:
      path: The store's folder.
      generation: The generation; None: the newest one at construction. Later appends don't change the result.

    Attributes:
      path: The store's folder.
      generation: The number of the generation.
      watermark: The time before which all events had arrived.
      start: The time before which compaction removed events; None: no compaction.
      deletions: Number of users whose events were deleted.
      columns: The names of the columns, by group.
      time: The name of the column of times.

    Raises:
      DataError: There is no such store or generation, or its manifest is damaged.
      ConfigError: The file system can't be read from here.

    Example:
      >>> store = HistoryStore("histories")
      >>> requests = tf.data.Dataset.from_tensor_slices({"user": users, "time": times}).batch(256)
      >>> batches = requests.map(
      ...     lambda r: {**r, "history": store.read(r["user"], ["item"], until=r["time"], longest=1000)},
      ...     num_parallel_calls=tf.data.AUTOTUNE,
      ... )
    """

    def __init__(self, path: str | os.PathLike[str], generation: int | None = None) -> None:
        store = locate(path)
        self.path = os.fspath(store)
        newest, gone = newest_generation(store), dropping(store)
        if generation is not None and (not 1 <= generation <= newest or generation in gone):
            raise DataError(f"there is no generation {generation}; the newest is {newest}", path=path)
        if gone:
            warnings.warn(
                f"{self.path}: the deletion of generations {', '.join(map(str, sorted(gone)))} was begun and "
                f"isn't finished: run `gmeta history verify {self.path}` where the store can be written",
                stacklevel=2,
            )
        self._manifest = HistoryManifest.load(store, newest if generation is None else generation)
        self.generation = self._manifest.generation
        self.watermark = self._manifest.watermark
        self.start = self._manifest.start
        self.deletions = sum(shard.deleted for shard in self._manifest.shards)
        self.columns = {name: [c.name for c in own] for name, own in self._manifest.groups.items()}
        self.time: str = self._manifest.spec["time"]
        self._attributes = {  # the op's description of the store
            "store": self.path,
            "digest": self._manifest.digest,
            "opened": self.generation,
            "indexes": [shard.index_sha256 for shard in self._manifest.shards],
        }

    def check(self, columns: Sequence[str]) -> None:
        """Check that columns can be read together.

        Raises:
          ConfigError: One is missing, or they belong to several groups.
        """
        self._manifest.find(columns)

    def deleted(self, users: Any, generation: Any = None) -> tf.Tensor:
        """Distinguish users whose events were deleted (`gmeta history scrub`) from users without events.

        Args:
          users: (R,) int64, in any order.
          generation: (R,) int64, or one for all. None: 0.

        Returns:
          (R,) bool: whether events of the user that this generation, or a later one, held were deleted.

        Raises:
          tf.errors.DataLossError: An index is damaged.
        """
        users = tf.convert_to_tensor(users, tf.int64)
        return load_op_library("io").gmeta_deleted_histories(
            users=users, generation=_spread(generation, 0, users), **self._attributes
        )

    def read(
        self,
        users: Any,
        columns: Sequence[str],
        *,
        until: Any = None,
        start: Any = None,
        generation: Any = None,
        longest: int | None = None,
        on_bad: OnBad = "raise",
        stats: ReaderStats | None = None,
    ) -> dict[str, tf.RaggedTensor]:
        """Rebuild histories as of a given time.

        A history contains the newest ``longest`` of the user's events with ``start <= time < until`` in
        ``generation``, ordered by time and birth. Any later generation returns the same history. Only the
        stripes that can contain these events are read, and only these columns are decoded.

        Args:
          users: (R,) int64, in any order. A user who isn't in the store has no events. Several requests for a
            user read and decode the user's stripes once.
          columns: Columns of one group, the time, or ``"born"``: the generation that first held an event.
          until: The exclusive upper bound of times: (R,) int64, or one for all. None: no bound.
          start: The inclusive lower bound of times, likewise.
          generation: The newest generation whose events are read, likewise. None: this one.
          longest: Maximum number of events of a history. None: all.
          on_bad: ``"raise"`` raises an error at a damaged stripe; ``"skip"`` returns an empty history, and
            counts it. A file that can't be read raises an error in both cases.
          stats: The counters to update, of histories, and of reads and bytes from the store's files.

        Returns:
          Name -> RaggedTensor (R, None), int64 or float32, all with the same row splits.

        Raises:
          ConfigError: A column is missing, columns belong to several groups, or an argument is out of range.
          tf.errors.DataLossError: A stripe is damaged or missing; `gmeta.io.reader_stats.as_data_error`
            reduces it to one line with file, offset, user and generation.
          tf.errors.InvalidArgumentError: A generation is later than this one.

        References:
          Versioned Late Materialization, sections 3.3 and 4.1.
        """
        if not columns:
            raise ConfigError("HistoryStore.read: columns is empty: name the columns to read")
        group, chosen = self._manifest.find(columns)
        users = tf.convert_to_tensor(users, tf.int64)
        splits, _, values = load_op_library("io").gmeta_read_histories(
            users=users,
            start=_spread(start, tf.int64.min, users),
            until=_spread(until, tf.int64.max, users),
            generation=_spread(generation, self.generation, users),
            **self._attributes,
            group=group,
            columns=[column.number for column in chosen],
            column_types=[tf.as_dtype(column.dtype) for column in chosen],
            longest=_LONGEST if longest is None else whole_number("longest", longest, least=0),
            on_bad=check_on_bad(on_bad),
            stats=0 if stats is None else stats.id,
        )
        return {
            name: tf.RaggedTensor.from_row_splits(own, splits, validate=False)
            for name, own in zip(columns, values, strict=True)
        }


def _spread(given: Any, default: int, users: tf.Tensor) -> tf.Tensor:
    return tf.broadcast_to(tf.cast(default if given is None else given, tf.int64), tf.shape(users))
