"""Variables that are made in the middle of a function, without making TensorFlow trace it twice.

The first time that a function is called, TensorFlow takes note of each variable that is made meanwhile. It
might be made under a condition alone, so the whole function is traced again, this time without making any.
That doubles the time until the first train step, as Keras makes an optimizer's slots and the metrics' sums in
it. `tf.init_scope` makes their values outside of the function, but the note is taken all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.python.eager import context


@contextmanager
def lift_variables() -> Iterator[None]:
    """Make variables in a ``with`` block as if no function were being traced.

    They have their values when the block ends. In a graph of TensorFlow 1, and under a distribution strategy,
    which must see what is made, this is `tf.init_scope`.

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
        # Who takes note stands on the function's graph: on another one nobody does.
        with tf.Graph().as_default(), context.eager_mode():
            yield
