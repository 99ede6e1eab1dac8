"""Requests of users as fat rows, which repeat histories, and as examples beside a store of histories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gmeta.core.data_manifest import Manifest, Split
from gmeta.core.schema import Column, Schema
from gmeta.preprocess import HistorySpec
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.shards.data_set import shard_name, write_shard
from gmeta.preprocess.synthetic.exposures import ExposureConfig, exposure_log

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

EVENT = ("item", "category", "style", "action")
TIME = "timestamp"
PAGE = 5
"""Exposures of a request."""

STORED = 3000
"""The most events of a fat row."""

SCHEMA = Schema((Column("user"), Column("batch_id"), *map(Column, (*EVENT, TIME, "click"))), "user")
_SHARDS = 4
Columns = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Forms:
    """The same requests in two forms; a group is a request of a user, and groups are in the same order.

    Attributes:
      fat: A prepared data set; a group has a history of at most `STORED` events, and `PAGE` exposures.
      shown: A prepared data set; a group has `PAGE` exposures.
      store: The store with the events.
      histories: (requests,) int64: the lengths of the histories in `fat`.
    """

    fat: Path
    shown: Path
    store: Path
    histories: NDArray[np.int64]


def make_forms(folder: Path, users: int, requests: int, events: float) -> Forms:
    """Draw a log, and write it.

    Args:
      folder: An empty one.
      users: The number of users.
      requests: The requests of a user.
      events: The mean number of events of a user; at most twice as many.
    """
    config = ExposureConfig(
        users=users,
        items=20_000,
        categories=100,
        mean_events=events,
        most_events=round(2 * events),
        exposures=PAGE * requests,
        page=PAGE,
    )
    log = exposure_log(config)
    events_of = {name: log[name][log["exposed"] == 0] for name in ("user", *EVENT, TIME)}
    pq.write_table(pa.table(events_of), folder / "events.parquet")
    spec = HistorySpec("user", TIME, groups={"events": EVENT}, shards=_SHARDS)
    append_history(folder / "store", folder / "events.parquet", spec)
    lengths = write_requests(folder / "fat", log, PAGE, STORED)
    write_requests(folder / "shown", log, PAGE, 0)
    return Forms(folder / "fat", folder / "shown", folder / "store", lengths)


def write_requests(folder: Path, log: Columns, page: int, most: int) -> NDArray[np.int64]:
    """Write a prepared data set of one split, ``train``, with a group for each request.

    Args:
      folder: The folder to write to.
      log: The result of `exposure_log`.
      page: The exposures of a request.
      most: The most events of a group, the newest before the request; exposures follow them.

    Returns:
      (requests,) int64: the number of events of each.
    """
    folder.mkdir()
    lengths: list[int] = []
    shards = [
        write_shard(
            folder / shard_name("train", number, _SHARDS),
            SCHEMA,
            "columnar",
            _requests(log, number, page, most, lengths),
        )
        for number in range(_SHARDS)
    ]
    Manifest(SCHEMA, {"train": Split(tuple(shards))}, layout="columnar").save(folder)
    return np.array(lengths)


def _requests(log: Columns, shard: int, page: int, most: int, lengths: list[int]) -> Iterator[Columns]:
    """Yield the groups of each user of a shard; append their numbers of events."""
    users = int(log["user"].max())
    edges = np.searchsorted(log["user"], np.arange(1, users + 2))
    for number in range(shard, users, _SHARDS):
        own = {name: values[edges[number] : edges[number + 1]] for name, values in log.items()}
        shown = np.flatnonzero(own["exposed"] == 1).reshape(-1, page)
        events = np.flatnonzero(own["exposed"] == 0)
        before = np.searchsorted(own[TIME][events], own[TIME][shown[:, 0]])
        groups = [
            np.concatenate([events[max(0, n - most) : n], one]) for n, one in zip(before, shown, strict=True)
        ]
        lengths += [len(group) - page for group in groups]
        rows = np.concatenate(groups)
        of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        columns = {name: own[name][rows].astype(np.int64) for name in ("user", *EVENT, TIME, "click")}
        yield {**columns, "batch_id": of}


def size(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
