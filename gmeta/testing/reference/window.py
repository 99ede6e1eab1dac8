"""The keys and units of a step in micro-batches, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def classify_keys(keys: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the distinct keys by class, and each key's place; see `gmeta.ops.keys.window.classify_keys`."""
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
    """Return the units' numbers, micro-batch by micro-batch; see `gmeta.ops.keys.window.cluster_units`."""
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
    """Return how many keys micro-batches have together, of the distinct keys of the batch."""
    part_of = np.repeat(np.arange(len(sizes)), sizes)[np.argsort(order)]
    return len({(part_of[unit], key) for key, unit in zip(keys, units, strict=True)}) / len(set(keys))
