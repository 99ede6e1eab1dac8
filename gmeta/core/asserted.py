"""Tensors that can be had only if something holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def asserted(tensors: Any, holds: tf.Tensor, told: Sequence[Any], summarize: int | None = None) -> Any:
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
      >>> float(asserted(tf.constant(2.0), tf.constant([True, True]), ["numbers must be positive"]))
      2.0
    """
    check = tf.debugging.Assert(tf.reduce_all(holds), list(told), summarize=summarize)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.nest.map_structure(tf.identity, tensors, expand_composites=True)
