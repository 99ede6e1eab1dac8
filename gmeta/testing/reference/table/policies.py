"""Admission and eviction in plain Python: a dict for counts, a sort for victims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from gmeta.policies import (
    LFU,
    TTL,
    Admission,
    CountAdmission,
    Eviction,
    MinNorm,
    ProbabilityAdmission,
)
from gmeta.policies.eviction import ROW_INDEX_BYTES
from gmeta.testing.reference.table.record import Record

_WORD = (1 << 64) - 1
_MOST_SHARDS = 64
_SMALLEST_SHARE = 1024


def murmur_hash3(key: int) -> int:
    """MurmurHash3's 64-bit finalizer of an int64 or uint64."""
    h = key & _WORD
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD & _WORD
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53 & _WORD
    return h ^ (h >> 33)


def shard_count(eviction: Eviction | None, record_bytes: int) -> int:
    """How many shards a table has: fewer than 64 where the bound is small."""
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
      shards: The table's shards; each has a filter of its own.
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
        """Whether a key that is missing now gets a row."""
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
    """Takes rows out of a dict of records.

    Args:
      policy: The eviction; None evicts nothing.
      shards: The table's shards.
      row_bytes: What a key's row is charged against a bound in bytes.
    """

    def __init__(self, policy: Eviction | None, shards: int, row_bytes: Callable[[int, Record], int]) -> None:
        self.policy, self.shards, self.row_bytes = policy, shards, row_bytes

    def make_room(self, records: dict[int, Record], step: int, keys: Iterable[int]) -> int:
        """Evict before an inserting lookup of ``keys``. Returns how many rows went."""
        met = {shard_of(key, self.shards) for key in keys}
        return sum(self._shard(records, step, shard, sweep=False) for shard in met)

    def end_update(self, records: dict[int, Record], step: int) -> int:
        """Sweep the shards whose turn it is at the end of update number ``step``; how many rows went."""
        every = 0 if self.policy is None else int(self.policy.settings[2])
        due = [i for i in range(self.shards) if every and (step + every * i // self.shards) % every == 0]
        return sum(self._shard(records, step, shard, sweep=True) for shard in due)

    def evict(self, records: dict[int, Record], step: int) -> int:
        """Sweep all shards. Returns how many rows went."""
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
            case TTL(steps=steps):
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


def _squared_norm(record: Record) -> float:
    total = 0.0
    for weight in record.row.tolist():
        total += weight * weight
    return total
