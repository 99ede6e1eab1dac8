"""Creates variables in the middle of a function, without making TensorFlow trace it twice.

When a function is first called, TensorFlow records each variable that the call creates. A variable might be
created under a condition only, so TensorFlow traces the whole function again, this time without creating any.
That doubles the time until the first train step, because Keras creates an optimizer's slots and the metrics'
sums in that step. `tf.init_scope` computes their values outside of the function, but TensorFlow records the
variables all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.python.eager import context


@contextmanager
def lift_variables() -> Iterator[None]:
    """Create variables in a ``with`` block as if no function were being traced.

    The variables have their values when the block ends. In a graph of TensorFlow 1, and under a distribution
    strategy, which must see each new variable, this is `tf.init_scope`.

    Example:
      >>> @tf.function
      ... def step():
      ...     with lift_variables():
      ...         count = tf.Variable(3)
      ...     return count.assign_add(1)
      >>> int(step())
      4
    """
    inside = tf.inside_function()
    with tf.init_scope():
        if not inside or not tf.executing_eagerly() or tf.distribute.has_strategy():
            yield
            return
        # The hook that records variables belongs to the function's graph; another graph has none.
        with tf.Graph().as_default(), context.eager_mode():
            yield
