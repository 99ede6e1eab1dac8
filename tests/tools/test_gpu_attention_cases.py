"""What attention on the GPU is measured on, against all pairs written out."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "bench"))
from parts.attention.cases import causal_blocks, jagged_lengths


@pytest.mark.parametrize("tokens", [8192, 131_072])
def test_jagged_lengths_are_all_of_the_tokens(tokens: int) -> None:
    lengths = jagged_lengths(np.random.default_rng(1), tokens)
    assert lengths.sum() == tokens
    assert 1 <= lengths.min() <= lengths.max() <= 3000


def test_jagged_lengths_have_the_stated_mean() -> None:
    mean = jagged_lengths(np.random.default_rng(1), 10_000_000).mean()
    assert 560 < mean < 620  # the cut at 3,000 takes a little


@pytest.mark.parametrize("lengths", [[5, 11, 1, 7, 8], [32], [16, 16], [1] * 32, [3, 29], [8, 0, 24]])
def test_blocks_are_those_of_the_mask(lengths: list[int]) -> None:
    block = 8
    of = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(of))
    seen = (place[:, None] >= place) & (of[:, None] == of)
    blocks = seen.reshape(len(of) // block, block, -1, block).transpose(0, 2, 1, 3)
    partial, full = causal_blocks(np.array(lengths), block)
    np.testing.assert_array_equal(full, blocks.all((2, 3)))
    np.testing.assert_array_equal(partial | full, blocks.any((2, 3)))
    assert not (partial & full).any()
