"""Admission and eviction in plain Python: a dict for counts, a sort for victims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gmeta.initializers import CENTER, LOG, LOW, TAIL, TRUNCATION, Initializer, philox4x32
from gmeta.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, Momentum, RowWiseAdagrad, SparseOptimizer
from gmeta.policies import LFU, TTL, CountAdmission, MinNorm, ProbabilityAdmission
from gmeta.policies.row_lifetimes import ROW_INDEX_BYTES, Admission, Eviction

Floats = npt.NDArray[np.float32]
_WORD = (1 << 64) - 1
_MOST_SHARDS = 64
_SMALLEST_SHARE = 1024


@dataclass
class Record:
    """One row: weights (dim,), the optimizer's slots (slot_floats,), and the metadata."""

    row: Floats
    slots: Floats
    frequency: int
    last_step: int


def murmur_hash3(key: int) -> int:
    """MurmurHash3's 64-bit finalizer of an int64 or uint64."""
    h = key & _WORD
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD & _WORD
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53 & _WORD
    return h ^ (h >> 33)


def shard_count(eviction: Eviction | None, record_bytes: int) -> int:
    """The number of a table's shards: fewer than 64 if the bound is small."""
    bounds = [] if eviction is None else [eviction.max_rows, eviction.max_bytes]
    if eviction is not None and eviction.max_bytes is not None:
        bounds[1] = eviction.max_bytes // (record_bytes + ROW_INDEX_BYTES)
    rows = min((bound for bound in bounds if bound is not None), default=1 << 63)
    shards = 1
    while shards < _MOST_SHARDS and rows // (2 * shards) >= _SMALLEST_SHARE:
        shards *= 2
    return shards


def shard_of(key: int, shards: int) -> int:
    """The shard of a key: the top bits of its hash."""
    return murmur_hash3(key) * shards >> 64


class AdmissionModel:
    """Decides on missing keys one by one.

    Args:
      policy: The admission.
      seed: The table's seed.
      shards: The table's shards; each has its own filter.
    """

    def __init__(self, policy: Admission, seed: int, shards: int) -> None:
        self.policy, self.seed, self.shards = policy, seed, shards
        self.counts: dict[int, int] = {}
        self.filters: list[list[int]] = []
        if isinstance(policy, CountAdmission) and policy.filter is not None:
            share = -(-policy.filter.capacity // shards)
            size = math.ceil(share * policy.filter.counters_per_id)
            self.filters = [[0] * size for _ in range(shards)]

    def admit(self, key: int, step: int) -> bool:
        """Whether a missing key gets a row."""
        match self.policy:
            case CountAdmission(threshold=threshold, filter=None):
                self.counts[key] = self.counts.get(key, 0) + 1
                if self.counts[key] < threshold:
                    return False
                del self.counts[key]
            case CountAdmission(threshold=threshold):
                counters, places = self._places(key)
                count = min(min(counters[at] for at in places) + 1, threshold)
                for at in places:
                    counters[at] = max(counters[at], count)
                return count >= threshold
            case ProbabilityAdmission(p=p):
                salt = murmur_hash3(self.seed + 0x9E3779B97F4A7C15)
                return murmur_hash3(murmur_hash3((key & _WORD) ^ salt) + step) >> 11 < int(p * 2**53)
        return True

    def _places(self, key: int) -> tuple[list[int], list[int]]:
        """The filter of a key's shard, and the key's places in it."""
        assert isinstance(self.policy, CountAdmission)
        assert self.policy.filter is not None
        counters = self.filters[shard_of(key, self.shards)]
        first = murmur_hash3((key & _WORD) ^ 0x9E3779B97F4A7C15)
        step = murmur_hash3((key & _WORD) ^ 0xD1B54A32D192ED03) | 1
        hashes = [(first + i * step) & _WORD for i in range(self.policy.filter.hashes)]
        return counters, [h * len(counters) >> 64 for h in hashes]


class EvictionModel:
    """Evicts rows from a dict of records.

    Args:
      policy: The eviction; None evicts nothing.
      shards: The table's shards.
      row_bytes: The bytes that a key's row counts against a bound in bytes.
    """

    def __init__(self, policy: Eviction | None, shards: int, row_bytes: Callable[[int, Record], int]) -> None:
        self.policy, self.shards, self.row_bytes = policy, shards, row_bytes
        self.clock: Callable[[], float] = lambda: 0.0
        self.times: list[tuple[int, int]] = []  # of a TTL in seconds: steps and their microseconds

    def make_room(self, records: dict[int, Record], step: int, keys: Iterable[int]) -> int:
        """Evict before an inserting lookup of ``keys``. Returns the number of evicted rows."""
        met = {shard_of(key, self.shards) for key in keys}
        return sum(self._shard(records, step, shard, sweep=False) for shard in met)

    def end_update(self, records: dict[int, Record], step: int) -> int:
        """Sweep the shards that are due after update number ``step``. Returns the number of evicted rows."""
        if isinstance(self.policy, TTL) and self.policy.steps is None:
            due = self._note(step, _microseconds(self.clock()))
            return sum(self._shard(records, step, shard, sweep=True) for shard in due)
        every = 0 if self.policy is None else int(self.policy.settings[2])
        due = [i for i in range(self.shards) if every and (step + every * i // self.shards) % every == 0]
        return sum(self._shard(records, step, shard, sweep=True) for shard in due)

    def _note(self, step: int, time: int) -> list[int]:
        """Note an update's time. Returns the shards whose turn has come."""
        assert isinstance(self.policy, TTL)
        lifetime, every = _microseconds(self.policy.lifetime), _microseconds(self.policy.interval)
        back = max(0, self.times[-1][1] - time) if self.times else 0
        self.times = [(at, then - back) for at, then in self.times]
        before = self.times[-1][1] if self.times else time
        if len(self.times) > 1 and self.times[-1][1] - self.times[-2][1] < lifetime // 64:
            self.times.pop()
        self.times.append((step, time))
        if time - before >= every:
            return [*range(self.shards)]
        turns = {turn % 64 for turn in range(before * 64 // every + 1, time * 64 // every + 1)}
        return [shard for shard in range(self.shards) if shard * 64 // self.shards in turns]

    def evict(self, records: dict[int, Record], step: int) -> int:
        """Sweep all shards. Returns the number of evicted rows."""
        return sum(self._shard(records, step, shard, sweep=True) for shard in range(self.shards))

    def _shard(self, records: dict[int, Record], step: int, shard: int, sweep: bool) -> int:
        if self.policy is None:
            return 0
        held = {key: r for key, r in records.items() if shard_of(key, self.shards) == shard}
        before = len(held)
        if sweep:
            held = {key: r for key, r in held.items() if not self._expired(r, step)}
        if any(load > high for load, (high, _) in self._loads(held, shard)):
            for key in sorted(held, key=lambda key: (self._rank(held[key]), key)):
                if all(load <= low for load, (_, low) in self._loads(held, shard)):
                    break
                del held[key]
        for key in [key for key in records if shard_of(key, self.shards) == shard and key not in held]:
            del records[key]
        return before - len(held)

    def _loads(self, held: dict[int, Record], shard: int) -> list[tuple[int, tuple[int, int]]]:
        """Rows and bytes of a shard, each with its high and low mark."""
        assert self.policy is not None
        loads = []
        for bound, load in (
            (self.policy.max_rows, len(held)),
            (self.policy.max_bytes, sum(self.row_bytes(key, record) for key, record in held.items())),
        ):
            if bound is not None:
                slack = bound // self.shards // 16
                high = bound // self.shards - slack * shard // self.shards
                loads.append((load, (high, high - slack)))
        return loads

    def _expired(self, record: Record, step: int) -> bool:
        match self.policy:
            case TTL(steps=None):
                old = _microseconds(self.clock()) - _microseconds(self.policy.lifetime)
                return any(time <= old and record.last_step < at for at, time in self.times)
            case TTL(steps=int(steps)):
                return record.last_step < step - steps
            case MinNorm(threshold=threshold):
                return _squared_norm(record) < threshold * threshold
        return False

    def _rank(self, record: Record) -> tuple[float, float]:
        match self.policy:
            case LFU():
                return record.frequency, record.last_step
            case MinNorm():
                return _squared_norm(record), 0
        return record.last_step, record.frequency


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _squared_norm(record: Record) -> float:
    total = 0.0
    for weight in record.row.tolist():
        total += weight * weight
    return total


# The sparse optimizers' formulas in NumPy.


def update_row(
    optimizer: SparseOptimizer, row: Floats, slots: Floats, gradient: Floats, learning_rate: float, step: int
) -> None:
    """One optimizer step, in place.

    Args:
      optimizer: Any of gmeta's.
      row: (dim,) weights.
      slots: (slot_floats,), the optimizer's slots one after another.
      gradient: (dim,).
      learning_rate: The rate of this step.
      step: The table's step, counted from 1.

    Raises:
      TypeError: Another optimizer.
    """
    rate, dim = np.float32(learning_rate), len(row)
    match optimizer:
        case SGD():
            row -= rate * gradient
        case RowWiseAdagrad():  # before Adagrad, its base class
            slots[0] += np.mean(gradient * gradient)
            row -= rate * gradient / np.sqrt(slots[0] + np.float32(optimizer.epsilon))
        case Adagrad():
            slots += gradient * gradient
            row -= rate * gradient / np.sqrt(slots + np.float32(optimizer.epsilon))
        case Momentum():
            momentum = np.float32(optimizer.momentum)
            slots *= momentum
            slots -= rate * gradient
            row += momentum * slots - rate * gradient if optimizer.nesterov else slots
        case Adam(beta_1=beta_1, beta_2=beta_2, epsilon=epsilon):
            if isinstance(optimizer, AdamW):
                row -= np.float32(float(rate) * optimizer.weight_decay) * row
            m, v = slots[:dim], slots[dim:]
            m += (gradient - m) * np.float32(1 - beta_1)
            v += (gradient * gradient - v) * np.float32(1 - beta_2)
            alpha = np.float32(float(rate) * np.sqrt(1 - beta_2**step) / (1 - beta_1**step))
            row -= m * alpha / (np.sqrt(v) + np.float32(epsilon))
        case Ftrl():
            power, l1 = np.float32(-optimizer.learning_rate_power), np.float32(optimizer.l1)
            accumulator, linear = slots[:dim], slots[dim:]
            before = accumulator**power
            accumulator += gradient * gradient
            after = accumulator**power
            linear += gradient + np.float32(2 * optimizer.l2_shrinkage) * row - (after - before) / rate * row
            strength = np.float32(2 * optimizer.l2 + optimizer.beta / float(rate))
            row[:] = (np.clip(linear, -l1, l1) - linear) / (after / rate + strength)
        case _:
            raise TypeError(f"no reference for {optimizer}")


def with_prior(
    optimizer: SparseOptimizer, row: Floats, gradient: Floats, missed: int, learning_rate: float
) -> Floats:
    """A row's gradient, with that of the prior for the steps that the row has missed.

    Args:
      optimizer: Any of gmeta's.
      row: (dim,) weights.
      gradient: (dim,).
      missed: The steps since the row's last update, this one included.
      learning_rate: The rate of this step.
    """
    l2 = np.array(optimizer.prior_l2(len(row)), np.float32)
    if not len(l2):
        return gradient
    with np.errstate(divide="ignore"):
        most = np.float32(1) / np.float32(learning_rate)
    return gradient + np.minimum(l2 * np.float32(missed), most) * row


# The initial rows of a table, as ``ops/table/core/initializer.h`` makes them, in NumPy.
#
# The same operations on float32 in the same order: the results are equal to the last bit.

Words = npt.NDArray[np.uint64]


def _high(words: Words) -> Words:
    return words >> np.uint64(32)


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = np.float32(coefficient) + value * x
    return value


def _log(x: Floats) -> Floats:
    bits = x.view(np.uint32)
    m = (bits & np.uint32(0x007FFFFF) | np.uint32(0x3F000000)).view(np.float32)
    low = m < np.float32(0.707106781186547524)
    e = ((bits >> np.uint32(23)).astype(np.int32) - 126).astype(np.float32) - low.astype(np.float32)
    m = (m - np.float32(1)) + np.where(low, m, np.float32(0))
    z = m * m
    p = _polynomial(LOG, m) * m * z
    p = p + e * np.float32(-2.12194440e-4)
    p = p - np.float32(0.5) * z
    return (m + p) + e * np.float32(0.693359375)


def _erfinv(x: Floats) -> Floats:
    one = np.float32(1)
    w = -_log((one - x) * (one + x))
    center = _polynomial(CENTER, w - np.float32(2.5))
    tail = _polynomial(TAIL, np.sqrt(np.maximum(w, np.float32(5))) - np.float32(3))
    return np.where(w < 5, center, tail) * x


def initial_rows(initializer: Initializer, seed: int, keys: npt.NDArray[np.int64], dim: int) -> Floats:
    """The initial rows of keys.

    Args:
      initializer: The distribution.
      seed: The table's seed, any int64.
      keys: (n,) int64.
      dim: Width of a row.

    Returns:
      (n, dim) float32.

    Example:
      >>> initial_rows(Uniform(0, 1), seed=0, keys=np.array([5, -1]), dim=2)
      array([[0.79673123, 0.6647489 ],
             [0.8379536 , 0.50708705]], dtype=float32)
    """
    parameters = [np.float32(value) for value in initializer.parameters]
    if initializer.kind == "constant":
        return np.full((len(keys), dim), parameters[0])
    blocks = -(-dim // 4)
    bits = np.asarray(keys, np.int64).view(np.uint64)
    zero = np.zeros((len(bits), blocks), np.uint64)
    number, key = np.arange(blocks, dtype=np.uint64), bits[:, np.newaxis]
    counter = (zero + number, zero, zero + (key & np.uint64(LOW)), zero + _high(key))
    words = np.stack(philox4x32(seed, counter, np.uint64, _high), axis=-1)
    words = words.reshape(len(bits), 4 * blocks)[:, :dim]
    integers = (words >> np.uint64(8)).astype(np.int32)
    unit = np.float32(2.0**-24)
    a, b = parameters
    if initializer.kind == "uniform":
        return a + (b - a) * (integers.astype(np.float32) * unit)
    x = (2 * integers + 1 - (1 << 24)).astype(np.float32) * unit
    if initializer.kind == "truncated_normal":
        x = TRUNCATION * x
    return a + b * np.float32(np.sqrt(2.0)) * _erfinv(x)
