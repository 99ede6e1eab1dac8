"""The codes of a catalogue: a trie of which digit may follow which prefix, and tensors to search it.

`CodeTrie` has the trie as arrays. `CodeTables` has it as tensors, with each item's path through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.semantic_ids import Codebooks, SemanticIds, places_in_groups
from gmeta.ops.trie import trie_log_probs


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


class CodeTables:
    """The semantic ids as a decoder uses them, which generates their first codes digit by digit.

    One more digit numbers the items that share these codes, from 0 without gaps.

    Attributes:
      trie: The `CodeTrie` of these digits, L a code.
      sizes: For each level, how many logits the children of a node take: the codes of the level; of the last
        one the largest number of items that share all generated codes.
      starts: For each level, as `CodeTrie` has them, int64.
      digits: For each level, which logit a child takes, int32.
      items: (V,) int64: the item at each node of the last level.
      nodes: (V, L) int64: the nodes that each item's code leads through, one per level.
      codes: (V, levels) int64: each item's codes, including those that aren't generated as digits.
      begins: (levels,) int64: where a level's codes begin in a table of the codes of all levels.

    Args:
      ids: The semantic ids.
      depth: How many codes are generated as digits, from 1 to the ids' levels.
    """

    def __init__(self, ids: SemanticIds, depth: int) -> None:
        told = ids.digits[:, :depth]
        _, groups = np.unique(told, axis=0, return_inverse=True)
        order, numbers = np.lexsort(ids.digits.T[::-1]), np.empty(len(told), np.int32)
        numbers[order] = places_in_groups(groups[order])
        self.trie = trie = CodeTrie.of(np.column_stack([told, numbers]))
        nodes = np.empty((len(trie.places), trie.levels), np.int64)
        node = np.argsort(trie.places)
        for level in range(trie.levels - 1, -1, -1):
            nodes[:, level] = node
            node = np.searchsorted(trie.starts[level], node, side="right") - 1
        books = ids.codebooks.sizes
        self.sizes = (*books[:depth], int(numbers.max()) + 1)
        self.starts = tuple(tf.constant(starts) for starts in trie.starts)
        self.digits = tuple(tf.constant(digits) for digits in trie.digits)
        self.items = tf.constant(trie.places)
        self.nodes = tf.constant(nodes)
        self.codes = tf.constant(ids.digits[:, :-1].astype(np.int64))
        self.begins = tf.constant(np.cumsum([0, *books[:-1]]))

    @property
    def levels(self) -> int:
        """L, the number of generated digits, the last included."""
        return len(self.sizes)

    def items_of(self, nodes: tf.Tensor) -> tf.Tensor:
        """Return the items at nodes of the last level, of the nodes' shape; -1 at -1."""
        return tf.where(nodes < 0, nodes, tf.gather(self.items, tf.maximum(nodes, 0)))

    def siblings(self, parents: tf.Tensor) -> tf.Tensor:
        """Return the items below nodes of the last level but one, (n, most items of a node) int64.

        Where a node has fewer, the last of the catalogue's nodes, or those after it, stand in for them.
        """
        begins = tf.gather(self.starts[-1], parents)[:, tf.newaxis]
        places = begins + tf.range(self.sizes[-1], dtype=tf.int64)
        return tf.gather(self.items, tf.minimum(places, tf.size(self.items, tf.int64) - 1))

    def told(self, items: tf.Tensor) -> tf.Tensor:
        """Return the digits of items, the last included, (n, L) int64."""
        found = [self.digits_at(level + 1, self.parents(items, level + 1)) for level in range(self.levels)]
        return tf.cast(tf.stack(found, axis=1), tf.int64)

    def digits_at(self, level: int, nodes: tf.Tensor) -> tf.Tensor:
        """Return the last digits of the prefixes at nodes of a level from 1 on, int32; at -1 any digit."""
        return tf.gather(self.digits[level - 1], tf.maximum(nodes, 0))

    def child(self, level: int, nodes: tf.Tensor, digits: tf.Tensor) -> tf.Tensor:
        """Return the children of nodes of a level that digits lead to, int64; -1 where there is none.

        Args:
          level: Of the nodes.
          nodes: int64 (...); -1: none.
          digits: int32 (...), below the level's size.
        """
        size, starts = self.sizes[level], self.starts[level]
        parents = tf.repeat(tf.range(tf.size(starts, tf.int64) - 1), starts[1:] - starts[:-1])
        keys = parents * size + tf.cast(self.digits[level], tf.int64)  # they rise from child to child
        wanted = tf.reshape(nodes * size + tf.cast(digits, tf.int64), [-1])
        found = tf.searchsorted(keys, wanted, out_type=tf.int64)
        there = tf.gather(tf.concat([keys, [-1]], 0), found) == wanted
        there &= tf.reshape(nodes, [-1]) >= 0
        return tf.reshape(tf.where(there, found, tf.constant(-1, tf.int64)), tf.shape(nodes))

    def parents(self, items: tf.Tensor, level: int) -> tf.Tensor:
        """Return the nodes at which the first ``level`` digits of items end, of the items' shape."""
        return tf.zeros_like(items) if level == 0 else tf.gather(self.nodes[:, level - 1], items)

    def log_probs(self, level: int, logits: tf.Tensor, items: tf.Tensor, allowed: Any = None) -> tf.Tensor:
        """Compute the logs of the probabilities of items' digits at a level, among those that may follow.

        Args:
          level: The level.
          logits: (n, codes), of what follows the digits before.
          items: (n,) numbers of items.
          allowed: For each level bool (nodes,), as `CodeTrie.allow` returns it; None: all are allowed.

        Returns:
          float32 (n,); -inf where no allowed item has the digit.
        """
        parents, children = self.parents(items, level), self.parents(items, level + 1)
        starts, digits = self.starts[level], self.digits[level]
        if allowed is None:
            return trie_log_probs(logits, parents, children, starts, digits)
        may = tf.gather(allowed[level], children)
        some = tf.where(may, children, -1)
        return tf.where(may, trie_log_probs(logits, parents, some, starts, digits, allowed[level]), -np.inf)


def ids_config(ids: SemanticIds) -> dict[str, Any]:
    """Return semantic ids in a form that JSON can hold."""
    books = ids.codebooks
    return {
        "items": ids.items.tolist(),
        "digits": ids.digits.tolist(),
        "levels": [level.tolist() for level in books.levels],
        "encoder": [[kernel.tolist(), bias.tolist()] for kernel, bias in books.encoder],
        "method": ids.method,
    }


def ids_from_config(config: dict[str, Any]) -> SemanticIds:
    """Return the semantic ids that `ids_config` wrote."""
    books = Codebooks(
        tuple(np.array(level, np.float32) for level in config["levels"]),
        tuple((np.array(k, np.float32), np.array(b, np.float32)) for k, b in config["encoder"]),
    )
    items, digits = np.array(config["items"], np.int64), np.array(config["digits"], np.int32)
    return SemanticIds(items, digits, books, config["method"])
