"""Checks a condition before tensors are used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError

_SENTENCE = re.compile(r"gmeta refuses: (.*?)\.\.\.")


def assert_first(tensors: Any, holds: tf.Tensor, told: Sequence[Any], summarize: int | None = None) -> Any:
    """Check a condition before tensors are used.

    Args:
      tensors: Any nested structure of tensors.
      holds: Booleans of any shape, all of which must be true.
      told: Texts and tensors that the error message shows.
      summarize: How many numbers of each of these tensors the message shows.

    Returns:
      The same tensors. If the condition doesn't hold, eager code fails here, and a graph fails where the
      tensors are used.

    Raises:
      InvalidArgumentError: The condition doesn't hold.

    Example:
      >>> float(assert_first(tf.constant(2.0), tf.constant([True, True]), ["numbers must be positive"]))
      2.0
    """
    check = tf.debugging.Assert(tf.reduce_all(holds), list(told), summarize=summarize)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.nest.map_structure(tf.identity, tensors, expand_composites=True)


def refuse_unless(tensors: Any, holds: tf.Tensor, sentence: str | tf.Tensor) -> Any:
    """Check a condition like `assert_first`, but raise an error that the user can fix.

    Args:
      tensors: Any nested structure of tensors.
      holds: Booleans of any shape, all of which must be true.
      sentence: The error message, a text or () string.

    Returns:
      The same tensors.

    Raises:
      ConfigError: The condition doesn't hold. A graph raises this error only inside `name_refusals`.
    """
    if tf.executing_eagerly() and not bool(tf.reduce_all(holds)):
        raise ConfigError(sentence if isinstance(sentence, str) else sentence.numpy().decode())
    return assert_first(tensors, holds, [tf.strings.join(["gmeta refuses: ", sentence, "..."])])


@contextmanager
def name_refusals() -> Iterator[None]:
    """Turn the error of a graph that `refuse_unless` stopped into a `ConfigError` with the sentence alone.

    Raises:
      ConfigError: The sentence.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _SENTENCE.search(str(error.message))
        if found is None:
            raise
        raise ConfigError(found[1]) from None
