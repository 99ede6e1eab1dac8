"""Elements of about equal cost: the contents of a step, and its average cost."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from gmeta.core.errors import ConfigError, whole_number
from gmeta.io.balance import SequenceCost
from gmeta.io.readers.prepared_split import open_split


@dataclass(frozen=True)
class Balance:
    """Elements with as many groups as reach a target cost (MTGenRec, algorithm 1).

    A group is a sequence. Its tokens are its rows, or the values of a list column in all its rows, or its
    rows and the events of a history that isn't among them (`gmeta.io.late`).

    Attributes:
      target: The cost that an element should have.
      cost: The cost of a sequence; by default its number of tokens.
      max_tokens: The most tokens of an element, to limit memory (`gmeta.models.max_tokens` measures how many
        a GPU holds). No element has more: a group that has more alone is an error when it is read. Of a rank
        that reads for several in an elastic job, it bounds the part for each.
      tokens: The list column whose values are counted; or the int64 column whose value in the group's last
        row is the number of events of its history, which count besides its rows. None: rows.
      longest: The most tokens of a sequence that count, for a model that reads no more of it; None: all. Of
        a history it is the most events, and all rows count.

    Raises:
      ConfigError: ``target`` isn't above 0, or ``max_tokens`` or ``longest`` is below 1.

    Example:
      >>> cost = SequenceCost.of_hstu(dim=512, blocks=3)
      >>> balance = Balance.of("data/train", sequences=480, cost=cost, longest=3000)
      >>> batches = sequences("data/train", history=["item"], balance=balance)
    """

    target: float
    cost: SequenceCost = field(default_factory=SequenceCost)
    max_tokens: int | None = None
    tokens: str | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        if not self.target > 0 or any(
            most is not None and most < 1 for most in (self.max_tokens, self.longest)
        ):
            raise ConfigError(
                f"Balance: target={self.target} must be above 0, max_tokens={self.max_tokens} and "
                f"longest={self.longest} at least 1"
            )

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        sequences: int,
        cost: SequenceCost | None = None,
        max_tokens: int | None = None,
        longest: int | None = None,
    ) -> Balance:
        r"""Derive the target from a split, so that an element has so many sequences on the average.

        .. math:: target = n \, \frac{1}{G} \sum_g F(\min(L_g, longest))

        for the split's G groups of :math:`L_g` rows. The lengths stand in the indexes beside the shards; no
        shard is read. A sequence's tokens are its rows.

        Args:
          path: As for `gmeta.io.groups`.
          sequences: n, the number of sequences of an element on the average.
          cost: F; by default the number of tokens.
          max_tokens: As the attribute.
          longest: As the attribute.

        Raises:
          ConfigError: A number is below 1, there is no such split, or it has groups of more than
            ``max_tokens`` tokens.
          DataError: An index can't be read.
        """
        whole_number("Balance.of: sequences", sequences, 1)
        cost, split = cost or SequenceCost(), open_split(path)
        total, most, longer = 0.0, 0, 0
        for rows in split.rows_of_groups():
            counted = np.minimum(rows, longest or rows.max())
            total += float(cost.of(counted).sum())
            most = max(most, int(counted.max()))
            longer += 0 if max_tokens is None else int((counted > max_tokens).sum())
        if longer:
            raise ConfigError(
                f"Balance.of: {longer} of {split.groups} groups of {os.fspath(path)} have more than "
                f"max_tokens={max_tokens} tokens, up to {most}: give longest={max_tokens} or less to "
                "Balance.of, and to the reader, which cuts histories to it"
            )
        return cls(sequences * total / split.groups, cost, max_tokens, longest=longest)
