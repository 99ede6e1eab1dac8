"""One task's adapted weights as a value to store, send and predict with.

The value holds deltas: the adapted weights minus the shared ones that adaptation started from. Deltas are
small numbers, which keep their digits in 16 bits. They stay meaningful when the shared weights have changed a
little. Only the embedding rows that the task's samples have moved are included.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import tensorflow as tf
from safetensors import SafetensorError

from gmeta.core.errors import ConfigError, DataError, GmetaError, NotFiniteError
from gmeta.core.json_values import parse_json
from gmeta.layers import EmbeddingCollection
from gmeta.models.meta.task_learner import TaskLearner
from gmeta.models.meta.task_view import row_names

# A checksum of serialized fast weights, by stock TensorFlow ops that run in Python and in exported graphs.
#
# It is an entry of the header's ``__metadata__``, ``"checksum":"<19 digits>"``: the lower 63 bits of
# FarmHash's 64-bit fingerprint (``Fingerprint64``) of all bytes, with the digits set to zero. Bytes of an
# earlier gmeta have no such entry, and no other entries than `EARLIER`. So bytes whose entry has a damaged
# name can't pass as those of an earlier gmeta.

NAME = "checksum"
DIGITS = 19
NONE = "0" * DIGITS
"""The placeholder that `seal` replaces with the checksum."""

EARLIER = ("format", "version", "model", "algorithm", "steps", "fingerprint")
"""The only entries that bytes without a checksum may have."""

_ENTRY = rf'"{NAME}":"\d{{{DIGITS}}}"'
_TEXT = r'"(?:[^"\\]|\\.)*"'
_PAIR = rf'"(?:{"|".join(map(re.escape, EARLIER))})":{_TEXT}'
_UNSEALED = rf'(?s)\{{"__metadata__":\{{{_PAIR}(?:,{_PAIR})*\}}.*'


def seal(data: tf.Tensor) -> tf.Tensor:
    """Put the checksum into the bytes of safetensors files whose metadata has `NONE` for it.

    Args:
      data: String, of any shape.
    """
    length, header, body = _parts(data)
    place = _place(header)
    before = tf.strings.substr(header, tf.zeros_like(place), place)
    behind = tf.strings.substr(header, place + DIGITS, tf.strings.length(header) - place - DIGITS)
    return tf.strings.join([length, before, _sum_of(data), behind, body])


def is_whole(data: tf.Tensor) -> tf.Tensor:
    """Return whether bytes match their checksum, or come from an earlier gmeta without checksums; () bool.

    Args:
      data: () string, a safetensors file whose header, at least, is whole.
    """
    length, header, body = _parts(data)
    place = _place(header)
    given = tf.strings.substr(header, tf.minimum(place, tf.strings.length(header)), DIGITS)
    empty = tf.strings.regex_replace(header, _ENTRY, f'"{NAME}":"{NONE}"', replace_global=False)
    same = tf.equal(given, _sum_of(tf.strings.join([length, empty, body])))
    return same | tf.strings.regex_full_match(header, _UNSEALED)


def _place(header: tf.Tensor) -> tf.Tensor:
    """Return where the checksum's digits begin; behind a header without any.

    The pattern has no group that is read, because groups make a search in long texts many times as slow.
    """
    before = tf.strings.regex_replace(header, f"(?s){_ENTRY}.*", "", replace_global=False)
    return tf.strings.length(before) + len(f'"{NAME}":"')


def _parts(data: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Split bytes into the header's length, the header, and the numbers."""
    size = tf.cast(tf.strings.length(data), tf.int64)
    eight = 8 * tf.ones_like(size)
    length = tf.strings.substr(data, 0 * eight, eight)
    end = 8 + tf.io.decode_raw(length, tf.int64)[..., 0]
    header = tf.strings.substr(data, eight, end - 8)
    return length, header, tf.strings.substr(data, end, size - end)


def _sum_of(data: tf.Tensor) -> tf.Tensor:
    prints = tf.raw_ops.Fingerprint(data=tf.reshape(data, [-1]), method="farmhash64")
    bits = tf.reshape(tf.bitcast(prints, tf.int64), tf.shape(data))
    return tf.strings.as_string(bits & tf.int64.max, width=DIGITS, fill="0")


# A fingerprint of the shared weights and table settings that deltas refer to.
#
# It covers the dense weights, which every training step changes, and each table's names, width, seed and
# initial rows. It doesn't depend on the rows that a table holds: there may be billions, and they change all
# the time during training or streaming updates. If rows change and the dense weights don't, deltas stay
# valid: a row that a task has moved is the present row plus its delta. If the row was evicted since, it is
# the id's initial row plus the delta. A table with another seed makes another model even if no weight
# differs, because all ids without a row then read other values.


def fingerprint(learner: TaskLearner) -> tf.Tensor:
    """Compute the fingerprint of a learner's dense weights and its tables' settings.

    Args:
      learner: The learner; a graph reads its weights when it runs.

    Returns:
      () string, 16 hexadecimal digits.
    """
    weights = [weight for layer in learner.layers for weight in layer.weights]
    return _hexadecimal(weights_digest(weights, learner.collection))


def weights_digest(weights: Sequence[tf.Variable], collection: EmbeddingCollection | None) -> tf.Tensor:
    """Compute the digest of weights and of a collection's settings, (8,) uint8.

    Args:
      weights: The weights; a graph reads them when it runs.
      collection: The collection; None: there is none.
    """
    tables: list[str] = []
    if collection is not None:
        tables = [
            f"{name} {merged.dim} {collection.seed} {merged.policy.initializer!r}"
            for name, merged in zip(row_names(collection), collection.merged, strict=True)
        ]
    with tf.device("CPU:0"):
        dense = [
            tf.fingerprint(tf.reshape(variable, [1, -1]))  # FarmHash64 of the weight's bytes
            for variable in weights
        ]
        of_dense = _hexadecimal(tf.fingerprint(tf.reshape(tf.concat(dense, axis=0), [1, -1]))[0])
        return tf.fingerprint([tf.strings.join([of_dense, *tables], separator="\n")])[0]


def _hexadecimal(digest: tf.Tensor) -> tf.Tensor:
    digits = tf.constant([f"{byte:02x}" for byte in range(256)])
    return tf.strings.reduce_join(tf.gather(digits, tf.cast(digest, tf.int32)))


FORMAT = "gmeta.fast_weights"
VERSION = "1"
KEYS, ROWS = ":keys", ":rows"
"""The suffixes that name a table's two tensors."""

DeltaDtype = Literal["float32", "float16"]
Floats = npt.NDArray[np.float32]
_ADVICE = "adapt the task again, which recreates it"


class HasLearner(Protocol):
    """A model over a learner, such as a `gmeta.models.MetaModel`."""

    learner: TaskLearner


class RowDeltas(NamedTuple):
    """The rows of a table that a task has moved.

    Attributes:
      keys: (rows,) int64, ascending. In a table that holds several features' ids, a key's upper bits are the
        feature's number; see `gmeta.layers.embedding.merge_plan`.
      deltas: (rows, dim) float32.
    """

    keys: npt.NDArray[np.int64]
    deltas: Floats


@dataclass(frozen=True, eq=False)
class FastWeights:
    r"""One task's adaptation, :math:`\theta_t - \theta`, as `MetaModel.adapt` makes it.

    The bytes are in the `safetensors <https://github.com/huggingface/safetensors>`_ format: a JSON header
    that names tensors, shapes and dtypes, then the numbers; reading them runs no code. A tensor has the name
    of its weight, such as ``"fc1/kernel"``; a table has the tensors ``"embeddings/item:keys"`` and
    ``"embeddings/item:rows"``. The header's ``__metadata__`` has the scalar attributes below, and a checksum
    of all bytes (`seal`), so that damaged bytes are refused. In an exported
    model the signature ``adapt`` returns the same bytes and ``predict_with`` takes them.

    =================================================================  ===========  ===========
    of `gmeta.models.melu` (six features, 32 wide; 64-64-1) adapt      ``float32``  ``float16``
    =================================================================  ===========  ===========
    all decision layers (``maml``), 16,577 numbers                     66.9 kB      33.7 kB
    the head alone (``anil``), 65 numbers                              0.6 kB       0.4 kB
    embedding rows besides (``adapt="all"``), each that was moved      + 136 B      + 72 B
    =================================================================  ===========  ===========

    With ``float16`` each delta is rounded by at most one part in 2048 (below 6e-5 by at most 3e-8 in absolute
    terms). The shared weights keep all their digits.

    Attributes:
      model: The name of the model.
      algorithm: The inner loop's algorithm.
      steps: The number of inner steps taken.
      fingerprint: The fingerprint of the weights and tables that these deltas refer to (the
        function `fingerprint`).
      deltas: Name of a weight -> its delta, of the weight's shape, float32.
      rows: Name of a table -> the rows that the task has moved; empty if rows don't adapt.

    Example:
      ::

        fast = model.adapt(support_x, support_y)
        store[user] = fast.to_bytes(dtype="float16")
        model.predict(query_x, weights=FastWeights.from_bytes(store[user]))
    """

    model: str
    algorithm: str
    steps: int
    fingerprint: str
    deltas: Mapping[str, Floats]
    rows: Mapping[str, RowDeltas] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The size of the numbers as float32 and of the keys, in bytes."""
        of_rows = sum(part.nbytes for rows in self.rows.values() for part in rows)
        return sum(delta.nbytes for delta in self.deltas.values()) + of_rows

    def not_finite(self) -> str:
        """Return the name of a weight or table whose deltas hold NaN or infinity; "" if there is none."""
        every = {**self.deltas, **{name: rows.deltas for name, rows in self.rows.items()}}
        return next((name for name, deltas in every.items() if not np.isfinite(deltas).all()), "")

    def to_bytes(self, dtype: DeltaDtype = "float32") -> bytes:
        """Serialize to `nbytes` and about 100 bytes of header per tensor; ``"float16"`` halves the numbers.

        Raises:
          ConfigError: Another dtype, or deltas beyond 65,504, which float16 can't hold.
          NotFiniteError: A delta is NaN or infinite.
        """
        if dtype not in ("float32", "float16"):
            raise ConfigError(f"fast weights: dtype must be 'float32' or 'float16', got {dtype!r}")
        if bad := self.not_finite():
            raise NotFiniteError(f"fast weights: {bad} holds NaN or infinity: {_ADVICE}")
        tensors: dict[str, npt.NDArray[Any]] = {
            name: _as_dtype(name, delta, dtype) for name, delta in self.deltas.items()
        }
        for name, (keys, deltas) in self.rows.items():
            tensors[name + KEYS] = keys
            tensors[name + ROWS] = _as_dtype(name, deltas, dtype)
        unsealed = safetensors.numpy.save(tensors, metadata={**self.metadata(), NAME: NONE})
        whole: bytes = seal(tf.constant(unsealed)).numpy()
        return whole

    def metadata(self) -> dict[str, str]:
        """Return the entries of the header's ``__metadata__``."""
        return metadata(self.model, self.algorithm, self.steps, self.fingerprint)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> FastWeights:
        """Read bytes from `to_bytes` or from an exported model's ``adapt``.

        Raises:
          DataError: The bytes are damaged, aren't fast weights, have a later version of the format, or hold
            NaN or infinity.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise DataError(
                f"fast weights are bytes, got {type(data).__name__}",
                advice="pass the unchanged result of `to_bytes` or of an exported model's `adapt`",
            )
        data = bytes(data)
        try:
            tensors = safetensors.numpy.load(data)
            about = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{len(data):,} bytes aren't fast weights ({error})", advice=f"they are damaged: {_ADVICE}"
            ) from error
        if about.get("format") != FORMAT:
            raise DataError(
                f"safetensors of the format {about.get('format', 'none')!r}, not of {FORMAT!r}",
                advice="give what `to_bytes`, `save` or an exported model's `adapt` wrote",
            )
        if about.get("version") != VERSION:
            raise DataError(
                f"fast weights of version {about.get('version')!r}, where this gmeta reads {VERSION}",
                advice=f"read them with a later gmeta, or {_ADVICE}",
            )
        if not bool(is_whole(tf.constant(data))):
            raise DataError(
                f"{len(data):,} bytes of fast weights are damaged: their checksum differs", advice=_ADVICE
            )
        try:
            found = cls(
                about["model"],
                about["algorithm"],
                int(about["steps"]),
                about["fingerprint"],
                {name: each.astype(np.float32) for name, each in tensors.items() if ":" not in name},
                _rows_among(tensors),
            )
        except (KeyError, ValueError) as error:
            raise DataError(f"incomplete fast weights: {error}", advice=_ADVICE) from error
        if bad := found.not_finite():
            raise DataError(f"fast weights: {bad} holds NaN or infinity", advice=_ADVICE)
        return found

    def save(self, path: str | os.PathLike[str], dtype: DeltaDtype = "float32") -> None:
        """Write the bytes of `to_bytes` to a file, whole or not at all.

        Raises:
          GmetaError: The file can't be written.
        """
        whole = Path(path)
        part = whole.with_name(f".{whole.name}.{os.getpid()}.part")
        try:
            part.write_bytes(self.to_bytes(dtype))
            part.replace(whole)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise GmetaError(f"{whole}: can't write fast weights: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FastWeights:
        """Read a file that `save` wrote.

        Raises:
          DataError: The file doesn't exist, or isn't one of fast weights.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"can't read fast weights: {error.strerror}", path=path) from error
        try:
            return cls.from_bytes(data)
        except DataError as error:
            raise DataError(str(error), path=path) from error

    def rebase(self, model: HasLearner) -> FastWeights:
        """Return the same deltas, to be added to the shared weights that a model has now.

        Use this if the model was trained since: the task's deltas are then added to the newly trained
        weights. How well this works depends on the data; adapting again is the safe way.
        """
        return replace(self, fingerprint=fingerprint(model.learner).numpy().decode())


def metadata(model: str, algorithm: str, steps: int, of: str) -> dict[str, str]:
    """Return the header's ``__metadata__``.

    Args:
      model: As in `FastWeights`.
      algorithm: As in `FastWeights`.
      steps: As in `FastWeights`.
      of: The fingerprint.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "algorithm": algorithm,
        "steps": str(steps),
        "fingerprint": of,
    }


def _as_dtype(name: str, deltas: Floats, dtype: DeltaDtype) -> npt.NDArray[Any]:
    if dtype == "float16" and np.any(np.abs(deltas) > np.finfo(np.float16).max):
        raise ConfigError(
            f"fast weights: {name} has deltas up to {np.abs(deltas).max():.3g}, and float16 ends at "
            "65,504: keep them as float32, and look whether the inner learning rate diverges"
        )
    return np.ascontiguousarray(deltas, dtype)


def _rows_among(tensors: Mapping[str, npt.NDArray[Any]]) -> dict[str, RowDeltas]:
    """Return the rows of each table among the tensors.

    Raises:
      KeyError: A table has only keys or only rows.
      ValueError: Keys and rows have wrong dtypes or shapes, or different numbers.
    """
    found = {}
    for table in sorted({name.rpartition(":")[0] for name in tensors if ":" in name}):
        keys, deltas = tensors[table + KEYS], tensors[table + ROWS]
        if keys.dtype != np.int64 or keys.ndim != 1 or deltas.ndim != 2 or len(keys) != len(deltas):
            raise ValueError(
                f"{table} has keys {keys.dtype} {keys.shape} for rows of shape {deltas.shape}; it takes "
                "int64 (rows,) for (rows, dim)"
            )
        found[table] = RowDeltas(keys, deltas.astype(np.float32))
    return found
