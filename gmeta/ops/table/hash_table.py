"""The dynamic embedding table: rows come to be when their key is first seen.

The engine is native: ``ops/table/host/table.h`` describes how it works and why it is fast.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.initializers.distributions import Initializer, Normal
from gmeta.ops.device import DEVICE_NAMES, Device, Place, place_of, warn_once
from gmeta.ops.inputs import float_matrix, ids_tensor, keys_vector
from gmeta.ops.keys.distinct import unique
from gmeta.ops.portable import freeze
from gmeta.ops.table.lookup import Lookup
from gmeta.ops.table.records import AdmissionState, FilterShards, Records, ShardRecords
from gmeta.ops.table.saving import are_saved_elsewhere
from gmeta.ops.table.statistics import Statistics
from gmeta.optimizers import Adam, SparseOptimizer
from gmeta.policies import ROW_INDEX_BYTES, Admission, Always, Eviction, TwoPrecisions

_native = load_op_library("ops")
for _name in (
    *("Lookup", "Update", "Remove", "Contains", "Evict", "Statistics", "Size", "Step"),
    *("Export", "Import", "ExportAdmission", "ImportAdmission"),
    *("ExportFilter", "ExportShards", "StartJournal", "JournalSaved", "JournalWhole"),
):
    tf.no_gradient(f"GmetaHashTable{_name}")


class HashTable(tf.saved_model.experimental.TrackableResource):
    """A dynamic embedding table: int64 key -> row of ``dim`` float32 numbers, with its optimizer.

    A row is made when a lookup first asks for its key; it is then a pure function of (seed, key), never of
    order, step or rank. Weights, optimizer state, frequency and last step of a row are one record; they are
    saved, restored and removed together.

    The table is a ``Trackable``: as an attribute of a Keras layer, a model or a ``tf.Module``, or named in a
    ``tf.train.Checkpoint``, it is saved and restored with them (keys, whole records, and the step). Restoring
    replaces what the table held. It works in eager mode and in ``tf.function``, and may be read and updated
    from several threads at once. Lookups have no gradient of their own; gradients stop at ``rows``, and
    you hand them back:

    Args:
      dim: Width of a row, >= 1.
      optimizer: How `apply_gradients` updates a row.
      initializer: What a new row holds.
      admission: Which missing ids get a row: `gmeta.policies.Always`, `gmeta.policies.CountAdmission`,
        `gmeta.policies.ProbabilityAdmission`.
      eviction: Which rows go, and the bound: `gmeta.policies.LRU`, `gmeta.policies.LFU`,
        `gmeta.policies.TTL`, `gmeta.policies.MinNorm`. None: rows stay until they are removed.
      precision: `gmeta.policies.TwoPrecisions` keeps rarely used rows in half precision. None: all in
        float32.
      device: ``"cpu"`` keeps the table in host memory, ``"gpu"`` in that of the first GPU that the process
        sees, where rows are looked up and updated without crossing the bus. It is the same table: rows,
        records and checkpoints mean the same on either, and go from one to the other. Without a GPU, or in a
        build without CUDA, a table is kept in host memory, with one warning. ``"auto"``: what the environment
        variable ``GMETA_TABLE_DEVICE`` says, else ``"cpu"``.
      device_rows: Of a table on a GPU: about how many rows its memory is to hold, those that come first. The
        others are in pinned host memory, where kernels read and write them over the bus: slower, and as
        many as the host has room for. With `gmeta.policies.TwoPrecisions`: so many half rows, and half as
        many of float32. None: all are on the GPU. A table in host memory doesn't mind.
      seed: Makes the initial rows of one table differ from another's; any int64.
      name: Names the table in messages and, unless it is an attribute of something, nowhere else.

    Raises:
      ConfigError: ``dim`` or ``device_rows`` is below 1, ``seed`` doesn't fit int64, or a bound in bytes
        holds no row.

    Example:
      >>> table = HashTable(4, optimizer=SGD(0.5), initializer=Zeros(), name="item")
      >>> lookup = table.lookup([[7, 3], [7, 9]])
      >>> with tf.GradientTape() as tape:
      ...     tape.watch(lookup.rows)
      ...     loss = tf.reduce_sum(tf.gather(lookup.rows, lookup.inverse))
      >>> table.apply_gradients(lookup.keys, tape.gradient(loss, lookup.rows))
      >>> table.lookup([7, 3], insert=False).rows.numpy()  # 7 stood there twice
      array([[-1. , -1. , -1. , -1. ],
             [-0.5, -0.5, -0.5, -0.5]], dtype=float32)
      >>> int(table.size())
      3
    """

    chosen_by: Literal["user", "nobody", "compile"] = "user"
    take_records_of: Callable[[HashTable, str], Callable[[Records], Records]] | None = None

    def __init__(
        self,
        dim: int,
        optimizer: SparseOptimizer | None = None,
        initializer: Initializer | None = None,
        seed: int = 0,
        name: str = "hash_table",
        *,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        precision: TwoPrecisions | None = None,
        device: Device = "auto",
        device_rows: int | None = None,
    ) -> None:
        if dim < 1:
            raise ConfigError(f"table {name!r}: dim must be at least 1, got {dim}")
        if not -(2**63) <= seed < 2**63:
            raise ConfigError(f"table {name!r}: seed must fit int64, got {seed}")
        if device_rows is not None and device_rows < 1:
            raise ConfigError(f"table {name!r}: device_rows must be at least 1, or None, got {device_rows}")
        self._device_rows = device_rows
        self._place: Place = place_of(device, f"table {name!r}")
        super().__init__(device=DEVICE_NAMES[self._place])
        self._dim = int(dim)
        self._optimizer = optimizer if optimizer is not None else Adam()
        self._initializer = initializer if initializer is not None else Normal()
        self._admission = admission if admission is not None else Always()
        self._eviction = eviction
        self._precision = precision
        self._seed = int(seed)
        self._name = name
        self._check_bound()
        with tf.init_scope():
            _ = self.resource_handle  # made now, not inside the first tf.function that uses it

    dim = property(lambda self: self._dim, doc="Width of a row.")
    optimizer = property(lambda self: self._optimizer, doc="The `SparseOptimizer` of the rows.")
    initializer = property(lambda self: self._initializer, doc="The `Initializer` of new rows.")
    admission = property(lambda self: self._admission, doc="The `Admission` of missing keys.")
    eviction = property(lambda self: self._eviction, doc="The `Eviction` of rows, or None.")
    precision = property(lambda self: self._precision, doc="The `TwoPrecisions` of rows, or None: float32.")
    seed = property(lambda self: self._seed, doc="The seed of the initial rows.")
    name = property(lambda self: self._name, doc="The table's name.")
    device = property(lambda self: self._place, doc="Where it is: ``'cpu'`` or ``'gpu'``.")

    def __repr__(self) -> str:
        return (
            f"HashTable({self._dim}, optimizer={self._optimizer}, initializer={self._initializer}, "
            f"seed={self._seed}, name={self._name!r}, admission={self._admission}, "
            f"eviction={self._eviction}, precision={self._precision}, device={self._place!r})"
        )

    def _check_bound(self) -> None:
        bound = self._eviction.max_bytes if self._eviction is not None else None
        row = 8 + 4 * (self._dim + self._optimizer.slot_floats(self._dim)) + ROW_INDEX_BYTES
        if bound is not None and bound < row:
            raise ConfigError(f"{self._owner}: max_bytes is {bound}, but one row takes {row}")

    @property
    def _owner(self) -> str:
        return f"table {self._name!r}"

    def _create_resource(self) -> tf.Tensor:
        if self._place == "cpu":
            return self._make()
        try:
            return self._make()
        except tf.errors.UnimplementedError as error:
            warn_once(error.message)
        self._place, self._resource_device = "cpu", DEVICE_NAMES["cpu"]
        with tf.device(self._resource_device):
            return self._make()

    def _make(self) -> tf.Tensor:
        return _native.gmeta_hash_table(
            optimizer_parameters=tf.constant(self._optimizer.hyperparameters, tf.float64),
            initializer_parameters=tf.constant(self._initializer.parameters, tf.float64),
            admission_parameters=tf.constant(self._admission.settings, tf.float64),
            eviction_parameters=tf.constant(
                self._eviction.settings if self._eviction is not None else (), tf.float64
            ),
            table_name=self._name,
            dim=self._dim,
            optimizer=self._optimizer.kind,
            initializer=self._initializer.kind,
            admission=self._admission.kind,
            eviction=self._eviction.kind if self._eviction is not None else "none",
            half_below=self._precision.threshold if self._precision is not None else 0,
            device_rows=self._device_rows or 0,
            seed=self._seed,
        )

    def lookup(self, ids: Any, insert: bool | tf.Tensor = True) -> Lookup:
        """The rows of the distinct ids.

        Args:
          ids: Integers of any shape; any int64 is a valid id, and an id may stand there any number of times.
          insert: Whether missing keys are stored with their initial row, and the use is counted in the
            records' frequency and last step (training); rows may be evicted before, and a missing key that
            is not admitted reads its initial row. Otherwise every missing key does, and the table stays as
            it is (evaluation).

        Returns:
          A `Lookup`.

        Raises:
          ConfigError: ``ids`` are not integers.
        """
        keys, inverse = unique(ids_tensor(ids, self._owner), device=self._place)
        return Lookup(self._rows_of(keys, insert, distinct=True), keys, inverse)

    def lookup_keys(self, keys: Any, insert: bool | tf.Tensor = True) -> tf.Tensor:
        """The row of each key: the second half of `lookup`, for callers that have made the keys distinct.

        Args:
          keys: (n,) integers. Each occurrence of a key counts as a use.
          insert: As in `lookup`.

        Returns:
          (n, dim) float32.

        Raises:
          ConfigError: ``keys`` is not a vector of integers.
        """
        return self._rows_of(keys_vector(keys, self._owner), insert, distinct=False)

    def _rows_of(self, keys: tf.Tensor, insert: bool | tf.Tensor, *, distinct: bool) -> tf.Tensor:
        copy = freeze(self, insert)
        if copy is not None:
            return copy.lookup_keys(keys)
        return _native.gmeta_hash_table_lookup(
            table=self.resource_handle,
            keys=keys,
            insert=tf.convert_to_tensor(insert, tf.bool),
            dim=self._dim,
            distinct=distinct,
        )

    def apply_gradients(
        self, keys: Any, grads: Any, learning_rate: float | tf.Tensor | None = None
    ) -> tf.Operation | None:
        """One optimizer step for the rows of ``keys``.

        Gradients of equal keys are summed first. Keys that the table doesn't hold are left out, and counted
        in ``statistics().ignored``. The table's step goes up by one.

        Args:
          keys: (n,) integers, as a `Lookup` gave them.
          grads: (n, dim) float32, the gradient of ``Lookup.rows``: a tensor, or the ``tf.IndexedSlices`` that
            a gather leaves, whose rows then alone are updated.
          learning_rate: Replaces the optimizer's for this call; needed where that is None.

        Returns:
          The operation, in a graph; None in eager mode.

        Raises:
          ConfigError: Wrong dtypes or shapes; no rate; or no ``grads``: the loss doesn't depend on the rows.
        """
        if grads is None:
            raise ConfigError(
                f"{self._owner}: grads is None: the loss doesn't depend on the rows, or the tape didn't "
                "watch them (tape.watch(lookup.rows) before they are used)"
            )
        keys = keys_vector(keys, self._owner)
        if isinstance(grads, tf.IndexedSlices):
            keys, grads = tf.gather(keys, grads.indices), grads.values
        rate = self._optimizer.learning_rate if learning_rate is None else learning_rate
        if rate is None:
            raise ConfigError(f"{self._owner}: its optimizer has learning_rate=None: give this call one")
        return _native.gmeta_hash_table_update(
            table=self.resource_handle,
            keys=keys,
            gradients=float_matrix(grads, self._owner, "grads", keys, self._dim),
            learning_rate=tf.cast(rate(self.step()) if callable(rate) else rate, tf.float32),
        )

    def remove(self, keys: Any) -> tf.Tensor:
        """Remove keys with their records; absent ones are passed over.

        Args:
          keys: (n,) integers.

        Returns:
          () int64, how many were there.

        Raises:
          ConfigError: ``keys`` is not a vector of integers.
        """
        return _native.gmeta_hash_table_remove(self.resource_handle, keys_vector(keys, self._owner))

    def evict(self) -> tf.Tensor:
        """Evict now: rows that have expired, and in shards above their bound the rows of the lowest rank.

        Lookups and updates evict by themselves (see `gmeta.policies.Eviction`); this is for moments when
        none comes, such as before a checkpoint. It does nothing in a table without eviction.

        Returns:
          () int64, how many rows went.
        """
        return _native.gmeta_hash_table_evict(self.resource_handle)

    def contains(self, keys: Any) -> tf.Tensor:
        """Which keys the table holds.

        Args:
          keys: (n,) integers.

        Returns:
          (n,) bool.

        Raises:
          ConfigError: ``keys`` is not a vector of integers.
        """
        return _native.gmeta_hash_table_contains(self.resource_handle, keys_vector(keys, self._owner))

    def reserve(self, rows: int) -> tf.Operation | None:
        """Make room for ``rows`` rows in all, so that none of them waits for memory or for growth.

        The table grows by itself without this, and goes on growing beyond it. What it saves is the time that
        the system takes to supply fresh memory, which is more than all else that is done with a new row.

        Args:
          rows: How many rows to make room for, those that are there included.

        Returns:
          The operation, in a graph; None in eager mode.

        Raises:
          ConfigError: ``rows`` is negative.
        """
        if rows < 0:
            raise ConfigError(f"{self._owner}: rows to reserve must be >= 0, got {rows}")
        return _native.gmeta_hash_table_reserve(self.resource_handle, rows=rows)

    def size(self) -> tf.Tensor:
        """The number of keys, () int64."""
        return _native.gmeta_hash_table_size(self.resource_handle)

    def step(self) -> tf.Tensor:
        """The number of `apply_gradients` calls so far, () int64."""
        return _native.gmeta_hash_table_step(self.resource_handle)

    def statistics(self) -> Statistics:
        """What the table holds and what has happened to it, as a `Statistics`."""
        size, capacity, *rest = tf.unstack(_native.gmeta_hash_table_statistics(self.resource_handle), 12)
        return Statistics(size, capacity, size / capacity, *rest)

    def export(self, with_slots: bool = True) -> Records:
        """A snapshot of all records; batches wait meanwhile.

        Args:
          with_slots: Without them, ``slots`` is (n, 0). For serving, which reads weights alone: with `Adam`
            that is a third of the memory.
        """
        return Records(
            *_native.gmeta_hash_table_export(self.resource_handle, dim=self._dim, with_slots=with_slots)
        )

    def export_shards(self, first: int, last: int, min_last_step: int = 0) -> ShardRecords:
        """A snapshot of some logical shards: what a save that is to need little memory goes through.

        Batches wait while a range is copied, and may run between two ranges. Save between two steps for a
        save of one moment. Otherwise each range is of its own moment; no record is torn.

        The export takes the removed keys out of the journal's notes, up to `journal_saved`: an export that
        fails on its way to the disk loses none.

        Args:
          first: The first of the 1024 logical shards.
          last: One past the last; with ``first == last`` nothing is exported.
          min_last_step: Leave out rows whose last step is below it. With the table's step at the beginning of
            the save before, what is left is every row that was read by an inserting lookup or updated since
            (and those of that very step).

        Returns:
          `ShardRecords`.

        Raises:
          tf.errors.InvalidArgumentError: The range isn't within [0, 1024), or ``min_last_step`` not within
            [0, 2^32).
        """
        shards, since = tf.cast([first, last], tf.int64), tf.cast(min_last_step, tf.int64)
        return ShardRecords(*_native.gmeta_hash_table_export_shards(self.resource_handle, shards, since))

    def start_journal(self, limit: int) -> tf.Operation | None:
        """Note removed keys from now on, so that `export_shards` can tell them to an incremental save.

        Args:
          limit: About how many to keep, of 8 bytes each; 0 ends the journal. When more distinct keys are
            removed between two saves, the journal gives up, and the next save must be a full one.

        Returns:
          The operation, in a graph; None in eager mode.

        Raises:
          tf.errors.InvalidArgumentError: ``limit`` is negative.
        """
        return _native.gmeta_hash_table_start_journal(self.resource_handle, tf.cast(limit, tf.int64))

    def journal_saved(self) -> tf.Operation | None:
        """Forget the removed keys that `export_shards` has given: they are safe."""
        return _native.gmeta_hash_table_journal_saved(self.resource_handle)

    def journal_whole(self) -> tf.Tensor:
        """Whether every removal since `start_journal` is noted, () bool: `import_` breaks the journal too."""
        return tf.cast(_native.gmeta_hash_table_journal_whole(self.resource_handle), tf.bool)

    def import_(self, records: Records, replace: bool = False) -> tf.Operation | None:
        """Take in whole records, as `export` gave them.

        Args:
          records: The records; their keys must be distinct.
          replace: Whether the table then holds these records alone, has their step, and has forgotten what
            admission remembered. Otherwise they are added to its content, replacing records of the same
            keys, and its step stays. Either way a bound is enforced by the next lookup, not here.

        Returns:
          The operation, in a graph; None in eager mode.

        Raises:
          ConfigError: Wrong dtypes or shapes.
          tf.errors.InvalidArgumentError: The records are of another width or another optimizer.
        """
        keys = keys_vector(records.keys, self._owner)
        width = self._optimizer.slot_floats(self._dim)
        return _native.gmeta_hash_table_import(
            table=self.resource_handle,
            keys=keys,
            rows=float_matrix(records.rows, self._owner, "rows", keys, self._dim),
            slots=float_matrix(records.slots, self._owner, "slots", keys, width),
            frequency=tf.cast(records.frequency, tf.int64),
            last_step=tf.cast(records.last_step, tf.int64),
            step=tf.cast(records.step, tf.int64),
            replace=replace,
        )

    def export_admission(self) -> AdmissionState:
        """What admission remembers of keys that have no row; batches wait meanwhile."""
        return AdmissionState(*_native.gmeta_hash_table_export_admission(self.resource_handle))

    def export_filter(self, first: int, last: int) -> FilterShards:
        """A snapshot of the filters of the table's own shards ``first`` up to ``last``; equal, none.

        Raises:
          tf.errors.InvalidArgumentError: The range isn't within the table's shards.
        """
        shards = tf.cast([first, last], tf.int64)
        return FilterShards(*_native.gmeta_hash_table_export_filter(self.resource_handle, shards))

    def import_admission(
        self, state: AdmissionState, *, replace: bool = True, first_filter: int = 0
    ) -> tf.Operation | None:
        """Take in what admission remembers, as `export_admission` gave it.

        Exact counts may go into a filter: it then counts these ids as often at least. A filter has no ids, so
        that exact counts can't come out of it: a part that admission has no use for is passed over, and one
        that is missing (empty) starts afresh.

        Args:
          state: The state.
          replace: Whether admission then remembers this alone, and ``state.filter`` is the whole filter.
            Otherwise it is added: counts replace those of the same ids, and of each filter counter and its
            new value the larger stays, so that no id's count is too low, and none higher than if one table
            had met what both have.
          first_filter: If added, number of the first of the table's own shards whose filters these are.

        Returns:
          The operation, in a graph; None in eager mode.

        Raises:
          ConfigError: ``state.keys`` is not a vector of integers.
          tf.errors.InvalidArgumentError: The filter is of another size, so of another capacity or error.
        """
        return _native.gmeta_hash_table_import_admission(
            table=self.resource_handle,
            keys=keys_vector(state.keys, self._owner),
            counts=tf.cast(state.counts, tf.int64),
            filter=tf.cast(state.filter, tf.uint8),
            first_filter=tf.cast(first_filter, tf.int64),
            replace=replace,
        )

    # Checkpoints. TensorFlow calls these two; the names of the tensors are part of the file format.

    def _layout(self) -> str:
        return json.dumps({"dim": self._dim, "optimizer": self._optimizer.kind})

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        if are_saved_elsewhere():
            return {}
        tensors = {f"-{name}": tensor for name, tensor in self.export()._asdict().items()}
        tensors |= {f"-admission_{name}": t for name, t in self.export_admission()._asdict().items()}
        return {**tensors, "-layout": tf.constant(self._layout())}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> tf.Operation | None:
        if not restored_tensors:  # saved elsewhere
            return None
        records = Records(*(restored_tensors[f"-{name}"] for name in Records._fields))
        layout = restored_tensors["-layout"]
        if tf.executing_eagerly() and layout.numpy().decode() != self._layout():
            if self.take_records_of is None:
                held = f"but the checkpoint holds {layout.numpy().decode()}"
                raise ConfigError(f"{self._owner} is {self._layout()}, {held}: restore it into one like that")
            records = self.take_records_of(self, json.loads(layout.numpy())["optimizer"])(records)
        admission = AdmissionState(*(restored_tensors[f"-admission_{n}"] for n in AdmissionState._fields))
        replaced = self.import_(records, replace=True)
        with tf.control_dependencies([] if replaced is None else [replaced]):
            return self.import_admission(admission)
