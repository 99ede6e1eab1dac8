"""Shares of the data, of which a step has the same number on however many ranks.

A job divides the data of every step into V shares, as many as it was started with ranks. While it has V ranks
each takes one. When ranks are lost the others take theirs as well: of W ranks, rank r takes the shares from
r V // W up to (r + 1) V // W. So a step trains on the same samples as before, in the same order of shares,
and its gradient, which is that of the mean over the samples of all ranks, is the same.

No TensorFlow here; `gmeta.core.collectives.shared_data` takes the shares' part of a data set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from gmeta.core.errors import ConfigError

SHARES = "GMETA_SHARES"
"""Environment variable: into how many shares the data of a step is divided; unset, as many as there are
ranks."""


@dataclass(frozen=True)
class Shares:
    """Those of one rank.

    Attributes:
      first: The number of its first share.
      count: How many it has; they follow each other.
      total: How many there are.
    """

    first: int
    count: int
    total: int

    @classmethod
    def of(cls, rank: int, size: int, total: int | None = None) -> Shares:
        """The shares of a rank among ``size``; ``total`` of them, by default one for each rank.

        Example:
          >>> [Shares.of(rank, 2, 3) for rank in range(2)]
          [Shares(first=0, count=1, total=3), Shares(first=1, count=2, total=3)]
        """
        total = size if total is None else total
        first = rank * total // size
        return cls(first, (rank + 1) * total // size - first, total)

    def steps(self, elements: int) -> int:
        """How many steps these shares have data for, if element i of so many is of share i mod total."""
        return max(0, -(-(elements - self.first) // self.total))


def total_shares(ranks: int) -> int:
    """Into how many shares a job of so many ranks divides the data of a step.

    Raises:
      ConfigError: The environment has no number, or fewer shares than there are ranks.
    """
    text = os.environ.get(SHARES)
    if text is None:
        return ranks
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{SHARES}={text!r} is no number of shares of the data; unset it, or give at least 1"
        )
    if int(text) < ranks:
        raise ConfigError(
            f"{SHARES}={text}, but there are {ranks} ranks: a rank without a share has nothing to do; start "
            f"at most {text}"
        )
    return int(text)
