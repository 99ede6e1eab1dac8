"""A rank's part of a data set: the elements of its shares, those of one step joined into one.

Element i belongs to step i // V and, in it, to share i mod V (`gmeta.core.shares`). A rank of k
shares makes one element of its k elements of a step, as if the data had come in larger batches. Their order
is kept, so only the last step can be of fewer, as it is of fewer shares where each has a rank.

Joining is done on flat values. A part's values, row by row, are laid behind each other, and so are the
lengths of ragged rows; rows follow rows then, whatever the part's rank. This takes one `ragged_batch` of
vectors.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.shares import Shares


@tf.autograph.experimental.do_not_convert
def part_of(dataset: tf.data.Dataset, shares: Shares) -> tf.data.Dataset:
    """The elements of a data set that belong to some shares, one for each step.

    Args:
      dataset: Of elements whose parts are dense, ragged or sparse tensors with samples in the first
        dimension, or scalars.
      shares: Whose elements are wanted.

    Returns:
      Elements of the same structure. Samples of a step's elements stand behind each other, in the elements'
      order; scalars must be equal in all of them. Called eagerly, the cardinality is known if the data set's
      is.

    Raises:
      ConfigError: There are several elements to join, and a part of them can't be.
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
    """How one part of an element becomes vectors, and those of several elements one part again."""

    def __init__(self, spec: tf.TypeSpec, name: str) -> None:
        self._spec, self._name = spec, name

    def flat(self, leaf: Any) -> tuple[tf.Tensor, ...]:
        raise NotImplementedError

    def join(self, *vectors: Any) -> Any:
        raise NotImplementedError

    def _dense(self, values: Any, shapes: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        """The rows of dense tensors of these shapes, (k, rank), behind each other."""
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
        # A row of the flat values is one of theirs, so its shape is that of the ragged tensor's last
        # dimensions.
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
        # What isn't there needs no room, so the widest holds all.
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
    # Of unknown length, whatever is known of it: `ragged_batch` then always makes rows of one ragged tensor.
    vector = tf.reshape(tensor, [-1])
    return tf.raw_ops.PlaceholderWithDefault(input=vector, shape=[None])


def _behind_each_other(vectors: tf.RaggedTensor | tf.Tensor) -> tf.Tensor:
    return vectors.flat_values if isinstance(vectors, tf.RaggedTensor) else tf.reshape(vectors, [-1])
