"""A rank's part of a data set: the elements of its shares, joined into one element for each step.

Element i belongs to step i // V and, within that step, to share i mod V (`gmeta.core.shares`). A rank with k
shares joins its k elements of a step into one, as if batches were larger. It keeps their order, so only the
last step can have fewer elements, just as with one share per rank.

The elements are joined as flat values. The code concatenates a part's values, row by row, and the lengths of
its ragged rows, so that rows follow rows for parts of any rank. This takes one `ragged_batch` of vectors.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.shares import Shares


@tf.autograph.experimental.do_not_convert
def part_of(dataset: tf.data.Dataset, shares: Shares) -> tf.data.Dataset:
    """Select the elements of a data set that belong to some shares, joined into one element per step.

    Args:
      dataset: A data set. The parts of its elements are dense, ragged or sparse tensors with samples in the
        first dimension, or scalars.
      shares: The shares whose elements are selected.

    Returns:
      A data set with elements of the same structure. The samples of a step's elements are concatenated in
      order; scalars must be equal in all elements. In eager mode, the cardinality is known if that of
      `dataset` is known.

    Raises:
      ConfigError: There are several elements to join, and one of their parts can't be joined.
      tf.errors.InvalidArgumentError: While iterating: the elements of a step differ in a scalar, or in a
        dimension other than the first.

    Example:
      >>> pairs = tf.data.Dataset.range(10).batch(2)
      >>> [e.numpy().tolist() for e in part_of(pairs, Shares(first=1, count=2, total=3))]
      [[2, 3, 4, 5], [8, 9]]
    """
    if shares.count == 1:
        return dataset.shard(shares.total, shares.first) if shares.total > 1 else dataset
    known = int(dataset.cardinality()) if tf.executing_eagerly() else tf.data.UNKNOWN_CARDINALITY
    spec = dataset.element_spec
    parts = [_part(part, index) for index, part in enumerate(tf.nest.flatten(spec))]

    def flat(*element: Any) -> tuple[tuple[tf.Tensor, ...], ...]:
        leaves = tf.nest.flatten(element if isinstance(spec, tuple) else element[0])
        return tuple(part.flat(leaf) for part, leaf in zip(parts, leaves, strict=True))

    def join(*vectors: tuple[Any, ...]) -> Any:
        leaves = [part.join(*vector) for part, vector in zip(parts, vectors, strict=True)]
        return tf.nest.pack_sequence_as(spec, leaves)

    if shares.count < shares.total:
        last = shares.first + shares.count

        def ours(number: tf.Tensor, _: Any) -> tf.Tensor:
            share = number % shares.total
            return (share >= shares.first) & (share < last)

        dataset = dataset.enumerate().filter(ours).map(lambda _, element: element)
    steps = dataset.map(flat).ragged_batch(shares.count).map(join)
    size = known if known < 0 else shares.steps(known)
    return (
        steps
        if size == tf.data.UNKNOWN_CARDINALITY
        else steps.apply(tf.data.experimental.assert_cardinality(size))
    )


class _Part:
    """Splits one part of an element into vectors, and joins the vectors of several elements into one part."""

    def __init__(self, spec: tf.TypeSpec, name: str) -> None:
        self._spec, self._name = spec, name

    def flat(self, leaf: Any) -> tuple[tf.Tensor, ...]:
        raise NotImplementedError

    def join(self, *vectors: Any) -> Any:
        raise NotImplementedError

    def _dense(self, values: Any, shapes: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        """Concatenate the rows of dense tensors of these shapes, (k, rank)."""
        same = tf.reduce_all(shapes[:, 1:] == shapes[:1, 1:])
        advice = "give them one width (padded_batch with padded_shapes), or ragged or sparse tensors"
        what = f"the elements of a step can't be joined: {self._name} has these shapes in them; {advice}"
        with tf.control_dependencies([tf.debugging.Assert(same, [what, shapes], summarize=64)]):
            rows = tf.reduce_sum(shapes[:, :1], axis=0)
        tensor = tf.reshape(_behind_each_other(values), tf.concat([rows, shapes[0, 1:]], axis=0))
        return tf.ensure_shape(tensor, [None, *spec.shape[1:]])


class _Dense(_Part):
    def flat(self, leaf: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return _vector(leaf), tf.shape(leaf, tf.int64)

    def join(self, values: Any, shapes: tf.Tensor) -> tf.Tensor:
        return self._dense(values, shapes, self._spec)


class _Scalar(_Part):
    def flat(self, leaf: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (leaf,)

    def join(self, values: tf.Tensor) -> tf.Tensor:
        same = tf.reduce_all(values == values[0])
        what = f"the elements of a step can't be joined: {self._name} is a scalar, and differs in them"
        with tf.control_dependencies([tf.debugging.Assert(same, [what, values], summarize=64)]):
            return tf.identity(values[0])


class _Ragged(_Part):
    def flat(self, leaf: tf.RaggedTensor) -> tuple[tf.Tensor, ...]:
        values = leaf.flat_values
        return (_vector(values), tf.shape(values, tf.int64), *leaf.nested_row_lengths())

    def join(self, values: Any, shapes: tf.Tensor, *lengths: Any) -> tf.RaggedTensor:
        # A row of the flat values has the shape of the ragged tensor's last dimensions.
        inner = self._spec.shape[self._spec.ragged_rank :]
        flat = self._dense(values, shapes, tf.TensorSpec(inner, self._spec.dtype))
        nested = [_behind_each_other(part) for part in lengths]
        return tf.RaggedTensor.from_nested_row_lengths(flat, nested, validate=False)


class _Sparse(_Part):
    def flat(self, leaf: tf.SparseTensor) -> tuple[tf.Tensor, ...]:
        return leaf.indices[:, 0], _vector(leaf.indices[:, 1:]), leaf.values, leaf.dense_shape

    def join(self, rows: Any, rest: Any, values: Any, shapes: tf.Tensor) -> tf.SparseTensor:
        before = tf.cumsum(shapes[:, 0], exclusive=True)
        moved = _behind_each_other(rows) + tf.repeat(before, rows.row_lengths())
        inner = tf.reshape(_behind_each_other(rest), tf.stack([tf.size(moved), shapes.shape[1] - 1]))
        # Absent values take no space, so the widest shape holds all elements.
        size = tf.concat([tf.reduce_sum(shapes[:, :1], axis=0), tf.reduce_max(shapes[:, 1:], axis=0)], axis=0)
        indices = tf.concat([moved[:, None], inner], axis=1)
        return tf.SparseTensor(indices, _behind_each_other(values), size)


def _part(spec: tf.TypeSpec, index: int) -> _Part:
    name = f"part {index} of an element, {spec},"
    tensors = isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec))
    if not tensors or spec.shape.rank is None:
        raise ConfigError(
            f"this rank takes several elements a step and has to join them, but {name} can't be joined: give "
            "the data set's elements tensors of known rank (from_generator: output_signature)"
        )
    if isinstance(spec, tf.SparseTensorSpec):
        return _Sparse(spec, name)
    if isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank:
        return _Ragged(spec, name)
    return _Dense(spec, name) if spec.shape.rank else _Scalar(spec, name)


def _vector(tensor: tf.Tensor) -> tf.Tensor:
    # With an unknown static length, `ragged_batch` always makes the vectors rows of one ragged tensor.
    vector = tf.reshape(tensor, [-1])
    return tf.raw_ops.PlaceholderWithDefault(input=vector, shape=[None])


def _behind_each_other(vectors: tf.RaggedTensor | tf.Tensor) -> tf.Tensor:
    return vectors.flat_values if isinstance(vectors, tf.RaggedTensor) else tf.reshape(vectors, [-1])


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
