"""What is known of items besides their ids: columns of attributes, as sparse indicators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

from gmeta.experiment.baselines.task_rows import Ints


@dataclass(frozen=True)
class ItemAttributes:
    r"""The attributes of all items, also of those that no warm row has.

    An item with the n values V in a column has there the row :math:`a_v = 1 / \sqrt n` for v in V, and 0
    elsewhere. So each column says as much of an item, however many values it lists.

    Attributes:
      columns: Name of a column -> (items, values), float64.

    Example:
      >>> genres = np.array([7, 7, 3]), np.array([1, 2])  # item 0 has genre 7, item 1 has 7 and 3
      >>> ItemAttributes.of({"genre": genres}).columns["genre"].toarray().round(2)
      array([[0.  , 1.  ],
             [0.71, 0.71]])
    """

    columns: Mapping[str, csr_matrix]

    @classmethod
    def of(cls, values: Mapping[str, tuple[Ints, Ints]]) -> ItemAttributes:
        """Build the rows from each column's values, item after item, and how many of them each item has."""
        return cls({name: _indicate(*each) for name, each in values.items()})

    @property
    def items(self) -> int:
        """How many items there are."""
        return int(next(iter(self.columns.values())).shape[0])


def _indicate(values: Ints, counts: Ints) -> csr_matrix:
    ids, column = np.unique(values, return_inverse=True)
    splits = np.concatenate([[0], np.cumsum(counts)])
    entries = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts)
    return csr_matrix((entries, column, splits), shape=(len(counts), len(ids)))
