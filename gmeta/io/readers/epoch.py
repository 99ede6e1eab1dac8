"""The state of reading in a few numbers: the rest of an epoch, and the ranges of it that the ranks read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.settings import from_mapping, to_mapping

Span: TypeAlias = tuple[int, int]
"""Positions ``first`` to ``end - 1`` of an epoch's order."""


@dataclass(frozen=True)
class EpochPlan:
    r"""The positions of an epoch's order that no rank has read yet.

    An epoch is an order of all groups, a pure function of (``seed``, ``epoch``) (`gmeta.io.groups`). It has
    G positions. With N ranks, or shares of the data, rank v reads the range

    .. math:: [\lfloor v G / N \rfloor, \lfloor (v + 1) G / N \rfloor)

    of them (G-Meta, section 2.2.2, cut at groups and not at rows), the same number of groups in each step.
    After some steps, the rest of each range is left. Any other number of ranks can continue from there: the
    rests are joined in order, and the new ranges are cut out of them.

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
        """Create the plan of an epoch that hasn't begun."""
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
        """Count the steps that every rank takes: as many as the longest range needs."""
        longest = -(-self.groups // ranks)
        return -(-longest // groups_per_step)

    def after(self, cursors: Sequence[int]) -> EpochPlan:
        """Return the rest after each rank has read a number of groups of its range.

        Args:
          cursors: The ``cursor`` of each rank's, or share's, last element, in order (`gmeta.io.groups`).
        """
        return replace(self, left=tuple(span for rest in self.rests(cursors) for span in rest))

    def rests(self, cursors: Sequence[int]) -> tuple[tuple[Span, ...], ...]:
        """Return the rest of each range after its rank has read a number of groups (`after`)."""
        lanes = self.lanes(len(cursors))
        return tuple(cut_spans(lane, cursor, None) for lane, cursor in zip(lanes, cursors, strict=True))

    def after_steps(self, steps: int, *, ranks: int, groups_per_step: int) -> EpochPlan:
        """Return the rest after each of ``ranks`` ranks, or shares, has taken ``steps`` steps."""
        return self.after([steps * groups_per_step] * ranks)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return to_mapping(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EpochPlan:
        """Create a plan from what `to_json` returned.

        Raises:
          ConfigError: The value isn't one that `to_json` returned.
        """
        try:
            return from_mapping(cls, value, where="plan")
        except ConfigError as error:
            raise ConfigError(f"EpochPlan: {value!r} isn't what to_json made: {error}") from error


def cut_spans(spans: Sequence[Span], begin: int, end: int | None) -> tuple[Span, ...]:
    """Cut the positions with numbers ``begin`` to ``end - 1`` out of some spans."""
    found, before = [], 0
    for first, last in spans:
        start = first + max(0, begin - before)
        stop = last if end is None else min(last, first + end - before)
        if start < stop:
            found.append((start, stop))
        before += last - first
    return tuple(found)


# A start at any run of groups, set before an iteration: one dataset reads part after part.


class PartStart:
    """A run of positions of epoch 0's order, which each iteration reads alone.

    It costs tf.data a second or so to make a dataset and trace its functions, and nothing to iterate again.

    Attributes:
      epoch: 0.
      readers: The options of each dataset that begins here.

    Example:
      >>> part = PartStart()
      >>> dataset = groups("data/test", start=part, options=ReadOptions(shuffle=False, shard=(0, 1)))
      >>> part.move_to((128, 256))
      >>> elements = list(dataset)
    """

    epoch = 0

    def __init__(self) -> None:
        self.readers: list[Any] = []
        with tf.init_scope(), tf.device("CPU:0"):
            self._span = tf.Variable([0, 0], dtype=tf.int64, trainable=False, name="part")

    def move_to(self, span: Span) -> None:
        """Let the next iteration read the positions from ``span[0]`` up to ``span[1] - 1``."""
        self._span.assign(span)

    def read(self, options: Any) -> tf.data.Dataset:
        """Return a dataset of one element, (begin, end), read when an iteration begins.

        Args:
          options: The `ReadOptions` of the dataset that is made of it.
        """
        self.readers.append(options)
        return tf.data.Dataset.range(1).map(lambda _: tuple(tf.unstack(self._span.read_value())))
