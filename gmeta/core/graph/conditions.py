"""Checks a condition before tensors are used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from gmeta.core import errors
from gmeta.core.errors import ConfigError, GmetaError

_SENTENCE = re.compile(r"gmeta raises (\w+): (.*?)\.\.\.")


def assert_first(tensors: Any, holds: tf.Tensor, told: Sequence[Any], summarize: int | None = None) -> Any:
    """Check a condition before tensors are used.

    Args:
      tensors: Any nested structure of tensors; it may contain None.
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
    return hold(tensors, [] if check is None else [check])


@tf.autograph.experimental.do_not_convert
def hold(tensors: Any, until: Sequence[Any]) -> Any:
    """Return the same tensors, available in a graph only once ``until``, tensors and operations, have run.

    Args:
      tensors: Any nested structure of tensors; it may contain None.
      until: What must have run.
    """
    with tf.control_dependencies(list(until)):
        return tf.nest.map_structure(
            lambda tensor: None if tensor is None else tf.identity(tensor), tensors, expand_composites=True
        )


def refuse_unless(
    tensors: Any, holds: tf.Tensor, sentence: str | tf.Tensor, error: type[GmetaError] = ConfigError
) -> Any:
    """Check a condition like `assert_first`, but raise an error that the user can fix.

    Args:
      tensors: Any nested structure of tensors.
      holds: Booleans of any shape, all of which must be true.
      sentence: The error message, a text or () string.
      error: The class of the error, one of `gmeta.core.errors`.

    Returns:
      The same tensors.

    Raises:
      GmetaError: The condition doesn't hold. A graph raises an error of the class ``error`` only inside
        `name_refusals`, and elsewhere TensorFlow's `InvalidArgumentError` with the same message.
    """
    if tf.executing_eagerly() and not bool(tf.reduce_all(holds)):
        raise error(sentence if isinstance(sentence, str) else sentence.numpy().decode())
    return assert_first(
        tensors, holds, [tf.strings.join([f"gmeta raises {error.__name__}: ", sentence, "..."])]
    )


def refuse_numbers(numbers: tf.Tensor, good: tf.Tensor, wanted: str, advice: str = "") -> tf.Tensor:
    """Refuse numbers that aren't in their domain.

    Args:
      numbers: Numbers of any shape.
      good: bool of that shape, which numbers are in their domain.
      wanted: What they must be, such as "labels must be at least 0".
      advice: What to do next.

    Returns:
      The same numbers.

    Raises:
      ConfigError: Some aren't; the message shows the first of them. As in `refuse_unless`, a graph raises it
        only inside `name_refusals`.

    Example:
      >>> refuse_numbers(tf.constant([1.0, 2.0]), tf.constant([True, True]), "rates must be above 0").numpy()
      array([1., 2.], dtype=float32)
    """
    bad = tf.cast(tf.boolean_mask(numbers, ~good)[:1], tf.float64)
    shown = tf.strings.reduce_join(tf.strings.as_string(bad, shortest=True))
    sentence = tf.strings.join([f"{wanted}, got ", shown, f": {advice}" if advice else ""])
    return refuse_unless(numbers, good, sentence)


@contextmanager
def name_refusals() -> Iterator[None]:
    """Turn the error of a graph that `refuse_unless` stopped into the error that it names.

    Raises:
      GmetaError: The error, with the sentence alone.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _SENTENCE.search(str(error.message))
        if found is None:
            raise
        sentence = re.sub(r"\\(['\"\\])", r"\1", found[2])  # TensorFlow escapes quotes
        raise getattr(errors, found[1])(sentence) from None
