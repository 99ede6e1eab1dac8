"""Batches of shuffled rows, for models that learn from samples rather than tasks, and their negatives.

Negatives are drawn while data are read: rows with items that a user doesn't have, and the label 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.native import load_op_library
from gmeta.core.schema import Column, Schema
from gmeta.core.shares import Shares
from gmeta.io.readers.epoch import count_epochs
from gmeta.io.readers.group_reader import groups, settle
from gmeta.io.readers.position import ReadingPosition
from gmeta.io.readers.prepared_split import choose_features, choose_label, choose_weight, open_split
from gmeta.io.readers.read_options import (
    DEFAULTS,
    AfterSteps,
    OneEpoch,
    ReadOptions,
    Start,
    as_start,
    shares_of,
)

Law = Literal["uniform", "popularity", "in-batch"]
_TRIES = 16
_GROUPS = 256  # per element, when the catalogue is read


@dataclass(frozen=True)
class Negatives:
    """Negatives that `gmeta.io.rows` adds to implicit feedback, whose data have only positive rows.

    For each row with a label above 0, copies are added with other items and the label 0. Their items are
    drawn from those of the split, which is read once for this purpose. A draw is a pure function of (seed,
    epoch, the row's group, its place in the group), so a resumed run, on any number of ranks, draws the same
    items as an uninterrupted one; with the law ``"in-batch"``, it also depends on which rows are permuted
    together.

    Attributes:
      item: The column of items, int64.
      count: Number of negatives per positive row.
      law: ``"uniform"``: all items are equally likely; ``"popularity"``: in proportion to their rows in the
        split; ``"in-batch"``: the item of another row among those that are permuted together.
      columns: The other columns that describe the item, such as its genres: a negative copies them from the
        first row with its item. All other columns are those of the positive row.
      known: Whether a negative may be an item of a positive row of its group, which holds all rows of a task
        unless the data were prepared with ``--batch-rows``. If not, such an item is redrawn, at most 16
        times, and then skipped. The law's proportions then hold among the other items.
      seed: The seed of the draws.

    Raises:
      ConfigError: A setting is invalid.

    Example:
      >>> negatives = Negatives("movie_id", count=4, law="popularity", columns=["genres"])
      >>> train = gmeta.io.rows("data/train", negatives=negatives)  # doctest: +SKIP
    """

    item: str
    count: int = 4
    law: Law = "uniform"
    columns: Sequence[str] = ()
    known: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("Negatives: count", self.count, least=1)
        whole_number("Negatives: seed", self.seed)
        if self.law not in get_args(Law):
            raise ConfigError(f"Negatives: law must be one of {', '.join(get_args(Law))}, got {self.law!r}")

    def check(self, schema: Schema, label: str) -> None:
        """Check that a split has the columns.

        Raises:
          ConfigError: A column is missing, or unsuitable for its role.
        """
        found = {column.name: column for column in schema}
        missing = [name for name in (self.item, *self.columns) if name not in found]
        if missing:
            raise ConfigError(f"Negatives: no column {', '.join(missing)}; there are {', '.join(found)}")
        if found[self.item].is_list or found[self.item].dtype != "int64":
            raise ConfigError(f"Negatives: item={self.item!r} holds lists or floats: name a column of ids")
        twice = {self.item, label, schema.task} & {*self.columns}
        if twice or self.item in (label, schema.task):
            raise ConfigError(
                f"Negatives: item={self.item!r} and columns={list(self.columns)} can't have the label, the "
                "task or the item among them"
            )

    def add_to(
        self, elements: tf.data.Dataset, path: str | os.PathLike[str], label: str, options: ReadOptions
    ) -> tf.data.Dataset:
        """Add the negatives to elements of `gmeta.io.groups`, after each group's own rows.

        Args:
          elements: The elements.
          path: The split of the elements.
          label: The column of labels.
          options: How the split is read.
        """
        items = _read_items(path, self, options)
        return elements.map(
            lambda element: self._add(element, items, label),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    @tf.autograph.experimental.do_not_convert
    def _add(self, element: dict[str, Any], items: _Items, label: str) -> dict[str, Any]:
        columns, splits = element["columns"], element["row_splits"]
        rows = splits[-1]
        group = tf.repeat(tf.range(tf.size(splits, tf.int64) - 1), splits[1:] - splits[:-1])
        places = tf.range(rows) - tf.gather(splits, group)
        positive = tf.where(columns[label] > 0)[:, 0]
        numbers = tf.searchsorted(items.ids, columns[self.item], out_type=tf.int64)
        tries = 1 if self.known else _TRIES
        hashed = _hash([self.seed, element["epoch"]], tf.zeros([1, 1, 1], tf.uint64))
        own = (element["task"], element["batch_id"])
        of_row = [tf.gather(tf.gather(each, group), positive) for each in own] + [tf.gather(places, positive)]
        for part in of_row:
            hashed = _mix(hashed + tf.cast(part, tf.uint64)[:, tf.newaxis, tf.newaxis])
        for part, shape in ((tf.range(self.count), [1, -1, 1]), (tf.range(tries), [1, 1, -1])):
            hashed = _mix(hashed + tf.reshape(tf.cast(part, tf.uint64), shape))
        drawn = self._items(tf.cast(tf.bitwise.right_shift(hashed, _u64(1)), tf.int64), items, numbers)
        of_group = tf.gather(group, positive)
        good = tf.ones_like(drawn, tf.bool)
        if not self.known:
            size = tf.size(items.ids, tf.int64)
            held = tf.sort(of_group * size + tf.gather(numbers, positive))
            keys = of_group[:, tf.newaxis, tf.newaxis] * size + drawn
            place = tf.searchsorted(held, tf.reshape(keys, [-1]), out_type=tf.int64)
            place = tf.minimum(place, tf.maximum(tf.size(held, tf.int64) - 1, 0))
            good = tf.reshape(tf.gather(held, place), tf.shape(keys)) != keys
        first = tf.argmax(tf.cast(good, tf.int32), axis=2)
        chosen = tf.gather(drawn, first, batch_dims=2)
        some = tf.where(tf.reduce_any(good, axis=2))
        number, source = tf.gather_nd(chosen, some), tf.gather(positive, some[:, 0])
        order = tf.argsort(tf.concat([group, tf.gather(group, source)], axis=0), stable=True)
        added = {
            self.item: tf.gather(items.ids, number),
            label: tf.zeros(tf.shape(source), columns[label].dtype),
        }
        added |= {name: tf.gather(items.columns[name], number) for name in self.columns}
        joined = {
            name: tf.gather(
                tf.concat([values, added[name] if name in added else tf.gather(values, source)], axis=0),
                order,
            )
            for name, values in columns.items()
        }
        more = tf.math.bincount(tf.cast(tf.gather(group, source), tf.int32), minlength=tf.size(splits) - 1)
        ends = tf.cumsum(tf.cast(more, tf.int64)[: tf.size(splits) - 1])
        return {
            **element,
            "columns": joined,
            "row_splits": splits + tf.concat([[tf.constant(0, tf.int64)], ends], 0),
        }

    def _items(self, drawn: tf.Tensor, items: _Items, numbers: tf.Tensor) -> tf.Tensor:
        """Map non-negative draws to the numbers of items, by the law."""
        if self.law == "uniform":
            return drawn % tf.size(items.ids, tf.int64)
        if self.law == "in-batch":
            return tf.gather(numbers, drawn % tf.maximum(tf.size(numbers, tf.int64), 1))
        sums = tf.cumsum(items.counts)
        flat = tf.reshape(drawn % sums[-1], [-1])
        return tf.reshape(tf.searchsorted(sums, flat, side="right", out_type=tf.int64), tf.shape(drawn))


class _Items(NamedTuple):
    """The items of a split: ids (V,), ascending; counts (V,) of their rows; and their descriptive columns."""

    ids: tf.Tensor
    counts: tf.Tensor
    columns: Mapping[str, Any]


def _read_items(path: Any, settings: Negatives, options: ReadOptions) -> _Items:
    """Read the items of a split, whole."""
    whole = ReadOptions(shuffle=False, shard=(0, 1), on_bad=options.on_bad)
    found: list[Any] = []
    parts: dict[str, list[Any]] = {name: [] for name in settings.columns}
    for element in groups(path, groups_per_element=_GROUPS, start=OneEpoch(), options=whole):
        found.append(element["columns"][settings.item].numpy())
        for name, values in parts.items():
            values.append(element["columns"][name])
    every: npt.NDArray[np.int64] = np.concatenate(found) if found else np.zeros(0, np.int64)
    ids, first, counts = np.unique(every, return_index=True, return_counts=True)
    columns = {name: tf.gather(tf.concat(values, axis=0), first) for name, values in parts.items()}
    return _Items(tf.constant(ids), tf.constant(counts.astype(np.int64)), columns)


# SplitMix64 (Steele, Lea and Flood, 2014): a hash of 64 bits whose bits are as good as random.


def _u64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)


def _mix(values: tf.Tensor) -> tf.Tensor:
    found = values + _u64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = tf.bitwise.bitwise_xor(found, tf.bitwise.right_shift(found, _u64(shift))) * _u64(factor)
    return tf.bitwise.bitwise_xor(found, tf.bitwise.right_shift(found, _u64(31)))


def _hash(parts: Sequence[Any], start: tf.Tensor) -> tf.Tensor:
    for part in parts:
        start = _mix(start + tf.cast(part, tf.uint64))
    return start


# Batches of rows, taken across groups.


def row_batches(
    elements: tf.data.Dataset,
    structure: Any,
    *,
    task: str,
    batch_size: int,
    shuffle_seed: int | None,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Cut the rows of elements of groups into batches; each batch starts where the previous one ended.

    The rows within an element are permuted by the Fisher-Yates shuffle, in an order that is a function of
    (``shuffle_seed``, the element's epoch, its cursor). A native op writes each column of a batch once,
    directly from the element. An iterator's state is that of its input, plus the buffered elements.

    Args:
      elements: A dataset of `gmeta.io.groups` that reads one range, so its cursor is one number.
      structure: The structure of a batch: tuples and dicts of columns. A column with a different dtype than
        the data's is cast.
      task: The name of the task's column.
      batch_size: Rows of a batch; the last one may have fewer.
      shuffle_seed: The seed of the orders. None: rows keep their order.
      drop_remainder: Drop the last batch if it isn't full.

    Returns:
      A dataset of ``structure``, with (batch,) tensors for columns, or RaggedTensor (batch, None) for list
      columns.

    Example:
      >>> elements = groups("data/warm", groups_per_element=1000)
      >>> batches = row_batches(elements, Column("item"), task="user", batch_size=1024, shuffle_seed=0)
    """
    columns: list[Column] = tf.nest.flatten(structure)
    kinds = ["group" if c.name == task else "list" if c.is_list else "row" for c in columns]
    splits = tf.TensorSpec((None,), tf.int64)
    specs = [(tf.TensorSpec((None,), c.dtype), *((splits,) if c.is_list else ())) for c in columns]
    flat = tf.nest.flatten(specs)

    @tf.autograph.experimental.do_not_convert  # no Python branch on a tensor, so tracing is quicker
    def tensors(element: dict[str, Any]) -> tuple[tf.Tensor, ...]:
        draws = tf.zeros((0,), tf.int64)
        if shuffle_seed is not None:
            # Different for each element of each epoch: the cursor is the end of the element in its range.
            draws = tf.stack([tf.constant(shuffle_seed, tf.int64), element["epoch"], element["cursor"][0]])
        found = [draws, element["row_splits"]]
        for column in columns:
            values = element["task"] if column.name == task else element["columns"][column.name]
            values = tf.cast(values, column.dtype)
            found += [values.values, values.row_splits] if column.is_list else [values]
        return tuple(found)

    @tf.autograph.experimental.do_not_convert
    def pack(*parts: Any) -> Any:
        found = [
            tf.RaggedTensor.from_row_splits(*part, validate=False) if len(part) == 2 else part[0]
            for part in tf.nest.pack_sequence_as(specs, parts)
        ]
        return tf.nest.pack_sequence_as(structure, found)

    def batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
        variant = load_op_library("io").gmeta_row_batches_dataset(
            dataset._variant_tensor,
            tf.constant(batch_size, tf.int64),
            drop_remainder,
            column_kinds=kinds,
            output_types=[spec.dtype for spec in flat],
            output_shapes=[spec.shape for spec in flat],
        )
        # A map costs as much as the batch, because tf.data runs it on its own thread; only lists require one.
        lists = any(column.is_list for column in columns)
        spec = tuple(flat) if lists else tf.nest.pack_sequence_as(structure, flat)
        found = tf.data.experimental.from_variant(variant, spec)
        return found.map(pack) if lists else found

    # `apply` keeps the input, and with it the epoch counter, alive as long as the result.
    return cast(tf.data.Dataset, elements.map(tensors).apply(batches))


BLOCK_BYTES = 4 << 20
"""Default size of the buffer in which rows are permuted; it fits into a CPU's cache."""


def rows(
    path: str | os.PathLike[str],
    *,
    batch_size: int = 1024,
    label: str | Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    weight: str | None = None,
    pad_value: int | None = None,
    drop_remainder: bool = False,
    negatives: Negatives | None = None,
    start: Start = 0,
    options: ReadOptions = DEFAULTS,
) -> tf.data.Dataset:
    """Read the rows of one split of a prepared data set in shuffled batches; each iteration is one epoch.

    The order has two levels. The groups of an epoch come in the order of `gmeta.io.groups`: permuted over the
    whole split by blocks, then within a window of 64 MiB. Then all rows of as many groups as contain
    ``shuffle_buffer`` rows are permuted together, across tasks. The rows of a task therefore appear in
    neighbouring batches. A larger buffer spreads them further, and a buffer that contains all rows makes the
    order uniform. The order is a pure function of (``seed``, epoch number, the rank's range).

    Args:
      path: ``"<folder>/<split>"``, such as ``"data/train"``.
      batch_size: Rows of a batch; the last batch of an epoch may have fewer.
      label: The column to predict, or several columns; cast to float32. None: the label that was passed to
        `gmeta prepare`, otherwise ``label`` or ``rating``.
      features: The columns to return, of int64 or float32. None: all columns, including the task, except the
        batch, the time, the labels and the weight.
      weight: A float32 column of sample weights, as in Keras.
      pad_value: None: list columns are ragged. A number: list columns are dense, padded with this number to
        the longest list of the batch.
      drop_remainder: Drop the last batch of an epoch, or of a rank's part of it, if it isn't full.
      negatives: Rows to add to each positive row, with drawn items and the label 0
        (`gmeta.io.readers.row_reader.Negatives`). They are permuted with the others, and a batch still has
        ``batch_size`` rows. None: no negatives.
      start: Where reading begins: an epoch's number; `OneEpoch`, whose pieces have separate batches; an
        `EpochPlan`, by whole groups, on any number of ranks; or `AfterSteps` with the current number of
        ranks, which rereads the rows of those steps and discards them.
      options: Order, rank, threads and bad data (`ReadOptions`). Here ``shuffle_buffer`` counts the rows that
        are permuted together, rounded to whole groups; None: as many as fit into 4 MiB, and at least 16
        batches. A rank reads the rows of its range of the epoch's groups. Ranges may have different numbers
        of rows, so ranks may have different numbers of batches; ``fit`` of gmeta's models supports that.

    Returns:
      A dataset of (features, label), or (features, label, weight): a dict of (batch,) tensors, or
      RaggedTensor (batch, None) for list columns; (batch,) float32, or (batch, labels) where ``label`` is a
      sequence; (batch,) float32. Its cardinality is known for one rank that starts at an epoch's
      number, unless ``on_bad`` is ``"skip"`` or there are ``negatives``.

    Raises:
      ConfigError: An argument is invalid, or names a split or column that doesn't exist.
      DataError: A manifest can't be read, or doesn't match its shards.
      tf.errors.DataLossError, tf.errors.InvalidArgumentError: While iterating, as for `gmeta.io.groups`.

    Example:
      >>> model.fit(rows("data/train", batch_size=512), epochs=3)  # doctest: +SKIP
    """
    size = whole_number("rows: batch_size", batch_size, least=1)
    start = as_start(start)
    if isinstance(start, ReadingPosition):
        raise ConfigError(
            f"rows: start={start!r} counts steps of groups, and a batch has rows of many groups: start at an "
            "epoch's number, OneEpoch, AfterSteps or an EpochPlan, or save the iterator"
        )
    if drop_remainder and isinstance(start, OneEpoch) and start.pieces > 1:
        raise ConfigError(
            "rows: drop_remainder=True would lose the last rows of every piece of the epoch: leave it out, "
            "and drop small batches behind gmeta.io.distribute"
        )
    split = open_split(path, options.on_bad)
    label = choose_label("rows", split.schema, split.roles, label)
    weight = choose_weight("rows", split.schema, weight)
    labels = (label,) if isinstance(label, str) else label
    names = choose_features("rows", split.schema, features, (split.roles.time, weight, *labels))
    if negatives is not None:
        if not isinstance(label, str):
            raise ConfigError(f"rows: negatives have one label, and label={label!r} has several: name one")
        negatives.check(split.schema, label)
    answers = tuple(Column(name, "float32") for name in labels)
    structure: tuple[Any, ...] = (
        {name: split.schema[name] for name in names},
        answers[0] if isinstance(label, str) else answers,
        *((split.schema[weight],) if weight else ()),
    )
    shuffle_buffer = options.shuffle_buffer
    if shuffle_buffer is None:
        width = max(1, sum(shard.bytes for shard in split.shards) // max(1, split.rows))
        shuffle_buffer = max(16 * size, BLOCK_BYTES // width)
    shares = shares_of(options.shard, start)
    skipped = _count_skipped(start, shares)
    of_groups = start.epoch if isinstance(start, AfterSteps) else start
    if isinstance(start, OneEpoch):
        of_groups = replace(start, taken=0)

    def lane(number: int) -> tf.data.Dataset:
        """Read the batches of one range."""
        elements = groups(
            path,
            groups_per_element=max(1, shuffle_buffer * split.groups // max(1, split.rows)),
            start=of_groups,
            options=replace(options, shard=(number, shares.total), shuffle_buffer=None),
        )
        if negatives is not None:
            assert isinstance(label, str)
            elements = negatives.add_to(elements, path, label, options)
        batches = row_batches(
            elements,
            structure,
            task=split.schema.task,
            batch_size=size,
            shuffle_seed=options.seed if options.shuffle else None,
            drop_remainder=drop_remainder,
        )
        return batches if isinstance(label, str) else batches.map(_stack)

    lanes = [lane(number) for number in range(shares.first, shares.first + shares.count)]
    batches = lanes[0] if len(lanes) == 1 else _join(lanes)
    if isinstance(start, OneEpoch) and start.taken:
        batches = batches.skip(start.taken)
    if skipped:
        # Epoch 0 of this counter is the first iteration, which resumes after the skipped batches.
        batches = count_epochs(0).flat_map(
            lambda epoch, every=batches: every.skip(tf.where(epoch == 0, tf.constant(skipped, tf.int64), 0))
        )
    if pad_value is not None:
        batches = batches.map(lambda *batch: _pad(batch, pad_value), num_parallel_calls=tf.data.AUTOTUNE)
    whole = isinstance(start, AfterSteps | OneEpoch) and start.whole
    if shares.total == 1 and whole and options.on_bad == "raise" and negatives is None:
        steps = split.rows // size if drop_remainder else -(-split.rows // size)
        batches = batches.apply(tf.data.experimental.assert_cardinality(steps))
    return settle(batches.prefetch(tf.data.AUTOTUNE))


def _count_skipped(start: Start, shares: Shares) -> int:
    """Count the batches of the first epoch before the start."""
    if not isinstance(start, AfterSteps):
        return 0
    other = [ranks for ranks, steps in start.steps if ranks != shares.total and steps]
    if other:
        raise ConfigError(
            f"rows: start={start!r} counts steps of {other[0]} ranks, and there are {shares.total}: a batch "
            "has rows of many groups, so resume on as many ranks, or at the beginning of an epoch"
        )
    return sum(whole_number("rows: AfterSteps", steps) for _, steps in start.steps)


@tf.autograph.experimental.do_not_convert  # no Python branch on a tensor, so tracing is quicker
def _stack(features: dict[str, Any], labels: tuple[tf.Tensor, ...], *weight: tf.Tensor) -> tuple[Any, ...]:
    return features, tf.stack(labels, axis=1), *weight


def _join(lanes: Sequence[tf.data.Dataset]) -> tf.data.Dataset:
    """Join the batches of all lanes into one batch per step; an exhausted lane contributes no rows."""

    def nothing(spec: Any) -> Any:
        empty = tf.zeros([0, *spec.shape[1:]], spec.dtype)
        ragged = isinstance(spec, tf.RaggedTensorSpec)
        return tf.RaggedTensor.from_row_splits(tf.zeros([0], spec.dtype), [0]) if ragged else empty

    empty = tf.nest.map_structure(nothing, lanes[0].element_spec)
    endless = [lane.concatenate(tf.data.Dataset.from_tensors(empty).repeat()) for lane in lanes]

    def join(*batches: Any) -> Any:
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *batches)

    steps = tf.data.Dataset.zip(*endless).map(join)
    return steps.take_while(lambda _, label, *__: tf.shape(label)[0] > 0)


def _pad(batch: tuple[Any, ...], pad_value: int) -> tuple[Any, ...]:
    features = {
        name: values.to_tensor(tf.cast(pad_value, values.dtype))
        if isinstance(values, tf.RaggedTensor)
        else values
        for name, values in batch[0].items()
    }
    return features, *batch[1:]
