"""What deltas are from: a name for a model's shared weights and for what its tables are.

It is told from the dense weights, which every training step moves, and of each table from the names in it,
its width, its seed and how rows start. It takes no count of the rows: there may be billions, and while
training or streaming updates go on they are never the same twice. Where rows move and the dense weights
don't, deltas stay good: a row that a task has moved is then the present row plus its delta, and one that was
evicted since, the row that its id starts with plus the delta. A table of another seed is another matter: all
ids without a row read something else, so it is another model though no weight differs.
"""

from __future__ import annotations

import tensorflow as tf

from gmeta.models.meta.learner.task_learner import TaskLearner
from gmeta.models.meta.learner.task_view import row_names


def fingerprint(learner: TaskLearner) -> tf.Tensor:
    """Of a model's dense weights and what its tables are, 16 hexadecimal digits, () string.

    Args:
      learner: The learner; in a graph, its weights as they are when the graph runs.
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
