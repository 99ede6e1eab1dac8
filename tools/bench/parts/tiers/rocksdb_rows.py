"""RocksDB as a table: a key's value is its record. It reads and writes them; no optimizer runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import rocksdict
from numpy.typing import NDArray

BLOCK = 4096


class RocksDB:
    """A database of records of one size, with a bound on its memory.

    Args:
      folder: The folder of its files.
      record: The bytes of a record.
      memory: The bytes of its block cache; write buffers are additional.
    """

    def __init__(self, folder: Path, record: int, memory: int) -> None:
        options = rocksdict.Options(raw_mode=True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.increase_parallelism(2)
        options.optimize_level_style_compaction(64 << 20)
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_cache(rocksdict.Cache(memory))
        blocks.set_block_size(BLOCK)
        blocks.set_bloom_filter(10, False)
        blocks.set_cache_index_and_filter_blocks(True)
        options.set_block_based_table_factory(blocks)
        self._writes = rocksdict.WriteOptions()
        self._writes.disable_wal = True  # scratch, as the table's files are
        self._database = rocksdict.Rdict(str(folder), options)
        self._record = record

    def fill(self, keys: NDArray[np.int64]) -> None:
        """Write a record for each key."""
        self._put(keys, np.zeros([len(keys), self._record], np.uint8))
        self._database.flush()

    def step(self, keys: NDArray[np.int64]) -> None:
        """Read the records of a batch, change them, and write them."""
        found = self._database[[key.tobytes() for key in keys]]
        records = np.frombuffer(b"".join(found), np.uint8).reshape(len(keys), self._record) + np.uint8(1)
        self._put(keys, records)

    def _put(self, keys: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        for first in range(0, len(keys), 10_000):
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, record in zip(
                keys[first : first + 10_000], records[first : first + 10_000], strict=True
            ):
                batch.put(key.tobytes(), record.tobytes())
            self._database.write(batch, self._writes)

    def close(self) -> None:
        """Close the database."""
        self._database.close()
