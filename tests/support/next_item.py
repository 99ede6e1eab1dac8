"""Histories written as lists, and scorers with given scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gmeta.experiment.next_item.counting import Scores
from gmeta.experiment.next_item.histories import Histories


def histories(sequences: Sequence[Sequence[int]], times: NDArray[np.int64] | None = None) -> Histories:
    """Make the histories of users 0, 10, 20, …"""
    splits = np.concatenate([[0], np.cumsum([len(each) for each in sequences])]).astype(np.int64)
    items = np.concatenate([np.asarray(each, np.int64) for each in sequences])
    return Histories(np.arange(len(sequences)) * 10, splits, items, times)


@dataclass
class Fixed:
    """Gives the users of `histories` the rows of a matrix, in their order."""

    values: Scores

    def scores(self, asked: Histories) -> Scores:
        """Return the rows of these users."""
        return self.values[asked.users // 10]
