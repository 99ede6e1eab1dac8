"""The preparation as pure functions over columns: the order of rows, batches, their places, the shards.

The computation is G-Meta's preprocessing (section 2.2). Records are normalised. The records of a task are
grouped in time order and cut into numbered batches. Then whole batches, never single rows, are permuted: a
reader finds a batch's rows side by side, and still meets tasks in random order.

::

    records ──normalise──> rows ──sort by row_order──> tasks ──repeated, selected──> rows that are kept
                                                                                              │
    shards <── sort by place (split, shard, order_key, task, batch_id) <── batch_of(position, task_size)

An engine supplies the rest: reading, the shuffle, parallel workers, writing. Four properties let any engine,
with any number of workers, produce the same bytes:

* the order of rows is total over everything that is written, so the order of the input doesn't matter;
* the batch of a row depends only on (its position in its task, the task's size), so a task whose rows
  are spread over several workers can be cut once its size, and the number of its rows that precede each
  worker's, are known;
* the place of a batch (split, shard, position in it) depends only on (seed, task, batch id);
* `order_key` is arithmetic on 64-bit integers written out here, not a library's hash.

These functions don't depend on the columns' meaning. A `TableSpec` defines which column is the task and which
one the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.core.shares import range_of, splitmix64
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.source import Columns, Ints, Values

PLAN_VERSION = 3
"""The version of the plan, increased whenever the same input and settings would give other bytes."""


class Placement(NamedTuple):
    """The places of some batches, or of the batches of some rows.

    Attributes:
      split: (N,) number of the split in `splits`.
      shard: (N,) number of the shard in its split.
      key: (N,) uint64, `order_key`. Batches of a shard are sorted by (key, task, batch id).
    """

    split: Ints
    shard: Ints
    key: NDArray[np.uint64]


def row_order(columns: Columns, names: Sequence[str]) -> Ints:
    """Compute the permutation that sorts rows.

    Rows are compared by the first of ``names``, ties by the second, and so on. Numbers are compared by value
    (and -0.0 before 0.0, so that rows that compare as equal have equal bytes), lists by length and then
    element by element.

    Args:
      columns: N rows.
      names: The columns to sort by, usually `TableSpec.order`. A column is read only for rows that tie in all
        columns before it, so the many columns at the end of the list cost almost nothing. Rows that are
        already sorted by the first two columns aren't sorted again.

    Returns:
      (N,) int64.
    """
    first = [columns[name] for name in names[:2]]
    keys = [comparable(values) for values in first if not isinstance(values, tuple)]
    rows = len(keys[0])
    same = np.ones(max(rows - 1, 0), np.bool_)  # row i + 1 of the order ties with row i
    ascending = same.copy()
    for key in keys:
        ascending &= ~same | (key[1:] >= key[:-1])
        same &= key[1:] == key[:-1]
    if ascending.all():
        order = np.arange(rows)
    else:
        order = np.lexsort(keys[::-1])
        same[:] = True
        for key in keys:
            same &= key[order[1:]] == key[order[:-1]]
    for name in names[len(keys) :]:
        for key in _keys(columns[name]):
            if not same.any():
                return order
            _break_ties(order, same, key)
    return order


def _break_ties(order: Ints, same: NDArray[np.bool_], key: NDArray[Any]) -> None:
    """Sort the tied runs of ``order`` by ``key``; ``same`` marks the ties, and is updated."""
    edges = np.concatenate(([False], same, [False]))
    places = np.flatnonzero(edges[:-1] | edges[1:])
    run = np.cumsum(~edges[:-1])[places]
    rows = order[places]
    by_key = np.lexsort((key[rows], run))
    order[places] = rows[by_key]
    values = key[order[places]]
    together = run[1:] == run[:-1]
    same[places[:-1][together]] = (values[1:] == values[:-1])[together]


def _keys(values: Values) -> Iterator[NDArray[Any]]:
    """Yield the sort keys of a column's rows, most significant first."""
    if not isinstance(values, tuple):
        yield comparable(values)
        return
    flat, splits = values
    lengths, flat = np.diff(splits), comparable(flat)
    yield lengths
    for place in range(int(lengths.max(initial=0))):
        key = np.zeros(len(lengths), flat.dtype)
        longer = lengths > place
        key[longer] = flat[splits[:-1][longer] + place]
        yield key


def comparable(values: NDArray[Any]) -> NDArray[Any]:
    """Convert ``values`` to integers with the same order, which are equal exactly if the bytes are equal."""
    if values.dtype.kind != "f":
        return values
    bits = values.astype(np.float32, copy=False).view(np.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def positions(task: Ints, first: int = 0) -> Ints:
    """Compute the position of each row in its task.

    Args:
      task: (N,) the tasks of sorted rows.
      first: The position of the first row in its task, if earlier rows of that task are elsewhere.

    Returns:
      (N,) int64, counted from 0 in each task.
    """
    starts = np.concatenate(([True], task[1:] != task[:-1]))[: len(task)]
    places = np.arange(len(task))
    found = places - np.maximum.accumulate(np.where(starts, places, 0))
    if len(task):
        found[: np.argmax(starts[1:]) + 1 if starts[1:].any() else len(task)] += first
    return found


def find_repeated(columns: Columns, task: str, unique: Sequence[str]) -> NDArray[np.bool_]:
    """Find rows that repeat the ``unique`` values of an earlier row of their task.

    If one of two such rows were in the support set and the other in the query set, the label would leak. So
    only the first row in `row_order` is kept.

    Args:
      columns: Whole tasks, sorted by `row_order`.
      task: The name of the task's column.
      unique: Names of columns with one value per row.

    Returns:
      (N,) bool.
    """
    keys = [columns[name] for name in (task, *unique)]
    plain = [comparable(key) for key in keys if not isinstance(key, tuple)]
    order = np.lexsort(plain[::-1])  # stable: rows with equal keys stay in row_order
    again = np.zeros(len(order), np.bool_)
    same = np.ones(max(len(order) - 1, 0), np.bool_)
    for key in plain:
        same &= key[order[1:]] == key[order[:-1]]
    again[order[1:]] = same
    return again


def select_tasks(task_size: Ints, config: PlanConfig) -> NDArray[np.bool_]:
    """Select the tasks to keep by their sizes (N,): ``min_rows <= size <= max_rows``."""
    kept = task_size >= config.min_rows
    return kept & (task_size <= config.max_rows) if config.max_rows else kept


def left_out(task_size: Ints, config: PlanConfig) -> dict[str, tuple[int, int]]:
    """Count what the selection leaves out for tasks of these sizes (N,): reason -> (rows, tasks)."""
    few, many = task_size < config.min_rows, (task_size > config.max_rows) & (config.max_rows > 0)
    reasons = {
        f"task has fewer than {config.min_rows} rows": few,
        f"task has more than {config.max_rows} rows": many,
    }
    return {why: (int(task_size[out].sum()), int(out.sum())) for why, out in reasons.items() if out.any()}


def batch_count(task_size: Ints, batch_rows: int | None) -> Ints:
    """Count the batches of tasks of these sizes (N,): ``max(1, size // batch_rows)``, or 1."""
    return np.ones_like(task_size) if batch_rows is None else np.maximum(1, task_size // batch_rows)


def batch_of(position: Ints, task_size: Ints, batch_rows: int | None) -> Ints:
    """Compute each row's batch: a task is cut into consecutive batches whose sizes differ by at most one.

    If a task of ``n`` rows has ``b`` batches, the first ``n % b`` batches have ``n // b + 1`` rows, and the
    others have ``n // b`` (as in `numpy.array_split`). So every batch has at least ``batch_rows`` rows,
    unless the whole task has fewer, and every batch has fewer than ``2 * batch_rows``.

    Args:
      position: (N,) position of the row in its task, from 0.
      task_size: (N,) rows of the task.
      batch_rows: The smallest number of rows of a batch. None: a task is a batch.

    Returns:
      (N,) int64, batch ids from 0.

    Example:
      >>> batch_of(np.arange(7), np.full(7, 7), 2)
      array([0, 0, 0, 1, 1, 2, 2])
    """
    count = batch_count(task_size, batch_rows)
    short, longer = task_size // count, task_size % count
    seam = longer * (short + 1)
    return np.where(
        position < seam, position // (short + 1), longer + (position - seam) // np.maximum(short, 1)
    )


def splits(config: PlanConfig) -> tuple[str, ...]:
    """Return the names of the splits.

    They are the source's own splits, if it has any; else ``("warm", "cold")``, or ``("train",)`` if no task
    is held out.
    """
    if config.partitions:
        return config.partitions
    return ("warm", "cold") if config.cold_modulus else ("train",)


def split_of(task: Ints, config: PlanConfig) -> Ints:
    """Return the number of each task's split in `splits`; (N,) int64."""
    if config.partitions:
        return np.full(len(task), config.partition, np.int64)
    if not config.cold_modulus:
        return np.zeros(len(task), np.int64)
    return (task % config.cold_modulus == 0).astype(np.int64)


def place(task: Ints, batch_id: Ints, config: PlanConfig) -> Placement:
    """Compute the places of batches (N,)."""
    key = order_key(config.seed, task, batch_id)
    return Placement(split_of(task, config), shard_of(key, config.shards), key)


def order_key(seed: int, task: Ints, batch_id: Ints) -> NDArray[np.uint64]:
    """Compute a pseudo-random number for each batch; sorting by it permutes the batches.

    The number comes from three rounds of SplitMix64 (Steele, Lea and Flood, 2014); each round mixes in one of
    the arguments.

    Args:
      seed: Another seed gives another permutation.
      task: (N,) the batches' tasks.
      batch_id: (N,) the batches' numbers in their tasks.

    Returns:
      (N,) uint64, uniform.
    """
    state = np.zeros(len(task), np.uint64)
    for value in (np.full(len(task), seed, np.int64), task, batch_id):
        state = splitmix64(state ^ value.astype(np.uint64))
    return state


def shard_of(key: NDArray[np.uint64], shards: int) -> Ints:
    """Compute the shard of each batch: shards are equal ranges of `order_key`, in ascending order.

    Shards therefore hold about, but not exactly, the same number of batches. In return, a worker that writes
    one shard needs to know nothing about the others.
    """
    return range_of(key, shards)
