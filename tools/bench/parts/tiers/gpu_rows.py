"""Rows in GPU memory and host memory, by the table's C interface, with PyTorch's streams."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

from gmeta.optimizers import Adam
from support.gpu.cuda_library import call, library
from support.gpu.gpu_table import GpuTable

import torch

LOOKAHEAD = 2
"""Batches between the one whose rows are brought and the one that computes."""

_NORMAL = SimpleNamespace(kind="normal", parameters=(0.0, 0.05))
_PIECE, _SMALL_PIECE = (
    1 << 18,
    1 << 16,
)  # rows made in one call; over a drive, where the latest rows stay in memory
_RATE = ctypes.c_float(1e-3)
_DISTINCT = ctypes.c_int32(1)


def at(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Return a tensor's address."""
    return ctypes.c_void_p(tensor.data_ptr())


def keys_of(ids: torch.Tensor) -> torch.Tensor:
    """Return keys that look random, a different one for each id."""
    return ids * 0x1E3779B97F4A7C15


class Zipf:
    """Draws batches of keys on the GPU by Zipf's law. A key's rank is random.

    Args:
      rows: The number of keys: those of the numbers from 0.
      skew: The exponent.
      seed: The seed of the draws.
    """

    def __init__(self, rows: int, skew: float, seed: int = 0) -> None:
        self._random = torch.Generator(device="cuda").manual_seed(seed)
        self._order = torch.randperm(rows, device="cuda", generator=self._random)
        self._shares = torch.arange(1, rows + 1, dtype=torch.float64, device="cuda").pow_(-skew).cumsum(0)

    def keys(self, size: int) -> torch.Tensor:
        """Draw keys, in their random order."""
        drawn = torch.rand(size, dtype=torch.float64, device="cuda", generator=self._random)
        ranks = torch.searchsorted(self._shares, drawn * self._shares[-1])
        return keys_of(self._order[ranks.clamp_(max=len(self._order) - 1)])

    def distinct(self, size: int) -> torch.Tensor:
        """Draw keys, and return each distinct one once."""
        return torch.unique(self.keys(size))


class Rows:
    """A table with Adam that holds the keys of all numbers below ``rows``.

    Args:
      rows: The number of rows.
      dim: The width of a row.
      most: The most keys of a batch.
      hbm_rows: The number of rows in the GPU's memory; 0: all.
      host_bytes: The bytes of host memory for the others; 0: as many as they take.
      folder: The folder for the rest.
    """

    def __init__(
        self, rows: int, dim: int, most: int, hbm_rows: int = 0, host_bytes: int = 0, folder: str = ""
    ) -> None:
        lookahead = LOOKAHEAD if hbm_rows else 1
        tiers = (hbm_rows, host_bytes, folder, lookahead)
        names = ("hbm_rows", "host_bytes", "disk_folder", "lookahead")
        self.table = GpuTable(dim, Adam(), _NORMAL, 1, **dict(zip(names, tiers, strict=True)))
        self.dim, self.tiered = dim, hbm_rows > 0
        self.row_bytes = 3 * 4 * dim  # the weights and both moments
        self.found = torch.empty((max(most, _PIECE), dim), device="cuda")
        self._ahead = torch.cuda.Stream()
        self._main = torch.cuda.current_stream()
        self.table.reserve(rows)
        piece = _SMALL_PIECE if host_bytes else _PIECE
        for first in range(0, rows, piece):
            self.look_up(keys_of(torch.arange(first, min(rows, first + piece), device="cuda")))
        torch.cuda.synchronize()
        if (made := self.table.size()) != rows:
            raise RuntimeError(f"the table made {made:,} rows of {rows:,}")

    def look_up(self, keys: torch.Tensor) -> torch.Tensor:
        """Find or insert distinct keys."""
        rows = self.found[: len(keys)]
        self.table.call(
            "lookup_or_insert", at(keys), len(keys), _DISTINCT, at(rows), self._stream(self._main)
        )
        return rows

    def update(self, keys: torch.Tensor, gradients: torch.Tensor) -> None:
        """Take a step of Adam on the rows of distinct keys."""
        queue = self._stream(self._main)
        self.table.call("update", at(keys), at(gradients), len(keys), _RATE, _DISTINCT, queue)

    def update_positions(self, keys: torch.Tensor, gradients: torch.Tensor, inverse: torch.Tensor) -> None:
        """Take a step of Adam by the gradients of a batch's positions."""
        sums = (at(gradients), at(inverse), len(inverse), _RATE, self._stream(self._main))
        self.table.call("update_indexed", at(keys), len(keys), *sums)

    def prefetch(self, keys: torch.Tensor) -> None:
        """Bring the rows of a later batch, in parallel with the main stream; the keys must exist."""
        if self.tiered:
            keys.record_stream(self._ahead)
            self.table.call("prefetch", at(keys), len(keys), self._stream(self._ahead))

    def moves(self) -> dict[str, int]:
        """Return the table's counts of moves, after all work."""
        torch.cuda.synchronize()
        counted = self.table.statistics()
        return {name: counted[name] for name in ("brought", "spilled", "crowded")}

    @staticmethod
    def _stream(stream: torch.cuda.Stream) -> ctypes.c_void_p:
        return ctypes.c_void_p(stream.cuda_stream)


class Distinct:
    """Deduplicates the keys of batches of one size."""

    def __init__(self, size: int) -> None:
        bytes_needed = library().gmeta_gpu_unique_workspace(ctypes.c_int64(size), ctypes.c_int32(0))
        self._space = torch.empty(bytes_needed, dtype=torch.uint8, device="cuda")
        self._keys = torch.empty(size, dtype=torch.int64, device="cuda")
        self._inverse = torch.empty(size, dtype=torch.int32, device="cuda")
        self._count = torch.empty(1, dtype=torch.int32, device="cuda")

    def of(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distinct keys, and which of them is at each position; waits for their number."""
        results = (at(self._keys), at(self._inverse), at(self._count), at(self._space))
        queue = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call("unique", at(keys), len(keys), *results, ctypes.c_size_t(len(self._space)), queue)
        return self._keys[: int(self._count.item())], self._inverse


def gather(rows: torch.Tensor, inverse: torch.Tensor, out: torch.Tensor) -> None:
    """Write the row of each position."""
    queue = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    call("gather_rows", at(rows), rows.shape[1], at(inverse), len(inverse), at(out), queue)
