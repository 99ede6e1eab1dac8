"""Text hashing (``ops/hash_text/md5.h``) in plain TensorFlow ops, for graphs that run without gmeta.

It computes the MD5 of many texts at once. Each of MD5's four words is a vector with one entry for each text,
so that a step is a handful of ops whatever the number of texts. Texts end in different blocks of 64 bytes; a
text that has ended keeps its words while the others continue.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

_SINES = np.floor(2.0**32 * np.abs(np.sin(np.arange(1.0, 65.0)))).astype(np.uint32)
_SHIFTS = ((7, 12, 17, 22), (5, 9, 14, 20), (4, 11, 16, 23), (6, 10, 15, 21))
_START = (0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476)
_and, _or, _xor, _not = (
    *(tf.bitwise.bitwise_and, tf.bitwise.bitwise_or, tf.bitwise.bitwise_xor),
    tf.bitwise.invert,
)


def portable_hash_text(texts: Any) -> tf.Tensor:
    """Compute the last 8 bytes of each text's MD5, little endian, as a signed number.

    Args:
      texts: Strings of any shape.

    Returns:
      int64, of the same shape.
    """
    texts = tf.convert_to_tensor(texts)
    flat = tf.reshape(texts, [-1])
    sizes = tf.strings.length(flat)
    last = (sizes + 8) // 64  # the block that a text ends in
    words = _blocks(flat, sizes, last)

    def body(block: tf.Tensor, state: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
        taken = _take(state, tf.unstack(words[:, block], num=16, axis=1))
        going_on = last >= block
        return block + 1, tuple(tf.where(going_on, new, old) for new, old in zip(taken, state, strict=True))

    start = tuple(tf.fill(tf.shape(flat), tf.constant(value, tf.uint32)) for value in _START)
    _, (_, _, c, d) = tf.while_loop(lambda block, _: block < tf.shape(words)[1], body, (0, start))
    number = tf.bitcast(tf.stack([c, d], axis=1), tf.int64)
    return tf.reshape(number, tf.shape(texts))


def _blocks(flat: tf.Tensor, sizes: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    """Build (n, blocks, 16) uint32: text, a 1 bit, zeros, and the length in bits to end the last block."""
    blocks = tf.reduce_max(tf.concat([last, [0]], axis=0)) + 1
    ended = tf.strings.join([flat, tf.constant(b"\x80")])
    words = tf.io.decode_raw(ended, tf.int32, little_endian=True, fixed_length=64 * blocks)
    words = tf.reshape(words, tf.stack([tf.size(flat), blocks, 16]))
    in_last = tf.equal(tf.range(blocks), last[:, tf.newaxis])
    lengths = tf.where(in_last, 8 * sizes[:, tf.newaxis], 0)[:, :, tf.newaxis]
    return tf.bitcast(words + tf.pad(lengths, [[0, 0], [0, 0], [14, 1]]), tf.uint32)


def _take(state: tuple[tf.Tensor, ...], words: list[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    a, b, c, d = state
    for step in range(64):
        kind = step // 16
        if kind == 0:
            mixed, word = _or(_and(b, c), _and(_not(b), d)), step
        elif kind == 1:
            mixed, word = _or(_and(d, b), _and(_not(d), c)), 5 * step + 1
        elif kind == 2:
            mixed, word = _xor(_xor(b, c), d), 3 * step + 5
        else:
            mixed, word = _xor(c, _or(b, _not(d))), 7 * step
        total = a + mixed + tf.constant(_SINES[step]) + words[word % 16]
        a, b, c, d = d, b + _rotate(total, _SHIFTS[kind][step % 4]), b, c
    return tuple(old + new for old, new in zip(state, (a, b, c, d), strict=True))


def _rotate(x: tf.Tensor, by: int) -> tf.Tensor:
    left = tf.bitwise.left_shift(x, tf.constant(by, tf.uint32))
    return _or(left, tf.bitwise.right_shift(x, tf.constant(32 - by, tf.uint32)))
