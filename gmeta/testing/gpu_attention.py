"""HSTU's attention on the GPU by its C interface: inputs, calls, and the formulas in PyTorch.

PyTorch, which nothing else of gmeta needs, is here for memory on the GPU and for the expected numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gmeta.testing.cuda_library import CudaError, library

Mask = Literal["causal", "full", "targets", "window", "mixed"]


class _Heads(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class _Attention(ctypes.Structure):
    _fields_ = (
        *(("dtype", ctypes.c_int32), ("batch", ctypes.c_int32), ("tokens", ctypes.c_int64)),
        *(("heads", ctypes.c_int32), ("width", ctypes.c_int32)),
        *(("alpha", ctypes.c_float), ("scale", ctypes.c_float)),
        *(("visible", ctypes.c_void_p), ("plan", ctypes.c_void_p)),
        *(("q", _Heads), ("k", _Heads), ("v", _Heads)),
    )


def call_hstu(name: str, *arguments: Any) -> None:
    """Call ``gmeta_hstu_<name>``.

    Raises:
      CudaError: It failed.
    """
    status = getattr(library(), f"gmeta_hstu_{name}")(*arguments)
    if status != 0:
        raise CudaError(status, library().gmeta_cuda_error().decode())


def visible_of(length: int, mask: Mask, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """What the tokens of one sequence see, as `AttentionMask` says it: (length, 3).

    ``window`` and ``targets`` draw how far tokens see and how many contexts and targets there are; ``mixed``
    has all of it.
    """
    place = np.arange(length)
    contexts = targets = 0
    if mask in ("targets", "mixed"):
        contexts = int(rng.integers(0, min(4, length + 1)))
        targets = int(rng.integers(0, min(20, length - contexts + 1)))
    first, end = np.full(length, contexts), np.full(length, length - targets)
    before = np.minimum(place, end)
    begin = first
    if mask in ("window", "mixed"):
        begin = np.maximum(first, before - int(rng.integers(1, 200)))
    until = end if mask == "full" else before
    is_context = place < first
    begin, until = np.where(is_context, first, begin), np.where(is_context, first, until)
    return np.stack([first, begin, np.maximum(begin, until)], axis=1).astype(np.int32)


def _pairs(visible: npt.NDArray[np.int32]) -> int:
    place = np.arange(len(visible))
    first, begin, end = visible.T
    alone = (place >= first) & ((place < begin) | (place >= end))
    return int((first + end - begin + alone).sum())


class GpuAttention:
    """Random inputs of jagged sequences, on the GPU, with the calls of the library.

    q, k, v and the gradient of the output are parts of one tensor, so that their tokens lie apart.

    Args:
      lengths: Of the sequences.
      heads: How many.
      width: Of a head.
      dtype: Its name, ``"bfloat16"`` or ``"float16"``.
      mask: The rule of what is seen.
      seed: Of the inputs.
    """

    def __init__(
        self, lengths: Sequence[int], heads: int, width: int, dtype: str, mask: Mask, seed: int = 0
    ) -> None:
        import torch  # type: ignore[import-not-found,unused-ignore]

        rng = np.random.default_rng(seed)
        self.torch: Any = torch
        self.batch, self.heads, self.width = len(lengths), heads, width
        self.dtype = getattr(torch, dtype)
        self.alpha, self.scale = width**-0.5, 1 / 64
        self.ends = np.cumsum(lengths)
        self.tokens = int(self.ends[-1])
        self.offsets = torch.as_tensor(np.concatenate([[0], self.ends]).astype(np.int64), device="cuda")
        visible = [visible_of(length, mask, rng) for length in lengths]
        self.visible = torch.as_tensor(np.concatenate(visible), device="cuda")
        self.pairs = sum(_pairs(of_sequence) for of_sequence in visible)
        torch.manual_seed(seed)
        self.inputs = torch.randn(self.tokens, 4, heads, width, device="cuda").to(self.dtype)
        self.q, self.k, self.v, self.of_out = self.inputs.unbind(1)
        size = library().gmeta_hstu_plan_bytes(ctypes.c_int64(self.tokens), ctypes.c_int32(self.batch))
        self.plan = torch.empty(size, dtype=torch.uint8, device="cuda")
        # Poisoned, so that what isn't written is noticed.
        self.results = torch.full((3, self.tokens, heads, width), np.nan, dtype=self.dtype, device="cuda")
        self.out = torch.full((self.tokens, heads, width), np.nan, dtype=self.dtype, device="cuda")

    def make_plan(self) -> None:
        """Plan for the offsets and the mask."""
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (self.offsets, self.visible, self.plan)]
        sizes = (ctypes.c_int64(self.tokens), ctypes.c_int32(self.batch))
        call_hstu("plan", *pointers[:2], *sizes, pointers[2], self._stream())

    def forward(self) -> Any:
        """(tokens, heads, width). The plan must be made."""
        call_hstu("forward", ctypes.byref(self._attention()), self._heads(self.out), self._stream())
        return self.out

    def gradients(self) -> Any:
        """(3, tokens, heads, width): of q, k and v. The plan must be made."""
        of_out, *of = (self._heads(x) for x in (self.of_out, *self.results.unbind(0)))
        call_hstu("backward", ctypes.byref(self._attention()), of_out, *of, self._stream())
        return self.results

    def _heads(self, x: Any) -> _Heads:
        return _Heads(x.data_ptr(), x.stride(0))

    def _attention(self) -> _Attention:
        return _Attention(
            *(0 if self.dtype == self.torch.bfloat16 else 1, self.batch, self.tokens),
            *(self.heads, self.width, self.alpha, self.scale),
            *(self.visible.data_ptr(), self.plan.data_ptr()),
            *(self._heads(x) for x in (self.q, self.k, self.v)),
        )

    def _seen(self, begin: int, end: int) -> Any:
        """(length, length) bool, of one sequence."""
        place = self.torch.arange(int(end - begin), device="cuda")
        first, since, until = (x[:, None] for x in self.visible[begin:end].long().unbind(1))
        return (place < first) | ((place >= since) & (place < until)) | (place == place[:, None])

    def expected(self, dtype: str) -> Any:
        """The formula as it stands, every number of a type, as float64."""
        einsum, of = self.torch.einsum, getattr(self.torch, dtype)
        out = self.torch.zeros_like(self.out, dtype=self.torch.float64)
        for begin, end in zip([0, *self.ends[:-1]], self.ends, strict=True):
            q, k, v = (x[begin:end].to(of) for x in (self.q, self.k, self.v))
            x = self.alpha * einsum("ihd,jhd->hij", q, k)
            weights = self.torch.nn.functional.silu(x) * self._seen(begin, end)
            out[begin:end] = self.scale * einsum("hij,jhd->ihd", weights, v)
        return out

    def expected_gradients(self, dtype: str) -> Any:
        """The formulas as they stand, every number of a type, as float64."""
        einsum, of = self.torch.einsum, getattr(self.torch, dtype)
        results = self.torch.zeros_like(self.results, dtype=self.torch.float64)
        for begin, end in zip([0, *self.ends[:-1]], self.ends, strict=True):
            seen = self._seen(begin, end)
            q, k, v, of_out = (x[begin:end].to(of) for x in (self.q, self.k, self.v, self.of_out))
            x = self.alpha * einsum("ihd,jhd->hij", q, k)
            gate = self.torch.sigmoid(x)
            slope = gate * (1 + x * (1 - gate)) * seen
            of_x = self.scale * einsum("ihd,jhd->hij", of_out, v) * slope
            results[0, begin:end] = self.alpha * einsum("hij,jhd->ihd", of_x, k)
            results[1, begin:end] = self.alpha * einsum("hij,ihd->jhd", of_x, q)
            results[2, begin:end] = self.scale * einsum("hij,ihd->jhd", x * gate * seen, of_out)
        return results

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
