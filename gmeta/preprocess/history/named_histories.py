"""Reads histories of a store by the names of columns, without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from gmeta.core.data.history_manifest import user_shards
from gmeta.core.errors import DataError
from gmeta.preprocess.history.files.generation import Generation
from gmeta.preprocess.history.files.shard_reader import REQUEST, Histories
from gmeta.preprocess.history.files.stripe import as_floats

_ALL = np.iinfo(np.int64)


class NamedHistories(NamedTuple):
    """Histories, one after another.

    Attributes:
      row_splits: (R + 1,) int64: request ``i`` has the events ``row_splits[i]`` to ``row_splits[i + 1] - 1``.
      columns: Name -> (E,) int64 or float32.
    """

    row_splits: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]


def read_histories(
    store: Generation,
    users: npt.ArrayLike,
    columns: Sequence[str],
    *,
    start: npt.ArrayLike | None = None,
    until: npt.ArrayLike | None = None,
    generation: npt.ArrayLike | None = None,
    longest: int = _ALL.max,
) -> NamedHistories:
    """Rebuild histories as they were at a moment.

    A history has the newest `longest` of the events with ``start <= time < until`` that `generation` held, in
    the order of time and birth. A user who isn't in the store has none.

    Args:
      store: The generation to read.
      users: (R,) int64.
      columns: Names of columns of one group, the time, or ``"born"``.
      start: The first time that counts, for all or (R,) for each; None: any.
      until: The first time that doesn't, likewise.
      generation: The newest generation whose events count, likewise; None: the one that is read.
      longest: Most events of a history.

    Raises:
      ConfigError: A column isn't there, or they are of several groups.
      DataError: The store is damaged, or a generation is later than the one that is read.

    Example:
      >>> read_histories(Generation(Path("histories")), [7], ["ts", "item"], until=1000)  # doctest: +SKIP
    """
    users, newest = np.asarray(users, np.int64), store.manifest.generation
    requests = np.zeros(len(users), REQUEST)
    requests["user"] = users
    requests["start"] = _ALL.min if start is None else start
    requests["until"] = _ALL.max if until is None else until
    requests["generation"] = newest if generation is None else generation
    later = requests["generation"] > newest
    if later.any():
        first = requests[later][0]
        raise DataError(
            f"user {first['user']}: generation {first['generation']} is asked for, and this is {newest}",
            path=store.store,
            advice="open a newer generation",
        )
    group, chosen = store.manifest.find(columns)
    shard = user_shards(users, len(store.manifest.shards))
    order = np.argsort(shard, kind="stable")
    found = []
    for number in np.unique(shard).tolist():
        with closing(store.open(number)) as reader:
            own = requests[order][shard[order] == number]
            found.append(reader.scan(own, [each.number for each in chosen], group=group, longest=longest))
    splits, values = _restore(found, order, len(chosen))
    named = {
        each.name: as_floats(own) if each.dtype == "float32" else own
        for each, own in zip(chosen, values, strict=True)
    }
    return NamedHistories(splits, named)


def _restore(found: Sequence[Histories], order: NDArray[np.int64], columns: int) -> Histories:
    """Join the histories of all shards, which are in `order`, in the order of the requests."""
    lengths = np.empty(len(order), np.int64)
    lengths[order] = np.concatenate([np.empty(0, np.int64), *(np.diff(each.row_splits) for each in found)])
    row_splits = np.concatenate(([0], np.cumsum(lengths)))
    into = np.repeat(row_splits[:-1][order], lengths[order])
    own = lengths[order]
    into += np.arange(len(into)) - np.repeat(np.cumsum(own) - own, own)
    values = []
    for column in range(columns):
        joined = np.empty(len(into), np.int64)
        joined[into] = np.concatenate([np.empty(0, np.int64), *(each.columns[column] for each in found)])
        values.append(joined)
    return Histories(row_splits, values)
