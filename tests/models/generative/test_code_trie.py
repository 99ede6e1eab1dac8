"""The trie of a catalogue's codes against sets of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError
from gmeta.models.generative.code_tables import CodeTrie

SEEDS = st.integers(0, 2**31 - 1)


def draw(seed: int, most: int, levels: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    codes = np.unique(rng.integers(0, rng.integers(1, 9), (most, levels)), axis=0)
    return rng.permutation(codes)


@given(SEEDS, st.integers(1, 60), st.integers(1, 4))
def test_nodes_are_the_prefixes_and_children_are_what_follows(seed: int, most: int, levels: int) -> None:
    codes = draw(seed, most, levels)
    trie = CodeTrie.of(codes)
    assert trie.levels == levels
    prefixes: list[tuple[int, ...]] = [()]
    for level in range(levels):
        known = sorted({tuple(code[: level + 1]) for code in codes.tolist()})
        children: list[tuple[int, ...]] = []
        for node, prefix in enumerate(prefixes):
            first, last = trie.starts[level][node], trie.starts[level][node + 1]
            children += [(*prefix, int(digit)) for digit in trie.digits[level][first:last]]
        assert children == known
        counts = [sum(child[:-1] == prefix for child in children) for prefix in prefixes]
        assert trie.most_children[level] == max(counts)
        prefixes = children
    np.testing.assert_array_equal(codes[trie.places], prefixes)


@given(SEEDS, st.integers(1, 60), st.integers(1, 4))
def test_a_mask_leaves_the_prefixes_of_what_it_allows(seed: int, most: int, levels: int) -> None:
    codes = draw(seed, most, levels)
    rng = np.random.default_rng(seed)
    mask = rng.random(len(codes)) < rng.random()
    mask[rng.integers(len(codes))] = True
    trie = CodeTrie.of(codes)
    for level, alive in enumerate(trie.allow(mask)):
        every = sorted({tuple(code[: level + 1]) for code in codes.tolist()})
        allowed = {tuple(code[: level + 1]) for code in codes[mask].tolist()}
        assert alive.tolist() == [prefix in allowed for prefix in every]


@given(SEEDS, st.integers(1, 60), st.integers(1, 4))
def test_codes_end_at_their_nodes(seed: int, most: int, levels: int) -> None:
    codes = draw(seed, most, levels)
    trie = CodeTrie.of(codes)
    np.testing.assert_array_equal(trie.places[trie.walk(codes)], np.arange(len(codes)))
    asked = np.random.default_rng(seed).integers(-1, 10, (50, levels))
    known = {tuple(code): place for place, code in enumerate(codes.tolist())}
    found = trie.walk(asked)
    for code, node in zip(asked.tolist(), found, strict=True):
        assert (trie.places[node] if node >= 0 else None) == known.get(tuple(code))


def test_what_makes_no_trie_is_named() -> None:
    with pytest.raises(DataError, match=r"two items have the code \[1, 2\]"):
        CodeTrie.of(np.array([[1, 2], [0, 0], [1, 2]]))
    with pytest.raises(DataError, match=r"needs codes \(items, digits\), got shape \(0, 3\)"):
        CodeTrie.of(np.zeros((0, 3), np.int32))
    trie = CodeTrie.of(np.array([[1], [0]]))
    with pytest.raises(ConfigError, match="a mask forbids every item"):
        trie.allow(np.zeros(2, bool))
    with pytest.raises(ConfigError, match=r"must be bool \(2,\), got int64 \(3,\)"):
        trie.allow(np.ones(3, np.int64))
