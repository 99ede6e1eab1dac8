"""What readers fetch from a store: bytes and reads, with every batch read anew."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gmeta
from gmeta.core.history_manifest import user_shards
from gmeta.io.reader_stats import ReaderStats

import numpy as np
from numpy.typing import NDArray
from parts.history_store.days import OWN, SHARDS, Grown, Requests

BATCH = 256


class Fetched(NamedTuple):
    """The cost of requests.

    Attributes:
      bytes: The bytes of a request.
      reads: The reads of a request whose history isn't empty.
      lengths: (R,) int64: the number of events of each history.
    """

    bytes: float
    reads: float
    lengths: NDArray[np.int64]


def fetch(grown: Grown, requests: Requests, longest: int, generation: int | None = None) -> Fetched:
    """Read the histories of requests in batches, and count.

    Args:
      grown: The store.
      requests: The requests, in the order in which they are read.
      longest: The most events of a history.
      generation: The generation to open; None: the newest.
    """
    store, stats, lengths = gmeta.io.HistoryStore(grown.path, generation), ReaderStats(), []
    for begin in range(0, len(requests), BATCH):
        own = requests[slice(begin, begin + BATCH)]
        found = store.read(
            own.user,
            ["time", *OWN],
            until=own.time,
            generation=own.generation,
            longest=longest,
            stats=stats,
        )
        lengths.append(found["time"].row_lengths().numpy())
    joined, counts = np.concatenate(lengths), stats.read()
    return Fetched(
        counts.history_bytes / len(requests), counts.history_reads / max(1, (joined > 0).sum()), joined
    )


def fetch_late(grown: Grown, examples: Path, longest: int) -> float:
    """Read batches of examples as `gmeta.io.late` does by default; return bytes of a request."""
    stats = ReaderStats()
    batches = gmeta.io.late(
        examples / "train",
        gmeta.io.HistoryStore(grown.path),
        history=["time", *OWN],
        targets=["item"],
        generation="generation",
        longest=longest,
        sequences_per_batch=BATCH,
        options=gmeta.io.ReadOptions(seed=1, stats=stats),
    )
    for _ in batches:
        pass
    return stats.read().history_bytes / len(grown.requests)


def shuffled(requests: Requests) -> Requests:
    """Return requests in random order."""
    return requests[np.random.default_rng(2).permutation(len(requests))]


def by_affinity(requests: Requests) -> Requests:
    """Return requests in the order of shards and users, so that a batch has all of some users' requests."""
    shard = user_shards(requests.user, SHARDS)
    return requests[np.lexsort((requests.time, requests.user, shard))]
