"""Philox4x32-10, the counter-based random numbers of initial rows, over arrays of any library.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). NumPy's and TensorFlow's references share
it: they differ in how an integer becomes a word and how a word is shifted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

LOW = 0xFFFFFFFF
"""The lower 32 bits of a 64-bit word."""


def philox4x32(
    key: int, counter: Sequence[Any], word: Callable[[int], Any], high: Callable[[Any], Any]
) -> list[Any]:
    """Blocks of four random words.

    Args:
      key: The 64-bit key.
      counter: The four words of the blocks' counters, the least first: arrays of one shape. A word of 32 bits
        is held in a uint64, so that products of two have room.
      word: Makes such a word of an integer.
      high: The upper 32 bits of words, shifted to the lower.

    Returns:
      The four words of the blocks, arrays of that shape.

    Example:
      >>> words = philox4x32(0, np.zeros((4, 1), np.uint64), np.uint64, lambda x: x >> np.uint64(32))
      >>> [hex(x) for (x,) in words]
      ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & LOW, key >> 32 & LOW
    for _ in range(10):
        product0, product1 = word(0xD2511F53) * c0, word(0xCD9E8D57) * c2
        c0, c2 = high(product1) ^ c1 ^ word(k0), high(product0) ^ c3 ^ word(k1)
        c1, c3 = product1 & word(LOW), product0 & word(LOW)
        k0, k1 = k0 + 0x9E3779B9 & LOW, k1 + 0xBB67AE85 & LOW
    return [c0, c1, c2, c3]
