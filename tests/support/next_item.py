"""Histories written as lists, a small log of events, and scorers with given scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gmeta.experiment.next_item.counting import Scores
from gmeta.experiment.next_item.histories import Histories

USERS, ITEMS, EVENTS = 60, 25, 12
"""The size of the log of `write_events`."""


def histories(sequences: Sequence[Sequence[int]], times: NDArray[np.int64] | None = None) -> Histories:
    """Make the histories of users 0, 10, 20, …"""
    splits = np.concatenate([[0], np.cumsum([len(each) for each in sequences])]).astype(np.int64)
    items = np.concatenate([np.asarray(each, np.int64) for each in sequences])
    return Histories(np.arange(len(sequences)) * 10, splits, items, times)


@dataclass
class Fixed:
    """Assigns the rows of a matrix to the users of `histories`, in their order."""

    values: Scores

    def scores(self, asked: Histories) -> Scores:
        """Return the rows of these users."""
        return self.values[asked.users // 10]


def write_events(path: Path) -> None:
    """Write a Parquet file of walks along a ring of items, with some jumps, which rules can learn."""
    rng = np.random.default_rng(0)
    item = rng.integers(0, ITEMS, USERS)
    columns: dict[str, list[Any]] = {"user": [], "ts": [], "item": [], "place": []}
    for event in range(EVENTS):
        item = np.where(rng.random(USERS) < 0.2, rng.integers(0, ITEMS, USERS), (item + 1) % ITEMS)
        columns["user"].append(np.arange(USERS) + 1000)
        columns["ts"].append(1_600_000_000 + event * 60 + rng.integers(0, 9, USERS))
        columns["item"].append(item * 7 + 100)
        columns["place"].append(np.arange(USERS) % 3)
    pq.write_table(pa.table({name: np.concatenate(parts) for name, parts in columns.items()}), path)
