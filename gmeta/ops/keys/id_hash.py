"""Hashing of text and 64-bit numbers to ids of a given number of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.data.merged_keys import HASHED_BITS, Fold, check_fold
from gmeta.core.data.splitmix import splitmix64_tensor
from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.ops.inputs import ids_tensor, integers_of
from gmeta.ops.keys.portable_text_hash import portable_hash_text
from gmeta.ops.portable import is_portable

_native = load_op_library("ops")
tf.no_gradient("GmetaHashText")


def hash_ids(values: Any, bits: int = HASHED_BITS, fold: Fold = "mix") -> Any:
    """Map text and any 64-bit numbers to ids in [0, 2^bits).

    The id is ``fold(hash(value))``. ``hash`` is the last 8 bytes of a text's MD5 as a signed number
    (`hash_text`), which ``gmeta prepare`` stores; ``fold`` is `fold_ids`. A text and the number that
    ``gmeta prepare`` stored for it therefore have the same id. Whole numbers from 0 to 2^bits − 1 are their
    own ids. With the defaults, these are the ids of features with ``hash=True``.

    Among n distinct values, about n² / 2^(bits + 1) pairs share an id: with a million values and 56 bits, one
    in 144,000 data sets has such a pair. `count_collisions` counts collisions.

    Args:
      values: Strings (UTF-8, or any bytes) or integers: a Tensor of any shape, a RaggedTensor, or anything
        that converts to a Tensor. uint64 are taken as the int64 of the same bits.
      bits: 1 to 63.
      fold: As in `fold_ids`.

    Returns:
      int64, in the form of ``values``.

    Raises:
      ConfigError: The values have another dtype, ``bits`` is out of range, or there is no such fold.

    Example:
      >>> hash_ids(["sku/7", "sku/8"]).numpy()
      array([68390468141671386, 36276105243266274])
      >>> hash_ids([7, -1]).numpy()
      array([                7, 61204826320874528])
    """
    if isinstance(values, tf.RaggedTensor):
        return values.with_flat_values(hash_ids(values.flat_values, bits, fold))
    tensor = integers_of(values)
    return fold_ids(hash_text(tensor) if tensor.dtype == tf.string else tensor, bits, fold)


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


def fold_ids(numbers: Any, bits: int = HASHED_BITS, fold: Fold = "mix") -> tf.Tensor:
    """Fold 64-bit numbers x into ids in [0, 2^bits): `gmeta.core.data.merged_keys.fold_numbers` of tensors.

    Args:
      numbers: Integers of any shape; negative ones stand for their two's complement.
      bits: 1 to 63.
      fold: ``"mix"``: the low bits of SplitMix64(x), and x itself where it is in [0, 2^bits). ``"xor"``: the
        low bits of ``x XOR (x >> bits)``, as gmeta folded ids before it had "mix". Numbers that count in
        their upper and in their lower bits then share ids.

    Returns:
      int64, of the same shape.

    Raises:
      ConfigError: ``numbers`` aren't integers, ``bits`` is out of range, or there is no such fold.
    """
    bits = whole_number("hash_ids: bits", bits, least=1)
    if bits > 63:
        raise ConfigError(f"hash_ids: bits must be at most 63, got {bits}")
    check_fold("hash_ids", fold)
    numbers = ids_tensor(numbers, "hash_ids", "values")
    x, most = tf.bitcast(numbers, tf.uint64), tf.constant((1 << bits) - 1, tf.uint64)
    if fold == "xor":
        x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(bits, tf.uint64)))
        return tf.bitcast(tf.bitwise.bitwise_and(x, most), tf.int64)
    fits = tf.equal(tf.bitwise.right_shift(numbers, tf.constant(bits, tf.int64)), 0)  # no negative one does
    return tf.where(fits, numbers, tf.bitcast(tf.bitwise.bitwise_and(splitmix64_tensor(x), most), tf.int64))


def count_collisions(values: Any, bits: int = HASHED_BITS, fold: Fold = "mix") -> int:
    """Count collisions: the number of distinct values minus the number of distinct ids.

    Args:
      values: As in `hash_ids`.
      bits: As in `hash_ids`.
      fold: As in `hash_ids`.

    Example:
      Numbers with a slot in their upper bits, in a collection of 30 tables before and now:

      >>> import numpy as np
      >>> ids = (np.arange(64)[:, None] << 54 | np.arange(64)).reshape(-1)
      >>> count_collisions(ids, bits=58, fold="xor"), count_collisions(ids)
      (3072, 0)
    """
    flat = values.flat_values if isinstance(values, tf.RaggedTensor) else integers_of(values)
    ids = hash_ids(tf.reshape(flat, [-1]), bits, fold).numpy()
    return len(set(flat.numpy().reshape(-1).tolist())) - len(np.unique(ids))
