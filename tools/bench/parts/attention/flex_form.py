"""FlexAttention, compiled: softmax attention, causal within sequences that lie one after another.

Its document mask is HSTU's causal one over jagged sequences, block for block: blocks without a pair are
skipped, and the mask is evaluated only in partial blocks. Its weights are softmax, HSTU's are SiLU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch._functorch.config
from parts.attention.cases import Array, causal_blocks
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128

torch._functorch.config.donated_buffer = False  # one pass is differentiated many times
_compiled = torch.compile(flex_attention, dynamic=False)


@cache
def _mask(tokens: int, device: str, window: int | None) -> tuple[Any, Callable[..., Any]]:
    """The sequence of each token, and the mask: one for all cases of a window, to be compiled once."""
    documents = torch.zeros(tokens, dtype=torch.int32, device=device)

    def seen(batch: Any, head: Any, row: Any, column: Any) -> Any:
        causal = (row >= column) & (documents[row] == documents[column])
        return causal if window is None else causal & (row - column <= window)

    return documents, seen


def _listed(blocks: Array, device: str) -> tuple[Any, Any]:
    """(1, 1, rows): the number of a row's blocks; (1, 1, rows, columns): which blocks, these first."""
    dense = torch.as_tensor(blocks, device=device)[None, None]
    order = torch.argsort(dense.int(), dim=-1, descending=True, stable=True)
    return dense.sum(-1).int(), order.int()


def block_mask(lengths: Array, device: str = "cuda", window: int | None = None) -> BlockMask:
    """The causal mask, or that of a window, within sequences, whose tokens must be whole blocks in all."""
    documents, seen = _mask(int(lengths.sum()), device, window)
    numbers = torch.arange(len(lengths), dtype=torch.int32)
    documents.copy_(torch.repeat_interleave(numbers, torch.as_tensor(lengths)))
    partial, full = causal_blocks(lengths, BLOCK)
    if window is not None:
        blocks = np.arange(len(full))
        apart = BLOCK * (blocks[:, None] - blocks)  # from the first column of a block to its first row
        near = (partial | full) & (apart - BLOCK < window)
        full = full & (apart + BLOCK <= window + 1)
        partial = near & ~full
    return BlockMask.from_kv_blocks(
        *_listed(partial, device), *_listed(full, device), BLOCK_SIZE=BLOCK, mask_mod=seen
    )


class FlexAttention:
    """One set of inputs; one at a time, since the mask is that of the last one made.

    Args:
      q, k, v: (tokens, heads, width).
      of_out: The gradient of the output, of the same shape.
      lengths: The lengths of the sequences.
      alpha: The factor of products of queries and keys.
      window: How far back a token sees; None: any distance.
    """

    def __init__(
        self, q: Any, k: Any, v: Any, of_out: Any, lengths: Array, alpha: float, window: int | None = None
    ) -> None:
        self._inputs = [self._by_head(x).requires_grad_() for x in (q, k, v)]
        self._of_out = self._by_head(of_out)
        self._mask = block_mask(lengths, window=window)
        self._alpha = alpha
        self._trained: Any = None

    @staticmethod
    def _by_head(x: Any) -> Any:
        """(1, heads, tokens, width)."""
        return x.transpose(0, 1).unsqueeze(0).contiguous()

    @staticmethod
    def jagged(x: Any) -> Any:
        """(tokens, heads, width) of a result of the passes."""
        return x.detach()[0].transpose(0, 1)

    def forward(self) -> Any:
        """Run as in training: it also keeps the logarithm of each row's sum, which costs little."""
        return _compiled(*self._inputs, block_mask=self._mask, scale=self._alpha)

    def backward(self) -> tuple[Any, ...]:
        """The gradients of q, k and v; the first call runs the forward pass too."""
        if self._trained is None:
            self._trained = self.forward()
        return torch.autograd.grad(self._trained, self._inputs, self._of_out, retain_graph=True)
