"""Deduplication on the GPU against NumPy."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest

from support.gpu.cuda_library import CudaError, DeviceArray, call, library
from support.reference.table import logical_shards

Array = npt.NDArray[np.int64]


def batches() -> dict[str, Array]:
    rng = np.random.default_rng()
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    zipf = np.minimum(rng.zipf(1.1, 300_000), most // 2).astype(np.int64)
    return {
        "none": np.zeros(0, np.int64),
        "one": np.array([least]),
        "all_equal": np.full(5000, -1, np.int64),
        "extremes": rng.choice(np.array([least, most, 0, -1, 1]), 777),
        "all_distinct": rng.permutation(200_000).astype(np.int64) * 7919,
        "uniform": rng.integers(0, 30_000, 100_001),
        "zipf": zipf,
        "wide": rng.integers(least, most, 70_000),
        "descending": np.arange(40_000, dtype=np.int64)[::-1] // 3,
    }


BATCHES = batches()


def first_appearances(ids: Array) -> tuple[Array, Array]:
    _, first, places = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return ids[first[order]], rank[places.reshape(-1)]


def run(ids: Array, ranks: int = 0) -> tuple[Array, Array, Array]:
    n = len(ids)
    given, keys, inverse = DeviceArray.of(ids, np.int64), DeviceArray(n, np.int64), DeviceArray(n, np.int32)
    counts, count = DeviceArray(max(ranks, 1), np.int32), DeviceArray(1, np.int32)
    size = library().gmeta_gpu_unique_workspace(ctypes.c_int64(n), ctypes.c_int32(ranks))
    space = DeviceArray(size, np.uint8)
    common = (given.pointer, n)
    rest = (count.pointer, space.pointer, ctypes.c_size_t(size), None)
    if ranks:
        results = (keys.pointer, inverse.pointer, counts.pointer)
        call("unique_by_owner", *common, ctypes.c_int32(ranks), *results, *rest)
    else:
        call("unique", *common, keys.pointer, inverse.pointer, *rest)
    found = int(count.numpy()[0])
    return keys.numpy()[:found], inverse.numpy(), counts.numpy()


@pytest.mark.parametrize("name", BATCHES)
def test_keys_are_in_the_order_of_their_first_appearance(name: str) -> None:
    keys, places = first_appearances(BATCHES[name])
    found, inverse, _ = run(BATCHES[name])
    np.testing.assert_array_equal(found, keys)
    np.testing.assert_array_equal(inverse, places)


@pytest.mark.parametrize("ranks", [1, 3, 8, 1024])
@pytest.mark.parametrize("name", BATCHES)
def test_keys_stand_by_owner(name: str, ranks: int) -> None:
    keys, places = first_appearances(BATCHES[name])
    owner = logical_shards(keys) * ranks // 1024
    order = np.argsort(owner, kind="stable")
    moved = np.empty(len(order), np.int64)
    moved[order] = np.arange(len(order))
    found, inverse, counts = run(BATCHES[name], ranks)
    np.testing.assert_array_equal(found, keys[order])
    np.testing.assert_array_equal(inverse, moved[places] if len(places) else places)
    np.testing.assert_array_equal(counts, np.bincount(owner, minlength=ranks))


@pytest.mark.parametrize("ranks", [1, 3, 8, 1024])
@pytest.mark.parametrize("name", BATCHES)
def test_all_ids_stand_by_owner(name: str, ranks: int) -> None:
    ids, n = BATCHES[name], len(BATCHES[name])
    given, keys, inverse = DeviceArray.of(ids, np.int64), DeviceArray(n, np.int64), DeviceArray(n, np.int32)
    counts = DeviceArray(ranks, np.int32)
    size = library().gmeta_gpu_order_by_owner_workspace(ctypes.c_int64(n), ctypes.c_int32(ranks))
    space = DeviceArray(size, np.uint8)
    results = (keys.pointer, inverse.pointer, counts.pointer, space.pointer, ctypes.c_size_t(size), None)
    call("order_by_owner", given.pointer, n, ctypes.c_int32(ranks), *results)
    owner = logical_shards(ids) * ranks // 1024
    order = np.argsort(owner, kind="stable")
    places = np.empty(n, np.int64)
    places[order] = np.arange(n)
    np.testing.assert_array_equal(keys.numpy(), ids[order])
    np.testing.assert_array_equal(inverse.numpy(), places)
    np.testing.assert_array_equal(counts.numpy(), np.bincount(owner, minlength=ranks))


def test_a_small_workspace_is_refused() -> None:
    ids, space = DeviceArray.of([1, 2], np.int64), DeviceArray(16, np.uint8)
    by_owner = (ids.pointer, ids.pointer, ids.pointer, space.pointer, 16, None)
    with pytest.raises(CudaError, match="gmeta_gpu_order_by_owner_workspace says"):
        call("order_by_owner", ids.pointer, 2, ctypes.c_int32(2), *by_owner)
    with pytest.raises(CudaError, match="gmeta_gpu_unique_workspace says"):
        call("unique", ids.pointer, 2, ids.pointer, ids.pointer, ids.pointer, space.pointer, 16, None)


def in_order(values: npt.NDArray[np.float32], inverse: Array, rows: int) -> npt.NDArray[np.float32]:
    """Sums in the order of positions, pieces of 256 first."""
    out = np.zeros((rows, values.shape[1]), np.float32)
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(rows + 1))
    for row in range(rows):
        members = values[order[starts[row] : starts[row + 1]]]
        pieces = []
        for begin in range(0, len(members), 256):
            total = members[begin].copy()
            for member in members[begin + 1 : begin + 256]:
                total += member
            pieces.append(total)
        for number, piece in enumerate(pieces):
            out[row] = out[row] + piece if number else piece
    return out


@pytest.mark.parametrize("dim", [1, 3, 4, 12, 64, 132])
@pytest.mark.parametrize("name", ["none", "one", "all_equal", "uniform", "extremes"])
def test_segments_are_summed_in_order(name: str, dim: int) -> None:
    ids = BATCHES[name][:20_000]
    keys, places = first_appearances(ids)
    n, rows = len(ids), len(keys) + 3  # the last three have no values
    values = np.random.default_rng().standard_normal((n, dim)).astype(np.float32)
    size = library().gmeta_gpu_segment_sum_workspace(*map(ctypes.c_int64, (n, rows, dim)))
    given, inverse = DeviceArray.of(values, np.float32), DeviceArray.of(places, np.int32)
    out, space = DeviceArray((rows, dim), np.float32), DeviceArray(size, np.uint8)
    sizes = (n, rows, out.pointer, space.pointer, ctypes.c_size_t(size), None)
    call("segment_sum", given.pointer, dim, inverse.pointer, *sizes)
    np.testing.assert_array_equal(out.numpy(), in_order(values, places, rows))


@pytest.mark.parametrize("dim", [1, 3, 8, 64, 260])
def test_rows_are_gathered(dim: int) -> None:
    rng = np.random.default_rng()
    rows, places = rng.standard_normal((500, dim)).astype(np.float32), rng.integers(0, 500, 12_345)
    given, inverse = DeviceArray.of(rows, np.float32), DeviceArray.of(places, np.int32)
    out = DeviceArray((len(places), dim), np.float32)
    call("gather_rows", given.pointer, dim, inverse.pointer, len(places), out.pointer, None)
    np.testing.assert_array_equal(out.numpy(), rows[places])
