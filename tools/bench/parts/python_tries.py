"""Tries of nested Python dictionaries, the peers of steps over a trie.

Both are our own forms of what Hugging Face's `generate` does with `prefix_allowed_tokens_fn` and a trie: each
beam walks the dictionaries by its digits.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Digits = list[list[list[int]]]


class PythonTrie:
    """Nested dictionaries by digits.

    Args:
      codes: The digits of each item, (items, digits).
      k: The number of beams that a step keeps.
    """

    def __init__(self, codes: NDArray[np.int32], k: int) -> None:
        self._root: dict[int, Any] = {}
        self._k = k
        for code in codes.tolist():
            node = self._root
            for digit in code:
                node = node.setdefault(digit, {})

    def _walk(self, prefix: list[int]) -> dict[int, Any]:
        node = self._root
        for digit in prefix:
            node = node[digit]
        return node

    def step_with_numpy(
        self, logits: NDArray[np.float32], scores: NDArray[np.float32], prefixes: _Digits
    ) -> NDArray[np.intp]:
        """Take a step for all users: dictionaries supply a mask of all codes, and NumPy does the rest.

        Returns:
          The k best (beam, digit) of each user, as beam · codes + digit.
        """
        mask = np.full(logits.shape, -np.inf, np.float32)
        for user, beams in enumerate(prefixes):
            for beam, prefix in enumerate(beams):
                mask[user, beam, list(self._walk(prefix))] = 0
        valid = logits + mask
        valid -= valid.max(axis=2, keepdims=True)
        valid -= np.log(np.exp(valid).sum(axis=2, keepdims=True))
        every = (scores[:, :, None] + valid).reshape(len(scores), -1)
        best = np.argpartition(-every, self._k, axis=1)[:, : self._k]
        return np.take_along_axis(best, np.argsort(-np.take_along_axis(every, best, axis=1), axis=1), axis=1)

    def step_alone(
        self, logits: list[list[list[float]]], scores: list[list[float]], prefixes: _Digits
    ) -> list[list[tuple[float, int, int]]]:
        """Take a step for all users, child by child, without any array.

        Returns:
          The k best (score, beam, digit) of each user.
        """
        found = []
        for of_beams, reached, beams in zip(logits, scores, prefixes, strict=True):
            every = []
            for beam, prefix in enumerate(beams):
                z = of_beams[beam]
                children = [(z[digit], digit) for digit in self._walk(prefix)]
                most = max(children)[0]
                whole = most + math.log(sum(math.exp(value - most) for value, _ in children))
                every += [(reached[beam] + (value - whole), beam, digit) for value, digit in children]
            found.append(heapq.nlargest(self._k, every))
        return found
