"""The dynamic embedding table, which creates a row when its key is first looked up.

The engine is native: ``ops/table/host/table.h`` describes how it works and why it is fast.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.initializers import Initializer, Normal
from gmeta.ops.device import (
    DEVICE_NAMES,
    Device,
    DeviceKind,
    asked_place,
    float_matrix,
    freeze,
    ids_tensor,
    keys_vector,
    place_of,
    warn_once,
)
from gmeta.ops.distinct import unique
from gmeta.ops.id_hash import HoldsMergedKeys
from gmeta.ops.table.finite import NamedGradient, refuse_bad
from gmeta.ops.table.followed_optimizer import FollowsModels, Rate
from gmeta.ops.table.read_ahead import HasClock, ReadsAhead
from gmeta.ops.table.records import (
    AdmissionState,
    FilterShards,
    Lookup,
    NotesRemovals,
    Records,
    SavedByTensorFlow,
    ShardRecords,
    Statistics,
)
from gmeta.optimizers import Adam, SparseOptimizer
from gmeta.policies import Tiers, TwoPrecisions
from gmeta.policies.row_lifetimes import ROW_INDEX_BYTES, Admission, Always, Eviction

_native = load_op_library("ops")
for _name in (
    *("Lookup", "Update", "UpdateIndexed", "Remove", "Contains", "Evict", "Statistics", "Size", "Step"),
    *("Export", "Import", "ExportAdmission", "ImportAdmission", "ExportFilter", "ExportShards"),
):
    tf.no_gradient(f"GmetaHashTable{_name}")


class HashTable(
    SavedByTensorFlow,
    ReadsAhead,
    NotesRemovals,
    HoldsMergedKeys,
    HasClock,
    FollowsModels,
    tf.saved_model.experimental.TrackableResource,
):
    """Dynamic embedding table: int64 key -> row of ``dim`` float32 numbers, with its optimizer.

    The first lookup of a key creates its row. The initial row is a pure function of (seed, key), independent
    of order, step and rank. Weights, optimizer state, frequency and last step of a row are one record; they
    are saved, restored and removed together.

    The table is a ``Trackable``: as an attribute of a Keras layer, a model or a ``tf.Module``, or named in a
    ``tf.train.Checkpoint``, it is saved and restored with them (keys, whole records, and the step). Restoring
    replaces the table's content. It works in eager mode and in ``tf.function``, and may be read and updated
    from several threads at once. Lookups aren't differentiable: compute the gradient of ``rows`` and pass it
    to `apply_gradients`, as in the example.

    Args:
      dim: Width of a row, >= 1.
      optimizer: How `apply_gradients` updates a row.
      initializer: The initial numbers of a new row.
      admission: Which missing ids get a row: a class of `gmeta.policies.row_lifetimes`.
      eviction: Which rows are evicted, and the bound: `gmeta.policies.LRU`, `gmeta.policies.LFU`,
        `gmeta.policies.TTL`, `gmeta.policies.MinNorm`. None: rows are kept until removed.
      precision: `gmeta.policies.TwoPrecisions` keeps rarely used rows in half precision. None: all rows are
        in float32.
      tiers: `gmeta.policies.Tiers` bounds the rows in host memory, with the others on a drive, or the rows in
        a GPU's memory, with the others in host memory. None: all rows are in one memory.
      device: ``"cpu"`` keeps the table in host memory. ``"gpu"`` keeps it in the memory of the first GPU that
        the process sees. Rows, records and checkpoints mean the same on both devices, and can move between
        them. Without a GPU, or in a build without CUDA, a table is kept in host memory without tiers, with
        one warning. ``"auto"``: the value of the environment variable ``GMETA_TABLE_DEVICE``, else ``"cpu"``.
      follows: Whether the table adopts the optimizer of the models that train it, like tables of a
        `gmeta.layers.EmbeddingCollection` without an optimizer. ``optimizer`` is used until then.
      seed: Makes the initial rows of one table differ from another's; any int64.
      name: The table's name, used only in messages, unless the table is an attribute of an object.

    Raises:
      ConfigError: ``dim`` is below 1, ``seed`` doesn't fit int64, or a bound in bytes is smaller than a row;
        ``tiers`` are for a table on another device, or their folder isn't writable.

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

    imports = 0  # the number of imports and restores

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
        tiers: Tiers | None = None,
        device: Device = "auto",
        follows: bool = False,
    ) -> None:
        if dim < 1:
            raise ConfigError(f"table {name!r}: dim must be at least 1, got {dim}")
        if not -(2**63) <= seed < 2**63:
            raise ConfigError(f"table {name!r}: seed must fit int64, got {seed}")
        asked = asked_place(device, f"table {name!r}")
        if tiers is not None:
            tiers.check(asked, f"table {name!r}")
        self._place: DeviceKind = place_of(device, f"table {name!r}")
        self._tiers = tiers if self._place == asked or tiers is None else tiers.without_gpu()
        super().__init__(device=DEVICE_NAMES[self._place])
        self._dim, self._seed, self._name = int(dim), int(seed), name
        self._optimizer = optimizer if optimizer is not None else Adam()
        self._start_following(follows)
        self._initializer = initializer if initializer is not None else Normal()
        self._admission, self._eviction = admission or Always(), eviction
        self._start_clock(eviction)
        self._precision = precision
        self._check_bound()
        with tf.init_scope():
            _ = self.resource_handle  # created now, not inside the first tf.function that uses it

    dim = property(lambda self: self._dim, doc="Width of a row.")
    optimizer = property(lambda self: self._optimizer, doc="The `SparseOptimizer` of the rows.")
    initializer = property(lambda self: self._initializer, doc="The `Initializer` of new rows.")
    admission = property(lambda self: self._admission, doc="The `Admission` of missing keys.")
    eviction = property(lambda self: self._eviction, doc="The `Eviction` of rows, or None.")
    precision = property(lambda self: self._precision, doc="The `TwoPrecisions` of rows, or None: float32.")
    tiers = property(lambda self: self._tiers, doc="The `Tiers` of rows, or None: all are in one memory.")
    seed = property(lambda self: self._seed, doc="The seed of the initial rows.")
    name = property(lambda self: self._name, doc="The table's name.")
    device = property(lambda self: self._place, doc="Where it is: ``'cpu'`` or ``'gpu'``.")

    def rename(self, name: str) -> None:
        """Set the table's name."""
        self._name = name

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
        self._tiers = self._tiers.without_gpu() if self._tiers is not None else None
        self._place, self._resource_device = "cpu", DEVICE_NAMES["cpu"]
        with tf.device(self._resource_device):
            return self._make()

    def _make(self) -> tf.Tensor:
        return _native.gmeta_hash_table(
            optimizer_parameters=tf.constant(self._optimizer.hyperparameters, tf.float64),
            initializer_parameters=tf.constant(self._initializer.parameters, tf.float64),
            admission_parameters=tf.constant(self._admission.settings, tf.float64),
            eviction_parameters=tf.constant(self._eviction.settings if self._eviction else (), tf.float64),
            table_name=self._name,
            dim=self._dim,
            optimizer=self._optimizer.kind,
            initializer=self._initializer.kind,
            admission=self._admission.kind,
            eviction=self._eviction.kind if self._eviction is not None else "none",
            half_below=self._precision.threshold if self._precision is not None else 0,
            half_life=(self._precision.half_life or 0) if self._precision is not None else 0,
            round_at_random=self._precision is not None and self._precision.rounding == "stochastic",
            l2=self._optimizer.prior_l2(self._dim, self._owner),
            hbm_rows=(self._tiers.hbm_rows or 0) if self._tiers is not None else 0,
            lookahead=self._tiers.lookahead if self._tiers is not None else 0,
            disk_folder=self._tiers.folder(self._owner) if self._tiers is not None else "",
            memory_bytes=(self._tiers.host_bytes or 0) if self._tiers is not None else 0,
            seed=self._seed,
        )

    def lookup(self, ids: Any, insert: bool | tf.Tensor = True) -> Lookup:
        """Look up the rows of the distinct ids.

        Args:
          ids: Integers of any shape; any int64 is a valid id, and an id may occur any number of times. uint64
            are taken as the int64 of the same bits.
          insert: True (training) stores missing keys with their initial row, and counts the use in the
            records' frequency and last step. Rows may be evicted first, and a missing key that isn't admitted
            reads its initial row. False (evaluation): every missing key reads its initial row, and the table
            doesn't change.

        Returns:
          A `Lookup`.

        Raises:
          ConfigError: ``ids`` are not integers.
        """
        keys, inverse = unique(ids_tensor(ids, self._owner), device=self._place)
        return Lookup(self._rows_of(keys, insert, distinct=True), keys, inverse)

    def lookup_keys(self, keys: Any, insert: bool | tf.Tensor = True, *, distinct: bool = False) -> tf.Tensor:
        """Look up the row of each key: the second half of `lookup`, for keys that are already distinct.

        Args:
          keys: (n,) integers. Each occurrence of a key counts as a use.
          insert: As in `lookup`.
          distinct: Whether the keys are known to be distinct, which saves work on a GPU.

        Returns:
          (n, dim) float32.

        Raises:
          ConfigError: ``keys`` is not a vector of integers.
        """
        return self._rows_of(keys_vector(keys, self._owner), insert, distinct=distinct)

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
        self,
        keys: Any,
        grads: Any,
        learning_rate: Rate = None,
        *,
        finite: bool = True,
        distinct: bool = False,
    ) -> tf.Operation | None:
        """Make one optimizer step for the rows of ``keys``.

        Gradients of equal keys are summed first. Missing keys are skipped, and counted in
        ``statistics().ignored``. The table's step increases by one.

        Args:
          keys: (n,) integers, like `Lookup.keys`.
          grads: (n, dim) float32, the gradient of ``Lookup.rows``: a tensor, or the ``tf.IndexedSlices`` of a
            gather, in which case only the rows in the slices are updated.
          learning_rate: Replaces the optimizer's learning rate for this call; required if that is None.
          finite: Whether to refuse gradients that hold NaN or infinity, before any row changes.
          distinct: Whether the keys are known to be distinct, as in `lookup_keys`.

        Returns:
          The operation, in a graph; None in eager mode.

        Raises:
          ConfigError: Wrong dtypes or shapes; no rate; or no ``grads``: the loss doesn't depend on the rows.
          NotFiniteError: A gradient holds NaN or infinity; a graph raises `tf.errors.InvalidArgumentError`.
            The message names the id.
        """
        if grads is None:
            raise ConfigError(
                f"{self._owner}: grads is None: the loss doesn't depend on the rows, or the tape didn't "
                "watch them (tape.watch(lookup.rows) before they are used)"
            )
        keys = keys_vector(keys, self._owner)
        positions = grads.indices if isinstance(grads, tf.IndexedSlices) else None
        grads = grads if positions is None else grads.values
        of_each = keys if positions is None else tf.gather(keys, positions)
        rate = self._rate_of_step(learning_rate)
        grads = float_matrix(grads, self._owner, "grads", of_each, self._dim)
        if finite:
            grads = refuse_bad([NamedGradient(self, grads, lambda: of_each)], grads)
        handle = self.resource_handle
        if positions is not None and distinct:
            positions = tf.cast(positions, tf.int32)
            update = _native.gmeta_hash_table_update_indexed(handle, keys, grads, positions, rate)
        else:
            update = _native.gmeta_hash_table_update(handle, of_each, grads, rate, distinct=distinct)
        return self._sweep(update)

    def remove(self, keys: Any) -> tf.Tensor:
        """Remove keys with their records; absent keys are skipped.

        Args:
          keys: (n,) integers.

        Returns:
          () int64, the number of removed keys.

        Raises:
          ConfigError: ``keys`` is not a vector of integers.
        """
        return _native.gmeta_hash_table_remove(self.resource_handle, keys_vector(keys, self._owner))

    def evict(self) -> tf.Tensor:
        """Evict expired rows now, and the rows of the lowest rank in shards above their bound.

        Lookups and updates evict automatically (`gmeta.policies.LRU` and others). Call this when there are
        none, such as before a checkpoint. It does nothing in a table without eviction.

        Returns:
          () int64, the number of evicted rows.
        """
        return self._evict_all()

    def contains(self, keys: Any) -> tf.Tensor:
        """Check which keys the table contains.

        Args:
          keys: (n,) integers.

        Returns:
          (n,) bool.

        Raises:
          ConfigError: ``keys`` is not a vector of integers.
        """
        return _native.gmeta_hash_table_contains(self.resource_handle, keys_vector(keys, self._owner))

    def reserve(self, rows: int) -> tf.Operation | None:
        """Reserve space for ``rows`` rows in total, so that no insertion waits for memory or growth.

        The table also grows automatically; reserving saves the time for allocating new memory.

        Args:
          rows: The total number of rows.

        Raises:
          ConfigError: ``rows`` is negative.
        """
        if rows < 0:
            raise ConfigError(f"{self._owner}: rows to reserve must be >= 0, got {rows}")
        return _native.gmeta_hash_table_reserve(self.resource_handle, rows=rows)

    def size(self) -> tf.Tensor:
        """Count the keys, () int64."""
        return _native.gmeta_hash_table_size(self.resource_handle)

    def step(self) -> tf.Tensor:
        """Return the number of `apply_gradients` calls so far, () int64."""
        return _native.gmeta_hash_table_step(self.resource_handle)

    def statistics(self) -> Statistics:
        """Return counts of the table's content and of past events, as a `Statistics`."""
        size, capacity, *rest = tf.unstack(_native.gmeta_hash_table_statistics(self.resource_handle), 18)
        return Statistics(size, capacity, size / capacity, *rest)

    def export(self, with_slots: bool = True) -> Records:
        """Export a snapshot of all records; batches wait until it is done.

        Args:
          with_slots: Whether to export the optimizer's slots; otherwise ``slots`` is (n, 0). Serving reads
            only weights: with `Adam`, that is a third of the memory.
        """
        return Records(
            *_native.gmeta_hash_table_export(self.resource_handle, dim=self._dim, with_slots=with_slots)
        )

    def export_shards(self, first: int, last: int, min_last_step: int = 0) -> ShardRecords:
        """Export a snapshot of some logical shards, so that a save can process ranges in little memory.

        Batches wait while a range is copied, and may run between two ranges. For a consistent state of the
        table, save between two steps. Otherwise, each range is saved at its own time; no record is torn.

        The export reads the removed keys from the journal. The journal keeps them until `journal_saved`, so
        that a failed save loses none.

        Args:
          first: The first of the 1024 logical shards.
          last: One past the last; with ``first == last``, nothing is exported.
          min_last_step: Skip rows whose last step is below it. If it is the table's step at the start of the
            previous save, the export contains every row that an inserting lookup read or a gradient updated
            since then (and those of that step itself).

        Returns:
          `ShardRecords`.

        Raises:
          tf.errors.InvalidArgumentError: The range isn't within [0, 1024), or ``min_last_step`` not within
            [0, 2^32).
        """
        shards, since = tf.cast([first, last], tf.int64), tf.cast(min_last_step, tf.int64)
        found = _native.gmeta_hash_table_export_shards(self.resource_handle, shards, since)
        return self._noted(ShardRecords(*found))

    def import_(self, records: Records, replace: bool = False) -> tf.Operation | None:
        """Import whole records, as `export` returned them.

        Args:
          records: The records; their keys must be distinct.
          replace: True: the table then contains only these records, adopts their step, and clears its
            admission state. False: the records are added to its content, replacing records of the same keys,
            and its step is unchanged. In both cases, the next lookup enforces a bound, not the import.

        Returns:
          The operation, in a graph; None in eager mode.

        Raises:
          ConfigError: Dtypes or shapes are wrong.
          tf.errors.InvalidArgumentError: The records have another width or belong to another optimizer.
        """
        keys = keys_vector(records.keys, self._owner)
        width = self._optimizer.slot_floats(self._dim)
        self.imports += 1
        if replace:
            self.set_step_times([])
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
        """Export the admission state of keys without a row; batches wait until it is done."""
        return AdmissionState(*_native.gmeta_hash_table_export_admission(self.resource_handle))

    def export_filter(self, first: int, last: int) -> FilterShards:
        """Export the filters of the table's own shards ``first`` up to ``last``; none if these are equal.

        Raises:
          tf.errors.InvalidArgumentError: The range isn't within the table's shards.
        """
        shards = tf.cast([first, last], tf.int64)
        return FilterShards(*_native.gmeta_hash_table_export_filter(self.resource_handle, shards))

    def import_admission(
        self, state: AdmissionState, *, replace: bool = True, first_filter: int = 0
    ) -> tf.Operation | None:
        """Import admission state, as `export_admission` returned it.

        Exact counts can be imported into a filter, whose counts of these ids are then at least as high. A
        filter has no ids, so it can't be converted to exact counts. Parts of the state that this admission
        can't use are skipped, and missing (empty) parts are reset.

        Args:
          state: The state.
          replace: True: this state replaces the admission state, and ``state.filter`` is the whole filter.
            False: the state is added. Counts replace those of the same ids, and each filter counter becomes
            the larger of its old and new values. No id's count is then too low, and none is higher than if
            one table had seen the ids of both.
          first_filter: If the state is added: the number of the first of the table's own shards whose filters
            it contains.

        Returns:
          The operation, in a graph; None in eager mode.

        Raises:
          ConfigError: ``state.keys`` is not a vector of integers.
          tf.errors.InvalidArgumentError: The filter has another size, hence another capacity or error.
        """
        return _native.gmeta_hash_table_import_admission(
            table=self.resource_handle,
            keys=keys_vector(state.keys, self._owner),
            counts=tf.cast(state.counts, tf.int64),
            filter=tf.cast(state.filter, tf.uint8),
            first_filter=tf.cast(first_filter, tf.int64),
            replace=replace,
        )
