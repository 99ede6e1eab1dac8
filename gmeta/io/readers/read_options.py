"""What all readers of prepared data sets take alike: in which order they read, and where they begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gmeta.core.data.on_bad import OnBad, check_on_bad
from gmeta.core.errors import ConfigError
from gmeta.io.reader_stats import ReaderStats
from gmeta.io.readers.epoch import EpochPlan
from gmeta.io.readers.position import ReadingPosition


@dataclass(frozen=True)
class ReadOptions:
    """How a split is read: its order, this rank's part of it, and what becomes of bad data.

    Attributes:
      shuffle: Whether the order changes with the epoch, or is the shards'.
      shuffle_buffer: Groups that are permuted among each other, and held in memory twice; the order is
        uniform if it holds all of them. None: as many of average size as fill 64 MiB. `gmeta.io.rows` counts
        rows, and fills 4 MiB.
      seed: Gives the orders: an epoch's is a pure function of (``seed``, epoch number).
      shard: (r, N): this is rank r of N ranks, and reads the r-th of N contiguous ranges of the epoch's
        order. Give all ranks the same ``seed``. None: the rank that this process is (``gmeta.init()``); in an
        elastic job that has lost ranks, an element has what those would have read as well
        (`gmeta.core.shares`).
      threads: Threads that parse. None: as many as there are cores, at most 4.
      on_bad: ``"raise"`` reports the first bad record, group or index. ``"skip"`` leaves it out and counts
        it. A file that can't be opened or read is reported in both cases.
      stats: Counters to count into; they name what was skipped.

    Raises:
      ConfigError: A number is out of its range, ``shard`` names no rank, or ``on_bad`` no policy.

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
    """A start that each iteration has: all of them are the same epoch.

    The dataset then has no state outside of its iterators, and can be read by tf.data service
    (`gmeta.io.data_service`), which deals pieces of the epoch out to its workers.

    Attributes:
      epoch: Its number.
      pieces: Into so many runs of steps the epoch is cut. A piece should be no smaller than a window of
        ``shuffle_buffer`` groups, or windows are read several times.

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
    """A start in the middle of an epoch, of which some steps were taken before; the next epochs are whole.

    Attributes:
      steps: (ranks, steps) for each number of ranks in turn.
      epoch: The epoch's number.

    Example:
      >>> AfterSteps([(4, 120), (3, 40)], epoch=2).epoch  # 120 steps of four ranks, then 40 of three
      2
    """

    steps: Sequence[tuple[int, int]]
    epoch: int = 0


Start: TypeAlias = int | OneEpoch | AfterSteps | EpochPlan | ReadingPosition
"""Where a dataset begins: at an epoch's number, which each iteration that reads an element adds one to; in
one epoch alone; behind steps that were taken; at what an `EpochPlan` has left, on any number of ranks; or at
a position that variables hold."""


def without_steps(start: Start) -> Start:
    """Replace `AfterSteps` of no steps by its epoch's number, which it means; keep any other start."""
    return start.epoch if isinstance(start, AfterSteps) and not any(n for _, n in start.steps) else start


def first_epoch_of(start: Start) -> int:
    """Return the number of the first iteration.

    Raises:
      ConfigError: It is none of a start's kinds, or below 0.
    """
    if isinstance(start, ReadingPosition):
        return 0  # the position says it, at each iteration
    number = start.epoch if isinstance(start, OneEpoch | AfterSteps | EpochPlan) else start
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ConfigError(
            f"start={start!r} must be an epoch's number from 0 on, OneEpoch, AfterSteps, an EpochPlan or a "
            "ReadingPosition"
        )
    return number
