"""Groups of a prepared data set: each epoch has its own order, and each rank reads a range of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.core.schema import Column, Schema
from gmeta.core.shares import Shares
from gmeta.io.readers.balance import Balance, bound_groups, group_tokens
from gmeta.io.readers.epoch import EpochPlan, Epochs, Iteration
from gmeta.io.readers.prepared_split import PreparedSplit, open_split
from gmeta.io.readers.read_options import DEFAULTS, ReadOptions, Start, as_start, shares_of

WINDOW_BYTES = 64 << 20
"""Default size of the window in which groups are permuted."""


def groups(
    path: str | os.PathLike[str],
    *,
    groups_per_element: int = 32,
    balance: Balance | None = None,
    min_rows: int = 1,
    start: Start = 0,
    options: ReadOptions = DEFAULTS,
) -> tf.data.Dataset:
    """Read the groups of one split of a prepared data set; each iteration is one epoch.

    The order of an epoch is a pure function of (``seed``, epoch number). Blocks of neighbouring groups are
    permuted over the whole split; then each run of ``shuffle_buffer`` groups is permuted. Each rank reads
    only one contiguous range of that order, which it finds by the index beside each shard. A native source op
    reads, parses on several threads, and joins the groups of an element.

    An iterator's state is the number of groups that it has returned: a few hundred bytes, restored without
    rereading. ``tf.train.Checkpoint`` saves it, also through ``prefetch`` and ``map``, which add their
    buffered elements. With Keras' ``BackupAndRestore``, use `ReadingPosition`. To resume with another number
    of ranks, start each of them at the same `EpochPlan` or, with ``balance``, at a position.

    Args:
      path: ``"<folder>/<split>"``, such as ``"data/warm"`` or ``"gs://bucket/data/warm"``: local, or on any
        file system that TensorFlow, tensorflow-io, pyarrow or fsspec supports, including ``hdfs://`` and
        ``s3://``.
      groups_per_element: Groups ``G`` in an element; the last one of a range may have fewer. Skipping a bad
        group makes its element smaller, so bad data doesn't change which groups step k reads.
      balance: Make elements of about equal cost instead.
      min_rows: A group with fewer rows is bad.
      start: Where reading begins: an epoch's number, or `OneEpoch`, `AfterSteps`, an `EpochPlan`, a
        `ReadingPosition`. With a position, end the pipeline with its `count`.
      options: Order, rank, threads and bad data (`ReadOptions`). All ranks have the same number of elements:
        if the range of one rank is longer, the last elements of the others have no groups. This doesn't apply
        with ``balance``.

    Returns:
      A dataset. An element is a dict of ``G`` groups with ``N`` rows in total::

        {"task": (G,) int64, "batch_id": (G,) int64, "row_splits": (G + 1,) int64,
         "columns": {name: (N,) tensor, or RaggedTensor (N, None) for a list column},
         "cursor": (shares,) int64, "epoch": () int64}

      ``columns`` contains all columns except those of the key. Group ``g`` is rows
      ``row_splits[g]:row_splits[g + 1]``. The cursor counts, for each range that this rank reads, the groups
      returned so far, including this element's. The cardinality is known for a start at an epoch's number or
      a position, without ``balance``.

    Raises:
      ConfigError: An argument is invalid, names a split that doesn't exist, or is an `EpochPlan` of another
        data set.
      DataError: There is no manifest, or it doesn't match its shards.
      NativeLibraryError: The native op isn't built.
      tf.errors.DataLossError, tf.errors.InvalidArgumentError: While iterating: "FILE at byte OFFSET: what;
        what to do". `gmeta.io.reader_stats.as_data_error` extracts that line. Also if a group has more than
        ``balance.max_tokens`` tokens.

    Example:
      >>> for element in groups("data/warm", groups_per_element=32):
      ...     ratings = tf.RaggedTensor.from_row_splits(element["columns"]["rating"], element["row_splits"])
    """
    if groups_per_element < 1 or min_rows < 1:
        raise ConfigError(
            f"groups: groups_per_element={groups_per_element} and min_rows={min_rows} must be at least 1"
        )
    start, seed, on_bad = as_start(start), options.seed, options.on_bad
    bound, shares = _bound_of(balance, os.fspath(path)), shares_of(options.shard, start)
    split = open_split(path, on_bad)
    window = 0
    if options.shuffle:
        buffer = options.shuffle_buffer
        window = split.window(WINDOW_BYTES) if buffer is None else min(buffer, split.groups)
    inputs = {
        "shuffle_window": window,
        "groups_per_element": groups_per_element,
        "balance": _balance(balance),
        "token_column": "" if balance is None else balance.tokens or "",
        "min_rows": min_rows,
        "threads": options.threads or min(4, os.cpu_count() or 1),
        "on_bad": on_bad,
        "stats": 0 if options.stats is None else options.stats.id,
    }

    @tf.autograph.experimental.do_not_convert  # no Python branch on a tensor, so tracing is quicker
    def read(iteration: Iteration) -> tf.data.Dataset:
        return _group_batch(split, shares, iteration, bound, seed, **inputs)

    whole = EpochPlan.whole(split.digest, groups=split.groups, seed=seed, epoch=0)
    size = groups_per_element if balance is None else None
    return settle(start.elements(Epochs(os.fspath(path), whole, shares, size, options, read)))


def settle(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset with options: no further sharding, it can be saved, and it ends at once.

    TensorFlow 2.16 doesn't wake the thread that tunes a pipeline when an iterator is deleted before the end
    of its data: deleting it then takes as long as the iterator has lived, at most a minute. The readers have
    their own threads, and read no slower without that thread.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The only external state is the epoch counter, and a saved iterator contains the value read from it.
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    options.autotune.enabled = False
    dataset = dataset.with_options(options)
    dataset._gmeta_ranges = True
    return dataset


def reads_ranges(dataset: tf.data.Dataset) -> bool:
    """Return whether a dataset is, or derives from, one of `groups`, whose ranks read contiguous ranges."""
    return hasattr(dataset, "_gmeta_ranges") or any(map(reads_ranges, dataset._inputs()))


def epoch_plan(path: str | os.PathLike[str], *, seed: int = 0, epoch: int = 0) -> EpochPlan:
    """Return the plan of an unread epoch of a split, on which to call `EpochPlan.after_steps`.

    Args:
      path: As for `groups`.
      seed: As for `groups`.
      epoch: The epoch's number.

    Example:
      >>> left = epoch_plan("data/warm", seed=0, epoch=3).after_steps(120, ranks=4, groups_per_step=32)
      >>> rest = groups("data/warm", groups_per_element=32, start=left)  # on any number of ranks
    """
    split = open_split(path)
    return EpochPlan.whole(split.digest, groups=split.groups, seed=seed, epoch=epoch)


def _balance(balance: Balance | None) -> list[float]:
    if balance is None:
        return []
    cost = balance.cost
    most = [float(balance.max_tokens or 0), float(balance.longest or 0)]
    return [float(balance.target), cost.linear, cost.quadratic, *most]


Bound: TypeAlias = Callable[[dict[str, Any], Schema], dict[str, Any]]


def _bound_of(balance: Balance | None, path: str) -> Bound:
    """Return the function that refuses elements with too many tokens."""
    if balance is None or balance.max_tokens is None:
        return lambda element, _: element
    most, column, longest = balance.max_tokens, balance.tokens, balance.longest

    def bound(element: dict[str, Any], schema: Schema) -> dict[str, Any]:
        return bound_groups(element, group_tokens(element, schema, column, longest), most, path)

    return bound


def _attributes(schema: Schema) -> dict[str, Any]:
    """Return the attributes that describe the records to a reader's op."""
    return {
        "column_names": [column.name for column in schema],
        "column_types": [column.dtype for column in schema],
        "column_lists": [column.is_list for column in schema],
        "task_column": schema.task,
        "batch_column": schema.batch,
    }


def _specs(schema: Schema) -> list[tf.TensorSpec]:
    """Return the specs of task, batch and row splits, then of each other column's values (and row splits)."""
    vector = tf.TensorSpec((None,), tf.int64)
    specs = [vector, vector, vector]
    for column in _columns(schema):
        specs += [tf.TensorSpec((None,), column.dtype)] + [vector] * column.is_list
    return specs


def _as_dict(
    schema: Schema, task: tf.Tensor, batch: tf.Tensor, splits: tf.Tensor, *rest: tf.Tensor
) -> dict[str, Any]:
    """Return the same tensors by name, as `groups` describes them."""
    parts, values = iter(rest), {}
    for column in _columns(schema):
        values[column.name] = next(parts)
        if column.is_list:
            values[column.name] = tf.RaggedTensor.from_row_splits(
                values[column.name], next(parts), validate=False
            )
    return {"task": task, "batch_id": batch, "row_splits": splits, "columns": values}


def _columns(schema: Schema) -> list[Column]:
    return [column for column in schema if column.name not in (schema.task, schema.batch)]


def _group_batch(
    split: PreparedSplit, shares: Shares, iteration: Iteration, bound: Bound, seed: int, **inputs: Any
) -> tf.data.Dataset:
    epoch, schema = iteration.epoch, split.schema
    flat = [tf.TensorSpec((shares.count,), tf.int64), *_specs(schema)]
    variant = load_op_library("io").gmeta_group_batch_dataset(
        files=split.files,
        groups=[shard.groups for shard in split.shards],
        index_crcs=[shard.index for shard in split.shards],
        layout=split.layout,
        seed=tf.stack([tf.constant(seed, tf.int64), epoch]),
        first_step=iteration.first_step,
        steps=iteration.steps,
        lanes=iteration.lanes,
        begins=iteration.begins,
        ends=iteration.ends,
        **{**inputs, "balance": tf.constant(inputs["balance"], tf.float64)},
        **_attributes(schema),
        output_types=[spec.dtype for spec in flat],
        output_shapes=[spec.shape for spec in flat],
    )

    @tf.autograph.experimental.do_not_convert
    def structure(cursor: tf.Tensor, *rest: tf.Tensor) -> dict[str, Any]:
        return {**bound(_as_dict(schema, *rest), schema), "cursor": cursor, "epoch": epoch}

    # This map needs no separate thread: it only names tensors and counts an element's groups.
    return cast(tf.data.Dataset, tf.data.experimental.from_variant(variant, tuple(flat)).map(structure))
