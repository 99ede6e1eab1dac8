"""A user's history as a model has read it, as bytes that are stored, sent, continued and scored against.

A request to rank candidates reads the whole history again, though nothing of it has changed. A state holds
what the blocks keep of it: the keys and values of its tokens. New events are appended to them, and candidates
attend to them.

A state is little endian, in words of 32 bits, and a token takes the same number of words in all states of a
model, so events are appended without touching the words of others::

    header      magic and format, dtype and form of the model, digest of the trunk (2), the history's
                checksum (2), tokens (2)
    last        the last token as it enters the blocks, float32
    tokens      of each token: its time (2) if the model reads times; a key and a value a block and head
    seal        FarmHash64 of all bytes before (2)

Keys and values are rows of `gmeta.core.row_formats.RowFormat`, so int8 has a scale for each of them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.graph import assert_first
from gmeta.core.row_formats import RowDtype, RowFormat
from gmeta.layers import EmbeddingCollection
from gmeta.layers.sequence.reading import Kept, Reading
from gmeta.models.meta.fast_weights import weights_digest
from gmeta.models.sequence.grm_model import GRM
from gmeta.models.sequence.sequence_columns import Batch, Layout, Part
from gmeta.ops import Jagged, jagged
from gmeta.ops.table.portable_tables import decode_rows, pack_rows

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
      last: (users, dim) float32, the last token of each history as it enters the backbone.
      checksums: (users,) int64, as given when the history was read.
      digests: (users, 2) int32, of the weights of the trunk that read the first tokens.
    """

    reading: Reading
    last: tf.Tensor
    checksums: tf.Tensor
    digests: tf.Tensor


class StateFormat:
    """Encodes and decodes states with TensorFlow's own ops, so that exported models do so too.

    Args:
      model: The model whose histories are kept.
      dtype: How keys and values are held.

    Attributes:
      token_bytes: The bytes that a token takes.
      fixed_bytes: The bytes that a state takes besides its tokens.

    Raises:
      ConfigError: The dtype is unknown, or the backbone keeps nothing of what it reads.
    """

    def __init__(self, model: GRM, dtype: RowDtype) -> None:
        backbone = model.trunk.backbone
        if not getattr(getattr(backbone, "BLOCK", None), "EXTENDS", False):
            raise ConfigError(
                f"{model.name}: {type(backbone).__name__} keeps no keys and values, so there are no states "
                "of its histories: take a backbone of gmeta.layers.HSTU"
            )
        backbone.check_reads_on()
        if backbone.mask.contexts_see == "history":
            raise ConfigError(
                f"{model.name}: contexts that see the history can't be kept, got {backbone.mask}"
            )
        block = backbone.blocks[0]
        self._blocks, self._heads = len(backbone.blocks), block.heads
        self._key, self._value = RowFormat(dtype, block.attention_dim), RowFormat(dtype, block.value_dim)
        self._dtype, self._dim = dtype, model.trunk.dim
        self._contexts = len(model.columns.contexts)
        self._time = 0 if model.columns.time is None else 2
        self._token = self._time + self._blocks * self._heads * (self._key.width + self._value.width)
        self._name, self._code = model.name, _CODES[dtype] + (_form_of(model) << 8)
        self.token_bytes, self.fixed_bytes = 4 * self._token, 4 * (_HEADER + self._dim + _SEAL)

    def encode(self, content: StateContent) -> tf.Tensor:
        """Encode states, (users,) string."""
        return self._seal(self._head(content, content.reading.lengths), self._tokens(content.reading))

    def append(
        self, states: tf.Tensor, kept: tf.Tensor, added: StateContent, lengths: tf.Tensor
    ) -> tf.Tensor:
        """Append tokens to encoded states, whose other tokens keep their bytes.

        Args:
          states: (users,) string.
          kept: (users,) int64, how many tokens of each state stay.
          added: The tokens that follow, and the new last tokens and checksums.
          lengths: (users,) int64, the tokens of the new states.
        """
        tokens = self._tokens(added.reading)
        first = tf.fill(tf.shape(kept), self.fixed_bytes - 4 * _SEAL)
        former = tf.strings.substr(states, first, tf.cast(kept, tf.int32) * self.token_bytes)
        return self._seal(self._head(added, lengths), tf.strings.join([former, tokens]))

    def decode(self, states: tf.Tensor, digest: tf.Tensor | None) -> StateContent:
        """Decode states.

        Args:
          states: (users,) string.
          digest: (8,) uint8, of the trunk that must have read them; None: any.

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
        whole = (lengths >= self._contexts) & (lengths <= wanted) & (lengths * self.token_bytes == wanted)
        words = self._check(words, whole, "is cut, or is of a model of another form")
        words = self._check(words, self._is_sealed(states, sizes), "is damaged: its checksum differs")
        if digest is not None:
            same = tf.reduce_all(head[:, 2:4] == _as_words(digest), axis=1)
            words = self._check(words, same, "was read by other weights than these")
        last = tf.ensure_shape(words[:, _HEADER : _HEADER + self._dim], [None, self._dim])
        count = (longest - least) // self.token_bytes + 1
        first = _HEADER + self._dim
        body = tf.reshape(words[:, first : first + count * self._token], [-1, count, self._token])
        # Behind its tokens, a shorter state has its seal, and NaN may be among the numbers of these bits.
        body = tf.where(tf.sequence_mask(lengths, count)[:, :, tf.newaxis], body, 0)
        times = tf.bitcast(body[:, :, :2], tf.int64) if self._time else None
        kept, place = [], self._time
        for _ in range(self._blocks):
            parts = []
            for form in (self._key, self._value):
                wide = self._heads * form.width
                parts.append(self._rows(form, body[:, :, place : place + wide], count))
                place += wide
            kept.append(Kept(*parts))
        reading = Reading.of_padded(lengths, times, kept, self._contexts)
        last = tf.bitcast(last, tf.float32)
        return StateContent(reading, last, tf.bitcast(head[:, 4:6], tf.int64), head[:, 2:4])

    def _rows(self, form: RowFormat, words: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """Decode (users, count, heads * width) words to (users, heads, count, dim)."""
        words = tf.reshape(words, [-1, form.width])
        rows = decode_rows(form, tf.bitcast(words, tf.float32) if form.dtype == "float32" else words)
        return tf.transpose(tf.reshape(rows, [-1, count, self._heads, form.dim]), [0, 2, 1, 3])

    def _tokens(self, reading: Reading) -> tf.Tensor:
        """Encode the tokens of sequences, (users,) string."""
        lengths, columns = reading.lengths, []
        if reading.times is not None:
            columns.append(tf.bitcast(jagged.from_padded(reading.times, lengths).values, tf.int32))
        for block in reading.kept:
            for form, each in ((self._key, block.keys), (self._value, block.values)):
                flat = jagged.from_padded(tf.transpose(each, [0, 2, 1, 3]), lengths).values
                words = pack_rows(form, tf.reshape(tf.cast(flat, tf.float32), [-1, form.dim]))
                words = tf.bitcast(words, tf.int32)
                columns.append(tf.reshape(words, [-1, self._heads * form.width]))
        offsets = tf.concat([[0], tf.cumsum(lengths)], axis=0)
        return _bytes_of_rows(Jagged(tf.concat(columns, axis=1), offsets))

    def _head(self, content: StateContent, lengths: tf.Tensor) -> tf.Tensor:
        """Encode what stands before the tokens, (users,) string."""
        users = tf.size(lengths)
        words = [
            tf.tile([[_MAGIC, self._code]], [users, 1]),
            content.digests,
            *(tf.bitcast(each, tf.int32) for each in (content.checksums, lengths)),
            tf.bitcast(tf.cast(content.last, tf.float32), tf.int32),
        ]
        one_each = tf.range(tf.cast(users, tf.int64) + 1)
        return _bytes_of_rows(Jagged(tf.concat(words, axis=1), one_each))

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


def _bytes_of_rows(rows: Jagged) -> tf.Tensor:
    """Return the bytes of each sequence's rows (n, width) int32, (sequences,) string."""
    # TensorFlow has decode_raw but not its reverse; a serialized tensor ends with these bytes.
    width = rows.values.shape[1]

    def of_one(begin_end: tf.Tensor) -> tf.Tensor:
        own = rows.values[begin_end[0] : begin_end[1]]
        size = 4 * width * tf.cast(begin_end[1] - begin_end[0], tf.int32)
        serialized = tf.io.serialize_tensor(own)
        return tf.strings.substr(serialized, tf.strings.length(serialized) - size, size)

    spans = tf.stack([rows.offsets[:-1], rows.offsets[1:]], axis=1)
    return tf.map_fn(of_one, spans, fn_output_signature=tf.TensorSpec([], tf.string))


def _form_of(model: GRM) -> int:
    """Hash what the meaning of keys and values depends on besides weights, to 22 bits."""
    backbone = {
        name: value
        for name, value in model.trunk.backbone.get_config().items()
        if name not in ("name", "seed", "dropout", "dtype", "trainable")
    }
    columns = model.columns
    settings = [backbone, model.trunk.combine, columns.contexts, columns.history, columns.time]
    return zlib.crc32(json.dumps(settings, sort_keys=True).encode()) >> 10


def _as_words(digest: tf.Tensor) -> tf.Tensor:
    """Return a digest (8,) uint8 as (2,) int32."""
    return tf.bitcast(tf.reshape(digest, [2, 4]), tf.int32)


_EVERY_BYTE = [bytes([byte]) for byte in range(256)]


def _digits(digests: tf.Tensor) -> tf.Tensor:
    """Return (n, 8) uint8 as strings (n,)."""
    return tf.strings.reduce_join(tf.gather(tf.constant(_EVERY_BYTE), tf.cast(digests, tf.int32)), axis=1)


class UserStates:
    r"""Histories of users as a `GRM` has read them, as bytes.

    A state keeps, of each token and block, the key and the value, and the token's time. The result of `score`
    equals the model's logits for the whole sequence up to the rounding of ``dtype`` and the order of sums. It
    computes the candidates' tokens alone, and their attention to the kept ones. `read_on` reads new events
    and, once more, the last one before them, whose token depends on when the next event comes.

    A state of n tokens (contexts and events) has ``fixed_bytes + n * token_bytes`` bytes (of ``format``): for
    B blocks of h heads with keys d wide and values v wide, tokens D wide, and times::

        fixed_bytes = 40 + 4 D
        token_bytes = 8 + B h (b(d) + b(v))      b(x) = 4 x in float32, 2 x in bfloat16, x + 4 in int8

    where 2 x and x are rounded up to whole words of 4 bytes.

    A token is read by the rows and weights of that moment; rows may have changed since. A state that other
    dense weights of the trunk have read is refused, or used nevertheless (``stale="apply"``), and stays
    one of the former weights when it is continued. States of models with other settings are refused.

    A request computes as many tokens and candidates a user as its longest has: send users with histories of
    similar lengths together.

    Args:
      model: The model. Its backbone must be `gmeta.layers.HSTU` with a causal mask, without ``by_time`` and
        ``full_tail``, and with contexts that don't see the history.
      dtype: ``"float32"``, ``"bfloat16"`` or ``"int8"`` (`gmeta.core.row_formats.RowFormat`).
      stale: What to do with a state that other weights have read: ``"refuse"`` or ``"apply"``.
      at_once: How many candidates of a user are compared with the history at once, which bounds memory: about
        8 bytes × users × heads × ``at_once`` × tokens of the longest history.

    Raises:
      ConfigError: The model can't keep states, or a setting has an unknown value.

    Example:
      >>> item = FeatureConfig("item", dim=8)
      >>> model = GRM.of([item], contexts=[], history=["item"], targets=["item"], dim=16)
      >>> states = UserStates(model)
      >>> history = tf.ragged.constant([[3, 5], [7]], tf.int64)
      >>> state = states.read({"history": {"item": history}})
      >>> state = states.read_on(state, {"history": {"item": tf.ragged.constant([[9], []], tf.int64)}})
      >>> candidates = tf.ragged.constant([[1, 2, 3], [4]], tf.int64)
      >>> states.score(state, {"targets": {"item": candidates}})["ctr"].shape
      TensorShape([2, None])
    """

    def __init__(
        self, model: GRM, dtype: RowDtype = "bfloat16", *, stale: Stale = "refuse", at_once: int = 256
    ) -> None:
        if stale not in get_args(Stale):
            raise ConfigError(f"stale must be {' or '.join(map(repr, get_args(Stale)))}, got {stale!r}")
        self.model, self.format = model, StateFormat(model, dtype)
        self._refuses, self._at_once = stale == "refuse", whole_number("at_once", at_once, least=1)

    def digest(self) -> tf.Tensor:
        """Compute the digest of the weights that states depend on, (8,) uint8: those of the trunk."""
        return weights_digest([self.model.trunk], self.model.collection)

    def read(self, x: Batch, checksums: Any = None, digest: Any = None) -> tf.Tensor:
        """Read histories.

        Args:
          x: A batch; its targets aren't read, and may be missing.
          checksums: (users,) int64, of the histories, such as `gmeta.io.RecentHistories` gives; states hold
            them. None: 0.
          digest: The result of `digest`, if it is known.

        Returns:
          (users,) string.
        """
        model, columns = self.model, self.model.columns
        layout = columns.layout(x, "history")
        vectors = self._embed(columns.ids(x, set(model.labels.values()), targets=False))
        reading, last = model.trunk.read(vectors, layout)
        users = tf.size(layout.history) - 1
        digests = tf.tile(_as_words(self.digest() if digest is None else digest)[tf.newaxis], [users, 1])
        return self.format.encode(StateContent(reading, last, _checksums(checksums, users), digests))

    def read_on(self, states: Any, x: Batch, checksums: Any = None, digest: Any = None) -> tf.Tensor:
        """Read events that came after the histories of states.

        Args:
          states: (users,) string, of `read` or `read_on`.
          x: A batch, of whose parts the history alone is read: the new events.
          checksums: (users,) int64, of the histories with the new events. None: 0.
          digest: The result of `digest`, if it is known.

        Returns:
          (users,) string.

        Raises:
          InvalidArgumentError: As `StateFormat.decode`.
        """
        states = tf.convert_to_tensor(states, tf.string)
        content = self._decode(states, digest)
        model = self.model
        layout = self._part(x, "history", states)
        vectors = self._vectors(x, "history")
        extension, last = model.trunk.extend(content.reading, content.last, vectors, layout)
        kept = [Kept(*each) for each in extension.blocks]
        added = Reading.of_padded(extension.lengths, extension.times, kept, 0)
        lengths = extension.kept + extension.lengths
        new = StateContent(added, last, _checksums(checksums, tf.size(states)), content.digests)
        return self.format.append(states, extension.kept, new, lengths)

    def score(self, states: Any, x: Batch, digest: Any = None) -> dict[str, tf.RaggedTensor]:
        """Compute the logits of candidates, task or product -> ragged (users, None).

        Args:
          states: (users,) string, of `read` or `read_on`.
          x: A batch, of whose parts the targets alone are read (and the contexts for a scenario there).
          digest: The result of `digest`, if it is known.

        Raises:
          InvalidArgumentError: As `StateFormat.decode`.
        """
        logits, layout = self.logits(states, x, digest)
        return {
            name: tf.RaggedTensor.from_row_splits(logit, layout.targets, validate=False)
            for name, logit in logits.items()
        }

    def logits(self, states: Any, x: Batch, digest: Any = None) -> tuple[dict[str, tf.Tensor], Layout]:
        """Compute task or product -> logits (exposures,), and the exposures' layout; see `score`."""
        model = self.model
        hidden, layout = self.hidden(states, x, digest)
        return model.heads(model.mixture(hidden)), layout

    def hidden(self, states: Any, x: Batch, digest: Any = None) -> tuple[tf.Tensor, Layout]:
        """Compute the trunk's vector of each candidate, (exposures, dim), and the layout; see `score`."""
        states = tf.convert_to_tensor(states, tf.string)
        content = self._decode(states, digest)
        layout = self._part(x, "targets", states)
        vectors = self._vectors(x, "targets")
        return self.model.trunk.score(content.reading, vectors, layout, at_once=self._at_once), layout

    def about(self, states: Any) -> dict[str, tf.Tensor]:
        """Return ``tokens`` and ``checksum`` of states, and ``time`` of their last event if they have times.

        Args:
          states: (users,) string.

        Returns:
          Name -> (users,) int64. The time of a state without events is 0.
        """
        content = self.format.decode(tf.convert_to_tensor(states, tf.string), None)
        reading = content.reading
        found = {"tokens": reading.lengths, "checksum": content.checksums}
        if reading.times is not None:
            last = tf.gather(reading.times, tf.maximum(reading.lengths - 1, 0), batch_dims=1)
            found["time"] = tf.where(reading.lengths > reading.contexts, last, 0)
        return found

    def _decode(self, states: tf.Tensor, digest: tf.Tensor | None) -> StateContent:
        if not self._refuses:
            return self.format.decode(states, None)
        return self.format.decode(states, self.digest() if digest is None else digest)

    def _part(self, x: Batch, part: Part, states: tf.Tensor) -> Layout:
        """Return the layout of a part of a batch, after checking its number of users."""
        layout = self.model.columns.layout(x, part)
        users, given = tf.size(layout.history) - 1, tf.size(states)
        told = [f"{self.model.name}: a state for each user expected; users", users, "states", given]
        return assert_first(layout, users == given, told)

    def _vectors(self, x: Batch, part: Part) -> dict[str, tf.Tensor]:
        model = self.model
        labels = set(model.labels.values()) if part == "history" else ()
        found = model.columns.part_ids(x, part, labels)
        return self._embed({name: column.values for name, column in found.items()})

    def _embed(self, ids: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """Look up ids; features without any have no vectors."""
        return self.model.collection({**no_ids(self.model.collection), **ids}, training=False)


def no_ids(collection: EmbeddingCollection) -> dict[str, Any]:
    """Return the input of a collection without samples."""
    nothing = tf.zeros([0], tf.int64)
    none = tf.RaggedTensor.from_row_splits(nothing, tf.zeros([1], tf.int64), validate=False)
    return {each.name: nothing if each.combiner is None else none for each in collection.features}


def _checksums(given: Any, users: tf.Tensor) -> tf.Tensor:
    if given is None:
        return tf.zeros([users], tf.int64)
    found = tf.reshape(tf.cast(given, tf.int64), [-1])
    told = ["checksums: one a user expected; users", users, "checksums", tf.size(found)]
    return assert_first(found, tf.size(found) == users, told)
