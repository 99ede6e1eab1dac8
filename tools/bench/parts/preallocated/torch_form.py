"""The preallocated table of numpy_form.py in PyTorch, all of it on a GPU.

Rows are read by `torch.index_select`, and trained by one kernel in Triton, which reads and writes each number
once.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # then PyTorch's own operations train rows
    triton = None

_NONE = torch.iinfo(torch.int64).max
_RATE, _EPSILON = 1e-3, 1e-7

if triton is not None:

    @triton.jit
    def _adagrad(rows, sums, gradients, slots, dim, rate, epsilon, BLOCK: tl.constexpr):
        one = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < dim
        at = tl.load(slots + one) * dim + column
        g = tl.load(gradients + one * dim + column, mask=inside)
        total = tl.load(sums + at, mask=inside) + g * g
        row = tl.load(rows + at, mask=inside)
        tl.store(sums + at, total, mask=inside)
        tl.store(rows + at, row - rate * g / (tl.sqrt(total) + epsilon), mask=inside)


class TorchForm:
    """The table.

    Args:
      capacity: The number of rows, without the shared one.
      dim: The width of a row.
      interval: Batches between merges.
      device: The table's device.
    """

    def __init__(self, capacity: int, dim: int, interval: int, device: str = "cuda") -> None:
        self._ids = torch.full([capacity], _NONE, device=device)
        self._slots = torch.arange(capacity, device=device)
        self._uses = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._live, self._interval, self._device = 0, interval, device
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.rows = torch.empty([capacity + 1, dim], device=device).normal_(std=0.05)
        self._sums = torch.full([capacity + 1, dim], 0.1, device=device)

    def step(self, ids: torch.Tensor, gradient: torch.Tensor) -> None:
        """Look up a batch's ids, and train their rows by the first of the gradients."""
        distinct, counts = torch.unique(ids, return_counts=True)
        slots = self._slots_of(distinct, counts)
        torch.index_select(self.rows, 0, slots)
        self._train(slots, gradient[: len(slots)])
        if len(self._waiting) == self._interval:
            self.merge()

    def bytes(self) -> int:
        """Return the bytes of the table."""
        return sum(each.nbytes for each in (self._ids, self._slots, self._uses, self.rows, self._sums))

    def find(self, distinct: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of ascending ids in the map, and which of them have one."""
        at = torch.searchsorted(self._ids[: self._live], distinct).clamp_(max=len(self._ids) - 1)
        return at, self._ids[at] == distinct

    def _slots_of(self, distinct: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        at, found = self.find(distinct)
        self._uses.scatter_add_(0, at, counts * found)
        self._waiting.append((torch.where(found, _NONE, distinct), counts))
        return torch.where(found, self._slots[at], len(self._ids))

    def _train(self, slots: torch.Tensor, gradient: torch.Tensor) -> None:
        if triton is not None and slots.is_cuda:
            dim = gradient.shape[1]
            block = min(1024, triton.next_power_of_2(dim))
            places = (self.rows, self._sums, gradient, slots)
            _adagrad[len(slots), triton.cdiv(dim, block)](*places, dim, _RATE, _EPSILON, BLOCK=block)
        else:
            total = self._sums[slots] + gradient * gradient
            self._sums[slots] = total
            self.rows[slots] = self.rows[slots] - _RATE * gradient / (total.sqrt() + _EPSILON)

    def merge(self) -> None:
        """Give rows to the waiting ids, if necessary those of the least used ids."""
        ids, inverse = torch.unique(torch.cat([ids for ids, _ in self._waiting]), return_inverse=True)
        counts = torch.cat([counts for _, counts in self._waiting])
        uses = torch.zeros(len(ids), dtype=torch.int64, device=self._device).scatter_add_(0, inverse, counts)
        self._waiting.clear()
        if len(ids) and ids[-1] == _NONE:  # in the place of those that were found
            ids, uses = ids[:-1], uses[:-1]
        live = self._live
        kept = torch.ones(live + len(ids), dtype=torch.bool, device=self._device)
        if (over := len(kept) - len(self._ids)) > 0:
            least = torch.cat([self._uses[:live], uses]).topk(over, largest=False, sorted=False).indices
            kept[least] = False
        old, new = kept[:live], kept[live:]
        free = torch.cat([self._slots[:live][~old], self._slots[live:]])
        newcomers = ids[new]
        slots, left = free[: len(newcomers)], free[len(newcomers) :]
        self.rows[slots] = torch.empty([len(slots), self.rows.shape[1]], device=self._device).normal_(
            std=0.05
        )
        self._sums[slots] = 0.1
        merged, order = torch.sort(torch.cat([self._ids[:live][old], newcomers]))
        self._live = len(merged)
        self._uses[: self._live] = torch.cat([self._uses[:live][old], uses[new]])[order]
        self._slots = torch.cat([torch.cat([self._slots[:live][old], slots])[order], left])
        self._ids[: self._live], self._ids[self._live :] = merged, _NONE
