"""Options that all readers of prepared data sets share: the order of reading, and where it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gmeta.core.data.on_bad import OnBad, check_on_bad
from gmeta.core.errors import ConfigError
from gmeta.io.reader_stats import ReaderStats
from gmeta.io.readers.epoch import EpochPlan
from gmeta.io.readers.part_start import PartStart
from gmeta.io.readers.position import ReadingPosition


@dataclass(frozen=True)
class ReadOptions:
    """How a split is read: its order, this rank's part of it, and how bad data is treated.

    Attributes:
      shuffle: True: the order changes with the epoch. False: it is that of the shards.
      shuffle_buffer: Number of groups that are permuted together, and held in memory twice; the order is
        uniform if the buffer holds all groups. None: as many of average size as fill 64 MiB. In
        `gmeta.io.rows`, the number of rows; None fills 4 MiB.
      seed: The seed of the orders: an epoch's order is a pure function of (``seed``, epoch number).
      shard: (r, N): this is rank r of N ranks, and reads the r-th of N contiguous ranges of the epoch's
        order. Give all ranks the same ``seed``. None: this process' own rank (``gmeta.init()``); in an
        elastic job that has lost ranks, an element also holds what the lost ranks would have read
        (`gmeta.core.shares`).
      threads: Threads that parse. None: as many as there are cores, at most 4.
      on_bad: ``"raise"`` reports the first bad record, group or index. ``"skip"`` leaves it out and counts
        it. A file that can't be opened or read is reported in both cases.
      stats: The counters to update; they also name what was skipped.

    Raises:
      ConfigError: A number is out of its range, ``shard`` names no rank, or ``on_bad`` is no policy.

    Example:
      >>> ReadOptions(seed=1, on_bad="skip").shuffle
      True
    """

    shuffle: bool = True
    shuffle_buffer: int | None = None
    seed: int = 0
    shard: tuple[int, int] | None = None
    threads: int | None = None
    on_bad: OnBad = "raise"
    stats: ReaderStats | None = None

    def __post_init__(self) -> None:
        for name in ("shuffle_buffer", "threads"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ConfigError(f"ReadOptions: {name}={given} must be at least 1, or None")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise ConfigError(
                f"ReadOptions: shard={tuple(self.shard)} names no rank: give (r, N) with 0 <= r < N"
            )
        check_on_bad(self.on_bad)


DEFAULTS = ReadOptions()


@dataclass(frozen=True)
class OneEpoch:
    """A start with which every iteration is the same epoch.

    The dataset then has no state outside its iterators, so tf.data service can read it
    (`gmeta.io.data_service`) and distribute pieces of the epoch over its workers.

    Attributes:
      epoch: The epoch's number.
      pieces: The number of runs of steps that the epoch is cut into. A piece should be no smaller than a
        window of ``shuffle_buffer`` groups, or windows are read several times.

    Raises:
      ConfigError: A number is out of its range.
    """

    epoch: int = 0
    pieces: int = 1

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.pieces < 1:
            raise ConfigError(
                f"OneEpoch: epoch={self.epoch} must be at least 0, and pieces={self.pieces} at least 1"
            )


@dataclass(frozen=True)
class AfterSteps:
    """A start in the middle of an epoch, after some of its steps; the next epochs are whole.

    Attributes:
      steps: (ranks, steps) for each number of ranks that took steps, in order.
      epoch: The epoch's number.

    Example:
      >>> AfterSteps([(4, 120), (3, 40)], epoch=2).epoch  # 120 steps of four ranks, then 40 of three
      2
    """

    steps: Sequence[tuple[int, int]]
    epoch: int = 0


Start: TypeAlias = int | OneEpoch | AfterSteps | EpochPlan | ReadingPosition | PartStart
"""Where a dataset begins. An int is an epoch's number; each iteration that reads an element adds one to it.
`OneEpoch` reads one epoch alone, and `AfterSteps` begins after the steps already taken. An `EpochPlan` reads
what is left of an epoch, on any number of ranks, a `ReadingPosition` begins where its variables say, and
`gmeta.io.write_predictions` sets a `PartStart` for each part."""


def without_steps(start: Start) -> Start:
    """Replace `AfterSteps` without steps by the equivalent epoch number; keep any other start."""
    return start.epoch if isinstance(start, AfterSteps) and not any(n for _, n in start.steps) else start


def first_epoch_of(start: Start) -> int:
    """Return the number of the first iteration.

    Raises:
      ConfigError: The start is of no known kind, or its epoch is below 0.
    """
    if isinstance(start, ReadingPosition):
        return 0  # the position gives the number, at each iteration
    number = start.epoch if isinstance(start, OneEpoch | AfterSteps | EpochPlan | PartStart) else start
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ConfigError(
            f"start={start!r} must be an epoch's number from 0 on, OneEpoch, AfterSteps, an EpochPlan or a "
            "ReadingPosition"
        )
    return number
