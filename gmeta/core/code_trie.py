"""A trie over the codes of a catalogue, as arrays: which digit may follow which prefix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError


@dataclass(frozen=True)
class CodeTrie:
    """The prefixes of all codes, each level sorted.

    A node of level l is a prefix of l digits; level 0 is the root, level L has a node for each item. The
    children of node i of level l are the nodes starts[l][i] to starts[l][i + 1] - 1 of level l + 1, in the
    order of their last digits, which are digits[l]. So a search keeps the numbers of nodes, and finds their
    children without looking for any digit.

    Args:
      starts: For each level l < L int64 (nodes of l + 1,).
      digits: For each level l < L int32 (nodes of l + 1,).
      places: int64 (items,): the place, in the catalogue, of the item at each node of level L.

    Example:
      >>> trie = CodeTrie.of(np.array([[1, 0], [0, 2], [1, 5]]))
      >>> trie.digits[0], trie.digits[1], trie.places
      (array([0, 1], dtype=int32), array([2, 0, 5], dtype=int32), array([1, 0, 2]))
    """

    starts: tuple[NDArray[np.int64], ...]
    digits: tuple[NDArray[np.int32], ...]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, codes: NDArray[np.int32]) -> CodeTrie:
        """Make the trie of codes.

        Args:
          codes: The digits of each item, int (items, L), L >= 1, such as `SemanticIds.digits`.

        Raises:
          DataError: There is no code, or two items have the same.
        """
        codes = np.asarray(codes)
        if codes.ndim != 2 or 0 in codes.shape:
            raise DataError(f"a trie needs codes (items, digits), got shape {codes.shape}")
        places = np.lexsort(codes.T[::-1])
        ordered = codes[places]
        starts, digits = [], []
        # Where a prefix begins that the code before doesn't have.
        parents = np.zeros(1, np.int64)
        begins = np.zeros(len(codes), bool)
        begins[0] = True
        for level in range(codes.shape[1]):
            begins[1:] |= ordered[1:, level] != ordered[:-1, level]
            children = np.flatnonzero(begins)
            starts.append(np.append(np.searchsorted(children, parents), len(children)))
            digits.append(ordered[children, level].astype(np.int32))
            parents = children
        if len(parents) < len(codes):
            code = ordered[np.flatnonzero(~begins)[0]].tolist()
            raise DataError(f"two items have the code {code}: give each its own, as gmeta semantic-ids does")
        return cls(tuple(starts), tuple(digits), places.astype(np.int64))

    @property
    def levels(self) -> int:
        """The digits of a code."""
        return len(self.digits)

    @cached_property
    def most_children(self) -> tuple[int, ...]:
        """The most children that a node of each level has."""
        return tuple(int(np.diff(starts).max()) for starts in self.starts)

    def allow(self, mask: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], ...]:
        """Say which nodes lead to an item that may come out. The trie stays as it is.

        Args:
          mask: bool (items,), in the order of the catalogue: which items may.

        Returns:
          For each level l < L, bool (nodes of l + 1,), in the order of ``digits[l]``.

        Raises:
          ConfigError: The mask has another shape, isn't of bools, or forbids every item.
        """
        mask = np.asarray(mask)
        if mask.shape != self.places.shape or mask.dtype != np.bool_:
            raise ConfigError(
                f"a mask of items must be bool {self.places.shape}, got {mask.dtype} {mask.shape}: give one "
                "for each item of the catalogue, in its order"
            )
        if not mask.any():
            raise ConfigError("a mask forbids every item: it must allow at least one")
        alive = [mask[self.places]]
        for starts in self.starts[:0:-1]:
            alive.append(np.logical_or.reduceat(alive[-1], starts[:-1]))
        return tuple(alive[::-1])

    def walk(self, codes: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the node at which each code ends, -1 where no item has it.

        Args:
          codes: int (n, digits), digits <= L: whole codes, or the first digits of some.
        """
        codes = np.asarray(codes)
        nodes = np.zeros(len(codes), np.int64)
        for level in range(codes.shape[1]):
            # Keys that rise with the node and the digit: a binary search finds all children at once.
            size = int(self.digits[level].max()) + 1
            parent = np.repeat(np.arange(len(self.starts[level]) - 1), np.diff(self.starts[level]))
            keys = parent * size + self.digits[level]
            digit = codes[:, level]
            known = (nodes >= 0) & (digit >= 0) & (digit < size)
            wanted = nodes * size + digit
            found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            nodes = np.where(known & (keys[found] == wanted), found, -1)
        return nodes
