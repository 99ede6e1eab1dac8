"""HSTU's attention on the GPU by its C interface: inputs, calls, and the formulas in PyTorch.

It uses PyTorch, which nothing else in gmeta needs, for memory on the GPU and for the expected numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from support.gpu.cuda_library import call_library, library

Mask = Literal["causal", "full", "targets", "window", "mixed"]
Table = Literal["positions", "time_buckets"]
Form = Literal["silu", "softmax"]
_STARTS = np.ceil(np.exp(0.301 * np.arange(1, 129))).astype(np.int64)  # of buckets, from the second on


class _Heads(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class _Attention(ctypes.Structure):
    _fields_ = (
        *(("dtype", ctypes.c_int32), ("batch", ctypes.c_int32), ("tokens", ctypes.c_int64)),
        *(("heads", ctypes.c_int32), ("width", ctypes.c_int32)),
        *(("alpha", ctypes.c_float), ("scale", ctypes.c_float)),
        *(("visible", ctypes.c_void_p), ("plan", ctypes.c_void_p)),
        *(("q", _Heads), ("k", _Heads), ("v", _Heads)),
        *(("bias", ctypes.c_void_p), ("softmax", ctypes.c_void_p)),
    )


class _Softmax(ctypes.Structure):
    _fields_ = (("log_sums", ctypes.c_void_p), ("out", _Heads), ("products", ctypes.c_void_p))


class _Bias(ctypes.Structure):
    _fields_ = (
        *(("positions", ctypes.c_void_p), ("n", ctypes.c_int64)),
        *(("time_buckets", ctypes.c_void_p), ("buckets", ctypes.c_int32)),
        ("time_map", ctypes.c_void_p),
    )


class _BiasGradient(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("positions", "time_buckets", "workspace"))


def call_hstu(name: str, *arguments: Any) -> None:
    """Call ``gmeta_hstu_<name>``.

    Raises:
      CudaError: It failed.
    """
    call_library(f"hstu_{name}", *arguments)


def visible_of(length: int, mask: Mask | int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """What the tokens of one sequence see, in the form of `AttentionMask`: (length, 3).

    ``window`` and ``targets`` draw how far tokens see, and the numbers of contexts and targets; ``mixed`` has
    all of these. An integer is a causal window.
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
    if isinstance(mask, int):
        begin = np.maximum(first, before - mask)
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

    q, k, v and the gradient of the output are parts of one tensor, so that their tokens aren't contiguous.

    Args:
      lengths: The lengths of the sequences.
      heads: The number of heads.
      width: The width of a head.
      dtype: Its name, ``"bfloat16"`` or ``"float16"``.
      mask: The rule by which tokens see each other; an integer is how far back they see.
      seed: The seed of the inputs.
      bias: The tables of a relative bias.
      places: n of the table of places; None: too few for the longest distances.
      form: How scores become weights. The gradients of a softmax need its outputs: call `forward` before.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        width: int,
        dtype: str,
        mask: Mask | int,
        seed: int = 0,
        bias: Collection[Table] = (),
        places: int | None = None,
        form: Form = "silu",
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
        # Poisoned, which shows what isn't written.
        self.results = torch.full((3, self.tokens, heads, width), np.nan, dtype=self.dtype, device="cuda")
        self.out = torch.full((self.tokens, heads, width), np.nan, dtype=self.dtype, device="cuda")
        self.form = form
        self.softmax: _Softmax | None = None
        if form == "softmax":
            # Both (heads, tokens): the logarithms of the rows' sums, and a workspace.
            self.log_sums, self.products = torch.full((2, heads, self.tokens), np.nan, device="cuda")
            self.softmax = _Softmax(self.log_sums.data_ptr(), self._heads(self.out), self.products.data_ptr())
        self.bias: _Bias | None = None
        self.tables: dict[Table, Any] = {}
        if bias:
            self._draw_bias(bias, places or max(max(lengths) // 2, 1), rng)

    def _draw_bias(self, tables: Collection[Table], places: int, rng: np.random.Generator) -> None:
        torch = self.torch
        sizes: dict[Table, int] = {
            "positions": 2 * places - 1,
            "time_buckets": len(_STARTS) + 1,
        }
        for name in tables:
            self.tables[name] = torch.as_tensor(rng.standard_normal(sizes[name], np.float32), device="cuda")
        self.table_gradients = {name: torch.full_like(x, np.nan) for name, x in self.tables.items()}
        times = np.cumsum(rng.integers(0, 2 ** rng.integers(0, 31, self.tokens)))
        rows = times + rng.integers(0, 1000, self.tokens)
        self.times = torch.as_tensor(np.stack([rows, times]).astype(np.int64), device="cuda")
        pointers = {name: x.data_ptr() for name, x in self.tables.items()}
        self.bias = _Bias(
            *(pointers.get("positions"), (sizes["positions"] + 1) // 2),
            *(pointers.get("time_buckets"), len(_STARTS) + 1),
            None,
        )
        size = library().gmeta_hstu_bias_workspace
        size.restype = ctypes.c_int64
        self.workspace = torch.full((size(ctypes.byref(self._attention())),), 255, dtype=torch.uint8).cuda()

    def make_plan(self) -> None:
        """Plan for the offsets and the mask, and map the times."""
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (self.offsets, self.visible, self.plan)]
        sizes = (ctypes.c_int64(self.tokens), ctypes.c_int32(self.batch))
        call_hstu("plan", *pointers[:2], *sizes, pointers[2], self._stream())
        if "time_buckets" in self.tables:
            room = ctypes.c_int64()
            call_hstu("time_map_bytes", pointers[2], *sizes, ctypes.byref(room), self._stream())
            self.time_map = self.torch.full((room.value,), 254, dtype=self.torch.uint8, device="cuda")
            self.map_times()

    def map_times(self) -> None:
        """Write the map of times. There must be one."""
        rows, columns = (ctypes.c_void_p(x.data_ptr()) for x in self.times)
        sizes = (ctypes.c_int64(self.tokens), ctypes.c_int32(self.batch))
        starts = (_STARTS.ctypes.data_as(ctypes.c_void_p), ctypes.c_int32(len(_STARTS)))
        to = ctypes.c_void_p(self.time_map.data_ptr())
        plan = ctypes.c_void_p(self.plan.data_ptr())
        call_hstu("time_map", plan, *sizes, rows, columns, *starts, to, self._stream())
        assert self.bias is not None
        self.bias.time_map = self.time_map.data_ptr()

    def forward(self) -> Any:
        """(tokens, heads, width). The plan must be made."""
        call_hstu("forward", ctypes.byref(self._attention()), self._heads(self.out), self._stream())
        return self.out

    def gradients(self) -> Any:
        """(3, tokens, heads, width): of q, k and v. The plan must be made.

        Then ``table_gradients`` has those of the bias's tables.
        """
        of_out, *of = (self._heads(x) for x in (self.of_out, *self.results.unbind(0)))
        of_bias = None
        if self.bias is not None:
            found = {name: x.data_ptr() for name, x in self.table_gradients.items()}
            room = self.workspace.data_ptr()
            gradient = _BiasGradient(found.get("positions"), found.get("time_buckets"), room)
            of_bias = ctypes.byref(gradient)
        call_hstu("backward", ctypes.byref(self._attention()), of_out, *of, of_bias, self._stream())
        return self.results

    def _heads(self, x: Any) -> _Heads:
        return _Heads(x.data_ptr(), x.stride(0))

    def _attention(self) -> _Attention:
        return _Attention(
            *(0 if self.dtype == self.torch.bfloat16 else 1, self.batch, self.tokens),
            *(self.heads, self.width, self.alpha, self.scale),
            *(self.visible.data_ptr(), self.plan.data_ptr()),
            *(self._heads(x) for x in (self.q, self.k, self.v)),
            *(None if x is None else ctypes.addressof(x) for x in (self.bias, self.softmax)),
        )

    def _sees(self, begin: int, end: int) -> Any:
        """(length, length) bool, of one sequence."""
        place = self.torch.arange(int(end - begin), device="cuda")
        first, since, until = (x[:, None] for x in self.visible[begin:end].long().unbind(1))
        return (place < first) | ((place >= since) & (place < until)) | (place == place[:, None])

    def _places(self, begin: int, end: int) -> dict[Table, Any]:
        """(length, length) of one sequence: the number of each table for each pair."""
        found: dict[Table, Any] = {}
        if "positions" in self.tables:
            place = self.torch.arange(int(end - begin), device="cuda")
            last = len(self.tables["positions"]) - 1
            found["positions"] = (place - place[:, None] + last // 2).clamp(0, last)
        if "time_buckets" in self.tables:
            rows, columns = self.times[:, begin:end]
            starts = self.torch.as_tensor(_STARTS, device="cuda")
            found["time_buckets"] = self.torch.bucketize((rows[:, None] - columns).abs(), starts, right=True)
        return found

    def _scores(self, begin: int, end: int, of: Any) -> Any:
        """(heads, length, length): the arguments of SiLU or of softmax."""
        q, k = (x[begin:end].to(of) for x in (self.q, self.k))
        x = self.alpha * self.torch.einsum("ihd,jhd->hij", q, k)
        for name, place in self._places(begin, end).items():
            x = x + self.tables[name].to(of)[place]
        return x

    def _weights(self, scores: Any, seen: Any) -> Any:
        """(heads, length, length) of scores of this shape."""
        if self.form == "softmax":
            return self.torch.softmax(scores.masked_fill(~seen, -np.inf), -1)
        return self.torch.nn.functional.silu(scores) * seen

    def expected(self, dtype: str) -> Any:
        """The plain formula, with all numbers of one type, as float64."""
        einsum, of = self.torch.einsum, getattr(self.torch, dtype)
        out = self.torch.zeros_like(self.out, dtype=self.torch.float64)
        for begin, end in zip([0, *self.ends[:-1]], self.ends, strict=True):
            weights = self._weights(self._scores(begin, end, of), self._sees(begin, end))
            out[begin:end] = self.scale * einsum("hij,jhd->ihd", weights, self.v[begin:end].to(of))
        return out

    def expected_gradients(self, dtype: str) -> tuple[Any, dict[Table, Any]]:
        """The plain formulas, with all numbers of one type, as float64: `gradients`, and the tables'."""
        einsum, of = self.torch.einsum, getattr(self.torch, dtype)
        results = self.torch.zeros_like(self.results, dtype=self.torch.float64)
        of_tables = {name: self.torch.zeros_like(x, dtype=of) for name, x in self.tables.items()}
        for begin, end in zip([0, *self.ends[:-1]], self.ends, strict=True):
            seen = self._sees(begin, end)
            q, k, v, of_out = (x[begin:end].to(of) for x in (self.q, self.k, self.v, self.of_out))
            x = self._scores(begin, end, of)
            weights = self._weights(x, seen)
            of_weights = self.scale * einsum("ihd,jhd->hij", of_out, v)
            if self.form == "softmax":
                of_x = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
            else:
                gate = self.torch.sigmoid(x)
                of_x = of_weights * (gate * (1 + x * (1 - gate)) * seen)
            for name, place in self._places(begin, end).items():
                of_tables[name].index_add_(0, place.flatten(), of_x.sum(0).flatten())
            results[0, begin:end] = self.alpha * einsum("hij,jhd->ihd", of_x, k)
            results[1, begin:end] = self.alpha * einsum("hij,ihd->jhd", of_x, q)
            results[2, begin:end] = self.scale * einsum("hij,ihd->jhd", weights, of_out)
        return results, {name: x.double() for name, x in of_tables.items()}

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
