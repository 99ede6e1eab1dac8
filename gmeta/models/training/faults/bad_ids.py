"""Reports in one line which id a step has refused, instead of TensorFlow's dump of the graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from gmeta.core.errors import ConfigError

# Matches the error message of ``ops/merge_keys/kernels.cc``.
_REFUSAL = re.compile(r"feature '[^'\n]*': id (?P<id>-?\d+) at position .*? takes any id")
_MINUS_ONE = "; -1 stands for no id only in a matrix of ids of a feature with a combiner"


class BadIdError(ConfigError, tf.errors.InvalidArgumentError):
    """The error for an id that no row can have.

    Args:
      message: The feature, the id, the limit, and what to do.
    """

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


@contextmanager
def name_bad_ids() -> Iterator[None]:
    """Turn the error of a graph that received an id out of range into one line.

    Raises:
      BadIdError: An id is out of range. The message names the feature, the id, its position and the limit.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _REFUSAL.search(str(error.message))
        if found is None:
            raise
        raise BadIdError(found[0] + (_MINUS_ONE if found["id"] == "-1" else "")) from None
