"""Hashing of text and 64-bit numbers to ids of a given number of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.ops.inputs import ids_tensor, integers_of
from gmeta.ops.keys.portable_text_hash import portable_hash_text
from gmeta.ops.portable import is_portable

_native = load_op_library("ops")
tf.no_gradient("GmetaHashText")


def hash_ids(values: Any, bits: int = 62) -> Any:
    """Map text and any 64-bit numbers to ids in [0, 2^bits).

    The id is ``fold(hash(value))``. ``hash`` is the last 8 bytes of a text's MD5 as a signed number
    (`hash_text`), which ``gmeta prepare`` stores; ``fold`` is `fold_ids`. A text and the number that
    ``gmeta prepare`` stored for it therefore have the same id. Whole numbers from 0 to 2^bits − 1 are their
    own ids.

    Among n distinct texts, about n² / 2^(bits + 1) pairs share an id: with a million texts and 61 bits, one
    in four million data sets has such a pair. `count_collisions` counts collisions.

    Args:
      values: Strings (UTF-8, or any bytes) or integers: a Tensor of any shape, a RaggedTensor, or anything
        that converts to a Tensor. uint64 are taken as the int64 of the same bits.
      bits: 1 to 63.

    Returns:
      int64, in the form of ``values``.

    Raises:
      ConfigError: The values have another dtype, or ``bits`` is out of range.

    Example:
      >>> hash_ids(["sku/7", "sku/8"]).numpy()
      array([2980919199059177940, 4249099457959932085])
      >>> hash_ids([7, -1], bits=61).numpy()
      array([                  7, 2305843009213693944])
    """
    if isinstance(values, tf.RaggedTensor):
        return values.with_flat_values(hash_ids(values.flat_values, bits))
    tensor = integers_of(values)
    return fold_ids(hash_text(tensor) if tensor.dtype == tf.string else tensor, bits)


def hash_text(texts: Any) -> tf.Tensor:
    """Compute the last 8 bytes of each text's MD5, little endian, as a signed number.

    Args:
      texts: Strings of any shape.

    Returns:
      int64, of the same shape.

    Example:
      >>> int(hash_text("abc"))
      8250560606382298838
    """
    with tf.device("CPU:0"):  # where strings are
        return portable_hash_text(texts) if is_portable() else _native.gmeta_hash_text(texts=texts)


def fold_ids(numbers: Any, bits: int) -> tf.Tensor:
    """Fold 64 bits into fewer: combine the low bits by XOR with the bits above them.

    The result is ``(x XOR (x >>> bits)) AND (2^bits − 1)``. A number in [0, 2^bits) doesn't change.

    Args:
      numbers: Integers of any shape.
      bits: 1 to 63.

    Returns:
      int64, of the same shape.

    Raises:
      ConfigError: ``numbers`` aren't integers, or ``bits`` is out of range.
    """
    bits = whole_number("hash_ids: bits", bits, least=1)
    if bits > 63:
        raise ConfigError(f"hash_ids: bits must be at most 63, got {bits}")
    numbers = ids_tensor(numbers, "hash_ids", "values")
    above = tf.bitwise.right_shift(numbers, tf.constant(bits, tf.int64))  # with copies of the sign
    above = tf.bitwise.bitwise_and(above, tf.constant((1 << (64 - bits)) - 1, tf.int64))
    folded = tf.bitwise.bitwise_xor(numbers, above)
    return tf.bitwise.bitwise_and(folded, tf.constant((1 << bits) - 1, tf.int64))


def count_collisions(values: Any, bits: int = 62) -> int:
    """Count collisions: the number of distinct values minus the number of distinct ids.

    Args:
      values: As in `hash_ids`.
      bits: As in `hash_ids`.

    Example:
      >>> count_collisions([1, 2, 1 << 3 | 1, 2], bits=3)  # 9 folds to 0, 1 and 2 stay
      0
      >>> count_collisions([0, 9], bits=3)
      1
    """
    flat = values.flat_values if isinstance(values, tf.RaggedTensor) else integers_of(values)
    ids = hash_ids(tf.reshape(flat, [-1]), bits).numpy()
    return len(set(flat.numpy().reshape(-1).tolist())) - len(np.unique(ids))
