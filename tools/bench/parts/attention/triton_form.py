"""HSTU's attention in Triton: causal, over jagged sequences, forward and backward. A peer of the native op.

    o_i = s sum_{j <= i} SiLU(alpha q_i k_j) v_j

Written like most attention kernels in Triton. Forward, a program has a block of rows of one sequence and
head; it goes through the blocks of columns below the diagonal without a mask, then through those on it with
one. The gradients are two kernels, without atomics: one has a block of columns and loops over the rows for
the gradients of K and V, the other has a block of rows and loops over the columns for that of Q. Scores are
never in memory, products are of bfloat16 and summed in float32. Programs with the most work are started
first, and those past their sequence's end return at once.

SiLU takes one instruction of the special function unit, as in the native op: with h = x/2 and t = tanh(h),

    SiLU(x) = h + h t        SiLU'(x) = (1 + t + h (1 - t^2)) / 2
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime._async_compile import AsyncCompileMode

APPROXIMATE = not triton.knobs.runtime.interpret
"""Whether tanh is the GPU's instruction: the interpreter doesn't know it."""


@triton.jit
def _tanh(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 2 / (1 + tl.exp(-2 * x)) - 1


@triton.jit
def _load(base, rows, length, STRIDE: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """(rows, WIDTH) of a sequence whose first number is at ``base``; zeros after its end."""
    at = base + rows[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    if CHECK:
        return tl.load(at, mask=rows[:, None] < length, other=0.0)
    return tl.load(at)


@triton.jit
def _store(base, rows, length, block, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    at = base + rows[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    tl.store(at, block.to(base.dtype.element_ty), mask=rows[:, None] < length)


@triton.jit
def _sequence(offsets, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """A program's sequence: the place of its first number, and its length."""
    number = tl.program_id(1)
    first = tl.load(offsets + number // HEADS)
    length = (tl.load(offsets + number // HEADS + 1) - first).to(tl.int32)
    return first * (HEADS * WIDTH) + (number % HEADS) * WIDTH, length


@triton.jit
def _attend(
    acc, q, k_base, v_base, rows, start, length, half, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr, MASK: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """One block of columns, forward."""
    columns = start + tl.arange(0, N)
    k = _load(k_base, columns, length, STRIDE, WIDTH, MASK)
    h = tl.dot(q, tl.trans(k)) * half
    p = h * _tanh(h, APPROXIMATE) + h
    if MASK:
        p = tl.where(rows[:, None] >= columns[None, :], p, 0.0)
    v = _load(v_base, columns, length, STRIDE, WIDTH, MASK)
    return tl.dot(p.to(v.dtype), v, acc)


@triton.jit
def _slope(h, t):
    return 0.5 + 0.5 * (t + h * (1 - t * t))


@triton.jit
def _of_keys(
    of_k, of_v, k, v, q_base, g_base, columns, start, length, half, STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, MASK: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """One block of rows, for the gradients of K and V; scores are transposed: (columns, rows)."""
    rows = start + tl.arange(0, M)
    q = _load(q_base, rows, length, STRIDE, WIDTH, True)
    g = _load(g_base, rows, length, STRIDE, WIDTH, True)
    h = tl.dot(k, tl.trans(q)) * half
    t = _tanh(h, APPROXIMATE)
    p = h * t + h
    of_x = tl.dot(v, tl.trans(g)) * _slope(h, t)
    if MASK:
        seen = rows[None, :] >= columns[:, None]
        p = tl.where(seen, p, 0.0)
        of_x = tl.where(seen, of_x, 0.0)
    of_v = tl.dot(p.to(g.dtype), g, of_v)
    of_k = tl.dot(of_x.to(q.dtype), q, of_k)
    return of_k, of_v


@triton.jit
def _of_queries(
    of_q, q, g, k_base, v_base, rows, start, length, half, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr, MASK: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """One block of columns, for the gradient of Q."""
    columns = start + tl.arange(0, N)
    k = _load(k_base, columns, length, STRIDE, WIDTH, MASK)
    v = _load(v_base, columns, length, STRIDE, WIDTH, MASK)
    h = tl.dot(q, tl.trans(k)) * half
    of_x = tl.dot(g, tl.trans(v)) * _slope(h, _tanh(h, APPROXIMATE))
    if MASK:
        of_x = tl.where(rows[:, None] >= columns[None, :], of_x, 0.0)
    return tl.dot(of_x.to(k.dtype), k, of_q)


def _configs(*shapes: tuple[int, int, int, int]) -> list[triton.Config]:
    """From (M, N, warps, stages)."""
    return [triton.Config({"M": m, "N": n}, num_warps=w, num_stages=s) for m, n, w, s in shapes]


def _fitting(shapes: dict[int, list[triton.Config]], configs: Any, args: Any, **kwargs: Any) -> Any:
    return shapes[kwargs["WIDTH"]]


def _tuned(shapes: dict[int, list[triton.Config]]) -> Any:
    """`triton.autotune`, anew for each width and longest length, timed briefly."""
    every = [config for configs in shapes.values() for config in configs]
    return triton.autotune(
        every,
        key=["longest", "WIDTH"],
        prune_configs_by={"early_config_prune": partial(_fitting, shapes)},
        do_bench=lambda run, quantiles: triton.testing.do_bench(run, warmup=4, rep=16, quantiles=quantiles),
    )


# Those that ptxas compiles with no or little stack; the smaller ones let two programs share a multiprocessor.
FORWARD = {
    128: _configs((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2)),
    256: _configs((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2)),
}
OF_KEYS = {
    128: _configs((64, 128, 8, 2), (32, 128, 8, 3), (32, 64, 4, 3)),
    256: _configs((64, 64, 8, 2), (32, 64, 8, 2), (16, 64, 8, 2)),
}
OF_QUERIES = {
    128: _configs((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2)),
    256: _configs((128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2)),
}


@_tuned(FORWARD)
@triton.jit(do_not_specialize=["longest"])
def forward(
    q, k, v, out, offsets, half, scale, longest, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    APPROXIMATE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    base, length = _sequence(offsets, HEADS, WIDTH)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if start >= length:
        return
    STRIDE: tl.constexpr = HEADS * WIDTH
    rows = start + tl.arange(0, M)
    q_block = _load(q + base, rows, length, STRIDE, WIDTH, True)
    acc = tl.zeros([M, WIDTH], dtype=tl.float32)
    for at in tl.range(0, start, N):
        acc = _attend(
            acc, q_block, k + base, v + base, rows, at, length, half, STRIDE, WIDTH, N, False, APPROXIMATE
        )
    for at in tl.range(start, min(start + M, length), N):
        acc = _attend(
            acc, q_block, k + base, v + base, rows, at, length, half, STRIDE, WIDTH, N, True, APPROXIMATE
        )
    _store(out + base, rows, length, acc * scale, STRIDE, WIDTH)


@_tuned(OF_KEYS)
@triton.jit(do_not_specialize=["longest"])
def gradients_of_keys(
    q, k, v, of_out, of_k, of_v, offsets, half, scale, longest, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, APPROXIMATE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    base, length = _sequence(offsets, HEADS, WIDTH)
    start = tl.program_id(0) * N
    if start >= length:
        return
    STRIDE: tl.constexpr = HEADS * WIDTH
    columns = start + tl.arange(0, N)
    k_block = _load(k + base, columns, length, STRIDE, WIDTH, True)
    v_block = _load(v + base, columns, length, STRIDE, WIDTH, True)
    k_acc = tl.zeros([N, WIDTH], dtype=tl.float32)
    v_acc = tl.zeros([N, WIDTH], dtype=tl.float32)
    for at in tl.range(start, min(start + N, length), M):
        k_acc, v_acc = _of_keys(
            k_acc, v_acc, k_block, v_block, q + base, of_out + base, columns, at, length, half, STRIDE, WIDTH,
            M, True, APPROXIMATE,
        )  # fmt: skip
    for at in tl.range(start + N, length, M):
        k_acc, v_acc = _of_keys(
            k_acc, v_acc, k_block, v_block, q + base, of_out + base, columns, at, length, half, STRIDE, WIDTH,
            M, False, APPROXIMATE,
        )  # fmt: skip
    _store(of_k + base, columns, length, k_acc * (2 * half * scale), STRIDE, WIDTH)
    _store(of_v + base, columns, length, v_acc * scale, STRIDE, WIDTH)


@_tuned(OF_QUERIES)
@triton.jit(do_not_specialize=["longest"])
def gradient_of_queries(
    q, k, v, of_out, of_q, offsets, half, scale, longest, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    APPROXIMATE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    base, length = _sequence(offsets, HEADS, WIDTH)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if start >= length:
        return
    STRIDE: tl.constexpr = HEADS * WIDTH
    rows = start + tl.arange(0, M)
    q_block = _load(q + base, rows, length, STRIDE, WIDTH, True)
    g_block = _load(of_out + base, rows, length, STRIDE, WIDTH, True)
    acc = tl.zeros([M, WIDTH], dtype=tl.float32)
    for at in tl.range(0, start, N):
        acc = _of_queries(
            acc, q_block, g_block, k + base, v + base, rows, at, length, half, STRIDE, WIDTH, N, False,
            APPROXIMATE,
        )  # fmt: skip
    for at in tl.range(start, min(start + M, length), N):
        acc = _of_queries(
            acc, q_block, g_block, k + base, v + base, rows, at, length, half, STRIDE, WIDTH, N, True,
            APPROXIMATE,
        )  # fmt: skip
    _store(of_q + base, rows, length, acc * (2 * half * scale), STRIDE, WIDTH)


class TritonAttention:
    """One set of inputs.

    Args:
      q, k, v: (tokens, heads, width), contiguous.
      of_out: The gradient of the output, of the same shape.
      offsets: (batch + 1), int64.
      longest: The length of the longest sequence.
      alpha, scale: Numbers of the formula.
    """

    def __init__(
        self, q: Any, k: Any, v: Any, of_out: Any, offsets: Any, longest: int, alpha: float, scale: float
    ) -> None:
        _, self.heads, self.width = q.shape
        self.batch = len(offsets) - 1
        self.longest = longest
        self.out = torch.empty_like(v)
        self.of_q, self.of_k, self.of_v = (torch.empty_like(x) for x in (q, k, v))
        numbers = (offsets, alpha / 2, scale, longest)
        self._calls = {
            forward: ((q, k, v, self.out, *numbers), "M"),
            gradients_of_keys: ((q, k, v, of_out, self.of_k, self.of_v, *numbers), "N"),
            gradient_of_queries: ((q, k, v, of_out, self.of_q, *numbers), "M"),
        }
        self._flags = {"HEADS": self.heads, "WIDTH": self.width, "APPROXIMATE": APPROXIMATE}

    def compile(self, threads: int) -> None:
        """Compile the candidates of tuning, several at a time, since one after another is slow."""
        shapes = {forward: FORWARD, gradients_of_keys: OF_KEYS, gradient_of_queries: OF_QUERIES}
        with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for kernel, (arguments, _) in self._calls.items():
                for config in shapes[kernel][self.width]:
                    kernel.fn.warmup(*arguments, **self._flags, **config.all_kwargs(), grid=(1, 1))

    def _call(self, kernel: Any) -> None:
        arguments, block = self._calls[kernel]
        kernel[lambda meta: (triton.cdiv(self.longest, meta[block]), self.batch * self.heads)](
            *arguments, **self._flags
        )

    def forward(self) -> Any:
        """The output."""
        self._call(forward)
        return self.out

    def backward(self) -> tuple[Any, Any, Any]:
        """The gradients of q, k and v."""
        self._call(gradients_of_keys)
        self._call(gradient_of_queries)
        return self.of_q, self.of_k, self.of_v
