"""Gives each rank its part of the data, in the same number of batches as every other rank.

Any data that Keras accepts (arrays, tensors, data sets, generators) becomes a `tf.data.Dataset`. If all N
ranks receive the same data, each takes every N-th sample or element, starting at its own rank number. So
without shuffling, the k-th batches of all N ranks together are the k-th batch of one rank whose batches are N
times as large. If an elastic job has lost ranks, the remaining ranks also take the parts of the lost ones
(`gmeta.core.shares`), and the k-th batches contain the same samples as before.

Ranks must take the same number of steps, because they exchange data in each step. A rank with less data
continues with batches of no samples.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf
from tf_keras.src.engine import data_adapter

from gmeta.core import collectives
from gmeta.core.collectives.shared_data import empty_batch, part_of
from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.core.shares import Shares
from gmeta.core.step import StepCallback
from gmeta.ops.device import compute_place

_OFF = tf.data.experimental.AutoShardPolicy.OFF
_BATCH = 32  # samples, Keras' default


class RankData(NamedTuple):
    """A rank's part of the data.

    Attributes:
      dataset: The rank's batches.
      digest: If the rank takes every N-th element, the digest that `SameElements` compares with the other
        ranks' digests; None otherwise.
    """

    dataset: tf.data.Dataset
    digest: tf.Variable | None


def rank_dataset(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool | str = True,
    steps: int | None = None,
    shard: bool = True,
    **generator: Any,
) -> RankData:
    """Return this rank's training or test data, in the same number of batches as every other rank's.

    All ranks must call this together.

    Args:
      x: As in ``tf.keras.Model.fit``.
      y: As in ``tf.keras.Model.fit``.
      sample_weight: As in ``tf.keras.Model.fit``.
      batch_size: Samples per batch of one share of the data, which is one rank's. With N ranks, a step has N
        times as many.
      shuffle: As in ``tf.keras.Model.fit``, for arrays. A ``keras.utils.Sequence`` is read in its own order.
      steps: The requested number of batches. None: not set.
      shard: Whether to take this rank's part: every N-th sample of arrays, every N-th element of anything
        else. A data set whose ``options().experimental_distribute.auto_shard_policy`` is OFF isn't sharded:
        each rank must then receive its own part (in an elastic job, from
        ``gmeta.core.collectives.shared_data.part_of(data, world().shares)``).
      **generator: Keras' ``max_queue_size``, ``workers`` and ``use_multiprocessing``, and ``model``.

    Raises:
      ConfigError: Ranks can't take steps on the data together, or elements can't be joined.
    """
    shares = collectives.world().shares
    adapter = data_adapter.select_data_adapter(x, y)
    elements = isinstance(x, tf.data.Dataset) or issubclass(adapter, data_adapter.GeneratorDataAdapter)
    if isinstance(x, tf.data.Dataset):
        dataset = x
        shard = shard and dataset.options().experimental_distribute.auto_shard_policy != _OFF
    else:
        if shard and not elements:
            x, y, sample_weight = (take_strided(part, shares) for part in (x, y, sample_weight))
            if shares.count > 1 and (batch_size or steps is None):
                batch_size = (batch_size or _BATCH) * shares.count
        made = adapter(
            x,
            y,
            batch_size=batch_size,
            steps=steps,
            epochs=1,  # one pass over the data set is one epoch of training
            sample_weights=sample_weight,
            shuffle=shuffle and not elements,
            **generator,
        )
        dataset = made.get_dataset()
        if made.get_size() is not None:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(made.get_size()))
    digest = None
    if shard and elements:
        dataset, digest = _with_digest(dataset)
        dataset = part_of(dataset, shares)
    return RankData(in_lockstep(dataset, steps), digest)


def near_gpu(data: Any) -> Any:
    """Return a data set whose batches are in pinned memory, if this process computes on a GPU.

    Copies of batches to the GPU then stop neither the host nor the GPU. Some batches are prepared ahead,
    unless the options of the data set forbid it by ``inject_prefetch``: a position, which counts the batches
    that are taken, sets it. Strings stay where they are, and so does anything other than a data set.
    """
    if compute_place() == "cpu" or not isinstance(data, tf.data.Dataset):
        return data

    @tf.autograph.experimental.do_not_convert
    def copy(*parts: Any) -> Any:
        return tf.nest.map_structure(_near_gpu, _element(data.element_spec, parts), expand_composites=True)

    copied = data.map(copy)
    forbidden = data.options().experimental_optimization.inject_prefetch is False
    return copied if forbidden else copied.prefetch(1)


def _near_gpu(column: Any) -> Any:
    if tf.is_tensor(column) and column.dtype in _COPIED:
        return load_op_library("ops").gmeta_near_gpu(column=column)
    return column


_COPIED = (
    tf.bool,
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
)


def _element(spec: Any, parts: tuple[Any, ...]) -> Any:
    """Return an element from its parts, as `tf.data.Dataset.map` passes it: a plain tuple is unpacked."""
    return parts if type(spec) is tuple else parts[0]


def in_lockstep(dataset: tf.data.Dataset, steps: int | None = None) -> tf.data.Dataset:
    """Append batches of no samples to a rank's batches while other ranks still have batches.

    If a rank doesn't know its number of batches, all ranks continue without end: the first step in which no
    rank has samples ends the epoch (`gmeta.training.rank_steps`). All ranks must call this together.

    Args:
      dataset: The rank's batches.
      steps: The number of steps in an epoch. None: not set.

    Raises:
      ConfigError: Some data is endless and ``steps`` isn't set; or for a part of the elements there is no
        batch without samples.
    """
    sizes = collectives.allgather_objects(int(dataset.cardinality()))
    endless = [str(rank) for rank, size in enumerate(sizes) if size == tf.data.INFINITE_CARDINALITY]
    if endless and steps is None:
        raise ConfigError(
            f"the data of rank {', '.join(endless)} has no end: pass steps_per_epoch to fit, or steps to "
            "evaluate"
        )
    if len(sizes) == 1:
        return dataset
    padded = pad_for_ever(dataset)
    if steps is not None:
        return padded
    if min(sizes) >= 0:
        return padded.take(max(sizes))
    return padded.filter(lambda *_: True)  # hides the infinite cardinality, which Keras would refuse


def pad_for_ever(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Append an endless series of batches of no samples to a data set.

    If the data set's specification leaves a dimension after the first open, an empty batch takes it from the
    last real batch, or 1 if there was none.

    Raises:
      ConfigError: A part of an element has unknown rank, or isn't a tensor.
    """
    spec = dataset.element_spec
    empty = tf.data.Dataset.from_tensors(empty_batch(spec)).repeat()
    open_parts = [index for index, part in enumerate(tf.nest.flatten(spec)) if _is_open(part)]
    if not open_parts:
        return dataset.concatenate(empty)

    def remember(shapes: tuple[tf.Tensor, ...], both: tuple[tf.Tensor, Any]) -> Any:
        real, batch = both
        known, parts = list(shapes), tf.nest.flatten(batch)
        for place, index in enumerate(open_parts):
            found = parts[index]
            known[place] = tf.where(real, tf.concat([[0], tf.shape(found)[1:]], axis=0), shapes[place])
            nothing = functools.partial(tf.zeros, known[place], found.dtype)
            parts[index] = tf.cond(real, functools.partial(tf.identity, found), nothing)
        return tuple(known), tf.nest.pack_sequence_as(batch, parts)

    marked = dataset.map(lambda *parts: (True, _element(spec, parts))).concatenate(
        empty.map(lambda *parts: (False, _element(spec, parts)))
    )
    none = tf.nest.flatten(empty_batch(spec))
    return marked.scan(tuple(tf.shape(none[index]) for index in open_parts), remember)


def _is_open(spec: tf.TypeSpec) -> bool:
    return isinstance(spec, tf.TensorSpec) and None in (spec.shape.as_list() or [])[1:]


def _with_digest(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, tf.Variable]:
    """Return the data set, and a variable that receives the digest of the first element of each iteration."""
    with tf.init_scope(), tf.device("CPU:0"):
        digest = tf.Variable(tf.zeros([2], tf.int64), trainable=False, name="first_element")

    def note(element: Any) -> tf.Tensor:
        parts = [tf.io.serialize_tensor(part) for part in tf.nest.flatten(element, expand_composites=True)]
        both = tf.strings.to_hash_bucket_strong(tf.strings.join(parts), 1 << 62, key=[17, 4])
        return digest.assign([1, both], read_value=True)

    def pass_on(number: tf.Tensor, element: Any) -> Any:
        first = tf.cond(tf.equal(number, 0), lambda: note(element), lambda: tf.zeros([2], tf.int64))
        with tf.control_dependencies([first]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    return dataset.enumerate().map(pass_on), digest


class SameElements(StepCallback):
    """A callback that checks in the first step that the data set that ranks share is the same on all of them.

    Args:
      digest: The digest of the first element.

    Raises:
      ConfigError: The digests differ. Every rank raises this in the first step.
    """

    def __init__(self, digest: tf.Variable, *, of: Literal["training", "test"]) -> None:
        super().__init__()
        self._digest, self._of, self._checked = digest, of, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check the training data, once."""
        self._check("training")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check the test data, once."""
        self._check("test")

    def _check(self, kind: str) -> None:
        if kind != self._of or self._checked:
            return
        self._checked = True
        collectives.check_agreement(
            {f"the first element of the {kind} data": str(self._digest.numpy().tolist())},
            advice=(
                "each rank takes every N-th element of data that is the same on all of them: give shuffle a "
                "seed. If each rank gets its own part, turn sharding off: options = tf.data.Options(); "
                "options.experimental_distribute.auto_shard_policy = "
                "tf.data.experimental.AutoShardPolicy.OFF; data = data.with_options(options)"
            ),
        )


def take_strided(nest: Any, shares: Shares) -> Any:
    """Take some shares' samples of arrays, tensors and data frames: sample i is in share i mod the total."""
    if isinstance(nest, (list, tuple)) and nest and np.isscalar(nest[0]):
        nest = np.asarray(nest)
    return tf.nest.map_structure(lambda part: None if part is None else _strided_part(part, shares), nest)


def _strided_part(part: Any, shares: Shares) -> Any:
    first, count, total = shares.first, shares.count, shares.total
    if isinstance(part, tf.SparseTensor):
        row, share = part.indices[:, 0] // total, part.indices[:, 0] % total - first
        mine = (share >= 0) & (share < count)
        kept = tf.concat([(row * count + share)[:, None], part.indices[:, 1:]], axis=1)
        samples = part.dense_shape[0]
        size = samples // total * count + tf.clip_by_value(samples % total - first, 0, count)
        return tf.SparseTensor(
            tf.boolean_mask(kept, mine),
            tf.boolean_mask(part.values, mine),
            tf.concat([[size], part.dense_shape[1:]], axis=0),
        )
    if count == 1:
        rows: Any = slice(first, None, total)
    else:
        numbers = np.arange(len(part) if hasattr(part, "__len__") else int(part.shape[0]))
        rows = numbers[(numbers % total >= first) & (numbers % total < first + count)]
    if hasattr(part, "iloc"):
        return part.iloc[rows]
    return tf.gather(part, rows) if count > 1 and tf.is_tensor(part) else part[rows]
