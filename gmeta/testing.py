"""What the selftest and tests compare with and run on: attention in NumPy, and small MovieLens folders.

`hstu_attention`, `bias_attention` and `sees` follow the rules and equations of `gmeta.ops.hstu_attention` and
`gmeta.ops.AttentionMask` token by token. `small_data` and others write small folders, in either layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.experiment.plan.experiment_config import ExperimentConfig, MethodConfig
from gmeta.meta import InnerLoop
from gmeta.ops.attention_inputs import BUCKETS, WIDTH, AttentionMask, RelativeBias
from gmeta.preprocess import prepare
from gmeta.preprocess.movielens.movielens_records import AGE_THRESHOLDS, GENRES
from gmeta.preprocess.synthetic import ratings as synthetic

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


def softmax(scores: Array, seen: Array) -> Array:
    """Weights of the columns that a row sees, whose sum is 1; 0 of the others."""
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(1, initial=-np.inf, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


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
    form: str = "silu",
) -> Array:
    """(total, heads, dv), in the precision of the inputs; ``masks`` are those of `sees`, one per sequence.

    With ``form="softmax"``, weights are a row's softmax in place of SiLU.
    """
    out = np.zeros_like(v)
    for seen, (begin, end) in zip(masks, pairwise(offsets), strict=True):
        added = 0 if bias is None else rab(bias, begin, end).astype(v.dtype)
        for head in range(q.shape[1]):
            scores = alpha * (q[begin:end, head] @ k[begin:end, head].T) + added
            weights = softmax(scores, seen) if form == "softmax" else silu(scores) * seen
            out[begin:end, head] = (weights * v.dtype.type(scale)) @ v[begin:end, head]
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
    form: str = "silu",
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
            of_weights = scale * upstream[rows, head] @ v[rows, head].T * masks[sequence]
            if form == "softmax":
                weights = softmax(scores, masks[sequence])
                of_score = weights * (of_weights - (weights * of_weights).sum(1, keepdims=True))
            else:
                sigmoid = 1 / (1 + np.exp(-scores))
                weights = scores * sigmoid * masks[sequence]
                of_score = of_weights * sigmoid * (1 + scores * (1 - sigmoid))
            of_v[rows, head] = scale * weights.T @ upstream[rows, head]
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


USERS, ITEMS = 60, 80
_GROUPS_1M = (1, *AGE_THRESHOLDS)


def small_100k(folder: Path, seed: int = 0) -> Path:
    """Write a synthetic folder of `USERS` users and `ITEMS` items in MovieLens-100K's layout."""
    return synthetic.generate(folder, synthetic.SyntheticConfig(seed=seed, users=USERS, items=ITEMS))


def as_1m(folder_100k: Path, folder: Path) -> Path:
    """Write the content of a MovieLens-100K folder in MovieLens-1M's layout.

    Attributes come out the same from either, but for items of the genre "unknown", which 1M doesn't have
    and which are given none.
    """
    occupations = (folder_100k / "u.occupation").read_text().split()
    users = []
    for line in (folder_100k / "u.user").read_text().splitlines():
        user, age, gender, occupation, code = line.split("|")
        group = _GROUPS_1M[sum(int(age) >= threshold for threshold in AGE_THRESHOLDS)]
        users.append(f"{user}::{gender}::{group}::{occupations.index(occupation)}::{code}")
    items = []
    for line in (folder_100k / "u.item").read_text(encoding="latin-1").splitlines():
        item, title, _, _, _, *flags = line.split("|")
        genres = [name for name, flag in zip(GENRES[1:], flags[1:], strict=True) if flag == "1"]
        items.append(f"{item}::{title}::{'|'.join(genres)}")
    ratings = (folder_100k / "u.data").read_text().replace("\t", "::").splitlines()
    contents = {"users.dat": users, "movies.dat": items, "ratings.dat": ratings}
    return synthetic.write(folder, {name: _join(lines) for name, lines in contents.items()})


def edit(folder: Path, name: str, lines: Mapping[int, str | None]) -> None:
    """Replace lines of a file, counted from 1; None removes one, the number after the last appends one."""
    path = folder / name
    content: list[str | None] = [*path.read_text(encoding="latin-1").splitlines(), None]
    for number, line in lines.items():
        content[number - 1] = line
    path.write_bytes(_join([line for line in content if line is not None]))


def _join(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("latin-1")


# An experiment that trains in seconds: a few tasks of synthetic ratings, a narrow network.


def small_data(folder: Path) -> Path:
    """Prepare a small synthetic data set below ``folder``."""
    prepare(small_100k(folder / "raw"), folder / "data")
    return folder / "data"


def small_config(epochs: int = 3, seeds: tuple[int, ...] = (0,)) -> ExperimentConfig:
    """Both methods of the default experiment, made small."""
    return ExperimentConfig(
        seeds=seeds,
        tasks_per_batch=8,
        query=4,
        embedding_dim=4,
        hidden=(8,),
        support_sizes=(1, 4),
        support_steps=1,
        methods={
            "maml": MethodConfig(
                "MAML", "Adapts.", InnerLoop(steps=1, learning_rate=0.01), learning_rate=1e-2, epochs=epochs
            ),
            "joint": MethodConfig(
                "joint training",
                "Doesn't adapt.",
                InnerLoop(steps=0, learning_rate=0.01),
                outer_samples="all",
                learning_rate=1e-2,
                epochs=epochs,
            ),
        },
    )


def small_toml(*, epochs: int, tasks: int = 8) -> str:
    """Settings for ``gmeta train``: the first of these methods, with ``tasks`` a batch."""
    return _TOML.format(epochs=epochs, tasks=tasks)


_TOML = """
seeds = [0]
tasks_per_batch = {tasks}
query = 4
embedding_dim = 4
hidden = [8]
support_sizes = [1, 4]
support_steps = 1
[methods.maml]
label = "MAML"
description = "Adapts."
inner = {{ steps = 1 }}
learning_rate = 1e-2
epochs = {epochs}
"""
