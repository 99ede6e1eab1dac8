"""Split of a batch into two halves: tasks with few support samples and tasks with many.

Tasks that adapt side by side have their support sets padded to the longest one. The lengths of users'
histories have a long tail, so in one group an inner loop may compute mostly padding: with MovieLens-1M's
users in batches of 32, 57 rows in 100 are padding. In two groups 37 are (`gmeta bench meta`).
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from gmeta.models.meta.learner.task_view import TaskView


def in_two_groups(view: TaskView, outputs: Callable[[TaskView], tf.Tensor]) -> tf.Tensor:
    """Compute ``outputs(view)`` for each half separately.

    Args:
      view: A batch whose rows don't adapt.
      outputs: A view -> (tasks, ...); a task's outputs depend on its samples alone.

    Returns:
      (tasks, ...) in the order of the batch.
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
