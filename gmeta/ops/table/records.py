"""The data that a `gmeta.ops.HashTable` exports and imports: its records and its admission state."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn, Protocol

import tensorflow as tf
from tensorflow.python.checkpoint.tensor_callable import Callable as LateTensor

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.core.shares import LOGICAL_SHARDS, owned_shards
from gmeta.ops.distinct import owned_by


class Records(NamedTuple):
    """Whole records of a table, in no particular order.

    Attributes:
      keys: (n,) int64, distinct.
      rows: (n, dim) float32, the weights.
      slots: (n, slot_floats) float32, the state of the optimizer: its concatenated ``slots``.
      frequency: (n,) int64, the number of inserting lookups that read the row.
      last_step: (n,) int64, the table's step when the row was last updated or read by an inserting lookup.
      step: () int64, the table's step.
    """

    keys: tf.Tensor
    rows: tf.Tensor
    slots: tf.Tensor
    frequency: tf.Tensor
    last_step: tf.Tensor
    step: tf.Tensor


class ShardRecords(NamedTuple):
    """Records of a range of logical shards, sorted by logical shard and then by key.

    A key's logical shard is the top ten bits of its MurmurHash3, so there are 1024 in any process.

    Attributes:
      keys: (n,) int64, distinct.
      rows: (n, dim) float32, as in `Records`.
      slots: (n, slot_floats) float32, as in `Records`.
      frequency: (n,) int64, as in `Records`.
      last_step: (n,) int64, as in `Records`.
      row_splits: (shards + 1,) int64: shard number i of the range has records ``row_splits[i]`` up to
        ``row_splits[i + 1]``.
      removed: (r,) int64, the distinct keys that the journal recorded as removed from these shards, sorted in
        the same way. A key that was inserted again is also in ``keys``: apply removals first.
      removed_splits: (shards + 1,) int64, as ``row_splits``.
      live: (shards,) int64, the number of rows of each shard, exported or not.
      step: () int64, the table's step.
      journal_whole: () bool, whether ``removed`` contains every removal since `HashTable.start_journal`.
      waiting: (w,) int64, the keys that an exact `gmeta.policies.CountAdmission` rejected, sorted in the same
        way.
      waiting_counts: (w,) int64, how often each was rejected.
      waiting_splits: (shards + 1,) int64, as ``row_splits``.
    """

    keys: tf.Tensor
    rows: tf.Tensor
    slots: tf.Tensor
    frequency: tf.Tensor
    last_step: tf.Tensor
    row_splits: tf.Tensor
    removed: tf.Tensor
    removed_splits: tf.Tensor
    live: tf.Tensor
    step: tf.Tensor
    journal_whole: tf.Tensor
    waiting: tf.Tensor
    waiting_counts: tf.Tensor
    waiting_splits: tf.Tensor


class AdmissionState(NamedTuple):
    """The state of a table's admission: the counts of ids without a row; empty tensors if there are none.

    Attributes:
      keys: (c,) int64, the ids that an exact `gmeta.policies.CountAdmission` counts, in no particular order.
      counts: (c,) int64, how often each was rejected.
      filter: (b,) uint8, the counters of the admission's `gmeta.policies.Bloom` filter.
    """

    keys: tf.Tensor
    counts: tf.Tensor
    filter: tf.Tensor


class FilterShards(NamedTuple):
    """Bloom filters (`gmeta.policies.Bloom`) of some of a table's own shards, one per shard.

    A table has ``count`` own shards, a power of two up to 64 (`gmeta.policies.LRU`). Shard i contains the
    logical shards ``1024 // count * i`` up to ``1024 // count * (i + 1)``.

    Attributes:
      counters: (shards, m) uint8; m is 0 in a table without such a filter.
      count: () int64, how many shards the table has.
    """

    counters: tf.Tensor
    count: tf.Tensor


# Statistics of a `gmeta.ops.HashTable`.


class Statistics(NamedTuple):
    """Statistics as scalar int64 tensors (``load_factor``: float64). Counts start when the table is created.

    Attributes:
      size: Keys in the table.
      capacity: Slots of the key index.
      load_factor: ``size / capacity``; an index grows at 0.75, one shard at a time: by two fifths in host
        memory, to twice its size on a GPU.
      bytes: Memory of the index, the records and the state of admission.
      hits: Keys that were looked up and found.
      misses: Keys that were looked up and absent.
      inserts: Rows that lookups created.
      removes: Rows that `HashTable.remove` removed.
      updates: Rows that a gradient updated.
      ignored: Gradients of absent keys, which updated nothing.
      rejects: Misses of inserting lookups that admission rejected.
      evictions: Rows that eviction removed.
      half_rows: Rows that are currently in half precision (`gmeta.policies.TwoPrecisions`); the others are in
        float32.
      disk_rows: Rows that are currently on a drive (`gmeta.policies.Tiers`).
      disk_bytes: Bytes of the files on the drive.
      brought: Rows that moved to the faster tier: from the drive to memory, or on a GPU from host memory to
        the GPU's.
      spilled: Rows that moved to the slower tier.
      host_rows: Rows of a table on a GPU that are currently in host memory.
      crowded: Rows for which a prefetch found no space in the GPU's memory.
    """

    size: tf.Tensor
    capacity: tf.Tensor
    load_factor: tf.Tensor
    bytes: tf.Tensor
    hits: tf.Tensor
    misses: tf.Tensor
    inserts: tf.Tensor
    removes: tf.Tensor
    updates: tf.Tensor
    ignored: tf.Tensor
    rejects: tf.Tensor
    evictions: tf.Tensor
    half_rows: tf.Tensor
    disk_rows: tf.Tensor
    disk_bytes: tf.Tensor
    brought: tf.Tensor
    spilled: tf.Tensor
    host_rows: tf.Tensor
    crowded: tf.Tensor


# The result of a table lookup.


class Lookup(NamedTuple):
    """Result of one lookup. Results are independent: you can keep any number of them.

    Attributes:
      rows: (u, dim) float32, the row of each key. It is a plain tensor: gather from it, watch it in a tape,
        and pass its gradient to `HashTable.apply_gradients` together with ``keys``.
      keys: (u,) int64, the distinct ids, in the order of their first appearance.
      inverse: int32, in the shape of the ids: id i has row ``rows[inverse[i]]``.
    """

    rows: tf.Tensor
    keys: tf.Tensor
    inverse: tf.Tensor


# How TensorFlow's checkpoints and Keras' files save and restore a table.
#
# One process writes such a file. With several ranks, a table is therefore saved there only if this rank has
# all its rows: the tables of a `gmeta.layers.EmbeddingCollection` are divided among the ranks, and are
# refused. A file with all rows can be restored on any number of ranks; each keeps the rows that it owns.

_elsewhere: ContextVar[bool] = ContextVar("tables_are_saved_elsewhere", default=False)

_DTYPES = {
    **{f"-{name}": tf.int64 for name in Records._fields},
    **{f"-admission_{name}": tf.int64 for name in AdmissionState._fields},
    "-rows": tf.float32,
    "-slots": tf.float32,
    "-admission_filter": tf.uint8,
}
"""Name of a saved tensor -> its dtype. The names are part of the file format."""

_LAYOUT, _WHOLE, _TIMES = "-layout", "whole", "step_times"


@contextmanager
def tables_saved_elsewhere() -> Iterator[None]:
    """Exclude the tables from what ``tf.train.Checkpoint`` and Keras save or restore inside the block.

    Use it in code that saves the tables itself, such as `gmeta.checkpoint.ShardedCheckpoint`. TensorFlow's
    checkpoint then contains the dense weights, the optimizer's state and the object graph.

    Example:
      ::

        with tables_saved_elsewhere():
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write("dense")
    """
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def are_saved_elsewhere() -> bool:
    """Return whether the code runs inside `tables_saved_elsewhere`."""
    return _elsewhere.get()


def refuse_asynchronous(owner: str) -> NoReturn:
    """Refuse asynchronous checkpoints, which TensorFlow would write with the rows of a later step.

    Raises:
      ConfigError: Always.
    """
    raise ConfigError(
        f"{owner}: an asynchronous checkpoint would save its rows at a later step than the dense weights: "
        "save without CheckpointOptions(enable_async=True)"
    )


def refuse_part(owner: str, layout: Mapping[str, Any]) -> None:
    """Refuse a table's layout from a file that may have only one rank's rows.

    Raises:
      ConfigError: The layout doesn't state that the file has all rows.
    """
    if not layout.get(_WHOLE, False):
        raise ConfigError(
            f"{owner}: an earlier version of gmeta saved the file, which doesn't state whether it has the "
            "rows of all ranks: if a job of one rank saved it, load it in a process of one rank and save it "
            "again"
        )


class SavedByTensorFlow:
    """The part of a `gmeta.ops.HashTable` that TensorFlow calls when it saves and restores.

    Attributes:
      divided: Whether the ranks of a group divide the table's rows.
    """

    divided: bool = False

    def saved_tensors(self) -> dict[str, tf.Tensor]:
        """Export the table's tensors for a file, by name; none within `tables_saved_elsewhere`.

        Raises:
          ConfigError: This rank has only a part of the rows.
        """
        table: Any = self
        if are_saved_elsewhere():
            return {}
        here = collectives.world()
        if self.divided and here.group_size > 1:
            raise ConfigError(
                f"{table._owner}: rank {here.rank} of {here.size} has only the rows that it owns, and so "
                "would the file: save with tf.keras.callbacks.BackupAndRestore or "
                "gmeta.checkpoint.ShardedCheckpoint, to which every rank adds its rows, and which any number "
                "of ranks can load"
            )
        tensors = {f"-{name}": tensor for name, tensor in table.export()._asdict().items()}
        tensors |= {f"-admission_{name}": t for name, t in table.export_admission()._asdict().items()}
        return {**tensors, _LAYOUT: self._saved_layout()}

    def _layout(self) -> dict[str, Any]:
        table: Any = self
        return {"dim": table.dim, "optimizer": table.optimizer.kind}

    def _saved_layout(self) -> tf.Tensor:
        table: Any = self
        layout = json.dumps({**self._layout(), _WHOLE: True})
        if table.step_times is None:
            return tf.constant(layout)
        times = tf.strings.reduce_join(
            tf.strings.as_string(tf.reshape(table.step_times, [-1])), separator=","
        )
        return tf.strings.join([f'{layout[:-1]}, "{_TIMES}": [', times, "]}"])

    def _serialize_to_tensors(self) -> dict[str, Any]:
        if are_saved_elsewhere() or not tf.executing_eagerly():
            return self.saved_tensors()
        # A restore also calls this, for names and types; only a save exports.
        table: Any = self
        saved, device = functools.cache(self.saved_tensors), table.resource_handle.device
        late = {
            name: LateTensor(lambda name=name: saved()[name], dtype, device)
            for name, dtype in _DTYPES.items()
        }
        return {**late, _LAYOUT: self._saved_layout()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> tf.Operation | None:
        table: Any = self
        if not restored_tensors:  # saved elsewhere
            return None
        records = Records(*(restored_tensors[f"-{name}"] for name in Records._fields))
        admission = AdmissionState(*(restored_tensors[f"-admission_{n}"] for n in AdmissionState._fields))
        if tf.executing_eagerly():
            noted = json.loads(restored_tensors[_LAYOUT].numpy())
            layout = {name: noted[name] for name in noted if name not in (_WHOLE, _TIMES)}
            if layout != self._layout():
                if not table.follows:
                    raise ConfigError(
                        f"{table._owner} is {json.dumps(self._layout())}, but the checkpoint holds "
                        f"{json.dumps(layout)}: restore it into such a table"
                    )
                records = table.take_records_of(layout["optimizer"])(records)
            if self.divided and collectives.world().group_size > 1:
                refuse_part(table._owner, noted)
                records, admission = self._owned(records, admission)
        replaced = table.import_(records, replace=True)
        if tf.executing_eagerly():
            table.set_step_times(noted.get(_TIMES, []))
        with tf.control_dependencies([] if replaced is None else [replaced]):
            return table.import_admission(admission)

    def _owned(self, records: Records, admission: AdmissionState) -> tuple[Records, AdmissionState]:
        """Return the part of a whole table that this rank owns."""
        table: Any = self
        here = collectives.world()
        own = owned_by(records.keys, here.group_rank, here.group_size)
        rows = {name: tf.boolean_mask(t, own) for name, t in records._asdict().items() if name != "step"}
        counted = owned_by(admission.keys, here.group_rank, here.group_size)
        counters, nothing = admission.filter, table.export_filter(0, 0)
        filters, width = int(nothing.count), nothing.counters.shape[1]
        if counters.shape[0] == filters * width:  # otherwise, the import refuses them
            # Each filter has the counts of some neighbouring logical shards.
            shards, first = owned_shards(here.group_rank, here.group_size), tf.range(filters) * LOGICAL_SHARDS
            covers = (first < shards.stop * filters) & (first + LOGICAL_SHARDS > shards.start * filters)
            by_filter = tf.reshape(counters, [filters, width]) * tf.cast(covers, tf.uint8)[:, tf.newaxis]
            counters = tf.reshape(by_filter, [-1])
        return Records(**rows, step=records.step), AdmissionState(
            tf.boolean_mask(admission.keys, counted),
            tf.boolean_mask(admission.counts, counted),
            counters,
        )

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """Refuse asynchronous checkpoints."""
        table: Any = self
        refuse_asynchronous(table._owner)


# The part of `gmeta.ops.HashTable` that records removed keys for incremental saves.

_native = load_op_library("ops")
for _name in ("StartJournal", "JournalSaved", "JournalWhole"):
    tf.no_gradient(f"GmetaHashTable{_name}")


class RemovalReader(Protocol):
    """A reader of a table's journal in addition to checkpoints, which empty the journal after saving it."""

    limit: int
    """About how many removed keys the journal has to note."""

    def note_removals(self, table: Any, keys: Any) -> None:
        """Receive removed keys that the journal returned to any reader; keys may repeat."""
        ...

    def journal_emptied(self, table: Any, *, lost: bool, by_checkpoint: bool) -> None:
        """Handle that the journal won't return earlier keys again.

        Args:
          table: The table.
          lost: Whether some removals weren't recorded.
          by_checkpoint: Whether a checkpoint now uses the journal, and empties it.
        """
        ...


class NotesRemovals:
    """A table's journal of removed keys.

    Attributes:
      journal_epoch: Changes when the journal is started, and when unsaved keys are dropped: an increment
        requires the epoch of its base.
    """

    export_shards: Any
    resource_handle: tf.Tensor
    journal_epoch = 0

    @functools.cached_property
    def removal_readers(self) -> weakref.WeakSet[RemovalReader]:
        """The readers of the journal other than checkpoints."""
        return weakref.WeakSet()

    def start_journal(self, limit: int) -> tf.Operation | None:
        """Record removed keys from now on, so that `export_shards` can return them to an incremental save.

        Args:
          limit: About how many keys to record, 8 bytes each; 0 ends the journal. If more distinct keys are
            removed between two saves, the journal overflows, and the next save must be a full one.

        Returns:
          The operation, in a graph; None in eager mode.

        Raises:
          tf.errors.InvalidArgumentError: ``limit`` is negative.
        """
        readers = [*self.removal_readers]
        lost = bool(readers) and not bool(self.journal_whole())
        if readers and not lost:
            self.export_shards(0, LOGICAL_SHARDS, 2**32 - 1)  # passes to readers what the journal loses now
        most = max([limit, *(reader.limit for reader in readers)])
        started = _native.gmeta_hash_table_start_journal(self.resource_handle, tf.cast(most, tf.int64))
        self.journal_epoch += 1
        for reader in readers:
            reader.journal_emptied(self, lost=lost, by_checkpoint=limit > 0)
        return started

    def journal_saved(self) -> tf.Operation | None:
        """Drop the removed keys that `export_shards` returned from the journal: they are saved."""
        for reader in [*self.removal_readers]:
            reader.journal_emptied(self, lost=False, by_checkpoint=True)
        return _native.gmeta_hash_table_journal_saved(self.resource_handle)

    def forget_removals(self) -> None:
        """Drop these keys although no checkpoint saved them; the next save is a full one."""
        self.journal_epoch += 1
        _native.gmeta_hash_table_journal_saved(self.resource_handle)

    def journal_whole(self) -> tf.Tensor:
        """Return whether the journal contains every removal since its start, () bool; `import_` breaks it."""
        return tf.cast(_native.gmeta_hash_table_journal_whole(self.resource_handle), tf.bool)

    def _noted(self, records: ShardRecords) -> ShardRecords:
        """Return exported records, and pass their removed keys to the readers."""
        if tf.executing_eagerly():
            for reader in [*self.removal_readers]:
                reader.note_removals(self, records.removed.numpy())
        return records
