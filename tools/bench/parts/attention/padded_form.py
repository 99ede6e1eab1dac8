"""HSTU's attention as PyTorch users write it, with `torch.compile`: padded sequences, all pairs, a mask."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
import torch._functorch.config


def attend(q: Any, k: Any, v: Any, mask: Any, alpha: float, scale: float) -> Any:
    """(batch, heads, L, width), thrice; mask (L, L), bool."""
    scores = alpha * (q @ k.transpose(2, 3))
    return scale * (torch.where(mask, torch.nn.functional.silu(scores), 0) @ v)


MULTIPLE = 64
"""Sequences are padded to a multiple of this, so that products have aligned sizes."""

# One pass is differentiated many times; every length is compiled anew.
torch._functorch.config.donated_buffer = False
torch._dynamo.config.recompile_limit = 64
# By default a second length is compiled for all sizes, which is slower: at 512, 60 TFLOP/s instead of 86.
_compiled = torch.compile(attend, dynamic=False)


class PaddedAttention:
    """One set of inputs, padded beforehand with zeros, so that a causal mask suffices.

    Args:
      q, k, v: (tokens, heads, width).
      of_out: The gradient of the output, of the same shape.
      offsets: (batch + 1), int64.
      longest: The length of the longest sequence.
      alpha, scale: Numbers of the formula.
      compiled: Whether to use `torch.compile`.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        of_out: Any,
        offsets: Any,
        longest: int,
        alpha: float,
        scale: float,
        compiled: bool = True,
    ) -> None:
        self._attend = _compiled if compiled else attend
        longest = -(-longest // MULTIPLE) * MULTIPLE
        self._at = torch.arange(longest, device=q.device) < offsets.diff()[:, None]
        self._inputs = [self._padded(x).requires_grad_() for x in (q, k, v)]
        self._of_out = self._padded(of_out)
        mask = torch.ones((longest, longest), dtype=torch.bool, device=q.device).tril()
        self._rest = (mask, alpha, scale)
        self._trained: Any = None

    def _padded(self, x: Any) -> Any:
        """(batch, heads, L, width)."""
        padded = torch.zeros((*self._at.shape, *x.shape[1:]), dtype=x.dtype, device=x.device)
        padded[self._at] = x
        return padded.transpose(1, 2).contiguous()

    def jagged(self, x: Any) -> Any:
        """(tokens, heads, width) of a result of the passes."""
        return x.detach().transpose(1, 2)[self._at]

    def forward(self) -> Any:
        """Run without storing anything for gradients."""
        with torch.no_grad():
            return self._attend(*self._inputs, *self._rest)

    def backward(self) -> tuple[Any, ...]:
        """The gradients of q, k and v; the first call runs the forward pass too."""
        if self._trained is None:
            self._trained = self._attend(*self._inputs, *self._rest)
        return torch.autograd.grad(self._trained, self._inputs, self._of_out, retain_graph=True)
