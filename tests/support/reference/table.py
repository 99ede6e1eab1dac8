"""The native ops in NumPy or plain TensorFlow, short enough to be obviously right, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gmeta.initializers import LOW, Initializer, philox4x32
from gmeta.optimizers import SparseOptimizer
from gmeta.policies import TwoPrecisions
from gmeta.policies.row_lifetimes import ROW_INDEX_BYTES, Admission, Always, Eviction
from support.reference.table_rules import (
    AdmissionModel,
    EvictionModel,
    Record,
    initial_rows,
    shard_count,
    shard_of,
    update_row,
    with_prior,
)

# A row of a table and its metadata.

Floats = npt.NDArray[np.float32]

# Float32 numbers after being stored in 16 bits.

LARGEST_HALF = 65504.0


def round_to_float16(values: Floats) -> Floats:
    """Round through IEEE binary16; magnitudes above 65504 become 65504."""
    return np.clip(values, -LARGEST_HALF, LARGEST_HALF).astype(np.float16).astype(np.float32)


def round_to_bfloat16(values: Floats) -> Floats:
    """Round through bfloat16, the upper half of a float32; for numbers that are not NaN."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def draw_float16(values: Floats, random: npt.NDArray[np.uint32]) -> Floats:
    """Round through IEEE binary16, up or down by 16 random bits for each number that is not NaN."""
    magnitude = np.minimum(np.abs(values), np.float32(LARGEST_HALF))
    exponent = np.maximum(np.frexp(magnitude)[1].astype(np.int64) - 11, -24)  # of a unit of the last place
    fine = np.floor(np.ldexp(magnitude.astype(np.float64), 16 - exponent)).astype(np.int64)
    units = (fine + random) >> 16
    return np.copysign(np.ldexp(units.astype(np.float64), exponent), values).astype(np.float32)


def draw_bfloat16(values: Floats, random: npt.NDArray[np.uint32]) -> Floats:
    """Round through bfloat16, up or down by 16 random bits for each number that is not NaN."""
    return ((values.view(np.uint32) + random) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def to_scaled_float16(rows: Floats) -> npt.NDArray[np.float16]:
    """(n, dim) -> (n, 1 + dim): each row's e, then the row over 2^e (``ops/common/halves/scaled_half.h``)."""
    values = _normal(rows)
    finite = np.abs(np.where(np.isfinite(values), values, 0)).max(axis=1, initial=0, keepdims=True)
    exponents = np.where(finite > 0, np.maximum(np.frexp(finite)[1] - 16, -126), 0)
    scaled = _normal(np.ldexp(values, -exponents))
    clipped = np.where(np.isinf(scaled), scaled, np.clip(scaled, -LARGEST_HALF, LARGEST_HALF))
    return np.concatenate([exponents, clipped], axis=1).astype(np.float16)


def from_scaled_float16(wire: npt.NDArray[np.float16]) -> Floats:
    """The inverse."""
    return _normal(np.ldexp(wire[:, 1:].astype(np.float32), wire[:, :1].astype(np.int32)))


def _normal(values: Floats) -> Floats:
    """Replace subnormal numbers by zeros of the same sign."""
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


def read_as(rows: Floats, dtype: str) -> Floats:
    """Rows (n, dim) as an export with rows of a dtype reads them, number by number."""
    if dtype == "bfloat16":
        most = np.uint32(0x7F7F0000).view(np.float32)
        return np.clip(round_to_bfloat16(rows), -most, most)
    read = rows.copy()
    for row in read if dtype == "int8" else ():
        scale = np.float32(max(abs(float(x)) for x in row)) / np.float32(127)
        scale = min(scale, np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0)))
        normal = scale >= np.finfo(np.float32).tiny
        row[:] = [np.float32(round(float(x / scale))) * scale if normal else 0 for x in row]  # half to even
    return read


# Which rows of a table of two precisions are half, and how they are rounded, in NumPy.
# As in ``half_rule.h`` and ``half_rounding.h`` in ``ops/table/core``, to the last bit.

_SECOND_SLOT = 2**31


class HalfRows:
    """The half rows of a table.

    Args:
      precision: The table's precision; None: no row is half.
      seed: The table's seed.
      shards: The number of the table's shards.
    """

    def __init__(self, precision: TwoPrecisions | None, seed: int, shards: int) -> None:
        self.precision, self.seed, self.shards = precision, seed, shards

    def contain(self, key: int, record: Record, step: int) -> bool:
        """Whether a row is half after the update that has brought the table to ``step``."""
        if self.precision is None:
            return False
        threshold, half_life = self.precision.threshold, self.precision.half_life
        if record.frequency < threshold or half_life is None:
            return record.frequency < threshold
        idle = max(0, self._last_sweep(key, step) - record.last_step)
        halvings, rest = divmod(idle, half_life)
        return record.frequency * (2 * half_life - rest) < threshold * half_life << halvings

    def _last_sweep(self, key: int, step: int) -> int:
        assert self.precision is not None
        assert self.precision.half_life is not None
        every = max(1, self.precision.half_life // 8)
        return max(0, step - (step + every * shard_of(key, self.shards) // self.shards) % every)

    def round(self, record: Record) -> None:
        """Round a record to nearest."""
        record.row, record.slots = round_to_float16(record.row), round_to_bfloat16(record.slots)

    def store(self, key: int, record: Record, step: int) -> None:
        """Round a record like the update that brings the table to ``step``."""
        assert self.precision is not None
        if self.precision.rounding == "nearest":
            return self.round(record)
        dim = len(record.row)
        words = self._words(key, step, dim, 0)
        record.row = draw_float16(record.row, words & np.uint32(0xFFFF))
        second = self._words(key, step, dim, _SECOND_SLOT) & np.uint32(0xFFFF)
        bits = [words >> np.uint32(16), second]
        record.slots = draw_bfloat16(record.slots, np.concatenate(bits)[: len(record.slots)])
        return None

    def _words(self, key: int, step: int, dim: int, above: int) -> npt.NDArray[np.uint32]:
        """The random word of each column."""
        blocks = np.arange(-(-dim // 4), dtype=np.uint64) + np.uint64(above)
        counter = (blocks, *(np.full_like(blocks, word & LOW) for word in (step, key, key >> 32)))
        words = philox4x32(self.seed, counter, np.uint64, lambda word: word >> np.uint64(32))
        return np.stack(words, axis=1).reshape(-1)[:dim].astype(np.uint32)


# The dynamic embedding table as a Python dict of NumPy records.

Ints = npt.NDArray[np.int64]


class ReferenceHashTable:
    """`gmeta.ops.HashTable`, method by method, on NumPy arrays.

    Args:
      dim: The width of a row.
      optimizer: The optimizer of rows.
      initializer: The initializer of new rows.
      seed: The seed of the initial rows.
      admission: The policy by which missing ids get a row.
      eviction: The policy by which rows are evicted.
      precision: The rule by which rows are in half precision.
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
        """An unused row."""
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
        """The number of rows in half precision."""
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
                self.halves.round(record)  # changes only those that have just cooled down
        self.counts["evictions"] += self.eviction.end_update(self.records, self.step)

    def remove(self, keys: Ints) -> int:
        """Removes keys; returns how many existed."""
        removed = sum(self.records.pop(key, None) is not None for key in np.asarray(keys).tolist())
        self.counts["removes"] += removed
        return removed

    def evict(self) -> int:
        """Evicts now; returns the number of evicted rows."""
        evicted = self.eviction.evict(self.records, self.step)
        self.counts["evictions"] += evicted
        return evicted

    def contains(self, keys: Ints) -> npt.NDArray[np.bool_]:
        """Whether each key exists."""
        return np.array([key in self.records for key in np.asarray(keys).tolist()], bool)

    def size(self) -> int:
        """The number of keys."""
        return len(self.records)


# `gmeta.ops.id_hash.merge_keys` and `gmeta.ops.id_hash.fold_ids` in Python's integers, which are unbounded.

_WORD = 2**64


def merge_keys(
    ids: Sequence[Ints],
    features: Sequence[str],
    prefixes: Sequence[int],
    id_bits: int,
    hashed: Sequence[bool] | None = None,
    mix: bool = True,
) -> Ints:
    """``prefix | id``, one feature after another.

    Raises:
      ValueError: An id is outside [0, 2^id_bits); the message is the native op's.
    """
    limit, keys = 1 << id_bits, []
    of_features = zip(ids, features, prefixes, hashed or [False] * len(ids), strict=True)
    for values, feature, prefix, hashes in of_features:
        for position, value in enumerate(np.asarray(values).tolist()):
            if hashes:
                value = mix_fold(value) if mix else xor_fold(value, id_bits)
            if not 0 <= value < limit:
                raise ValueError(
                    f"feature '{feature}': id {value} at position {position} of {len(values)} "
                    f"is outside [0, {limit}): FeatureConfig(..., hash=True) takes any id"
                )
            keys.append(prefix | value)
    return np.array(keys, np.int64)


def mix_fold(number: int, bits: int = 56) -> int:
    """A number below 2^bits itself, and for others the low bits of their SplitMix64."""
    number %= _WORD
    return number if number < 2**bits else splitmix64(number) % 2**bits


def xor_fold(number: int, bits: int) -> int:
    """The upper bits, xored onto the low ones."""
    number %= _WORD
    return (number ^ (number >> bits)) % 2**bits


def splitmix64(x: int) -> int:
    """SplitMix64 of a number below 2^64."""
    x = (x + 0x9E3779B97F4A7C15) % _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _WORD
    return x ^ (x >> 31)


# The hash of a key, and its logical shard, in NumPy.


def logical_shards(keys: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The logical shard of each key: the top ten bits of its MurmurHash3, 0 up to 1023.

    Args:
      keys: Integers of any shape that fit int64.

    Returns:
      int64, of the keys' shape.

    Example:
      >>> logical_shards([0, 1, 2])
      array([  0, 721, 234])
    """
    return (murmur_hash3(keys) >> np.uint64(54)).astype(np.int64)


def murmur_hash3(keys: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """The finalizer of MurmurHash3 in 64 bits: a bijection in which every bit depends on the whole key."""
    h = np.asarray(keys, np.int64).astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ (h >> np.uint64(33))) * np.uint64(factor)
    return h ^ (h >> np.uint64(33))


__all__ = ["ReferenceHashTable", "initial_rows", "logical_shards", "merge_keys"]
