"""States of users as bytes: their layout, their seal, and the checks of what comes back.

A state is little endian, in words of 32 bits, and a token takes the same number of words in all states of a
model, so events are appended without touching the words of others::

    header      magic and format, dtype and form of the model, digest of the weights (2), the history's
                checksum (2), tokens (2)
    vector      float32, one a history
    tokens      of each token: its item's key (2) if states hold keys; its time (2) if the model reads times;
                a key and a value a block and head
    seal        FarmHash64 of all bytes before (2)

Keys and values are rows of `gmeta.core.row_formats.RowFormat`, so int8 has a scale for each of them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import assert_first
from gmeta.core.row_formats import RowDtype, RowFormat
from gmeta.layers import EmbeddingCollection
from gmeta.layers.sequence.reading import Kept, Reading
from gmeta.models.meta.fast_weights import weights_digest
from gmeta.ops import jagged
from gmeta.ops.table.portable_tables import bytes_of_words, decode_rows, pack_rows

_MAGIC = int.from_bytes(b"gmS\1", "little")
_HEADER = 8
_SEAL = 2
_CODES: Mapping[RowDtype, int] = {"float32": 0, "bfloat16": 1, "int8": 2}
_READ_AGAIN = "read the history again"

Stale = Literal["refuse", "apply"]


class StateContent(NamedTuple):
    """Decoded states.

    Attributes:
      reading: What the backbone kept.
      vector: (users, dim) float32, of each history.
      checksums: (users,) int64, as given when the history was read.
      digests: (users, 2) int32, of the weights that read the tokens.
      keys: (users, longest) int64, the key of each token's item; None: states of this model have none.
    """

    reading: Reading
    vector: tf.Tensor
    checksums: tf.Tensor
    digests: tf.Tensor
    keys: tf.Tensor | None = None


@dataclass(frozen=True)
class StateShape:
    """What the states of a model hold.

    Attributes:
      dim: The width of a history's vector.
      block: A block of the backbone, for its heads and widths.
      blocks: How many blocks keep keys and values; 0: a token has none.
      keys: Whether each token has its item's key.
      times: Whether each token has its time.
      least: The tokens of an empty history.
      contexts: How many of these are contexts, which tokens see at any distance.
      settings: What the meaning of keys and values depends on besides weights, as JSON holds it.
    """

    dim: int
    block: Any
    blocks: int
    keys: bool
    times: bool
    least: int
    contexts: int
    settings: Any

    @property
    def form(self) -> int:
        """A hash of the settings, of 22 bits."""
        return zlib.crc32(json.dumps(self.settings, sort_keys=True).encode()) >> 10


def check_keeps(name: str, backbone: Any) -> None:
    """Check that a backbone keeps what it has read.

    Raises:
      ConfigError: It keeps no keys and values, or what a token sees can change later.
    """
    if not getattr(getattr(backbone, "BLOCK", None), "EXTENDS", False):
        raise ConfigError(
            f"{name}: {type(backbone).__name__} keeps no keys and values, so there are no states "
            "of its histories: take a backbone of gmeta.layers.HSTU"
        )
    backbone.check_reads_on()
    if backbone.mask.contexts_see == "history":
        raise ConfigError(f"{name}: contexts that see the history can't be kept, got {backbone.mask}")


def backbone_settings(backbone: Any) -> dict[str, Any]:
    """Return the settings of a backbone that the meaning of keys and values depends on."""
    others = ("name", "seed", "dropout", "dtype", "trainable")
    return {name: value for name, value in backbone.get_config().items() if name not in others}


class StateFormat:
    """Encodes and decodes states with TensorFlow's own ops, so that exported models do so too.

    Args:
      name: The model's name, for errors.
      dtype: How keys and values are held.
      shape: What states hold.

    Attributes:
      token_bytes: The bytes that a token takes.
      fixed_bytes: The bytes that a state takes besides its tokens.

    Raises:
      ConfigError: The dtype is unknown.
    """

    def __init__(self, name: str, dtype: RowDtype, shape: StateShape) -> None:
        block = shape.block
        self._key, self._value = RowFormat(dtype, block.attention_dim), RowFormat(dtype, block.value_dim)
        self._name, self._dtype, self.shape = name, dtype, shape
        self._heads, self._dim = block.heads, shape.dim
        self._numbers = 2 * (shape.keys + shape.times)
        of_block = self._heads * (self._key.width + self._value.width)
        self._token = self._numbers + shape.blocks * of_block
        self._code = _CODES[dtype] + (shape.form << 8)
        self.token_bytes, self.fixed_bytes = 4 * self._token, 4 * (_HEADER + self._dim + _SEAL)

    def encode(self, content: StateContent) -> tf.Tensor:
        """Encode states, (users,) string."""
        return self._seal(self._head(content, content.reading.lengths), self._tokens(content))

    def append(
        self, states: tf.Tensor, kept: tf.Tensor, added: StateContent, lengths: tf.Tensor
    ) -> tf.Tensor:
        """Append tokens to encoded states, whose other tokens keep their bytes.

        Args:
          states: (users,) string.
          kept: (users,) int64, how many tokens of each state stay.
          added: The tokens that follow, and the new vectors and checksums.
          lengths: (users,) int64, the tokens of the new states.
        """
        tokens = self._tokens(added)
        first = tf.fill(tf.shape(kept), self.fixed_bytes - 4 * _SEAL)
        former = tf.strings.substr(states, first, tf.cast(kept, tf.int32) * self.token_bytes)
        return self._seal(self._head(added, lengths), tf.strings.join([former, tokens]))

    def decode(self, states: tf.Tensor, digest: tf.Tensor | None, kept: bool = True) -> StateContent:
        """Decode states.

        Args:
          states: (users,) string.
          digest: (8,) uint8, of the weights that must have read them; None: any.
          kept: Whether to decode keys and values too; False: the reading has no blocks.

        Raises:
          InvalidArgumentError: A state is damaged, of another dtype or model, or read by other weights.
        """
        sizes = tf.strings.length(states)
        least = self.fixed_bytes
        states = self._check(states, (sizes >= least) & (sizes % 4 == 0), "is too short")
        sizes = tf.maximum(sizes, least)
        longest = tf.reduce_max(tf.concat([sizes, [least]], axis=0))
        # One place more than the longest has, so that there is one where no state has a token.
        words = tf.io.decode_raw(states, tf.int32, fixed_length=longest + self.token_bytes)
        head = tf.ensure_shape(words[:, :_HEADER], [None, _HEADER])
        words = self._check(words, head[:, 0] == _MAGIC, "is none of this version of gmeta")
        same = (head[:, 1] & 255) == self._code & 255
        words = self._check(words, same, f"holds another dtype than {self._dtype}")
        words = self._check(words, head[:, 1] == self._code, "is of a model with other settings")
        lengths = tf.bitcast(head[:, 6:8], tf.int64)
        wanted = tf.cast(sizes - least, tf.int64)
        whole = (lengths >= self.shape.least) & (lengths <= wanted) & (lengths * self.token_bytes == wanted)
        words = self._check(words, whole, "is cut, or is of a model of another form")
        words = self._check(words, self._is_sealed(states, sizes), "is damaged: its checksum differs")
        if digest is not None:
            same = tf.reduce_all(head[:, 2:4] == as_words(digest), axis=1)
            words = self._check(words, same, "was read by other weights than these")
        vector = tf.ensure_shape(words[:, _HEADER : _HEADER + self._dim], [None, self._dim])
        count = (longest - least) // self.token_bytes + 1
        first = _HEADER + self._dim
        body = tf.reshape(words[:, first : first + count * self._token], [-1, count, self._token])
        # Behind its tokens, a shorter state has its seal, and NaN may be among the numbers of these bits.
        body = tf.where(tf.sequence_mask(lengths, count)[:, :, tf.newaxis], body, 0)
        numbers = [tf.bitcast(body[:, :, at : at + 2], tf.int64) for at in range(0, self._numbers, 2)]
        keys = numbers.pop(0) if self.shape.keys else None
        times = numbers.pop(0) if self.shape.times else None
        blocks, place = [], self._numbers
        for _ in range(self.shape.blocks if kept else 0):
            parts = []
            for form in (self._key, self._value):
                wide = self._heads * form.width
                parts.append(self._rows(form, body[:, :, place : place + wide], count))
                place += wide
            blocks.append(Kept(*parts))
        reading = Reading.of_padded(lengths, times, blocks, self.shape.contexts)
        vector, checksums = tf.bitcast(vector, tf.float32), tf.bitcast(head[:, 4:6], tf.int64)
        return StateContent(reading, vector, checksums, head[:, 2:4], keys)

    def _rows(self, form: RowFormat, words: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """Decode (users, count, heads * width) words to (users, heads, count, dim)."""
        words = tf.reshape(words, [-1, form.width])
        rows = decode_rows(form, tf.bitcast(words, tf.float32) if form.dtype == "float32" else words)
        return tf.transpose(tf.reshape(rows, [-1, count, self._heads, form.dim]), [0, 2, 1, 3])

    def _tokens(self, content: StateContent) -> tf.Tensor:
        """Encode the tokens of sequences, (users,) string."""
        reading, columns = content.reading, []
        lengths = reading.lengths
        for numbers in (content.keys, reading.times):
            if numbers is not None:
                columns.append(tf.bitcast(jagged.from_padded(numbers, lengths).values, tf.int32))
        for block in reading.kept:
            for form, each in ((self._key, block.keys), (self._value, block.values)):
                flat = jagged.from_padded(tf.transpose(each, [0, 2, 1, 3]), lengths).values
                words = pack_rows(form, tf.reshape(tf.cast(flat, tf.float32), [-1, form.dim]))
                words = tf.bitcast(words, tf.int32)
                columns.append(tf.reshape(words, [-1, self._heads * form.width]))
        rows = tf.RaggedTensor.from_row_lengths(tf.concat(columns, axis=1), lengths, validate=False)
        words = rows.to_tensor(shape=[None, None, self._token])
        flat = tf.reshape(words, [tf.size(lengths), tf.shape(words)[1] * self._token])
        return bytes_of_words(flat, lengths * self.token_bytes)

    def _head(self, content: StateContent, lengths: tf.Tensor) -> tf.Tensor:
        """Encode what stands before the tokens, (users,) string."""
        users = tf.size(lengths)
        words = [
            tf.tile([[_MAGIC, self._code]], [users, 1]),
            content.digests,
            *(tf.bitcast(each, tf.int32) for each in (content.checksums, lengths)),
            tf.bitcast(tf.cast(content.vector, tf.float32), tf.int32),
        ]
        size = tf.constant(self.fixed_bytes - 4 * _SEAL, tf.int64)
        return bytes_of_words(tf.concat(words, axis=1), tf.fill([users], size))

    @staticmethod
    def _seal(head: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
        whole = tf.strings.join([head, tokens])
        return tf.strings.join([whole, _digits(tf.raw_ops.Fingerprint(data=whole, method="farmhash64"))])

    @staticmethod
    def _is_sealed(states: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        ends = tf.maximum(sizes, 4 * _SEAL) - 4 * _SEAL
        ends = tf.minimum(ends, tf.strings.length(states))
        before = tf.strings.substr(states, tf.zeros_like(ends), ends)
        seals = tf.strings.substr(states, ends, tf.fill(tf.shape(ends), 4 * _SEAL))
        return seals == _digits(tf.raw_ops.Fingerprint(data=before, method="farmhash64"))

    def _check(self, value: tf.Tensor, holds: tf.Tensor, otherwise: str) -> tf.Tensor:
        bad = tf.where(~holds)[:, 0]
        told = [f"{self._name}: the state {otherwise}: {_READ_AGAIN}. Samples", bad]
        return assert_first(value, tf.size(bad) == 0, told, summarize=8)


def as_words(digest: tf.Tensor) -> tf.Tensor:
    """Return a digest (8,) uint8 as (2,) int32."""
    return tf.bitcast(tf.reshape(digest, [2, 4]), tf.int32)


def _digits(digests: tf.Tensor) -> tf.Tensor:
    """Return (n, 8) uint8 as strings (n,)."""
    words = tf.bitcast(tf.reshape(digests, [-1, 2, 4]), tf.int32)
    return bytes_of_words(words, tf.fill(tf.shape(words)[:1], tf.constant(8, tf.int64)))


class KeptStates:
    """Histories that a model has read, as bytes: what is the same for all models.

    Args:
      name: The model's name, for errors.
      dtype: ``"float32"``, ``"bfloat16"`` or ``"int8"`` (`gmeta.core.row_formats.RowFormat`).
      shape: What states hold.
      weights: The dense weights that read histories.
      collection: The embeddings that do; None: there are none.
      stale: What to do with a state that other weights have read: ``"refuse"`` or ``"apply"``.

    Attributes:
      format: The format of the bytes.

    Raises:
      ConfigError: A setting has an unknown value.
    """

    def __init__(
        self,
        name: str,
        dtype: RowDtype,
        shape: StateShape,
        weights: list[tf.Variable],
        collection: EmbeddingCollection | None,
        stale: Stale,
    ) -> None:
        if stale not in get_args(Stale):
            raise ConfigError(f"stale must be {' or '.join(map(repr, get_args(Stale)))}, got {stale!r}")
        self.format = StateFormat(name, dtype, shape)
        self._name, self._weights, self._collection = name, weights, collection
        self._refuses = stale == "refuse"

    def digest(self) -> tf.Tensor:
        """Compute the digest of the weights that states depend on, (8,) uint8."""
        return weights_digest(self._weights, self._collection)

    def about(self, states: Any) -> dict[str, tf.Tensor]:
        """Return ``tokens`` and ``checksum`` of states, and ``time`` of their last event if they have times.

        Args:
          states: (users,) string.

        Returns:
          Name -> (users,) int64. The time of a state without events is 0.
        """
        content = self.format.decode(tf.convert_to_tensor(states, tf.string), None, kept=False)
        reading = content.reading
        found = {"tokens": reading.lengths, "checksum": content.checksums}
        if reading.times is not None:
            last = tf.gather(reading.times, tf.maximum(reading.lengths - 1, 0), batch_dims=1)
            found["time"] = tf.where(reading.lengths > self.format.shape.least, last, 0)
        return found

    def _decode(self, states: tf.Tensor, digest: tf.Tensor | None, kept: bool = True) -> StateContent:
        if not self._refuses:
            return self.format.decode(states, None, kept)
        return self.format.decode(states, self.digest() if digest is None else digest, kept)

    def _content(
        self, reading: Reading, vector: tf.Tensor, checksums: Any, digest: Any, keys: Any = None
    ) -> StateContent:
        """Return what states of histories hold that these weights have read."""
        users = tf.size(reading.lengths)
        digests = tf.tile(as_words(self.digest() if digest is None else digest)[tf.newaxis], [users, 1])
        return StateContent(reading, vector, checksums_of(checksums, users), digests, keys)

    def _check_users(self, value: Any, users: tf.Tensor, states: tf.Tensor) -> Any:
        """Return the value after checking that there is a state for each user."""
        given = tf.size(states)
        told = [f"{self._name}: a state for each user expected; users", users, "states", given]
        return assert_first(value, users == given, told)


def checksums_of(given: Any, users: tf.Tensor) -> tf.Tensor:
    """Return the checksums of histories that were given, (users,) int64; 0 if there are none."""
    if given is None:
        return tf.zeros([users], tf.int64)
    found = tf.reshape(tf.cast(given, tf.int64), [-1])
    told = ["checksums: one a user expected; users", users, "checksums", tf.size(found)]
    return assert_first(found, tf.size(found) == users, told)
