"""Tasks of a batch in two halves, those with few support samples and those with many.

Support sets are padded to the longest of those that adapt side by side. Users' histories have long tails, so
in one group most of what an inner loop computes may be padding: of MovieLens-1M's users in batches of 32, 57
rows in 100. In two groups it is 37 (`gmeta bench meta`).
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from gmeta.models.meta.learner.task_view import TaskView


def in_two_groups(view: TaskView, outputs: Callable[[TaskView], tf.Tensor]) -> tf.Tensor:
    """``outputs(view)``, computed for each half by itself.

    Args:
      view: A batch whose rows don't adapt.
      outputs: A view -> (tasks, ...), each task's own by its samples alone.

    Returns:
      (tasks, ...) in the batch's order.
    """
    mask = view.mask("support")
    sizes = tf.reduce_max(tf.where(mask > 0, tf.range(1, tf.shape(mask)[1] + 1), 0), axis=1)
    order = tf.argsort(sizes)
    half = view.tasks // 2
    found = []
    for tasks in (order[:half], order[half:]):
        longest = tf.reduce_max(tf.concat([tf.gather(sizes, tasks), [0]], axis=0))
        found.append(outputs(view.of_tasks(tasks, longest)))
    return tf.gather(tf.concat(found, axis=0), tf.math.invert_permutation(order))
