r"""A checksum of serialized fast weights, by stock TensorFlow ops that run in Python and in exported graphs.

It is an entry of the header's ``__metadata__``, ``"checksum":"<19 digits>"``: the lower 63 bits of FarmHash's
64-bit fingerprint (``Fingerprint64``) of all bytes, with the digits set to zero. Bytes of an earlier gmeta
have no such entry, and no other entries than `EARLIER`. So bytes whose entry has a damaged name can't pass as
those of an earlier gmeta.
"""

from __future__ import annotations

import re

import tensorflow as tf

NAME = "checksum"
DIGITS = 19
NONE = "0" * DIGITS
"""The placeholder that `seal` replaces with the checksum."""

EARLIER = ("format", "version", "model", "algorithm", "steps", "fingerprint")
"""The only entries that bytes without a checksum may have."""

_ENTRY = rf'"{NAME}":"(\d{{{DIGITS}}})"'
_TEXT = r'"(?:[^"\\]|\\.)*"'
_PAIR = rf'"(?:{"|".join(map(re.escape, EARLIER))})":{_TEXT}'
_UNSEALED = rf'(?s)\{{"__metadata__":\{{{_PAIR}(?:,{_PAIR})*\}}.*'


def seal(data: tf.Tensor) -> tf.Tensor:
    """Put the checksum into the bytes of a safetensors file whose metadata has `NONE` for it.

    Args:
      data: () string.
    """
    length, header, body = _parts(data)
    digits = _sum_of(data)
    entry = tf.strings.join([f'"{NAME}":"', digits, '"'])
    header = tf.strings.regex_replace(header, _ENTRY, entry, replace_global=False)
    return tf.strings.join([length, header, body])


def is_whole(data: tf.Tensor) -> tf.Tensor:
    """Return whether bytes match their checksum, or come from an earlier gmeta without checksums; () bool.

    Args:
      data: () string, a safetensors file whose header, at least, is whole.
    """
    length, header, body = _parts(data)
    given = tf.strings.regex_replace(header, f"(?s).*?{_ENTRY}.*", r"\1")
    empty = tf.strings.regex_replace(header, _ENTRY, f'"{NAME}":"{NONE}"', replace_global=False)
    same = tf.equal(given, _sum_of(tf.strings.join([length, empty, body])))
    return same | tf.strings.regex_full_match(header, _UNSEALED)


def _parts(data: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Split bytes into the header's length, the header, and the numbers."""
    length = tf.strings.substr(data, 0, 8)
    end = 8 + tf.io.decode_raw(length, tf.int64)[0]
    header = tf.strings.substr(data, tf.constant(8, tf.int64), end - 8)
    return length, header, tf.strings.substr(data, end, tf.cast(tf.strings.length(data), tf.int64) - end)


def _sum_of(data: tf.Tensor) -> tf.Tensor:
    bits = tf.bitcast(tf.raw_ops.Fingerprint(data=data[None], method="farmhash64"), tf.int64)[0]
    return tf.strings.as_string(bits & tf.int64.max, width=DIGITS, fill="0")
