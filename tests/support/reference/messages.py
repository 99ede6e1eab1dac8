"""The messages of keys and rows between ranks in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from support.reference.table import from_scaled_float16, logical_shards, murmur_hash3, to_scaled_float16

Ints = npt.NDArray[np.int64]
Places = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class RoutedKeys(NamedTuple):
    """As `gmeta.ops.key_messages.RoutedKeys`."""

    message: Ints
    splits: Places
    keys: tuple[Ints, ...]
    counts: Places
    inverse: tuple[Places, ...]


class OwnedKeys(NamedTuple):
    """As `gmeta.ops.key_messages.OwnedKeys`; ``keys`` in the order of their first appearance."""

    keys: tuple[Ints, ...]
    positions: tuple[Places, ...]
    counts: Places
    notes: Ints
    wire_keys: tuple[Ints, ...]


def owners(keys: npt.ArrayLike, world_size: int) -> Ints:
    """The rank that owns each key."""
    return logical_shards(keys) * world_size // 1024


def parts_of(sizes: Sequence[int], world_size: int) -> int:
    """The number of parts of an owner's keys, for tables with these numbers of keys."""
    parts, most = 1, max(sizes) // world_size
    while parts < 64 and parts * 8192 < most:
        parts *= 2
    return parts


def route_keys(keys: Sequence[Ints], *, note: Ints, world_size: int, dedup: bool = True) -> RoutedKeys:
    """Keys by owner, then distinct ones by part and the order of their first appearance, or all of them."""
    parts_each = parts_of([batch.size for batch in keys], world_size) if dedup else 1
    routed, inverse = [], []
    for batch in keys:
        distinct, places = _first_appearances(batch) if dedup else (batch, np.arange(batch.size))
        part = (murmur_hash3(distinct) >> np.uint64(32)).astype(np.int64) % parts_each
        order = np.argsort(owners(distinct, world_size) * parts_each + part, kind="stable")
        rank_of = np.empty(distinct.size, np.int32)
        rank_of[order] = np.arange(distinct.size)
        routed.append(distinct[order])
        inverse.append(rank_of[places])
    parts = [[t[owners(t, world_size) == rank] for t in routed] for rank in range(world_size)]
    counts = np.array([[part.size for part in of_rank] for of_rank in parts], np.int32)
    messages = [np.concatenate([note, counts[rank], *parts[rank]]) for rank in range(world_size)]
    splits = np.array([message.size for message in messages], np.int32)
    return RoutedKeys(np.concatenate(messages), splits, tuple(routed), counts, tuple(inverse))


def receive_keys(
    message: Ints, splits: Places, *, tables: int, note_size: int, dedup: bool = True
) -> OwnedKeys:
    """Split the messages, and make each table's keys distinct."""
    parts = np.split(message, np.cumsum(splits)[:-1])
    notes = np.array([part[:note_size] for part in parts], np.int64)
    counts = np.array([part[note_size : note_size + tables] for part in parts], np.int32)
    sent = [
        np.split(part[note_size + tables :], np.cumsum(of_rank)[:-1])
        for part, of_rank in zip(parts, counts, strict=True)
    ]
    wire_keys = [np.concatenate([of_rank[table] for of_rank in sent]) for table in range(tables)]
    found = [_first_appearances(k) if dedup else (k, np.arange(k.size, dtype=np.int32)) for k in wire_keys]
    keys, positions = zip(*found, strict=True)
    return OwnedKeys(keys, positions, counts, notes, tuple(wire_keys))


def pack_rows(
    rows: Sequence[Floats],
    positions: Sequence[Places] | None,
    counts: Places,
    *,
    wire_dtype: Any = np.float32,
) -> tuple[npt.NDArray[Any], Places]:
    """Every rank's rows, table by table; in float16 each row follows its scale."""
    wire: list[npt.NDArray[Any]] = [
        matrix if positions is None else matrix[positions[table]] for table, matrix in enumerate(rows)
    ]
    if wire_dtype == np.float16:
        wire = [to_scaled_float16(matrix) for matrix in wire]
    parts = [np.split(matrix, np.cumsum(counts[:, table])[:-1]) for table, matrix in enumerate(wire)]
    buffers = [np.concatenate([part[rank].ravel() for part in parts]) for rank in range(len(counts))]
    splits = np.array([buffer.size for buffer in buffers], np.int32)
    return np.concatenate(buffers).astype(wire_dtype), splits


def unpack_rows(buffer: npt.NDArray[Any], counts: Places, *, dims: Sequence[int]) -> tuple[Floats, ...]:
    """The inverse, in wire order."""
    scaled = buffer.dtype == np.float16
    widths = [dim + scaled for dim in dims]
    parts = np.split(buffer, np.cumsum(counts * np.asarray(widths))[:-1])  # of each rank and table
    wire = [np.concatenate(parts[t :: len(dims)]).reshape(-1, width) for t, width in enumerate(widths)]
    return tuple(from_scaled_float16(m) if scaled else m.astype(np.float32) for m in wire)


def _first_appearances(keys: Ints) -> tuple[Ints, Places]:
    """Distinct keys in the order of their first appearance, and the place of each key among them."""
    found: dict[int, int] = {}
    places = [found.setdefault(key, len(found)) for key in keys.tolist()]
    return np.array(list(found), np.int64), np.array(places, np.int32)


# The keys and units of a step in micro-batches, in plain Python.


def classify_keys(keys: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the distinct keys by class, and each key's place; see `gmeta.ops.distinct.classify_keys`."""
    number = len(keys)
    uses = {key: [i for i, part in enumerate(keys) if key in set(part)] for part in keys for key in part}
    classes = [(first, last) for first in range(number) for last in range(first, number)]
    by_class = [[key for key, own in uses.items() if (own[0], own[-1]) == each] for each in classes]
    places = []
    for i, part in enumerate(keys):
        pairs = zip(classes, by_class, strict=True)
        there = [key for (first, last), own in pairs if first <= i <= last for key in own]
        places.append([there.index(key) for key in part])
    return by_class, places


def cluster_units(keys: Sequence[int], units: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the units' numbers, micro-batch by micro-batch; see `gmeta.ops.distinct.cluster_units`."""
    occurs = {key: list(keys).count(key) for key in keys}
    parts: list[list[int]] = [[] for _ in sizes]
    has: list[set[int]] = [set() for _ in sizes]
    for unit in range(sum(sizes)):
        own = [key for key, its in zip(keys, units, strict=True) if its == unit]
        scores = [
            (sum(1.0 / occurs[key] for key in own if key in has[m]) * (1.0 - len(parts[m]) / size), m)
            for m, size in enumerate(sizes)
            if len(parts[m]) < size
        ]
        _, best = max(scores, key=lambda each: (each[0], -len(parts[each[1]]), -each[1]))
        parts[best].append(unit)
        has[best].update(own)
    return [unit for part in parts for unit in part]


def inflation(keys: Sequence[int], units: Sequence[int], order: Sequence[int], sizes: Sequence[int]) -> float:
    """Return the total number of the micro-batches' keys over that of the batch's distinct keys."""
    part_of = np.repeat(np.arange(len(sizes)), sizes)[np.argsort(order)]
    return len({(part_of[unit], key) for key, unit in zip(keys, units, strict=True)}) / len(set(keys))
