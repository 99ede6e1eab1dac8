"""What is left of an epoch, and which ranges of it ranks take: the state of reading, in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from gmeta.core.errors import ConfigError

Span: TypeAlias = tuple[int, int]
"""Positions ``first`` to ``end - 1`` of an epoch's order."""


@dataclass(frozen=True)
class EpochPlan:
    r"""The positions of an epoch's order that nobody has been given yet.

    An epoch is an order of all groups, a pure function of (``seed``, ``epoch``) (`gmeta.io.groups`). Of N
    ranks, or shares of the data, number v reads the range

    .. math:: [\lfloor v G / N \rfloor, \lfloor (v + 1) G / N \rfloor)

    of its G positions (G-Meta, section 2.2.3, cut at groups and not at rows), the same number of groups a
    step. So after some steps what is left is the rest of each range, and any other number of ranks can take
    that up: their ranges are cut out of the rests, joined in order.

    Attributes:
      digest: The data set's and the split's, from its manifest.
      seed: As in `gmeta.io.groups`.
      epoch: The epoch's number.
      left: Spans of positions, in the order in which they are to be read.

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
        """An epoch that hasn't begun."""
        return cls(digest, seed, epoch, ((0, groups),))

    @property
    def groups(self) -> int:
        """How many are left."""
        return sum(end - begin for begin, end in self.left)

    def lanes(self, ranks: int) -> tuple[tuple[Span, ...], ...]:
        """The ranges of ``ranks`` ranks (or shares): of each the spans that it is made of."""
        cuts = [rank * self.groups // ranks for rank in range(ranks + 1)]
        return tuple(_cut(self.left, cuts[rank], cuts[rank + 1]) for rank in range(ranks))

    def steps(self, ranks: int, groups_per_step: int) -> int:
        """Steps that every rank takes, so that the one with the longest range reads all of it."""
        longest = -(-self.groups // ranks)
        return -(-longest // groups_per_step)

    def after(self, cursors: Sequence[int]) -> EpochPlan:
        """What is left when the ranks have been given so many groups of their ranges each.

        Args:
          cursors: Of each rank, or share, in order: ``cursor`` of its last element (`gmeta.io.groups`).
        """
        rests = (
            _cut(lane, cursor, None) for lane, cursor in zip(self.lanes(len(cursors)), cursors, strict=True)
        )
        return replace(self, left=tuple(span for rest in rests for span in rest))

    def after_steps(self, steps: int, *, ranks: int, groups_per_step: int) -> EpochPlan:
        """What is left when each of ``ranks`` ranks, or shares, has taken so many steps."""
        return self.after([steps * groups_per_step] * ranks)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "digest": self.digest,
            "seed": self.seed,
            "epoch": self.epoch,
            "left": [*map(list, self.left)],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EpochPlan:
        """The inverse of `to_json`.

        Raises:
          ConfigError: It isn't what `to_json` made.
        """
        try:
            left = tuple((int(begin), int(end)) for begin, end in value["left"])
            return cls(str(value["digest"]), int(value["seed"]), int(value["epoch"]), left)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"EpochPlan: {value!r} isn't what to_json made: {error}") from error


def _cut(spans: Sequence[Span], begin: int, end: int | None) -> tuple[Span, ...]:
    """Positions number ``begin`` to ``end - 1`` of some spans."""
    found, before = [], 0
    for first, last in spans:
        start = first + max(0, begin - before)
        stop = last if end is None else min(last, first + end - before)
        if start < stop:
            found.append((start, stop))
        before += last - first
    return tuple(found)
