"""Tables of Adam that have all of their rows."""

from __future__ import annotations

from gmeta.ops import HashTable
from gmeta.optimizers import Adam
from gmeta.policies import Tiers

import numpy as np
import tensorflow as tf

_PIECE = 50_000


def new_table(rows: int, dim: int, tiers: Tiers | None = None, device: str = "cpu") -> HashTable:
    """Make a table and the rows of the ids from 0 on; those without room move to the drive."""
    table = HashTable(dim, Adam(1e-3), tiers=tiers, device=device)
    for first in range(0, rows, _PIECE):
        table.lookup_keys(np.arange(first, min(rows, first + _PIECE)))
        table.apply_gradients(np.zeros(0, np.int64), tf.zeros([0, dim]))
    return table
