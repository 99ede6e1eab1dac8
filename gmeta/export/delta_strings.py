"""Encodes a task's deltas as one string in a graph, which `adapt` returns and `predict_with` takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.graph import assert_first
from gmeta.models import MetaModel
from gmeta.models.meta import fast_weights
from gmeta.models.meta.adapter import DIVERGED, TaskDeltas
from gmeta.models.meta.fast_weights import (
    FORMAT,
    KEYS,
    ROWS,
    VERSION,
    DeltaDtype,
    fingerprint,
    is_whole,
    metadata,
)
from gmeta.models.meta.task_losses import check_compiled
from gmeta.models.meta.task_view import row_names
from gmeta.ops.table.portable_tables import bytes_of_words, weights_change

# Encodes and decodes the safetensors format with TensorFlow ops, for graphs that run without Python.
#
# The format is eight bytes with the length of a header, the header in JSON, and the tensors' bytes, little
# endian, one after another::
#
#     {"__metadata__":{"steps":"5"},"out/bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}
#
# A graph writes that header by joining strings. It reads a header by finding entries with regular
# expressions, so it accepts one from any writer that, like the library, writes no spaces.

_BETWEEN = ']},"'  # ends a tensor's entry, and begins the name of the next
_DTYPES = {tf.float32: "F32", tf.float16: "F16", tf.int64: "I64"}


def encode(
    tensors: Mapping[str, tf.Tensor | tf.RaggedTensor],
    metadata: Mapping[str, str | tf.Tensor],
    files: tf.Tensor,
) -> tf.Tensor:
    """Encode tensors as the bytes of safetensors files, (files,) string.

    Args:
      tensors: Name -> the tensors of that name, (files, ...) float32, float16 or int64. If their first
        dimensions differ, a `tf.RaggedTensor` with one ragged dimension.
      metadata: The header's ``__metadata__`` in each file; a tensor must hold text that needs no escapes.
      files: The number of files, ().
    """
    # The library's layout: tensors of wide numbers come first, so all are aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.size, name))
    entries: list[tf.Tensor | str] = ['{"__metadata__":{']
    for number, (key, value) in enumerate(metadata.items()):
        quoted = ['"', value, '"'] if tf.is_tensor(value) else [_json(value)]
        entries += ["," * (number > 0), _json(key), ":", *quoted]
    entries.append("}")
    end = tf.constant(0, tf.int64)
    bodies = []
    for name in order:
        tensor = tensors[name]
        shape, size = _shape_and_bytes(tensor)
        begin, end = end, end + size
        entries += [
            f',{_json(name)}:{{"dtype":"{_DTYPES[tensor.dtype]}","shape":[',
            shape,
            '],"data_offsets":[',
            tf.strings.as_string(begin),
            ",",
            tf.strings.as_string(end),
            "]}",
        ]
        bodies.append(_bytes(tensor, tf.broadcast_to(size, [files])))
    header = tf.strings.join([*entries, "}"])
    aligned = tf.gather([" " * count for count in range(8)], -tf.strings.length(header) % 8)
    header = tf.broadcast_to(tf.strings.join([header, aligned]), [files])
    length = tf.cast(tf.strings.length(header), tf.int64)
    return tf.strings.join([_bytes(length, tf.fill([files], tf.constant(8, tf.int64))), header, *bodies])


class Decoder:
    """Reads tensors out of the bytes of a safetensors file, in a graph.

    Args:
      data: The bytes of the file, () string.
      what: The name of the data in errors.
      advice: What errors advise the user to do.
    """

    def __init__(self, data: tf.Tensor, what: str, advice: str) -> None:
        self._what, self._advice = what, advice
        data = self._check(data, tf.strings.length(data) >= 8, "is shorter than a header")
        length = tf.io.decode_raw(tf.strings.substr(data, 0, 8), tf.int64)[0]
        rest = tf.cast(tf.strings.length(data), tf.int64) - 8
        inside = (length >= 0) & (length <= rest)
        data = self._check(data, inside, "is not a safetensors file, or is truncated")
        self._data = data
        self._start = 8 + tf.where(inside, length, 0)
        header = _slice(data, tf.constant(8, tf.int64), self._start)
        # No text of JSON has an unescaped quote, so this splits between the entries of tensors alone.
        self._entries = tf.raw_ops.StringSplitV2(input=header[tf.newaxis], sep=_BETWEEN).values
        # The header lists tensors in the file's order, so the last entry gives the end of the file.
        last = r'(?s).*"data_offsets":\[\d+,(\d+)\]\}.*'
        some = tf.strings.regex_full_match(header, last)
        end = tf.where(some, tf.strings.regex_replace(self._entries[-1], last, r"\1"), "0")
        end = tf.strings.to_number(end, tf.int64)
        header = self._check(header, rest - length >= end, "is cut")
        self._header = self._check(header, rest - length <= end, "has bytes behind its end")

    def expect_whole(self) -> None:
        """Check the checksum, if there is one, before any later read."""
        with tf.control_dependencies([self._header]):  # failures of earlier checks are reported first
            whole = is_whole(self._data)
        self._header = self._check(self._header, whole, "is damaged: its checksum differs")

    def expect(self, key: str, value: str | tf.Tensor, otherwise: str) -> None:
        """Check an entry of the metadata before any later read.

        Args:
          key: The entry.
          value: The value that the entry must have; a tensor must hold text that needs no escapes.
          otherwise: The error's text if the entry has another value.
        """
        pattern: str | tf.Tensor
        if tf.is_tensor(value):
            pattern = tf.strings.join([f'(?s).*"{key}":"', value, '".*'])
        else:
            pattern = f"(?s).*{re.escape(_json(key) + ':' + _json(value))}.*"
        self._header = self._check(
            self._header, tf.strings.regex_full_match(self._header, pattern), otherwise
        )

    def tensor(self, name: str, dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
        """Read a tensor of the file.

        Args:
          name: Its name.
          dtype: int64, or float32, which can also be read from stored float16.
          shape: Its shape; the first dimension may be None.
        """
        stored = "I64" if dtype == tf.int64 else "F32|F16"
        dims = ",".join(r"\d+" if dim is None else str(dim) for dim in shape.as_list())
        pattern = (
            rf'(?s)(?:\{{"__metadata__":.*\}},"|\{{")?{re.escape(_json(name)[1:])}:\{{"dtype":"({stored})",'
            rf'"shape":\[{dims}\],"data_offsets":\[(\d+),(\d+)(?:\]\}}\}}\s*)?'
        )
        with tf.control_dependencies([self._header]):  # failures of earlier checks are reported first
            fits = tf.strings.regex_full_match(self._entries, pattern)
        entry = self._check(self._entries, tf.reduce_any(fits), f"has no {name} of shape {shape}")
        entry = tf.gather(entry, tf.argmax(tf.cast(fits, tf.int32)))
        kind, begin, end = (tf.strings.regex_replace(entry, pattern, rf"\{group}") for group in (1, 2, 3))
        begin, end = (tf.strings.to_number(number, tf.int64) for number in (begin, end))
        whole = self._start + end <= tf.cast(tf.strings.length(self._data), tf.int64)
        data = self._check(self._data, whole & (begin <= end), "is cut")
        part = _slice(data, self._start + begin, self._start + end)
        if dtype == tf.int64:
            values = tf.io.decode_raw(part, tf.int64)
        else:
            values = tf.cond(
                tf.equal(kind, "F16"),
                lambda: tf.cast(tf.io.decode_raw(part, tf.float16), tf.float32),
                lambda: tf.io.decode_raw(part, tf.float32),
            )
        return tf.reshape(values, [-1 if dim is None else dim for dim in shape.as_list()])

    def _check(self, value: tf.Tensor, holds: tf.Tensor, otherwise: str) -> tf.Tensor:
        return assert_first(value, holds, [f"{self._what} {otherwise}: {self._advice}"])


def _slice(data: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
    return tf.strings.substr(data, begin, end - begin)


def _json(value: object) -> str:
    """Format a value as JSON in the library's style."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _shape_and_bytes(tensor: tf.Tensor | tf.RaggedTensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the shape of each file's tensor as text, and its size; of ragged tensors, those of each."""
    if isinstance(tensor, tf.RaggedTensor):
        counts = tensor.row_lengths()
        inner = tf.shape(tensor.flat_values, tf.int64)[1:]
        shape = [tf.strings.as_string(counts), *(tf.strings.as_string(dim) for dim in tf.unstack(inner))]
        return tf.strings.join(shape, separator=","), counts * tf.reduce_prod(inner) * tensor.dtype.size
    inner = tf.shape(tensor, tf.int64)[1:]
    shape = tf.strings.reduce_join(tf.strings.as_string(inner), separator=",")
    return shape, tf.reduce_prod(inner) * tensor.dtype.size


def _bytes(tensor: tf.Tensor | tf.RaggedTensor, sizes: tf.Tensor) -> tf.Tensor:
    """Return the bytes of each file's numbers, (files,) string.

    Args:
      tensor: As for `encode`.
      sizes: (files,) int64, the number of these bytes.
    """
    if isinstance(tensor, tf.RaggedTensor):
        tensor = tensor.to_tensor()
    files, width = tf.shape(tensor)[0], tf.reduce_prod(tf.shape(tensor)[1:])
    flat = tf.reshape(tensor, [files, width])
    if tensor.dtype.size == 2:
        flat = tf.reshape(tf.pad(flat, [[0, 0], [0, width % 2]]), [files, (width + 1) // 2, 2])
    words = tf.bitcast(flat, tf.int32)
    if tensor.dtype.size == 8:
        words = tf.reshape(words, [files, 2 * width])
    return bytes_of_words(words, sizes)


WEIGHTS = "weights_bytes"
"""The name of a task's deltas on the wire. Over REST, values whose name ends so are base64."""

_ADAPT_AGAIN = "adapt the task again, by the signature `adapt`"

Stale = Literal["refuse", "apply"]


class DeltaStrings:
    """Writes and reads the bytes of `gmeta.models.meta.fast_weights.FastWeights` with TensorFlow's ops.

    Args:
      model: The model, compiled.
      steps: Number of inner steps; None: ``inner.steps_in("serving")``.
      dtype: The dtype of the deltas that are written.
      stale: What to do with deltas from other shared weights.

    Attributes:
      steps: Number of inner steps.

    Raises:
      ConfigError: The model isn't compiled, or a setting has an unknown value.
    """

    def __init__(self, model: MetaModel, steps: int | None, dtype: DeltaDtype, stale: Stale) -> None:
        self.steps = model.inner.steps_in("serving") if steps is None else whole_number("steps", steps)
        for name, given, known in (("dtype", dtype, DeltaDtype), ("stale", stale, Stale)):
            if given not in get_args(known):
                raise ConfigError(f"{name} must be {' or '.join(map(repr, get_args(known)))}, got {given!r}")
        check_compiled(model.learner)
        here = fingerprint(model.learner).numpy().decode()
        self._model, self._dtype, self._constant = model, dtype, here
        self._about = metadata(model.name, model.inner.algorithm, self.steps, here)
        self._refuses = stale == "refuse"

    @property
    def _here(self) -> str | tf.Tensor:
        """The fingerprint of the shared weights; an export that takes deltas computes it in each request."""
        return fingerprint(self._model.learner) if weights_change() else self._constant

    def encode(self, deltas: TaskDeltas, given: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Encode the deltas of one task, () string.

        Args:
          deltas: The deltas.
          given: The numbers that the task adapted to, by name.

        Raises:
          InvalidArgumentError: The inner steps have diverged, or the dtype can't hold a delta.
        """
        ranges = [part for name, numbers in given.items() for part in (name, *_range(numbers))]
        told = [f"adapt: the {self.steps} inner steps diverge on samples with", *ranges, DIVERGED]
        data, fits = self._encode(assert_first(deltas, deltas.sound, told))
        if self._dtype == "float16":
            told = ["adapt: float16 ends at 65,504, and a delta is larger: export with dtype float32"]
            data = assert_first(data, fits, told)
        return data[0]

    def encode_many(self, deltas: TaskDeltas) -> tf.Tensor:
        """Encode the deltas of tasks, (tasks,) string.

        A task has the empty text if its inner steps have diverged, or the dtype can't hold its deltas. Other
        tasks of the request have their deltas nevertheless.
        """
        data, fits = self._encode(deltas)
        return tf.where(deltas.sound & fits, data, "")

    def _encode(self, deltas: TaskDeltas) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the bytes of each task, and whether the dtype can hold its deltas."""
        tasks = tf.shape(deltas.sound)[0]
        fits = tf.ones([tasks], tf.bool)
        tensors: dict[str, tf.Tensor | tf.RaggedTensor] = {}
        for name, delta in deltas.weights.items():
            tensors[name] = tf.cast(delta, self._dtype)
            fits &= tf.reduce_all(tf.math.is_finite(tensors[name]), axis=range(1, delta.shape.rank))
        for name, moved in deltas.rows.items():
            order = tf.argsort(moved.owners, stable=True)
            owners, keys = tf.gather(moved.owners, order), tf.gather(moved.keys, order)
            rows = tf.cast(tf.gather(moved.deltas, order), self._dtype)
            whole = tf.cast(tf.reduce_all(tf.math.is_finite(rows), axis=1), tf.int32)
            fits &= tf.math.unsorted_segment_min(whole, owners, tasks) > 0
            for suffix, values in ((KEYS, keys), (ROWS, rows)):
                tensors[name + suffix] = tf.RaggedTensor.from_value_rowids(
                    values, owners, nrows=tf.cast(tasks, owners.dtype), validate=False
                )
        about = {**self._about, "fingerprint": self._here, fast_weights.NAME: fast_weights.NONE}
        return fast_weights.seal(encode(tensors, about, tasks)), fits

    def decode(self, data: tf.Tensor) -> tuple[dict[str, tf.Tensor], dict[str, tuple[tf.Tensor, tf.Tensor]]]:
        """Decode the deltas of weights, and the keys and deltas of rows.

        It refuses deltas from other shared weights, unless ``stale`` is ``"apply"``.
        """
        model, here = self._model, self._here
        decoder = Decoder(data, WEIGHTS, _ADAPT_AGAIN)
        decoder.expect("format", FORMAT, "is not a result of `adapt`")
        decoder.expect("version", VERSION, f"is not version {VERSION} of the format")
        decoder.expect_whole()
        if self._refuses:
            these = "these" if tf.is_tensor(here) else f"these, {here}"
            decoder.expect("fingerprint", here, f"has deltas from other shared weights than {these}")
        deltas = {
            name: decoder.tensor(name, tf.float32, variable.shape)
            for name, variable in model.learner.adapted_weights().items()
        }
        rows = {}
        if model.inner.adapts_embeddings:
            for name, merged in zip(row_names(model.collection), model.collection.merged, strict=True):
                keys = decoder.tensor(name + KEYS, tf.int64, tf.TensorShape([None]))
                rows[name] = keys, decoder.tensor(name + ROWS, tf.float32, tf.TensorShape([None, merged.dim]))
        squares = [tf.nn.l2_loss(each) for each in (*deltas.values(), *(moved for _, moved in rows.values()))]
        told = [f"{WEIGHTS} holds NaN, infinity, or numbers whose squares overflow: {_ADAPT_AGAIN}"]
        return (
            assert_first((deltas, rows), tf.math.is_finite(tf.add_n(squares)), told)
            if squares
            else (deltas, rows)
        )


def _range(numbers: tf.Tensor) -> tuple[Any, ...]:
    return "from", tf.reduce_min(numbers), "to", tf.reduce_max(numbers)
