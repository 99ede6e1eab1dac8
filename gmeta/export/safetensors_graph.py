"""The safetensors format in TensorFlow's own ops, for graphs that run where Python doesn't.

The format is eight bytes with the length of a header, the header in JSON, and the tensors' bytes, little
endian, one after another::

    {"__metadata__":{"steps":"5"},"out/bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}

A graph writes that text by joining strings. It reads of it what it looks for by name, with regular
expressions, so it takes what any writer of the format has written without spaces, as the library does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import tensorflow as tf

from gmeta.core.graph.conditions import assert_first
from gmeta.models.meta.adapter.checksum import is_whole

_DTYPES = {tf.float32: "F32", tf.float16: "F16", tf.int64: "I64"}


def encode(tensors: Mapping[str, tf.Tensor], metadata: Mapping[str, str]) -> tf.Tensor:
    """Tensors as the bytes of a safetensors file, () string.

    Args:
      tensors: Name -> tensor of float32, float16 or int64.
      metadata: What the header has as its ``__metadata__``.
    """
    # As the library lays them out: aligned, because those of wide numbers come first.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.size, name))
    entries: list[tf.Tensor | str] = [f'{{"__metadata__":{_json(dict(metadata))}']
    end = tf.constant(0, tf.int64)
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + _size(tensor)
        shape = tf.strings.reduce_join(tf.strings.as_string(tf.shape(tensor)), separator=",")
        entries += [
            f',{_json(name)}:{{"dtype":"{_DTYPES[tensor.dtype]}","shape":[',
            shape,
            '],"data_offsets":[',
            tf.strings.as_string(begin),
            ",",
            tf.strings.as_string(end),
            "]}",
        ]
    header = tf.strings.join([*entries, "}"])
    header = tf.strings.join([header, tf.strings.substr(" " * 8, 0, -tf.strings.length(header) % 8)])
    length = _bytes(tf.cast(tf.strings.length(header), tf.int64))
    return tf.strings.join([length, header, *(_bytes(tensors[name]) for name in order)])


class Decoder:
    """Reads tensors out of the bytes of a safetensors file, in a graph.

    Args:
      data: () string.
      what: What it is called in errors.
      advice: What errors say is to be done.
    """

    def __init__(self, data: tf.Tensor, what: str, advice: str) -> None:
        self._what, self._advice = what, advice
        data = self._check(data, tf.strings.length(data) >= 8, "is shorter than a header")
        length = tf.io.decode_raw(tf.strings.substr(data, 0, 8), tf.int64)[0]
        rest = tf.cast(tf.strings.length(data), tf.int64) - 8
        inside = (length >= 0) & (length <= rest)
        data = self._check(data, inside, "is no safetensors file, or is cut")
        self._data = data
        self._start = 8 + tf.where(inside, length, 0)
        header = _slice(data, tf.constant(8, tf.int64), self._start)
        # Tensors stand in the header as in the file, so the last one says where that ends.
        last = r'(?s).*"data_offsets":\[\d+,(\d+)\]\}.*'
        some = tf.strings.regex_full_match(header, last)
        end = tf.strings.to_number(
            tf.where(some, tf.strings.regex_replace(header, last, r"\1"), "0"), tf.int64
        )
        header = self._check(header, rest - length >= end, "is cut")
        self._header = self._check(header, rest - length <= end, "has bytes behind its end")

    def expect_whole(self) -> None:
        """Check the checksum, where there is one, before anything that is read afterwards."""
        with tf.control_dependencies([self._header]):  # what was expected before is said first
            whole = is_whole(self._data)
        self._header = self._check(self._header, whole, "is damaged, as its checksum is another")

    def expect(self, key: str, value: str, otherwise: str) -> None:
        """Check an entry of the metadata, before anything that is read afterwards.

        Args:
          key: The entry.
          value: What it has to be.
          otherwise: What the error says.
        """
        pattern = f"(?s).*{re.escape(_json(key) + ':' + _json(value))}.*"
        self._header = self._check(
            self._header, tf.strings.regex_full_match(self._header, pattern), otherwise
        )

    def tensor(self, name: str, dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
        """A tensor of the file.

        Args:
          name: Its name.
          dtype: int64, or float32, which is read from float16 too.
          shape: Its shape; the first dimension may be None.
        """
        stored = "I64" if dtype == tf.int64 else "F32|F16"
        dims = ",".join(r"\d+" if dim is None else str(dim) for dim in shape.as_list())
        pattern = (
            rf'(?s).*{re.escape(_json(name))}:\{{"dtype":"({stored})","shape":\[{dims}\],'
            rf'"data_offsets":\[(\d+),(\d+)\]\}}.*'
        )
        header = self._check(
            self._header,
            tf.strings.regex_full_match(self._header, pattern),
            f"has no {name} of shape {shape}",
        )
        kind, begin, end = (tf.strings.regex_replace(header, pattern, rf"\{group}") for group in (1, 2, 3))
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
    """As the library writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _size(tensor: tf.Tensor) -> tf.Tensor:
    return tf.size(tensor, tf.int64) * tensor.dtype.size


def _bytes(tensor: tf.Tensor) -> tf.Tensor:
    """The bytes of a tensor's numbers, () string.

    TensorFlow has ``decode_raw`` and not its reverse. ``serialize_tensor`` writes a message whose last field
    they are.
    """
    size = _size(tensor)
    return tf.strings.substr(tf.io.serialize_tensor(tensor), -size, size)  # -size counts from the end
