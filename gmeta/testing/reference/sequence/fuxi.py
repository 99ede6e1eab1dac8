"""`gmeta.layers.FuXiBlock` in NumPy, a sequence and a head at a time, in the precision of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.ops.attention.relative_bias import RelativeBias
from gmeta.testing.reference.sequence.attention import bias_attention, hstu_attention, silu

Array = npt.NDArray[Any]


def rms_norm(x: Array) -> Array:
    """Unit mean square, a token at a time."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + x.dtype.type(1e-6))


def fuxi_block(
    x: Array,
    weights: Mapping[str, Array],
    offsets: Array,
    masks: Sequence[Array],
    times: tuple[Array, Array],
    heads: int,
    attention_dim: int,
    value_dim: int,
    n: int,
) -> Array:
    """(total, dim) without dropout; arguments as of `gmeta.testing.reference.sequence.hstu.hstu_block`."""
    value, query = heads * value_dim, heads * attention_dim
    tables = [weights.get(f"relative_bias/{name}") for name in ("positions", "time_buckets")]
    biases = [RelativeBias(tables[0]), RelativeBias(None, tables[1], *times)]
    biases = [bias for bias, table in zip(biases, tables, strict=True) if table is not None]
    gate = value * (1 + len(biases))
    mixed = silu(rms_norm(x) @ weights["uvqk/kernel"])
    u, v, q, k = np.split(mixed, np.cumsum([gate, value, query]), axis=1)
    v = v.reshape(len(x), heads, value_dim)
    q, k = (each.reshape(len(x), heads, attention_dim) for each in (q, k))
    channels = [bias_attention(v, offsets, masks, 1, bias) for bias in biases]
    channels.append(hstu_attention(q, k, v, offsets, masks, 1 / n))
    attended = np.stack(channels, axis=2)
    gated = u * rms_norm(attended.reshape(len(x), gate))
    joined = gated @ weights["joined/kernel"] + weights["joined/bias"] + x
    z = rms_norm(joined)
    return (silu(z @ weights["ffn/gate"]) * (z @ weights["ffn/up"])) @ weights["ffn/down"] + joined
