"""Batches of shuffled rows, for models that learn from samples rather than tasks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.native import load_op_library
from gmeta.core.schema import Column
from gmeta.core.shares import Shares
from gmeta.io.readers.epoch import count_epochs
from gmeta.io.readers.group_reader import groups, settle
from gmeta.io.readers.negatives import Negatives
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
        (`gmeta.io.readers.negatives.Negatives`). They are permuted with the others, and a batch still has
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
