"""The contenders on a GPU: our table by its C interface, and the preallocated table of PyTorch and Triton."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

from gmeta.optimizers import Adagrad
from gmeta.policies import LFU
from support.gpu.gpu_table import GpuTable

import numpy as np
import torch
from numpy.typing import NDArray
from parts.preallocated.torch_form import TorchForm
from parts.tiers.gpu_rows import Distinct, at

Peer = TorchForm
_NORMAL = SimpleNamespace(kind="normal", parameters=(0.0, 0.05))


class Own:
    """Our table. ``most`` bounds its rows; None: no bound."""

    def __init__(self, dim: int, most: int | None) -> None:
        eviction = None if most is None else LFU(max_rows=most)
        self._table = GpuTable(dim, Adagrad(), _NORMAL, 1, eviction=eviction)
        self._dim = dim
        self._distinct: Distinct | None = None

    def step(self, ids: torch.Tensor, gradient: torch.Tensor) -> None:
        """Look up a batch's ids, and train their rows by the first of the gradients."""
        self._distinct = self._distinct or Distinct(len(ids))
        keys, _ = self._distinct.of(ids)
        rows = torch.empty([len(keys), self._dim], device="cuda")
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        one = ctypes.c_int32(1)  # each key occurs once
        self._table.call("lookup_or_insert", at(keys), len(keys), one, at(rows), stream)
        self._table.call("update", at(keys), at(gradient), len(keys), ctypes.c_float(1e-3), one, stream)

    def bytes(self) -> int:
        """Return its present bytes."""
        return self._table.statistics()["bytes"]


def batch(ids: NDArray[np.int64]) -> torch.Tensor:
    """Copy ids to the contenders' device."""
    return torch.tensor(ids, device="cuda")


def distinct(ids: torch.Tensor) -> torch.Tensor:
    """Return the distinct ids in ascending order."""
    return torch.unique(ids)


def gradient(size: int, dim: int) -> torch.Tensor:
    """Return gradients of this many rows."""
    return torch.randn([size, dim], device="cuda")


def wait() -> None:
    """Wait for the GPU."""
    torch.cuda.synchronize()


def free_bytes() -> int:
    """Return the free memory."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
