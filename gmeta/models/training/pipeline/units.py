"""Takes some units of a batch, such as samples, along the first dimension of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph.conditions import refuse_unless
from gmeta.ops import Jagged, jagged


def count_units(name: str, data: Any) -> tf.Tensor:
    """Return the first dimension of all parts of a batch, () int64.

    Args:
      name: The name of the model that is trained.
      data: The batch: a nest of tensors, dense, ragged, sparse or `Jagged`, and None.

    Raises:
      ConfigError: The parts have different first dimensions (in a graph, raised as by
        `gmeta.core.graph.conditions.refuse_unless`), or one has none.
    """
    sizes = [_size(name, part) for part in _parts(data) if part is not None]
    if not sizes:
        raise ConfigError(f"{name}: micro_batches divide a batch, and this one has no tensors")
    alike = tf.reduce_all(tf.stack(sizes) == sizes[0])
    told = (
        f"{name}: micro_batches divide a batch by its first dimension, which its parts don't have in common"
    )
    count: tf.Tensor = refuse_unless(sizes[0], alike, told)
    return count


def take_units(data: Any, units: tf.Tensor) -> Any:
    """Return a batch of some units.

    Args:
      data: The batch, as for `count_units`.
      units: (n,) int64, the numbers of the units, each at most once.
    """
    return _map(lambda part: None if part is None else _take(part, units), data)


def even_units(count: tf.Tensor, micro_batches: int) -> list[tf.Tensor]:
    """Divide units into micro-batches: contiguous, of nearly equal size, the first not empty if any isn't."""
    with tf.device("CPU:0"):
        ends = [(count * number + micro_batches - 1) // micro_batches for number in range(micro_batches + 1)]
        return [tf.range(begin, end) for begin, end in pairwise(ends)]


def _take(part: Any, units: tf.Tensor) -> Any:
    if isinstance(part, Jagged):
        whole = jagged.as_jagged(part)
        assert whole is not None
        return jagged.from_ragged(tf.gather(jagged.to_ragged(whole), units))
    if isinstance(part, tf.SparseTensor):
        numbers = tf.tensor_scatter_nd_update(
            tf.fill(part.dense_shape[:1], tf.constant(-1, tf.int64)),
            units[:, tf.newaxis],
            tf.range(_length(units)),
        )
        row = tf.gather(numbers, part.indices[:, 0])
        kept = row >= 0
        indices = tf.concat([row[:, tf.newaxis], part.indices[:, 1:]], axis=1)
        taken = tf.SparseTensor(
            tf.boolean_mask(indices, kept),
            tf.boolean_mask(part.values, kept),
            tf.concat([[_length(units)], part.dense_shape[1:]], axis=0),
        )
        return tf.sparse.reorder(taken)
    return tf.gather(part, units)


def _size(name: str, part: Any) -> tf.Tensor:
    if isinstance(part, Jagged):
        return _length(part.offsets) - 1
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    if tf.convert_to_tensor(part).shape.rank == 0:
        raise ConfigError(
            f"{name}: micro_batches divide a batch by its first dimension, and a part of this one is a "
            "single number: repeat it for each sample, or leave micro_batches out"
        )
    return _length(part)


def _length(vector: Any) -> tf.Tensor:
    return tf.shape(vector, tf.int64)[0]


def _parts(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        for value in data.values():
            yield from _parts(value)
    elif isinstance(data, list | tuple) and not isinstance(data, Jagged):
        for value in data:
            yield from _parts(value)
    else:
        yield data


def _map(change: Callable[[Any], Any], data: Any) -> Any:
    if isinstance(data, Mapping):
        return {name: _map(change, value) for name, value in data.items()}
    if isinstance(data, list | tuple) and not isinstance(data, Jagged):
        changed = [_map(change, value) for value in data]
        return type(data)(*changed) if hasattr(data, "_fields") else type(data)(changed)
    return change(data)
