"""The GPU table by its C interface, with the reference's methods, so that one test can compare both."""

from __future__ import annotations

import ctypes
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gmeta.policies import TwoPrecisions
from support.gpu.cuda_library import DeviceArray, call, library
from support.reference.table import ReferenceHashTable, logical_shards

Array = npt.NDArray[Any]

STATISTICS = (
    *("size", "capacity", "bytes", "hits", "misses", "inserts", "removes", "updates"),
    *("ignored", "rejects", "evictions", "half_rows", "disk_rows", "disk_bytes"),
    *("brought", "spilled", "host_rows", "crowded"),
)
_RECORD_COLUMNS = ("keys", "rows", "slots", "frequency", "last_step")
_HOST_COLUMNS = (
    *("row_splits", "live", "removed", "removed_splits"),
    *("waiting", "waiting_counts", "waiting_splits"),
)


class _Allocator(ctypes.Structure):
    _fields_ = [("allocate", ctypes.c_void_p), ("release", ctypes.c_void_p), ("context", ctypes.c_void_p)]


_PARAMETERS = ("optimizer", "initializer", "admission", "eviction")


class _Options(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dim", ctypes.c_int64),
        ("seed", ctypes.c_int64),
        *(
            field
            for name in _PARAMETERS
            for field in (
                (name, ctypes.c_char_p),
                (f"{name}_parameters", ctypes.POINTER(ctypes.c_double)),
                (f"{name}_parameter_count", ctypes.c_int64),
            )
        ),
        ("half_below", ctypes.c_int64),
        ("half_life", ctypes.c_int64),
        ("round_at_random", ctypes.c_int32),
        ("hbm_rows", ctypes.c_int64),
        ("host_bytes", ctypes.c_int64),
        ("disk_folder", ctypes.c_char_p),
        ("lookahead", ctypes.c_int64),
        ("l2", ctypes.POINTER(ctypes.c_float)),
        ("l2_count", ctypes.c_int64),
        ("device", ctypes.c_int32),
        ("allocator", _Allocator),
    ]


class _Sizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "removed", "waiting", "step")),
        ("journal_whole", ctypes.c_int32),
    ]


class _Columns(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in (*_RECORD_COLUMNS, *_HOST_COLUMNS)]


class Export(NamedTuple):
    """The result of `GpuTable.export`."""

    columns: dict[str, Array]
    step: int
    journal_whole: bool


class GpuTable:
    """A table on the GPU.

    Args:
      dim: The width of a row.
      optimizer: One of `gmeta.optimizers`.
      initializer: Anything with ``kind`` and ``parameters``.
      seed: The seed of the initial rows.
      admission: Anything with ``kind`` and ``settings``; None admits all.
      eviction: The same; None evicts nothing.
      half_below: As in the native op, like the next two.
      half_life: In steps.
      round_at_random: Whether updates of half rows round at random.
      hbm_rows: Rows beyond this many are in host memory; 0: none are.
      host_bytes: Rows beyond these bytes of host memory are on disk; 0: none are.
      disk_folder: The folder of rows on disk.
      lookahead: The number of batches that a prefetch is ahead of its lookup.
    """

    def __init__(
        self,
        dim: int,
        optimizer: Any,
        initializer: Any,
        seed: int = 0,
        admission: Any = None,
        eviction: Any = None,
        *,
        half_below: int = 0,
        half_life: int = 0,
        round_at_random: bool = False,
        hbm_rows: int = 0,
        host_bytes: int = 0,
        disk_folder: str = "",
        lookahead: int = 1,
    ) -> None:
        kinds = {
            "optimizer": (optimizer.kind, optimizer.hyperparameters),
            "initializer": (initializer.kind, initializer.parameters),
            "admission": (admission.kind, admission.settings) if admission else ("all", ()),
            "eviction": (eviction.kind, eviction.settings) if eviction else ("none", ()),
        }
        options = _Options(
            name=b"test",
            dim=dim,
            seed=seed,
            half_below=half_below,
            hbm_rows=hbm_rows,
            host_bytes=host_bytes,
            disk_folder=disk_folder.encode(),
            lookahead=lookahead,
            device=-1,
        )
        options.half_life, options.round_at_random = half_life, round_at_random
        l2 = optimizer.prior_l2(dim)
        options.l2, options.l2_count = (ctypes.c_float * len(l2))(*l2), len(l2)
        for name, (kind, parameters) in kinds.items():
            setattr(options, name, kind.encode())
            setattr(options, f"{name}_parameters", (ctypes.c_double * len(parameters))(*parameters))
            setattr(options, f"{name}_parameter_count", len(parameters))
        self._handle = ctypes.c_void_p()
        self.dim = dim
        call("table_create", ctypes.byref(options), ctypes.byref(self._handle))
        library().gmeta_gpu_table_slot_floats.restype = ctypes.c_int64
        self.slot_floats = int(library().gmeta_gpu_table_slot_floats(self._handle))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            call("table_destroy", self._handle)

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``gmeta_gpu_table_<name>`` with this table, for callers with their own arrays."""
        call(f"table_{name}", self._handle, *arguments)

    def _number(self, name: str, *arguments: Any) -> int:
        out = ctypes.c_int64(-1)
        self.call(name, *arguments, ctypes.byref(out))
        return out.value

    def lookup_keys(self, keys: Array, insert: bool = True, distinct: bool = False) -> Array:
        """The row of each key."""
        given, rows = DeviceArray.of(keys, np.int64), DeviceArray((len(keys), self.dim), np.float32)
        if insert:
            flag = ctypes.c_int32(distinct)
            self.call("lookup_or_insert", given.pointer, len(keys), flag, rows.pointer, None)
        else:
            self.call("lookup", given.pointer, len(keys), rows.pointer, None)
        return rows.numpy()

    def peek(self, keys: Array) -> tuple[Array, Array]:
        """The row of each key, and its stamp."""
        given, rows = DeviceArray.of(keys, np.int64), DeviceArray((len(keys), self.dim), np.float32)
        stamps = DeviceArray(len(keys), np.int64)
        self.call("peek", given.pointer, len(keys), rows.pointer, stamps.pointer, None)
        return rows.numpy(), stamps.numpy()

    def reread(
        self, keys: Array, rows: Array, stamps: Array, insert: bool = True, distinct: bool = False
    ) -> tuple[Array, int]:
        """The row of each peeked key, and the number of rows that were read again."""
        given, peeked = DeviceArray.of(keys, np.int64), DeviceArray.of(rows, np.float32)
        seen, changed = DeviceArray.of(stamps, np.int64), DeviceArray(1, np.int64)
        flags = ctypes.c_int32(insert), ctypes.c_int32(distinct)
        places = (peeked.pointer, seen.pointer, peeked.pointer, changed.pointer)
        self.call("reread", given.pointer, len(keys), *flags, *places, None)
        return peeked.numpy(), int(changed.numpy()[0])

    def apply_gradients(
        self, keys: Array, grads: Array, learning_rate: float, distinct: bool = False
    ) -> None:
        """One optimizer step; equal keys' gradients are summed."""
        given, gradients = DeviceArray.of(keys, np.int64), DeviceArray.of(grads, np.float32)
        rate, flag = ctypes.c_float(learning_rate), ctypes.c_int32(distinct)
        self.call("update", given.pointer, gradients.pointer, len(keys), rate, flag, None)

    def apply_indexed(self, keys: Array, grads: Array, inverse: Array, learning_rate: float) -> None:
        """One optimizer step for distinct keys from the gradients of positions."""
        given, gradients = DeviceArray.of(keys, np.int64), DeviceArray.of(grads, np.float32)
        places, rate = DeviceArray.of(inverse, np.int32), ctypes.c_float(learning_rate)
        arguments = (given.pointer, len(keys), gradients.pointer, places.pointer, len(inverse), rate, None)
        self.call("update_indexed", *arguments)

    def prefetch(self, keys: Array) -> None:
        """Move the rows of a later batch to GPU memory."""
        given = DeviceArray.of(keys, np.int64)
        self.call("prefetch", given.pointer, len(keys), None)

    def contains(self, keys: Array) -> Array:
        """Whether each key exists."""
        given, found = DeviceArray.of(keys, np.int64), DeviceArray(len(keys), np.uint8)
        self.call("contains", given.pointer, len(keys), found.pointer, None)
        return found.numpy()

    def remove(self, keys: Array) -> int:
        """Remove keys, and return how many existed."""
        given, removed = DeviceArray.of(keys, np.int64), ctypes.c_int64(-1)
        self.call("remove", given.pointer, len(keys), ctypes.byref(removed), None)
        return removed.value

    def evict(self) -> int:
        """Evict rows in all shards, as of the table's own step, and return their number."""
        evicted = ctypes.c_int64(-1)
        self.call("evict", -1, -1, ctypes.byref(evicted), None)
        return evicted.value

    def reserve(self, rows: int) -> None:
        """Make room."""
        self.call("reserve", rows)

    def clear(self) -> None:
        """Remove all rows."""
        self.call("clear")

    def size(self) -> int:
        """The number of keys."""
        return self._number("size")

    def step(self) -> int:
        """The number of updates."""
        return self._number("step")

    def statistics(self) -> dict[str, int]:
        """By name."""
        values = (ctypes.c_int64 * len(STATISTICS))()
        self.call("statistics", values)
        return dict(zip(STATISTICS, values, strict=True))

    def start_journal(self, limit: int) -> None:
        """Note removals."""
        self.call("start_journal", limit)

    def journal_saved(self) -> None:
        """Drop the exported removals."""
        self.call("journal_saved")

    def export(
        self, first: int = 0, last: int = 1024, min_last_step: int = 0, cut_journal: bool = False
    ) -> Export:
        """Records and related data, by column."""
        columns: dict[str, Array] = {}
        sizes_seen: list[Any] = []

        def allocate(_context: int, sizes_at: Any, to_at: Any) -> int:
            sizes, to = sizes_at.contents, to_at.contents
            shards = last - first
            shapes = {
                **dict.fromkeys(("keys", "frequency", "last_step"), (sizes.rows,)),
                "rows": (sizes.rows, self.dim),
                "slots": (sizes.rows, self.slot_floats),
                **dict.fromkeys(("row_splits", "removed_splits", "waiting_splits"), (shards + 1,)),
                "live": (shards,),
                "removed": (sizes.removed,),
                **dict.fromkeys(("waiting", "waiting_counts"), (sizes.waiting,)),
            }
            for name, shape in shapes.items():
                dtype = np.float32 if name in ("rows", "slots") else np.int64
                columns[name] = np.full(shape, -77, dtype)
                setattr(to, name, columns[name].ctypes.data)
            sizes_seen.append((sizes.step, bool(sizes.journal_whole)))
            return 0

        function = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Sizes), ctypes.POINTER(_Columns)
        )(allocate)
        self.call("export_shards", first, last, min_last_step, ctypes.c_int32(cut_journal), function, None)
        return Export(columns, *sizes_seen[0])

    def import_(self, columns: dict[str, Array], step: int, replace: bool) -> None:
        """Import records from host memory."""
        held = [
            np.ascontiguousarray(columns[name], np.float32 if name in ("rows", "slots") else np.int64)
            for name in _RECORD_COLUMNS
        ]
        pointers = [ctypes.c_void_p(column.ctypes.data) for column in held]
        self.call("import", *pointers, len(held[0]), step, ctypes.c_int32(replace))


# The expected content of a GPU table: the NumPy reference beside it, and the same calls to both.

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
EXTREMES = np.array([LEAST, LEAST + 1, -2, -1, 0, 1, 2, MOST - 1, MOST])
COUNTED = ("hits", "misses", "inserts", "removes", "updates", "ignored", "rejects", "evictions")


class Model(ReferenceHashTable):
    """The reference, with batches in which keys repeat."""

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
    """Make random calls, and compare every result."""
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
