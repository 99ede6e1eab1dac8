"""`gmeta.ops.hstu_attention` and the masks of `gmeta.ops.AttentionMask` in NumPy.

They follow the rules and equations token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.ops.attention_inputs import BUCKETS, WIDTH, AttentionMask, RelativeBias

Array = npt.NDArray[Any]


def sees(
    mask: AttentionMask, length: int, contexts: int, targets: int, times: Sequence[int] | None = None
) -> Array:
    """(length, length) bool: whether token i sees token j, by the rules of the mask one by one."""
    end = length - targets
    matrix = np.zeros((length, length), bool)
    for i in range(length):
        for j in range(length):
            if i == j or j < contexts:
                matrix[i, j] = True
            elif j >= end:
                continue  # a target, which no other token sees
            elif i < contexts:
                matrix[i, j] = mask.contexts_see == "history"
            elif not mask.causal:
                place = min(i, end)
                near = mask.window is None or abs(place - j) <= mask.window
                matrix[i, j] = near or (mask.full_tail > 0 and i >= end - mask.full_tail)
            else:
                if mask.by_time:
                    assert times is not None
                    before = [k for k in range(contexts, end) if times[k] < times[i]]
                else:
                    before = list(range(contexts, min(i, end)))
                if mask.window is not None and not (mask.full_tail and i >= end - mask.full_tail):
                    before = before[-mask.window :]
                matrix[i, j] = j in before
    return matrix


def silu(x: Array) -> Array:
    """X times its sigmoid."""
    return x / (1 + np.exp(-x))


def rab(bias: RelativeBias, begin: int, end: int) -> Array:
    """(length, length) the relative bias of the tokens [begin, end), by its formula."""
    found = np.zeros((end - begin, end - begin))
    if bias.positions is not None:
        found += np.asarray(bias.positions, np.float64)[_places(len(bias.positions), end - begin)]
    if bias.time_buckets is not None:
        found += np.asarray(bias.time_buckets, np.float64)[_buckets(bias, begin, end)]
    return found


def _places(size: int, length: int) -> Array:
    """(length, length): which of a table's numbers a distance takes."""
    n = (size + 1) // 2
    return np.clip(np.arange(length) - np.arange(length)[:, None] + n - 1, 0, 2 * n - 2)


def _buckets(bias: RelativeBias, begin: int, end: int) -> Array:
    """(length, length): which of the buckets."""
    rows, columns = (np.asarray(each)[begin:end] for each in (bias.row_times, bias.column_times))
    apart = np.abs(rows[:, None] - columns)
    return np.minimum(np.floor(np.log(np.maximum(apart, 1)) / WIDTH), BUCKETS - 1).astype(int)


def hstu_attention(
    q: Array,
    k: Array,
    v: Array,
    offsets: Array,
    masks: Sequence[Array],
    scale: float,
    alpha: float = 1.0,
    bias: RelativeBias | None = None,
) -> Array:
    """(total, heads, dv), in the precision of the inputs; ``masks`` are those of `sees`, one per sequence."""
    out = np.zeros_like(v)
    for seen, (begin, end) in zip(masks, pairwise(offsets), strict=True):
        added = 0 if bias is None else rab(bias, begin, end).astype(v.dtype)
        for head in range(q.shape[1]):
            scores = alpha * (q[begin:end, head] @ k[begin:end, head].T) + added
            out[begin:end, head] = (silu(scores) * seen * v.dtype.type(scale)) @ v[begin:end, head]
    return out


def hstu_gradients(
    q: Array,
    k: Array,
    v: Array,
    offsets: Array,
    masks: Sequence[Array],
    upstream: Array,
    scale: float,
    alpha: float = 1.0,
    bias: RelativeBias | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """Gradients of q, k, v, and of the bias' tables, in float64; of absent tables, they are of one number."""
    q, k, v, upstream = (np.asarray(each, np.float64) for each in (q, k, v, upstream))
    of_q, of_k, of_v = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    of_scores = []
    for sequence, (begin, end) in enumerate(pairwise(offsets)):
        rows, added = slice(begin, end), 0.0 if bias is None else rab(bias, begin, end)
        of_scores.append(np.zeros((end - begin, end - begin)))
        for head in range(q.shape[1]):
            scores = alpha * q[rows, head] @ k[rows, head].T + added
            sigmoid = 1 / (1 + np.exp(-scores))
            seen = masks[sequence] * scale
            of_weights = upstream[rows, head] @ v[rows, head].T * seen
            of_score = of_weights * sigmoid * (1 + scores * (1 - sigmoid))
            of_v[rows, head] = (scores * sigmoid * seen).T @ upstream[rows, head]
            of_q[rows, head] = alpha * of_score @ k[rows, head]
            of_k[rows, head] = alpha * of_score.T @ q[rows, head]
            of_scores[-1] += of_score
    return of_q, of_k, of_v, *_table_gradients(of_scores, offsets, bias)


def _table_gradients(
    of_scores: Sequence[Array], offsets: Array, bias: RelativeBias | None
) -> tuple[Array, Array]:
    positions = np.zeros(1 if bias is None or bias.positions is None else len(bias.positions))
    buckets = np.zeros(1 if bias is None or bias.time_buckets is None else BUCKETS)
    for (begin, end), of_score in zip(pairwise(offsets), of_scores, strict=True):
        np.add.at(positions, _places(len(positions), end - begin), of_score)
        if bias is not None and bias.time_buckets is not None:
            np.add.at(buckets, _buckets(bias, begin, end), of_score)
    return positions, buckets


def bias_attention(
    v: Array, offsets: Array, masks: Sequence[Array], scale: float, bias: RelativeBias
) -> Array:
    """(total, heads, dv), in the precision of v."""
    out = np.zeros_like(v)
    for seen, (begin, end) in zip(masks, pairwise(offsets), strict=True):
        weights = rab(bias, begin, end).astype(v.dtype) * seen * v.dtype.type(scale)
        for head in range(v.shape[1]):
            out[begin:end, head] = weights @ v[begin:end, head]
    return out
