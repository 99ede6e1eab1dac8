"""`gmeta.layers.MMoE`, `TaskHeads` and `GroupLayerNorm` in NumPy, a sample and an expert at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.testing.reference.sequence.hstu import layer_norm

Array = npt.NDArray[Any]


def gates(x: Array, kernel: Array, tasks: int, top_k: int) -> Array:
    """(samples, tasks, experts): the softmax of the k strongest, 0 for the others."""
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
    """The logit of a product of probabilities, by way of the probability, in the widest floats there are."""
    p = np.prod([1 / (1 + np.exp(-np.asarray(each, np.longdouble))) for each in logits], axis=0)
    return np.log(p) - np.log1p(-p)


def group_layer_norm(x: Array, weights: Mapping[str, Array], domains: Array) -> Array:
    """(total, dim), a token at a time."""
    rows = [
        layer_norm(token, weights["gamma"][domain], weights["beta"][domain])
        for token, domain in zip(x, domains, strict=True)
    ]
    return np.array(rows, x.dtype).reshape(x.shape)
