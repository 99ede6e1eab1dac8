"""Tensors that can be had only if something holds."""

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
      tensors: Of any nest.
      holds: Booleans of any shape, all of which must be true.
      told: What the error says, texts and tensors.
      summarize: How many numbers it shows of each of these tensors.

    Returns:
      The same tensors. Run at once, a condition that doesn't hold is an error here; in a graph, where they
      are used.

    Raises:
      InvalidArgumentError: It doesn't hold.

    Example:
      >>> float(assert_first(tf.constant(2.0), tf.constant([True, True]), ["numbers must be positive"]))
      2.0
    """
    check = tf.debugging.Assert(tf.reduce_all(holds), list(told), summarize=summarize)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.nest.map_structure(tf.identity, tensors, expand_composites=True)


def refuse_unless(tensors: Any, holds: tf.Tensor, sentence: str | tf.Tensor) -> Any:
    """`assert_first` for what is the user's to mend.

    Args:
      tensors: Of any nest.
      holds: Booleans of any shape, all of which must be true.
      sentence: What the error says, a text or () string.

    Returns:
      The same tensors.

    Raises:
      ConfigError: It doesn't hold; of a graph, where it is run within `name_refusals`.
    """
    if tf.executing_eagerly() and not bool(tf.reduce_all(holds)):
        raise ConfigError(sentence if isinstance(sentence, str) else sentence.numpy().decode())
    return assert_first(tensors, holds, [tf.strings.join(["gmeta refuses: ", sentence, "..."])])


@contextmanager
def name_refusals() -> Iterator[None]:
    """Turn the error of a graph that `refuse_unless` has stopped into its sentence alone.

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
