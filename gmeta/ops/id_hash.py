"""Hashing of text and 64-bit numbers to ids of a given number of bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.graph import assert_first
from gmeta.core.merged_tables import HASHED_BITS, Fold, MergedKeys, check_fold
from gmeta.core.native import load_op_library
from gmeta.core.shares import splitmix64_tensor
from gmeta.ops.device import DEVICE_NAMES, DeviceKind, ids_tensor, integers_of, is_portable

# Text hashing (``ops/hash_text/md5.h``) in plain TensorFlow ops, for graphs that run without gmeta.
#
# It computes the MD5 of many texts at once. Each of MD5's four words is a vector with one entry per text, so
# a step takes a few ops for any number of texts. Texts end in different blocks of 64 bytes; a text that has
# ended keeps its words while the others continue.

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
    return tf.reshape(_hash_vector(tf.reshape(texts, [-1])), tf.shape(texts))


@tf.function(input_signature=[tf.TensorSpec([None], tf.string)], autograph=False)
def _hash_vector(flat: tf.Tensor) -> tf.Tensor:
    """Hash (n,) texts; a function of its own, so that graphs share it and its 1,300 ops are traced once."""
    sizes = tf.strings.length(flat)
    last = (sizes + 8) // 64  # the last block of each text
    words = _blocks(flat, sizes, last)

    def body(block: tf.Tensor, state: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
        taken = _take(state, tf.unstack(words[:, block], num=16, axis=1))
        going_on = last >= block
        return block + 1, tuple(tf.where(going_on, new, old) for new, old in zip(taken, state, strict=True))

    start = tuple(tf.fill(tf.shape(flat), tf.constant(value, tf.uint32)) for value in _START)
    _, (_, _, c, d) = tf.while_loop(lambda block, _: block < tf.shape(words)[1], body, (0, start))
    return tf.bitcast(tf.stack([c, d], axis=1), tf.int64)


def _blocks(flat: tf.Tensor, sizes: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    """Build (n, blocks, 16) uint32: text, a 1 bit, zeros, and the length in bits, ending the last block."""
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


_native = load_op_library("ops")
tf.no_gradient("GmetaHashText")


def hash_ids(values: Any, bits: int = HASHED_BITS, fold: Fold = "mix") -> Any:
    """Map text and any 64-bit numbers to ids in [0, 2^bits).

    The id is ``fold(hash(value))``. ``hash`` is the last 8 bytes of a text's MD5 as a signed number
    (`hash_text`), which ``gmeta prepare`` stores; ``fold`` is `fold_ids`. A text and the number that ``gmeta
    prepare`` stores for it therefore have the same id. Whole numbers from 0 to 2^bits − 1 are their own ids.
    With the defaults, these are the ids of features with ``hash=True``.

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
      ConfigError: The values have another dtype, ``bits`` is out of range, or the fold is unknown.

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
    with tf.device("CPU:0"):  # the device of strings
        return portable_hash_text(texts) if is_portable() else _native.gmeta_hash_text(texts=texts)


def fold_ids(numbers: Any, bits: int = HASHED_BITS, fold: Fold = "mix") -> tf.Tensor:
    """Fold 64-bit numbers x into ids in [0, 2^bits): `gmeta.core.merged_tables.fold_numbers` of tensors.

    Args:
      numbers: Integers of any shape; negative ones are taken as their two's complement.
      bits: 1 to 63.
      fold: ``"mix"``: x itself if it is in [0, 2^bits), otherwise the low bits of SplitMix64(x). ``"xor"``:
        the low bits of ``x XOR (x >> bits)``, the fold of older versions. Numbers that count in both their
        upper and lower bits then share ids.

    Returns:
      int64, of the same shape.

    Raises:
      ConfigError: ``numbers`` aren't integers, ``bits`` is out of range, or the fold is unknown.
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
    fits = tf.equal(tf.bitwise.right_shift(numbers, tf.constant(bits, tf.int64)), 0)  # negative ones don't
    return tf.where(fits, numbers, tf.bitcast(tf.bitwise.bitwise_and(splitmix64_tensor(x), most), tf.int64))


def count_collisions(values: Any, bits: int = HASHED_BITS, fold: Fold = "mix") -> int:
    """Count collisions: the number of distinct values minus the number of distinct ids.

    Args:
      values: As in `hash_ids`.
      bits: As in `hash_ids`.
      fold: As in `hash_ids`.

    Example:
      Numbers with a slot in their upper bits, in a collection of 30 tables, with the old and new folds:

      >>> import numpy as np
      >>> ids = (np.arange(64)[:, None] << 54 | np.arange(64)).reshape(-1)
      >>> count_collisions(ids, bits=58, fold="xor"), count_collisions(ids)
      (3072, 0)
    """
    flat = values.flat_values if isinstance(values, tf.RaggedTensor) else integers_of(values)
    ids = hash_ids(tf.reshape(flat, [-1]), bits, fold).numpy()
    return len(set(flat.numpy().reshape(-1).tolist())) - len(np.unique(ids))


# Merges raw ids of several features into keys of one table.

tf.no_gradient("GmetaMergeKeys")


def merge_keys(
    ids: Sequence[Any],
    *,
    features: Sequence[str],
    prefixes: Sequence[int],
    id_bits: int,
    hashed: Sequence[bool] | None = None,
    mix: bool | tf.Tensor = True,
    device: DeviceKind = "cpu",
) -> tf.Tensor:
    """Compute ``prefix | id`` for the concatenated ids of all features, in one checked pass.

    With ``prefix = i << id_bits`` for table number i, ids of different tables never collide (MTGenRec,
    section 3.2).

    Args:
      ids: For each feature, a vector of integers in [0, 2^id_bits), or of any integers if ``hashed``.
      features: Their names, for messages.
      prefixes: For each feature, the bits that are or-ed into its ids.
      id_bits: How many bits an id may have, 0 to 63.
      hashed: For each feature, whether its numbers are folded into ids (`fold_ids`). None: no feature's.
      mix: How they are folded: True by "mix" into `gmeta.core.merged_tables.HASHED_BITS` bits, False by
        "xor" into ``id_bits``. A tensor is read when the graph runs.
      device: Where to compute and keep the result, as in `gmeta.ops.unique`.

    Returns:
      (n,) int64, where n is the total number of ids.

    Raises:
      ConfigError: ``ids`` are not integers, or there are no features.
      tf.errors.InvalidArgumentError: An id is negative or too large. The error names the feature, the id, its
        position in the vector, and the limit.

    Example:
      >>> merge_keys([[3, 4], [3]], features=["user", "item"], prefixes=[0, 1 << 61], id_bits=61).numpy()
      array([                  3,                   4, 2305843009213693955])
    """
    if not ids:
        raise ConfigError("merge_keys: at least one feature is needed")
    vectors = [_vector(values, f"feature {name!r}") for values, name in zip(ids, features, strict=True)]
    hashed = [False] * len(vectors) if hashed is None else list(hashed)
    if is_portable():
        return _portable(vectors, features, prefixes, id_bits, hashed, mix)
    with tf.device(DEVICE_NAMES[device]):
        return _native.gmeta_merge_keys(
            mix=mix,
            ids=vectors,
            features=list(features),
            prefixes=list(prefixes),
            hashed=hashed,
            id_bits=id_bits,
            mix_bits=HASHED_BITS,
        )


def _vector(ids: Any, owner: str) -> tf.Tensor:
    """Convert ids to a dtype that the kernel supports; int32 tensors are returned without a copy."""
    if tf.is_tensor(ids) and ids.dtype == tf.int32:
        return ids
    return ids_tensor(ids, owner)


def _portable(
    vectors: Sequence[tf.Tensor],
    features: Sequence[str],
    prefixes: Sequence[int],
    id_bits: int,
    hashed: Sequence[bool],
    mix: bool | tf.Tensor,
) -> tf.Tensor:
    """Merge by TensorFlow ops. The error states the range of the ids instead of the first bad id."""
    keys = []
    for ids, feature, prefix, hashes in zip(vectors, features, prefixes, hashed, strict=True):
        wide = tf.cast(ids, tf.int64)
        if hashes:
            mixes = tf.get_static_value(mix)
            if mixes is None:
                raise ConfigError("merge_keys: a portable graph has one fold: give mix=True or mix=False")
            wide = fold_ids(wide, HASHED_BITS, "mix") if mixes else fold_ids(wide, id_bits, "xor")
        else:
            # An arithmetic shift returns 0 only for ids that fit: for negative ids, it stays negative.
            excess = tf.bitwise.right_shift(wide, tf.constant(id_bits, tf.int64))
            limits = [tf.reduce_min(wide), "to", tf.reduce_max(wide)]
            message = f"feature {feature}: ids must be in [0, {1 << id_bits}); got some in the range of"
            wide = assert_first(wide, tf.equal(excess, 0), [message, *limits])
        keys.append(tf.bitwise.bitwise_or(wide, tf.constant(prefix, tf.int64)))
    return tf.concat(keys, axis=0)


class HoldsMergedKeys:
    """A mixin for a table whose keys are made from the ids of a collection's tables."""

    _merged_keys: MergedKeys | None = None
    _mixes: tf.Variable | None = None
    name: str

    @property
    def merged_keys(self) -> MergedKeys | None:
        """How the ids of a collection's tables map to this table's keys; None: any int64 is a key."""
        return self._merged_keys

    @merged_keys.setter
    def merged_keys(self, keys: MergedKeys) -> None:
        self._merged_keys = keys
        mixes = keys.fold == "mix"
        with tf.init_scope(), tf.device("CPU:0"):
            if self._mixes is not None:
                self._mixes.assign(mixes)
            elif keys.hashed:  # a variable, so that already traced graphs follow changes
                self._mixes = tf.Variable(mixes, trainable=False, name="mixes_ids")

    @property
    def mixes_ids(self) -> bool | tf.Variable:
        """Whether hashed ids are folded by "mix", as an argument of `merge_keys`.

        An exported graph keeps the fold that the table has at export.
        """
        if self._mixes is None or is_portable():
            return self.fold == "mix"
        return self._mixes

    @property
    def fold(self) -> Fold:
        """How hashed ids are folded (`gmeta.core.merged_tables`)."""
        return "mix" if self._merged_keys is None else self._merged_keys.fold

    def follow_fold(self, fold: Fold) -> None:
        """Fold hashed ids like those of the loaded rows, which no other fold finds."""
        if self._merged_keys is not None:
            self.merged_keys = replace(self._merged_keys, fold=fold)
