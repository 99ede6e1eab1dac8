"""The contenders on a CPU: `gmeta.ops.HashTable`, and the preallocated table of NumPy and TensorFlow."""

from __future__ import annotations

from pathlib import Path

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2
from gmeta.ops import HashTable
from gmeta.optimizers import Adagrad
from gmeta.policies import LFU

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from parts.preallocated.numpy_form import NumpyForm

Ids = NDArray[np.int64]
Peer = NumpyForm


class Own:
    """Our table. ``most`` bounds its rows; None: no bound."""

    def __init__(self, dim: int, most: int | None) -> None:
        eviction = None if most is None else LFU(max_rows=most)
        self._table = HashTable(dim, Adagrad(1e-3), eviction=eviction, device="cpu")

    def step(self, ids: Ids, gradient: tf.Tensor) -> None:
        """Look up a batch's ids, and train their rows by the first of the gradients."""
        lookup = self._table.lookup(ids)
        self._table.apply_gradients(lookup.keys, gradient[: lookup.keys.shape[0]])

    def bytes(self) -> int:
        """Return its present bytes."""
        return int(self._table.statistics().bytes)


def batch(ids: Ids) -> Ids:
    """Convert ids to the contenders' form."""
    return ids


def distinct(ids: Ids) -> Ids:
    """Return the distinct ids in ascending order."""
    return np.unique(ids)


def gradient(size: int, dim: int) -> tf.Tensor:
    """Return gradients of this many rows."""
    return tf.random.normal([size, dim])


def wait() -> None:
    """Wait for nothing: calls return when they are done."""


def free_bytes() -> int:
    """Return the free memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
