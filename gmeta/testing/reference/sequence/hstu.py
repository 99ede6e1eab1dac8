"""`gmeta.layers.HSTUBlock` in NumPy, a sequence and a head at a time, in the precision of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.ops.attention.relative_bias import RelativeBias
from gmeta.testing.reference.sequence.attention import hstu_attention, silu

Array = npt.NDArray[Any]


def layer_norm(x: Array, scale: Any = 1, offset: Any = 0) -> Array:
    """Zero mean and unit variance, a token at a time."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + x.dtype.type(1e-6)) * scale + offset


def row_times(times: Sequence[int], contexts: int, targets: int) -> list[int]:
    """For the tokens of one sequence, the time that each looks from."""
    end = len(times) - targets
    return [times[i + 1] if contexts <= i < end - 1 else times[i] for i in range(len(times))]


def hstu_block(
    x: Array,
    weights: Mapping[str, Array],
    offsets: Array,
    masks: Sequence[Array],
    times: tuple[Array | None, Array | None],
    heads: int,
    attention_dim: int,
    value_dim: int,
    n: int,
    form: str,
) -> Array:
    """(total, dim) without dropout.

    Args:
      x: (total, dim).
      weights: By the layer's names; bias tables that aren't there add nothing.
      offsets: (batch + 1,).
      masks: (length, length) bool, one a sequence.
      times: Row times and column times, (total,) each.
      heads: How many.
      attention_dim: Of a query, a head.
      value_dim: Of a value, a head.
      n: What attention is divided by.
      form: "research" or "production".
    """
    gate, query = heads * value_dim, heads * attention_dim
    normed = layer_norm(x, weights.get("norm/scale", 1), weights.get("norm/offset", 0))
    mixed = normed @ weights["uvqk/kernel"] + weights.get("uvqk/bias", 0)
    u, v, q, k = np.split(mixed, np.cumsum([gate, gate, query]), axis=1)
    if form == "research":
        u, v, q, k = silu(u), silu(v), silu(q), silu(k)
    else:
        u, q = silu(u), q / x.dtype.type(np.sqrt(attention_dim))
    tables = (weights.get("relative_bias/positions"), weights.get("relative_bias/time_buckets"))
    attended = hstu_attention(
        q.reshape(-1, heads, attention_dim),
        k.reshape(-1, heads, attention_dim),
        v.reshape(-1, heads, value_dim),
        offsets,
        masks,
        1 / n,
        bias=RelativeBias(*tables, *times),
    ).reshape(-1, gate)
    gated = u * layer_norm(
        attended, weights.get("attended_norm/scale", 1), weights.get("attended_norm/offset", 0)
    )
    if form == "production":
        gated = np.concatenate([u, attended, gated], axis=1)
    return x + gated @ weights["output/kernel"] + weights.get("output/bias", 0)
