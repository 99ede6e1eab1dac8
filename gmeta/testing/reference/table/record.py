"""A row of a table and what goes with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass
class Record:
    """One row: weights (dim,), the optimizer's slots (slot_floats,), and the metadata."""

    row: Floats
    slots: Floats
    frequency: int
    last_step: int
