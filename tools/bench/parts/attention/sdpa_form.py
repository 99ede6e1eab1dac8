"""PyTorch's scaled_dot_product_attention, causal: sequences of one length as they are, others jagged.

Jagged sequences are nested tensors, which it computes without padding where its backend can.
"""

from __future__ import annotations

from typing import Any

import torch
from parts.attention.cases import Array
from torch.nn.attention import SDPBackend, sdpa_kernel


class SdpaAttention:
    """One set of inputs.

    Args:
      q, k, v: (tokens, heads, width).
      of_out: The gradient of the output, of the same shape.
      lengths: The lengths of the sequences.
      alpha: The factor of products of queries and keys.
      backend: The name of one of PyTorch's `SDPBackend`.
    """

    def __init__(
        self, q: Any, k: Any, v: Any, of_out: Any, lengths: Array, alpha: float, backend: str
    ) -> None:
        self._backend = getattr(SDPBackend, backend)
        self._alpha = alpha
        ends = torch.as_tensor(lengths, device=q.device).cumsum(0)
        self._offsets = torch.nn.functional.pad(ends, (1, 0))
        self._shortest, self._longest = int(lengths.min()), int(lengths.max())
        self._one = self._shortest == self._longest
        self._inputs = [self._by_head(x).detach().requires_grad_() for x in (q, k, v)]
        self._of_out = self._by_head(of_out)
        self._trained: Any = None

    def _by_head(self, x: Any) -> Any:
        """(batch, heads, length, width), contiguous or nested."""
        if self._one:
            return x.unflatten(0, (-1, self._longest)).transpose(1, 2).contiguous()
        # Nested tensors have one shape only if they share the tensor of offsets.
        return torch.nested.nested_tensor_from_jagged(
            x, self._offsets, min_seqlen=self._shortest, max_seqlen=self._longest
        ).transpose(1, 2)

    def jagged(self, x: Any) -> Any:
        """(tokens, heads, width) of a result of the passes."""
        by_token = x.detach().transpose(1, 2)
        return by_token.flatten(0, 1) if self._one else by_token.values()

    def forward(self) -> Any:
        """Run as in training: it also keeps the logarithm of each row's sum."""
        with sdpa_kernel(self._backend):
            return torch.nn.functional.scaled_dot_product_attention(
                *self._inputs, is_causal=True, scale=self._alpha
            )

    def backward(self) -> tuple[Any, ...]:
        """The gradients of q, k and v; the first call runs the forward pass too."""
        if self._trained is None:
            self._trained = self.forward()
        return torch.autograd.grad(self._trained, self._inputs, self._of_out, retain_graph=True)
