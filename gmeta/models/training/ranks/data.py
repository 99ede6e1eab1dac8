"""A rank's part of the data, in as many batches as the others have.

Whatever Keras takes (arrays, tensors, data sets, generators) becomes a `tf.data.Dataset`. Of data that all
ranks are given alike, each takes every N-th sample or element, beginning with its own number. So the k-th
batches of all N ranks are, together, the k-th batch of one rank whose batches are N times as large, if
nothing is shuffled. Where an elastic job has lost ranks, those that are left take the parts of the lost ones
too (`gmeta.core.shares`), and the k-th batches are the same samples as before.

Ranks must take the same number of steps, as each step is a conversation. A rank with less data goes on with
batches of no samples.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf
from tf_keras.src.engine import data_adapter

from gmeta.core import collectives
from gmeta.core.collectives.shared_data import part_of
from gmeta.core.errors import ConfigError
from gmeta.core.shares import Shares

_OFF = tf.data.experimental.AutoShardPolicy.OFF
_BATCH = 32  # samples, where Keras isn't told


class RankData(NamedTuple):
    """A rank's part.

    Attributes:
      dataset: Its batches.
      digest: Where every N-th element is taken: what `SameElements` compares with the other ranks'.
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
    """What this rank trains or measures on, of the same number of batches as every other rank's.

    All ranks call it together.

    Args:
      x: As in ``tf.keras.Model.fit``.
      y: As there.
      sample_weight: As there.
      batch_size: Samples in the batches of a share of the data, which is a rank's; of N ranks, a step has N
        times as many.
      shuffle: As there, for arrays. A ``keras.utils.Sequence`` is read in its own order.
      steps: How many batches are asked for, if that was said.
      shard: Whether to take this rank's part: every N-th sample of arrays, every N-th element of anything
        else, unless a data set's ``options().experimental_distribute.auto_shard_policy`` is OFF, which says
        that ranks are given parts of their own (in an elastic job, by
        ``gmeta.core.collectives.shared_data.part_of(data, world().shares)``).
      **generator: Keras' ``max_queue_size``, ``workers`` and ``use_multiprocessing``, and ``model``.

    Raises:
      ConfigError: Data that ranks can't take steps on together, or elements that can't be joined.
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
            epochs=1,  # an epoch of the data set is an epoch of training
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


def in_lockstep(dataset: tf.data.Dataset, steps: int | None = None) -> tf.data.Dataset:
    """A rank's batches, and after them batches of no samples while other ranks still have batches.

    Where a rank can't tell how many it has, all go on without end: the step in which no rank has samples ends
    the epoch (`gmeta.models.training.ranks.step`). All ranks call it together.

    Args:
      dataset: The rank's batches.
      steps: How many steps an epoch has, if that was said.

    Raises:
      ConfigError: Some data is endless and ``steps`` doesn't say when to stop; or an element has a part of
        which there is no batch without samples.
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
    return padded.filter(lambda *_: True)  # Keras refuses what says of itself that it has no end


def pad_for_ever(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Batches, and after them batches of no samples without end.

    Dimensions besides the first are those of the last batch, where the data set's specification leaves them
    open, and 1 where no batch came.

    Raises:
      ConfigError: A part of an element has no number of dimensions, or isn't tensors.
    """
    spec = dataset.element_spec
    empty = tf.data.Dataset.from_tensors(empty_batch(spec)).repeat()
    open_parts = [index for index, part in enumerate(tf.nest.flatten(spec)) if _is_open(part)]
    if not open_parts:
        return dataset.concatenate(empty)

    def element(parts: tuple[Any, ...]) -> Any:
        return parts if isinstance(spec, tuple) else parts[0]

    def remember(shapes: tuple[tf.Tensor, ...], both: tuple[tf.Tensor, Any]) -> Any:
        real, batch = both
        known, parts = list(shapes), tf.nest.flatten(batch)
        for place, index in enumerate(open_parts):
            found = parts[index]
            known[place] = tf.where(real, tf.concat([[0], tf.shape(found)[1:]], axis=0), shapes[place])
            nothing = functools.partial(tf.zeros, known[place], found.dtype)
            parts[index] = tf.cond(real, functools.partial(tf.identity, found), nothing)
        return tuple(known), tf.nest.pack_sequence_as(batch, parts)

    marked = dataset.map(lambda *parts: (True, element(parts))).concatenate(
        empty.map(lambda *parts: (False, element(parts)))
    )
    none = tf.nest.flatten(empty_batch(spec))
    return marked.scan(tuple(tf.shape(none[index]) for index in open_parts), remember)


def empty_batch(spec: Any) -> Any:
    """A batch without samples, of the structure of a data set's elements.

    Raises:
      ConfigError: A part of it has no number of dimensions, or isn't tensors.
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


def _is_open(spec: tf.TypeSpec) -> bool:
    return isinstance(spec, tf.TensorSpec) and None in (spec.shape.as_list() or [])[1:]


def _with_digest(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, tf.Variable]:
    """The data set, and a variable that has a digest of the first element of each iteration over it."""
    with tf.init_scope(), tf.device("CPU:0"):
        digest = tf.Variable(tf.zeros([2], tf.int64), trainable=False, name="first_element")
    spec = dataset.element_spec

    def note(element: Any) -> tf.Tensor:
        parts = [tf.io.serialize_tensor(part) for part in tf.nest.flatten(element, expand_composites=True)]
        both = tf.strings.to_hash_bucket_strong(tf.strings.join(parts), 1 << 62, key=[17, 4])
        return digest.assign([1, both], read_value=True)

    def pass_on(number: tf.Tensor, *parts: Any) -> Any:
        element = parts if isinstance(spec, tuple) else parts[0]
        first = tf.cond(tf.equal(number, 0), lambda: note(element), lambda: tf.zeros([2], tf.int64))
        with tf.control_dependencies([first]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    numbered = dataset.enumerate()
    return numbered.map(lambda number, element: pass_on(number, *_as_tuple(element))), digest


def _as_tuple(element: Any) -> tuple[Any, ...]:
    return element if isinstance(element, tuple) else (element,)


class SameElements(tf.keras.callbacks.Callback):
    """Checks in the first step over a data set that it is the same on all ranks, as each takes its part.

    Args:
      digest: Of the first element.

    Raises:
      ConfigError: In that step, on every rank: the digests differ.
    """

    def __init__(self, digest: tf.Variable, *, of: Literal["training", "test"]) -> None:
        super().__init__()
        self._digest, self._of, self._checked = digest, of, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check, once."""
        self._check("training")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check, once."""
        self._check("test")

    def _check(self, kind: str) -> None:
        if kind != self._of or self._checked:
            return
        self._checked = True
        collectives.check_agreement(
            {f"the first element of the {kind} data": str(self._digest.numpy().tolist())},
            advice=(
                "each rank takes every N-th element of data that is the same on all of them: give shuffle a "
                "seed. If ranks are given parts of their own, say so: options = tf.data.Options(); "
                "options.experimental_distribute.auto_shard_policy = "
                "tf.data.experimental.AutoShardPolicy.OFF; data = data.with_options(options)"
            ),
        )


def take_strided(nest: Any, shares: Shares) -> Any:
    """The samples of some shares of arrays, tensors and data frames: sample i is of share i mod the total."""
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
