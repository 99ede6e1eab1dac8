"""The unread rest of an epoch, the ranges that the ranks read, and the input of an iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.position import int64_variable
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.core.shares import Shares

Span: TypeAlias = tuple[int, int]
"""Positions ``first`` to ``end - 1`` of an epoch's order."""


@dataclass(frozen=True)
class EpochPlan:
    r"""The positions of an epoch's order that no rank has read yet.

    An epoch is an order of all groups, a pure function of (``seed``, ``epoch``) (`gmeta.io.groups`). It has
    G positions. With N ranks, or shares of the data, rank v reads the range

    .. math:: [\lfloor v G / N \rfloor, \lfloor (v + 1) G / N \rfloor)

    of them (G-Meta, section 2.2.2, cut at groups rather than rows), with the same number of groups in each
    step. After some steps, the rest of each range remains. Any other number of ranks can continue: the rests
    are joined in order and cut into new ranges.

    Attributes:
      digest: The digest of the data set and the split, from the manifest.
      seed: As in `gmeta.io.groups`.
      epoch: The epoch's number.
      left: Spans of positions, in the order in which they will be read.

    Example:
      >>> plan = EpochPlan.whole("d", groups=10, seed=0, epoch=3)
      >>> plan.lanes(4)
      (((0, 2),), ((2, 5),), ((5, 7),), ((7, 10),))
      >>> rest = plan.after_steps(1, ranks=4, groups_per_step=2)
      >>> rest.left
      ((4, 5), (9, 10))
      >>> rest.lanes(1)
      (((4, 5), (9, 10)),)
    """

    digest: str
    seed: int
    epoch: int
    left: tuple[Span, ...]

    @classmethod
    def whole(cls, digest: str, *, groups: int, seed: int, epoch: int) -> EpochPlan:
        """Create the plan of an unread epoch."""
        return cls(digest, seed, epoch, ((0, groups),))

    @property
    def groups(self) -> int:
        """The number of groups left."""
        return sum(end - begin for begin, end in self.left)

    def lanes(self, ranks: int) -> tuple[tuple[Span, ...], ...]:
        """Return the ranges of ``ranks`` ranks (or shares), each as a tuple of spans."""
        cuts = [rank * self.groups // ranks for rank in range(ranks + 1)]
        return tuple(cut_spans(self.left, cuts[rank], cuts[rank + 1]) for rank in range(ranks))

    def steps(self, ranks: int, groups_per_step: int) -> int:
        """Count the steps that every rank takes: as many as the longest range requires."""
        longest = -(-self.groups // ranks)
        return -(-longest // groups_per_step)

    def after(self, cursors: Sequence[int]) -> EpochPlan:
        """Return the rest after each rank has read some groups of its range.

        Args:
          cursors: The ``cursor`` of each rank's, or share's, last element, in order (`gmeta.io.groups`).
        """
        return replace(self, left=tuple(span for rest in self.rests(cursors) for span in rest))

    def rests(self, cursors: Sequence[int]) -> tuple[tuple[Span, ...], ...]:
        """Return the rest of each range after its rank has read some groups (`after`)."""
        lanes = self.lanes(len(cursors))
        return tuple(cut_spans(lane, cursor, None) for lane, cursor in zip(lanes, cursors, strict=True))

    def after_steps(self, steps: int, *, ranks: int, groups_per_step: int) -> EpochPlan:
        """Return the rest after each of ``ranks`` ranks, or shares, has taken ``steps`` steps."""
        return self.after([steps * groups_per_step] * ranks)

    def elements(self, epochs: Epochs) -> tf.data.Dataset:
        """Read the plan in the first iteration, then whole epochs.

        Raises:
          ConfigError: The plan belongs to another data set or seed.
        """
        whole = epochs.whole
        if self.digest != whole.digest:
            raise ConfigError(
                f"groups: the EpochPlan is of another data set than {epochs.path}, whose manifest's digest "
                "differs: name the one that was read, or begin an epoch without a plan"
            )
        if self.seed != whole.seed:
            raise ConfigError(
                f"groups: the EpochPlan is of seed {self.seed}, and seed={whole.seed} gives another order: "
                f"pass seed={self.seed}"
            )
        first, every = epochs.iteration(self), epochs.iteration(whole)
        begun = self.left != whole.left

        @tf.autograph.experimental.do_not_convert  # no Python branch on a tensor, so tracing is quicker
        def read(epoch: tf.Tensor) -> tf.data.Dataset:
            now = tf.cond(tf.equal(epoch, self.epoch), lambda: first, lambda: every) if begun else every
            return epochs.read(now._replace(epoch=epoch))

        elements = count_epochs(self.epoch).flat_map(read)
        if begun or epochs.groups_per_step is None:
            return elements
        return elements.apply(tf.data.experimental.assert_cardinality(epochs.steps(whole)))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return to_mapping(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EpochPlan:
        """Create a plan from what `to_json` returned.

        Raises:
          ConfigError: `to_json` didn't return the value.
        """
        try:
            return from_mapping(cls, value, where="plan")
        except ConfigError as error:
            raise ConfigError(f"EpochPlan: {value!r} isn't what to_json made: {error}") from error


def cut_spans(spans: Sequence[Span], begin: int, end: int | None) -> tuple[Span, ...]:
    """Return the positions numbered ``begin`` to ``end - 1`` within some spans."""
    found, before = [], 0
    for first, last in spans:
        start = first + max(0, begin - before)
        stop = last if end is None else min(last, first + end - before)
        if start < stop:
            found.append((start, stop))
        before += last - first
    return tuple(found)


UNKNOWN = -1
"""The cursor of a share that another rank reads."""


def only_own(cursors: Sequence[int], shares: Shares) -> tuple[int, ...]:
    """Return the cursors of all shares, of which only one rank's are known."""
    rest = shares.total - shares.first - shares.count
    return (*[UNKNOWN] * shares.first, *cursors, *[UNKNOWN] * rest)


def ranges(
    plan: EpochPlan,
    shares: Shares,
    cursors: Sequence[int],
    part: Callable[[int], tuple[int, int]] | None = None,
) -> dict[str, npt.NDArray[np.int64]]:
    """Return the spans that a rank reads, as the inputs of the native reader's op.

    Args:
      plan: The rest of the epoch when the shares started to read.
      shares: The rank's shares.
      cursors: Number of groups that each of its shares has read since then.
      part: The first group of a share to read, and the exclusive end. None: all groups.

    Returns:
      ``lanes``, ``begins`` and ``ends``, each (spans,) int64: the share that a span belongs to, counted from
      the rank's first one, and its ends. A share without groups has an empty span.
    """
    rests = plan.rests(only_own(cursors, shares))[shares.first : shares.first + shares.count]
    if part is not None:
        rests = tuple(cut_spans(rest, *part(sum(end - begin for begin, end in rest))) for rest in rests)
    spans = [(lane, *span) for lane, rest in enumerate(rests) for span in rest or ((0, 0),)]
    columns = np.array(spans, np.int64).T
    return dict(zip(("lanes", "begins", "ends"), columns, strict=True))


class Iteration(NamedTuple):
    """The input of one iteration over a dataset of groups: int64 tensors, as the native op requires them.

    Attributes:
      epoch: () the number of the epoch whose order is read.
      first_step: () the number of elements to skip at the beginning.
      steps: () the number of elements, including skipped ones; -1: as many as the spans contain.
      lanes: (spans,) the rank's share that a span belongs to, counted from its first one.
      begins: (spans,) the first position of a span.
      ends: (spans,) one past the last position of a span.
    """

    epoch: tf.Tensor
    first_step: tf.Tensor
    steps: tf.Tensor
    lanes: tf.Tensor
    begins: tf.Tensor
    ends: tf.Tensor


@dataclass(frozen=True)
class Epochs:
    """The epochs of a split as a rank reads them; a start's ``elements`` makes a dataset of them.

    Attributes:
      path: The path of the split.
      whole: The plan of epoch 0.
      shares: The rank's shares.
      groups_per_step: Number of groups from each share in an element. None: enough to reach the target cost
        (``balance``).
      options: The `gmeta.io.ReadOptions`.
      read: Returns the elements of an iteration.
    """

    path: str
    whole: EpochPlan
    shares: Shares
    groups_per_step: int | None
    options: Any
    read: Callable[[Iteration], tf.data.Dataset]

    def steps(self, plan: EpochPlan) -> int:
        """Count the elements of a plan; -1 if the number is unknown before reading."""
        size = self.groups_per_step
        return -1 if size is None else plan.steps(self.shares.total, size)

    def iteration(self, plan: EpochPlan, part: Callable[[int], tuple[int, int]] | None = None) -> Iteration:
        """Return the iteration that reads a plan, or a part of each share's range of it (`ranges`)."""
        spans = ranges(plan, self.shares, [0] * self.shares.count, part)
        numbers = (plan.epoch, 0, self.steps(plan), *spans.values())
        return Iteration(*(tf.constant(number, tf.int64) for number in numbers))


def count_epochs(first: int) -> tf.data.Dataset:
    """Return a dataset of one element, the epoch's number, which grows by one at each iteration.

    tf.data has no equivalent. ``shuffle(reshuffle_each_iteration=True)`` and
    ``random(rerandomize_each_iteration=True)`` draw each epoch's seed from a generator, so epoch e requires
    the e epochs before it, and ``counter().flat_map`` makes one endless epoch. A variable therefore counts
    epochs, and a separate stage reads it: downstream, the number is an ordinary element, which a saved
    iterator restores instead of counting again.
    """
    counter = int64_variable("epoch", first)
    return tf.data.Dataset.range(1).map(lambda _: counter.assign_add(1, read_value=True) - 1)


class PartStart:
    """A start at a run of positions of epoch 0's order; each iteration reads only this run.

    tf.data takes about a second to make a dataset and trace its functions, and no time to iterate again.

    Attributes:
      epoch: 0.
      readers: The options of each dataset that starts here.

    Example:
      >>> part = PartStart()
      >>> dataset = groups("data/test", start=part, options=ReadOptions(shuffle=False, shard=(0, 1)))
      >>> part.move_to((128, 256))
      >>> elements = list(dataset)
    """

    epoch = 0

    def __init__(self) -> None:
        self.readers: list[Any] = []
        self._span = int64_variable("part", [0, 0])

    def move_to(self, span: Span) -> None:
        """Make the next iteration read the positions from ``span[0]`` to ``span[1] - 1``."""
        self._span.assign(span)

    def elements(self, epochs: Epochs) -> tf.data.Dataset:
        """Read the positions that the last `move_to` set before the iteration.

        Raises:
          ConfigError: There are several ranks.
        """
        if epochs.shares.total > 1:
            raise ConfigError(
                f"groups: a part is read by one rank, shard=(0, 1), and there are {epochs.shares.total}"
            )
        self.readers.append(epochs.options)
        every, size = epochs.iteration(epochs.whole), epochs.groups_per_step

        @tf.autograph.experimental.do_not_convert
        def read(span: tf.Tensor) -> tf.data.Dataset:
            begin, end = tf.unstack(span)
            steps = every.steps if size is None else -((begin - end) // size)
            return epochs.read(every._replace(steps=steps, begins=begin[None], ends=end[None]))

        return tf.data.Dataset.range(1).map(lambda _: self._span.read_value()).flat_map(read)
