"""Which rows of a table of two precisions are half, and how they are rounded, in NumPy.

As ``half_rule.h`` and ``half_rounding.h`` in ``ops/table/core`` say, to the last bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gmeta.initializers.philox import LOW, philox4x32
from gmeta.policies import TwoPrecisions
from gmeta.testing.reference.table.policies import shard_of
from gmeta.testing.reference.table.precisions import (
    draw_bfloat16,
    draw_float16,
    round_to_bfloat16,
    round_to_float16,
)
from gmeta.testing.reference.table.record import Record

_SECOND_SLOT = 2**31


class HalfRows:
    """The half rows of a table.

    Args:
      precision: The table's; None: no row is half.
      seed: The table's seed.
      shards: How many shards the table has.
    """

    def __init__(self, precision: TwoPrecisions | None, seed: int, shards: int) -> None:
        self.precision, self.seed, self.shards = precision, seed, shards

    def contain(self, key: int, record: Record, step: int) -> bool:
        """Whether a row is half after the update that has brought the table to ``step``."""
        if self.precision is None:
            return False
        threshold, half_life = self.precision.threshold, self.precision.half_life
        if record.frequency < threshold or half_life is None:
            return record.frequency < threshold
        idle = max(0, self._last_sweep(key, step) - record.last_step)
        halvings, rest = divmod(idle, half_life)
        return record.frequency * (2 * half_life - rest) < threshold * half_life << halvings

    def _last_sweep(self, key: int, step: int) -> int:
        assert self.precision is not None
        assert self.precision.half_life is not None
        every = max(1, self.precision.half_life // 8)
        return max(0, step - (step + every * shard_of(key, self.shards) // self.shards) % every)

    def round(self, record: Record) -> None:
        """Round a record to nearest."""
        record.row, record.slots = round_to_float16(record.row), round_to_bfloat16(record.slots)

    def store(self, key: int, record: Record, step: int) -> None:
        """Round a record as the update that brings the table to ``step`` does."""
        assert self.precision is not None
        if self.precision.rounding == "nearest":
            return self.round(record)
        dim = len(record.row)
        words = self._words(key, step, dim, 0)
        record.row = draw_float16(record.row, words & np.uint32(0xFFFF))
        second = self._words(key, step, dim, _SECOND_SLOT) & np.uint32(0xFFFF)
        bits = [words >> np.uint32(16), second]
        record.slots = draw_bfloat16(record.slots, np.concatenate(bits)[: len(record.slots)])
        return None

    def _words(self, key: int, step: int, dim: int, above: int) -> npt.NDArray[np.uint32]:
        """The random word of each column."""
        blocks = np.arange(-(-dim // 4), dtype=np.uint64) + np.uint64(above)
        counter = (blocks, *(np.full_like(blocks, word & LOW) for word in (step, key, key >> 32)))
        words = philox4x32(self.seed, counter, np.uint64, lambda word: word >> np.uint64(32))
        return np.stack(words, axis=1).reshape(-1)[:dim].astype(np.uint32)
