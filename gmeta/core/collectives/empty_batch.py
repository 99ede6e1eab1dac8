"""A batch of no samples, for a rank without data in a step that all ranks take together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError


def empty_batch(spec: Any) -> Any:
    """Return a batch without samples, with the structure of a data set's elements.

    Raises:
      ConfigError: A part of an element has unknown rank, or isn't a tensor.
    """
    return tf.nest.map_structure(_empty, spec)


def _empty(spec: tf.TypeSpec) -> Any:
    tensors = isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec))
    if not tensors or spec.shape.rank is None:
        raise ConfigError(
            f"a rank without data needs a batch of no samples, but there is none of {spec}: give the data "
            "set's elements tensors of known rank (from_generator: output_signature)"
        )
    shape = spec.shape
    if shape.rank == 0:
        return tf.zeros([], spec.dtype)
    inner = [1 if size is None else size for size in shape[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, shape.rank], tf.int64), tf.zeros([0], spec.dtype), [0, *inner])
    if isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank:
        values = tf.zeros([0, *inner[spec.ragged_rank :]], spec.dtype)
        nothing = tf.zeros([1], spec.row_splits_dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, [nothing] * spec.ragged_rank)
    return tf.zeros([0, *inner], spec.dtype)
