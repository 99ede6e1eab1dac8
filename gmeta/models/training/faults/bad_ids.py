"""Says in one line which id a step has refused, in place of TensorFlow's account of the graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from gmeta.core.errors import ConfigError

# What ``ops/merge_keys/kernels.cc`` says.
_REFUSAL = re.compile(r"feature '[^'\n]*': id (?P<id>-?\d+) at position .*? takes any id")
_MINUS_ONE = "; -1 stands for no id only in a matrix of ids of a feature with a combiner"


class BadIdError(ConfigError, tf.errors.InvalidArgumentError):
    """An id that no row can have.

    Args:
      message: The feature, the id, the limit, and what to do.
    """

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


@contextmanager
def name_bad_ids() -> Iterator[None]:
    """Turn the error of a graph that was given ids out of range into one line.

    Raises:
      BadIdError: It names the feature, the id, its position and the limit.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _REFUSAL.search(str(error.message))
        if found is None:
            raise
        raise BadIdError(found[0] + (_MINUS_ONE if found["id"] == "-1" else "")) from None
