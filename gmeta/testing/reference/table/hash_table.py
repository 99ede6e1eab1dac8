"""The dynamic embedding table as a Python dict of NumPy records."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gmeta.initializers.distributions import Initializer
from gmeta.optimizers import SparseOptimizer
from gmeta.policies import Admission, Always, Eviction, TwoPrecisions
from gmeta.policies.eviction import ROW_INDEX_BYTES
from gmeta.testing.reference.table.half_rows import HalfRows
from gmeta.testing.reference.table.initializers import initial_rows
from gmeta.testing.reference.table.optimizers import update_row, with_prior
from gmeta.testing.reference.table.policies import AdmissionModel, EvictionModel, shard_count
from gmeta.testing.reference.table.precisions import round_to_float16
from gmeta.testing.reference.table.record import Record

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class ReferenceHashTable:
    """`gmeta.ops.HashTable`, method by method, on NumPy arrays.

    Args:
      dim: Width of a row.
      optimizer: How a gradient changes a row.
      initializer: What a new row holds.
      seed: Seed of the initial rows.
      admission: Which missing ids get a row.
      eviction: Which rows go.
      precision: Which rows are in half precision.
    """

    def __init__(
        self,
        dim: int,
        optimizer: SparseOptimizer,
        initializer: Initializer,
        seed: int = 0,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        precision: TwoPrecisions | None = None,
    ) -> None:
        self.dim, self.optimizer, self.initializer, self.seed = dim, optimizer, initializer, seed
        self.records: dict[int, Record] = {}
        self.step = 0
        counts = ("hits", "misses", "inserts", "removes", "updates", "ignored", "rejects", "evictions")
        self.counts = dict.fromkeys(counts, 0)
        record_bytes = 8 + 4 * (dim + optimizer.slot_floats(dim))
        shards = shard_count(eviction, record_bytes)
        self.admission = AdmissionModel(admission or Always(), seed, shards)
        self.halves = HalfRows(precision, seed, shards)
        half_bytes = 8 + -(-(record_bytes - 8) // 8) * 4

        def row_bytes(key: int, record: Record) -> int:
            return ROW_INDEX_BYTES + (half_bytes if self.is_half(key, record) else record_bytes)

        self.eviction = EvictionModel(eviction, shards, row_bytes)

    def lookup(self, ids: Ints, insert: bool = True) -> tuple[Floats, Ints, npt.NDArray[np.int32]]:
        """Rows (u, dim), keys (u,) in the order of first appearance, and the inverse of the ids' shape."""
        ids = np.asarray(ids, np.int64)
        keys = np.array(list(dict.fromkeys(ids.reshape(-1).tolist())), np.int64)
        place = {key: index for index, key in enumerate(keys.tolist())}
        inverse = np.array([place[key] for key in ids.reshape(-1).tolist()], np.int32).reshape(ids.shape)
        rows = self.initial_rows(keys)
        if insert:
            self.counts["evictions"] += self.eviction.make_room(self.records, self.step, place)
        for index, key in enumerate(keys.tolist()):
            found = key in self.records
            self.counts["hits" if found else "misses"] += 1
            if insert and not found:
                admitted = self.admission.admit(key, self.step)
                self.counts["inserts" if admitted else "rejects"] += 1
                if admitted:
                    self.records[key] = self.new_record(rows[index])
            if key in self.records:
                rows[index] = self.records[key].row
                if insert:
                    self.touch(self.records[key])
        return rows, keys, inverse

    def touch(self, record: Record) -> None:
        """Record a use. With a prior, only the first use of a row changes its last step."""
        if self.optimizer.prior is None or record.frequency == 0:
            record.last_step = self.step
        record.frequency += 1

    def initial_rows(self, keys: Ints) -> Floats:
        """The rows of missing keys."""
        rows = initial_rows(self.initializer, self.seed, keys, self.dim)
        return round_to_float16(rows) if self.halves.precision is not None else rows

    def new_record(self, row: Floats) -> Record:
        """A row that nothing has used."""
        slots = np.zeros(self.optimizer.slot_floats(self.dim), np.float32)
        slots[: self.dim] = self.optimizer.initial_slot
        record = Record(row.copy(), slots, 0, 0)
        if self.halves.precision is not None:
            self.halves.round(record)
        return record

    def is_half(self, key: int, record: Record) -> bool:
        """Whether a row is in half precision."""
        return self.halves.contain(key, record, self.step)

    def half_rows(self) -> int:
        """How many rows are in half precision."""
        return sum(self.is_half(key, record) for key, record in self.records.items())

    def apply_gradients(self, keys: Ints, grads: Floats, learning_rate: float) -> None:
        """One optimizer step for the rows of ``keys`` (n,) with ``grads`` (n, dim)."""
        sums: dict[int, Floats] = {}
        for key, gradient in zip(np.asarray(keys).tolist(), np.asarray(grads, np.float32), strict=True):
            sums[key] = sums[key] + gradient if key in sums else gradient
        halves = {key for key in sums if key in self.records and self.is_half(key, self.records[key])}
        self.step += 1
        for key, gradient in sums.items():
            record = self.records.get(key)
            self.counts["ignored" if record is None else "updates"] += 1
            if record is not None:
                missed = self.step - record.last_step
                gradient = with_prior(self.optimizer, record.row, gradient, missed, learning_rate)
                update_row(self.optimizer, record.row, record.slots, gradient, learning_rate, self.step)
                record.last_step = self.step
                if key in halves:
                    self.halves.store(key, record, self.step)
        for key, record in self.records.items():
            if self.is_half(key, record):
                self.halves.round(record)  # changes those alone that have cooled down now
        self.counts["evictions"] += self.eviction.end_update(self.records, self.step)

    def remove(self, keys: Ints) -> int:
        """Removes keys; returns how many were there."""
        removed = sum(self.records.pop(key, None) is not None for key in np.asarray(keys).tolist())
        self.counts["removes"] += removed
        return removed

    def evict(self) -> int:
        """Evicts now; returns how many rows went."""
        evicted = self.eviction.evict(self.records, self.step)
        self.counts["evictions"] += evicted
        return evicted

    def contains(self, keys: Ints) -> npt.NDArray[np.bool_]:
        """Which keys there are."""
        return np.array([key in self.records for key in np.asarray(keys).tolist()], bool)

    def size(self) -> int:
        """The number of keys."""
        return len(self.records)
