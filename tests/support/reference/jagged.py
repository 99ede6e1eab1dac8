"""`gmeta.ops.jagged` in NumPy: a batch is a list with an array of tokens for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Rows = list[Array]


def rows(values: Array, offsets: Array) -> Rows:
    """The list that values and offsets represent."""
    return [values[begin:end] for begin, end in pairwise(offsets)]


def row_ids(sequences: Rows) -> list[int]:
    """The number of each token's sequence."""
    return [row for row, tokens in enumerate(sequences) for _ in tokens]


def positions(sequences: Rows) -> list[int]:
    """Each token's place in its sequence."""
    return [place for tokens in sequences for place in range(len(tokens))]


def from_padded(padded: Array, lengths: Sequence[int]) -> Rows:
    """The sequences at the beginning of padded rows."""
    return [row[:length] for row, length in zip(padded, lengths, strict=True)]


def to_padded(sequences: Rows, inner: tuple[int, ...], length: int | None = None, fill: float = 0) -> Array:
    """Rows of one length, by default the longest; ``inner`` is the shape of a token."""
    longest = max([0, *map(len, sequences)]) if length is None else length
    padded = np.full((len(sequences), longest, *inner), fill, np.float64)
    for row, tokens in zip(padded, sequences, strict=True):
        row[: len(tokens)] = tokens
    return padded


def concat(*batches: Rows) -> Rows:
    """Each sequence, followed by those of the other batches."""
    return [np.concatenate(each) for each in zip(*batches, strict=True)]


def split(sequences: Rows, lengths: Sequence[int]) -> tuple[Rows, Rows]:
    """Heads of this many tokens, and the tails."""
    cut = list(zip(sequences, lengths, strict=True))
    return [tokens[:length] for tokens, length in cut], [tokens[length:] for tokens, length in cut]


def slice_(sequences: Rows, begin: Sequence[int], size: Sequence[int]) -> Rows:
    """A stretch of each sequence."""
    return [tokens[b : b + s] for tokens, b, s in zip(sequences, begin, size, strict=True)]


def reverse(sequences: Rows) -> Rows:
    """Each sequence reversed."""
    return [tokens[::-1] for tokens in sequences]


def last(sequences: Rows, inner: tuple[int, ...]) -> Array:
    """(batch, ...): last tokens; zeros for an empty sequence."""
    found = np.zeros((len(sequences), *inner))
    for row, tokens in enumerate(sequences):
        if len(tokens):
            found[row] = tokens[-1]
    return found
