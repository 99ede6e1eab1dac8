"""`gmeta.layers.sequence.hstu.HSTUBlock` in NumPy, a sequence and a head at a time, in the precision of its
inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.ops.attention_inputs import RelativeBias
from gmeta.testing import bias_attention, hstu_attention, silu

Array = npt.NDArray[Any]


def layer_norm(x: Array, scale: Any = 1, offset: Any = 0) -> Array:
    """Zero mean and unit variance, a token at a time."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + x.dtype.type(1e-6)) * scale + offset


def row_times(times: Sequence[int], contexts: int, targets: int) -> list[int]:
    """The time from which each token of one sequence looks."""
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
      weights: The weights by the layer's names; missing bias tables add nothing.
      offsets: (batch + 1,).
      masks: (length, length) bool, one a sequence.
      times: Row times and column times, (total,) each.
      heads: The number of heads.
      attention_dim: The width of a query per head.
      value_dim: The width of a value per head.
      n: The divisor of attention.
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


# `gmeta.layers.sequence.stack.FuXiBlock` in NumPy, a sequence and a head at a time, in the precision of its
# inputs.


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
    """(total, dim) without dropout; arguments as in `hstu_block`."""
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


# `gmeta.layers.MMoE`, `TaskHeads` and `GroupLayerNorm` in NumPy, a sample and an expert at a time.


def gates(x: Array, kernel: Array, tasks: int, top_k: int) -> Array:
    """(samples, tasks, experts): the softmax over the k largest, 0 for the others."""
    logits = (x @ kernel).reshape(len(x), tasks, kernel.shape[1] // tasks)
    found = np.zeros_like(logits)
    for each, out in zip(
        logits.reshape(-1, logits.shape[-1]), found.reshape(-1, found.shape[-1]), strict=True
    ):
        chosen = np.argsort(-each, kind="stable")[:top_k]
        powers = np.exp(each[chosen] - each[chosen].max())
        out[chosen] = powers / powers.sum()
    return found


def mmoe(x: Array, weights: Mapping[str, Array], tasks: int, top_k: int) -> Array:
    """(tasks, samples, units)."""
    mixed = gates(x, weights["gates/kernel"], tasks, top_k)
    outputs = []
    for expert in range(mixed.shape[2]):
        hidden, layer = x, 0
        while f"experts{layer}/kernel" in weights:
            kernel, bias = (weights[f"experts{layer}/{part}"][expert] for part in ("kernel", "bias"))
            hidden, layer = np.maximum(hidden @ kernel + bias, 0), layer + 1
        outputs.append(hidden)
    mixtures = np.einsum("nte,enh->tnh", mixed, np.stack(outputs))
    return mixtures.astype(x.dtype)


def product_logits(*logits: Array) -> Array:
    """The logit of a product of probabilities, by way of the probability, in the widest floats available."""
    p = np.prod([1 / (1 + np.exp(-np.asarray(each, np.longdouble))) for each in logits], axis=0)
    return np.log(p) - np.log1p(-p)


def group_layer_norm(x: Array, weights: Mapping[str, Array], domains: Array) -> Array:
    """(total, dim), a token at a time."""
    rows = [
        layer_norm(token, weights["gamma"][domain], weights["beta"][domain])
        for token, domain in zip(x, domains, strict=True)
    ]
    return np.array(rows, x.dtype).reshape(x.shape)
