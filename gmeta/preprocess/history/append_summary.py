"""What an append to a store of histories did."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gmeta.core.data.history_manifest import HistoryManifest


@dataclass(frozen=True)
class AppendSummary:
    """What an append did.

    Attributes:
      generation: The number of the generation that it made.
      events: Events that it read.
      left_out: Bad records that it left out.
      users: Users of the store now.
      total_events: Events of the store now.
      watermark: The store's watermark now.
      bytes: Bytes of stripes that it wrote.
      index_bytes: Bytes of indexes that it wrote.
      seconds: How long it took.
    """

    generation: int
    events: int
    left_out: int
    users: int
    total_events: int
    watermark: int
    bytes: int
    index_bytes: int
    seconds: float

    @classmethod
    def of(cls, manifest: HistoryManifest, events: int, left_out: int, started: float) -> AppendSummary:
        """Summarise an append that has made a generation and `started` at this `time.perf_counter`."""
        shards = manifest.shards
        return cls(
            manifest.generation,
            events,
            left_out,
            sum(shard.users for shard in shards),
            sum(shard.events for shard in shards),
            manifest.watermark,
            sum(shard.bytes for shard in shards),
            sum(shard.index_bytes for shard in shards),
            time.perf_counter() - started,
        )
