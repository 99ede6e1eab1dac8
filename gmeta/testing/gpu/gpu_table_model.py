"""What a GPU table is to hold: the NumPy reference beside it, and the same calls to both."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gmeta.policies import TwoPrecisions
from gmeta.testing.gpu.gpu_table import GpuTable
from gmeta.testing.reference.table.hash_table import ReferenceHashTable
from gmeta.testing.reference.table.shards import logical_shards

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
EXTREMES = np.array([LEAST, LEAST + 1, -2, -1, 0, 1, 2, MOST - 1, MOST])
COUNTED = ("hits", "misses", "inserts", "removes", "updates", "ignored", "rejects", "evictions")


class Model(ReferenceHashTable):
    """The reference, with batches in which keys stand more than once."""

    def lookup_keys(self, keys: Ints, insert: bool = True) -> Floats:
        """The row of each key; each occurrence is a use."""
        if insert:
            self.counts["evictions"] += self.eviction.make_room(self.records, self.step, keys.tolist())
        rows = self.initial_rows(keys)
        for index, key in enumerate(keys.tolist()):
            record = self.records.get(key)
            self.counts["misses" if record is None else "hits"] += 1
            if record is None and insert:
                admitted = self.admission.admit(key, self.step)
                self.counts["inserts" if admitted else "rejects"] += 1
                if admitted:
                    record = self.records[key] = self.new_record(rows[index])
            if record is not None:
                rows[index] = record.row
                if insert:
                    self.touch(record)
        return rows


def pair(
    *arguments: Any,
    hbm_rows: int = 0,
    host_bytes: int = 0,
    disk_folder: str = "",
    lookahead: int = 1,
    half_below: int = 0,
    half_life: int = 0,
    round_at_random: bool = True,
    **policies: Any,
) -> tuple[GpuTable, Model]:
    """A table on the GPU and its model."""
    table = GpuTable(
        *arguments,
        **policies,
        hbm_rows=hbm_rows,
        host_bytes=host_bytes,
        disk_folder=disk_folder,
        lookahead=lookahead,
        half_below=half_below,
        half_life=half_life,
        round_at_random=round_at_random,
    )
    if half_below:
        rounding: Literal["stochastic", "nearest"] = "stochastic" if round_at_random else "nearest"
        policies["precision"] = TwoPrecisions(half_below, half_life or None, rounding)
    return table, Model(*arguments, **policies)


def check_equal(
    table: GpuTable, model: Model, tolerance: float = 0.0, shards: tuple[int, int] = (0, 1024)
) -> None:
    """All records of a range of logical shards, in their order; and the counts."""
    found = table.export(*shards).columns
    keys = np.array(list(model.records), np.int64)
    logical = logical_shards(keys)
    inside = (logical >= shards[0]) & (logical < shards[1])
    keys, logical = keys[inside], logical[inside]
    order = np.lexsort((keys, logical))
    np.testing.assert_array_equal(found["keys"], keys[order])
    counts = np.bincount(logical - shards[0], minlength=shards[1] - shards[0])
    np.testing.assert_array_equal(found["live"], counts)
    np.testing.assert_array_equal(found["row_splits"], np.concatenate([[0], np.cumsum(counts)]))
    records = [model.records[key] for key in keys[order].tolist()]
    np.testing.assert_array_equal(found["frequency"], [record.frequency for record in records])
    np.testing.assert_array_equal(found["last_step"], [record.last_step for record in records])
    for column, part in (("rows", "row"), ("slots", "slots")):
        expected = np.array([getattr(record, part) for record in records], np.float32)
        expected = expected.reshape(found[column].shape)
        np.testing.assert_allclose(found[column], expected, rtol=tolerance, atol=tolerance)
    statistics = table.statistics()
    assert {name: statistics[name] for name in COUNTED} == model.counts
    assert statistics["half_rows"] == model.half_rows()
    assert statistics["size"] == table.size() == len(model.records)
    assert table.step() == model.step


def check_trace(
    table: GpuTable,
    model: Model,
    *,
    calls: int,
    keys: int,
    batch: int,
    tolerance: float = 0.0,
    seed: int | None = None,
) -> None:
    """Random calls; every result is compared as it comes."""
    rng = np.random.default_rng()
    for _ in range(calls):
        ids = rng.integers(-keys // 2, keys // 2, rng.integers(1, batch))
        ids[rng.random(len(ids)) < 0.1] = rng.choice(EXTREMES)
        distinct = bool(rng.integers(2))
        if distinct:
            ids = rng.permutation(np.unique(ids))
        match rng.integers(6):
            case 0:
                np.testing.assert_allclose(
                    table.lookup_keys(ids, insert=False), model.lookup_keys(ids, False), tolerance, tolerance
                )
            case 1 | 2:
                np.testing.assert_allclose(
                    table.lookup_keys(ids, True, distinct), model.lookup_keys(ids), tolerance, tolerance
                )
            case 3 | 4:
                grads = rng.standard_normal((len(ids), model.dim)).astype(np.float32)
                table.apply_gradients(ids, grads, 0.1, distinct)
                model.apply_gradients(ids, grads, 0.1)
            case _:
                ids = ids[: len(ids) // 4]
                assert table.remove(ids) == model.remove(ids)
        probe = rng.integers(-keys, keys, 50)
        np.testing.assert_array_equal(table.contains(probe), model.contains(probe))
    check_equal(table, model, tolerance)
