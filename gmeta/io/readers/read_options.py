"""Options of all readers of prepared data sets: the order of reading, and where it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.schema import OnBad, check_on_bad
from gmeta.core.shares import Shares
from gmeta.io.reader_stats import ReaderStats
from gmeta.io.readers.epoch import EpochPlan, Epochs, PartStart
from gmeta.io.readers.position import ReadingPosition


@dataclass(frozen=True)
class ReadOptions:
    """How a split is read: its order, this rank's part, and the treatment of bad data.

    Attributes:
      shuffle: True: the order changes with each epoch. False: it is that of the shards.
      shuffle_buffer: Number of groups that are permuted together, and kept in memory twice; the order is
        uniform if the buffer contains all groups. None: as many groups of average size as fit into 64 MiB. In
        `gmeta.io.rows`, the number of rows; None: 4 MiB.
      seed: The seed of the orders: an epoch's order is a pure function of (``seed``, epoch number).
      shard: (r, N): this is rank r of N ranks, and reads the r-th of N contiguous ranges of the epoch's
        order. Give all ranks the same ``seed``. None: this process' own rank (``gmeta.init()``); in an
        elastic job that has lost ranks, an element also contains what the lost ranks would have read
        (`gmeta.core.shares`).
      threads: Number of parsing threads. None: the number of cores, at most 4.
      on_bad: ``"raise"`` reports the first bad record, group or index. ``"skip"`` skips and counts it. A file
        that can't be opened or read is reported in both cases.
      stats: The counters to update, which also store messages about skipped data.

    Raises:
      ConfigError: A number is out of its range, ``shard`` isn't a rank, or ``on_bad`` isn't a policy.

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
    """A start that makes every iteration read the same epoch, or the same piece of it.

    The dataset then has no state outside its iterators. The pieces of an epoch, in order, make up the epoch:
    a piece is a run of consecutive steps of `gmeta.io.groups` or, if a step's groups aren't known in advance
    (``balance``), of groups. It should be no smaller than a window of ``shuffle_buffer`` groups; otherwise,
    windows are read several times. `gmeta.io.distribute` makes pieces for workers to read.

    Attributes:
      epoch: The epoch's number.
      number: The piece's number, counted from 0.
      pieces: The number of pieces of the epoch.
      taken: Number of elements to skip at the piece's beginning because training has consumed them. With
        ``balance``, and in `gmeta.io.rows`, they are reread and discarded.
      shares: The part of the data that is read, unless ``ReadOptions.shard`` sets it; None: this process'.

    Raises:
      ConfigError: A number is out of its range.

    Example:
      >>> OneEpoch(3, number=1, pieces=4).part_of(10)
      (2, 5)
    """

    epoch: int = 0
    number: int = 0
    pieces: int = 1
    taken: int = 0
    shares: Shares | None = None

    def __post_init__(self) -> None:
        for name in ("epoch", "number", "taken"):
            whole_number(f"OneEpoch: {name}", getattr(self, name))
        if self.number >= whole_number("OneEpoch: pieces", self.pieces, least=1):
            raise ConfigError(
                f"OneEpoch: number={self.number} must be below pieces={self.pieces}: they count from 0"
            )

    @property
    def whole(self) -> bool:
        """Whether all of the epoch is read."""
        return self.pieces == 1 and not self.taken

    def part_of(self, size: int) -> tuple[int, int]:
        """Return the first of ``size`` steps, or groups, in the piece, and the first after it."""
        return self.number * size // self.pieces, (self.number + 1) * size // self.pieces

    def elements(self, epochs: Epochs) -> tf.data.Dataset:
        """Read the piece in each iteration."""
        plan = replace(epochs.whole, epoch=self.epoch)
        if epochs.groups_per_step is None:
            elements = epochs.read(epochs.iteration(plan, self.part_of))
            return elements.skip(self.taken) if self.taken else elements
        begin, end = self.part_of(epochs.steps(plan))
        first, last = (tf.constant(step, tf.int64) for step in (min(begin + self.taken, end), end))
        return epochs.read(epochs.iteration(plan)._replace(first_step=first, steps=last))


@dataclass(frozen=True)
class AfterSteps:
    """A start in the middle of an epoch, after some of its steps; later epochs are whole.

    Attributes:
      steps: (ranks, steps) for each number of ranks that took steps, in order.
      epoch: The epoch's number.

    Example:
      >>> AfterSteps([(4, 120), (3, 40)], epoch=2).epoch  # 120 steps of four ranks, then 40 of three
      2
    """

    steps: Sequence[tuple[int, int]]
    epoch: int = 0

    @property
    def whole(self) -> bool:
        """Whether no steps were taken."""
        return not any(steps for _, steps in self.steps)

    def elements(self, epochs: Epochs) -> tf.data.Dataset:
        """Read the rest of the epoch (`EpochPlan.after_steps`), then whole epochs.

        Raises:
          ConfigError: The number of groups of a step isn't fixed.
        """
        plan = replace(epochs.whole, epoch=self.epoch)
        if not self.whole and epochs.groups_per_step is None:
            raise ConfigError(
                f"groups: start={self!r} counts steps, and with balance a step has as many groups as cost "
                "enough: start at an epoch's number, a ReadingPosition or an EpochPlan, or save the iterator"
            )
        for ranks, steps in self.steps:
            plan = plan.after_steps(steps, ranks=ranks, groups_per_step=epochs.groups_per_step or 0)
        return plan.elements(epochs)


Start: TypeAlias = int | OneEpoch | AfterSteps | EpochPlan | ReadingPosition | PartStart
"""Where a dataset begins. An int is an epoch's number; each iteration that reads an element adds one to it.
`OneEpoch` reads one epoch alone, or a piece of it, and `AfterSteps` begins after the steps already taken. An
`EpochPlan` reads the rest of an epoch, on any number of ranks, a `ReadingPosition` begins at the position in
its variables, and `gmeta.io.write_predictions` sets a `PartStart` for each part. Each of them makes a dataset
out of `Epochs` by its method ``elements``."""


def as_start(start: Start) -> OneEpoch | AfterSteps | EpochPlan | ReadingPosition | PartStart:
    """Return the start; an epoch's number becomes `AfterSteps` without steps.

    Raises:
      ConfigError: The start is of an unknown kind, or its epoch is below 0.
    """
    if isinstance(start, ReadingPosition):
        return start  # each iteration reads the number from its variables
    number = start.epoch if isinstance(start, OneEpoch | AfterSteps | EpochPlan | PartStart) else start
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ConfigError(
            f"start={start!r} must be an epoch's number from 0 on, OneEpoch, AfterSteps, an EpochPlan or a "
            "ReadingPosition"
        )
    return AfterSteps((), start) if isinstance(start, int) else start


def shares_of(shard: tuple[int, int] | None, start: Start) -> Shares:
    """Return the shares of the data to read: those of ``shard``, or of the start, or of this process."""
    if shard is not None:
        return Shares.of(*shard)
    given = start.shares if isinstance(start, OneEpoch) else None
    return collectives.world().shares if given is None else given


# The time that training waits for data, which shows whether a run is bound by data or compute.


@dataclass(frozen=True)
class Waiting:
    """Values read from `ReadingTime`.

    Attributes:
      waited: Seconds between requesting an element and receiving it.
      worked: Seconds between receiving an element and requesting the next one.
      elements: Number of requested elements, except the first of each epoch.
    """

    waited: float = 0.0
    worked: float = 0.0
    elements: int = 0

    def __add__(self, other: Waiting) -> Waiting:
        return Waiting(self.waited + other.waited, self.worked + other.worked, self.elements + other.elements)

    @property
    def share(self) -> float:
        """The fraction of time spent waiting, 0 to 1."""
        return self.waited / max(self.waited + self.worked, 1e-9)

    def __str__(self) -> str:
        """Return one line for a report."""
        bound = "data" if self.share > 0.5 else "compute"
        advice = "; read with more threads, or from a faster disk" if bound == "data" else ""
        return (
            f"bound by {bound}: {self.share:.0%} of {self.waited + self.worked:.1f} s were spent waiting for "
            f"data, {self.waited / max(self.elements, 1) * 1e3:.2f} ms a batch{advice}"
        )


class ReadingTime:
    """A measurement, at the end of a dataset, of how long its consumer waits for elements.

    Training waits between requesting an element and receiving it, and works between receiving it and
    requesting the next one. The clock is read before and after each request, in the requesting thread. This
    must be the last transformation: with a ``prefetch`` after it, the prefetch would be the consumer. On a
    GPU, work is only launched during that time, and a step that waits for the GPU counts as work. The first
    element of an epoch isn't counted, because files are opened and functions traced for it.

    Example:
      >>> time = ReadingTime()
      >>> model.fit(time.of(tasks("data/warm")), epochs=5)
      >>> print(time.read())
      bound by compute: 2% of 41.3 s were spent waiting for data, 0.31 ms a batch
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._sums = tf.Variable(tf.zeros([3], tf.float64), trainable=False, name="reading_time")
            self._last = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="last_element")

    def of(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return a dataset of the same elements, timed."""
        clock = tf.data.Dataset.counter().map(lambda number: (number, tf.timestamp()))
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # it would become the consumer
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        # A zip requests its inputs one after another.
        return tf.data.Dataset.zip((clock, dataset, clock)).map(self._note).with_options(options)

    def _note(self, asked: Any, element: Any, given: Any) -> Any:
        (number, begin), (_, end) = asked, given
        counted = tf.cast(number > 0, tf.float64)
        times = tf.stack([end - begin, begin - self._last, tf.constant(1.0, tf.float64)])
        with tf.control_dependencies([self._sums.assign_add(times * counted)]):
            last = self._last.assign(end)
        with tf.control_dependencies([last]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    def read(self) -> Waiting:
        """Return the sums since the beginning or the last `reset`."""
        waited, worked, elements = self._sums.numpy().tolist()
        return Waiting(waited, worked, int(elements))

    def reset(self) -> None:
        """Set everything to zero."""
        self._sums.assign(tf.zeros([3], tf.float64))


def from_memory(dataset: tf.data.Dataset, elements: int = 16) -> tf.data.Dataset:
    """Repeat the first elements of a dataset, up to its length, to train without reading.

    The speed of such training is an upper bound on that with any reader.

    Args:
      dataset: A dataset of known length, or an endless one.
      elements: Number of elements that are read once and kept in memory.

    Returns:
      A dataset of the same length and structure.
    """
    size = int(dataset.cardinality())
    repeated = dataset.take(elements).cache().repeat()
    if size == tf.data.UNKNOWN_CARDINALITY:
        size = sum(1 for _ in dataset)
    return repeated if size == tf.data.INFINITE_CARDINALITY else repeated.take(size)
