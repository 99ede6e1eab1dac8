"""Logical shards: how the keys of a table are divided among ranks, and how a table is saved.

A key's logical shard is the top ten bits of its MurmurHash3: the same in every process. Each rank owns a run
of neighboring shards. So any number of ranks can load what any other number has saved, and each rank reads
only its own shards.
"""

from __future__ import annotations

from gmeta.core.errors import ConfigError

LOGICAL_SHARDS = 1024


def owned_shards(rank: int, world_size: int) -> range:
    """Return the logical shards of a rank: shard s belongs to rank ``s * world_size // 1024``.

    Args:
      rank: 0 up to ``world_size - 1``.
      world_size: How many ranks there are, 1 up to 1024.

    Raises:
      ConfigError: There is no such rank, or there are more ranks than shards.

    Example:
      >>> [len(owned_shards(rank, 3)) for rank in range(3)]
      [342, 341, 341]
    """
    if not 1 <= world_size <= LOGICAL_SHARDS:
        raise ConfigError(f"world_size must lie in [1, {LOGICAL_SHARDS}], got {world_size}")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must lie in [0, {world_size}), got {rank}")
    return range(*(-(-edge * LOGICAL_SHARDS // world_size) for edge in (rank, rank + 1)))
