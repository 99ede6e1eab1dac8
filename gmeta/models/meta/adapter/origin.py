"""A fingerprint of the shared weights and table settings that deltas refer to.

It covers the dense weights, which every training step changes, and each table's names, width, seed and
initial rows. It doesn't depend on the rows that a table holds: there may be billions, and they change all the
time during training or streaming updates. If rows change and the dense weights don't, deltas stay valid: a
row that a task has moved is the present row plus its delta. If the row was evicted since, it is the id's
initial row plus the delta. A table with another seed makes another model even if no weight differs, because
all ids without a row then read other values.
"""

from __future__ import annotations

import tensorflow as tf

from gmeta.models.meta.learner.task_learner import TaskLearner
from gmeta.models.meta.learner.task_view import row_names


def fingerprint(learner: TaskLearner) -> tf.Tensor:
    """Compute the fingerprint of a learner's dense weights and its tables' settings.

    Args:
      learner: The learner; a graph reads its weights when it runs.

    Returns:
      () string, 16 hexadecimal digits.
    """
    collection = learner.collection
    tables = [
        f"{name} {merged.dim} {collection.seed} {merged.policy.initializer!r}"
        for name, merged in zip(row_names(collection), collection.merged, strict=True)
    ]
    with tf.device("CPU:0"):
        dense = [
            tf.fingerprint(tf.reshape(variable, [1, -1]))  # FarmHash64 of the weight's bytes
            for layer in learner.layers
            for variable in layer.weights
        ]
        of_dense = _hexadecimal(tf.fingerprint(tf.reshape(tf.concat(dense, axis=0), [1, -1]))[0])
        return _hexadecimal(tf.fingerprint([tf.strings.join([of_dense, *tables], separator="\n")])[0])


def _hexadecimal(digest: tf.Tensor) -> tf.Tensor:
    digits = tf.constant([f"{byte:02x}" for byte in range(256)])
    return tf.strings.reduce_join(tf.gather(digits, tf.cast(digest, tf.int32)))
