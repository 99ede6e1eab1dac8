"""Shares of the data: a step has the same number of them, however many ranks there are.

A job divides the data of every step into V shares, where V is the number of ranks that it was started with.
While the job has V ranks, each rank takes one share. When ranks are lost, the others take their shares as
well: of W ranks, rank r takes the shares from r V // W up to (r + 1) V // W. So a step trains on the same
samples as before, in the same order of shares. Its gradient, that of the mean over the samples of all ranks,
is the same too.

This module doesn't use TensorFlow; `gmeta.core.collectives.shared_data` takes the shares' part of a data set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from gmeta.core.errors import ConfigError

SHARES = "GMETA_SHARES"
"""Environment variable: the number of shares that the data of a step is divided into; by default the
number of ranks."""


@dataclass(frozen=True)
class Shares:
    """The shares of one rank.

    Attributes:
      first: The number of the rank's first share.
      count: How many shares the rank has; they follow each other.
      total: How many shares there are in all.
    """

    first: int
    count: int
    total: int

    @classmethod
    def of(cls, rank: int, size: int, total: int | None = None) -> Shares:
        """Return the shares of a rank among ``size`` ranks; there are ``total`` shares, by default ``size``.

        Example:
          >>> [Shares.of(rank, 2, 3) for rank in range(2)]
          [Shares(first=0, count=1, total=3), Shares(first=1, count=2, total=3)]
        """
        total = size if total is None else total
        first = rank * total // size
        return cls(first, (rank + 1) * total // size - first, total)

    def steps(self, elements: int) -> int:
        """Return how many steps these shares have data for.

        The data set has ``elements`` elements; element i belongs to share i mod total.
        """
        return max(0, -(-(elements - self.first) // self.total))


def total_shares(ranks: int) -> int:
    """Return how many shares a job of this many ranks divides the data of a step into.

    Raises:
      ConfigError: The environment variable holds no number, or fewer shares than there are ranks.
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
