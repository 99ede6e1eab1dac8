"""Task batches for meta-learning: groups cut into support and query (G-Meta, sections 2.1 and 2.2)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives.shares import Shares
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.manifest import Manifest, Split
from gmeta.core.on_bad import OnBad, check_on_bad
from gmeta.core.schema import Schema
from gmeta.core.shared_data import part_of
from gmeta.io.group_batch import group_batch
from gmeta.io.reader_stats import ReaderStats

_BUFFER = 8192  # groups; all of a small data set, some hundred megabytes of a large one


def tasks(
    path: str | os.PathLike[str],
    *,
    tasks_per_batch: int = 32,
    query: int = 10,
    label: str = "rating",
    features: Sequence[str] | None = None,
    shuffle: bool = True,
    shuffle_buffer: int = _BUFFER,
    seed: int = 0,
    first_epoch: int = 0,
    shard: tuple[int, int] | None = None,
    on_bad: OnBad = "raise",
    stats: ReaderStats | None = None,
) -> tf.data.Dataset:
    """Task batches of one split of a prepared data set; each iteration is one epoch.

    A task is one group of records. Its last ``query`` rows, which are its latest, are the query set, the rows
    before them the support set.

    An epoch's order is a pure function of (``seed``, epoch number). The number is counted by the dataset:
    the first iteration is epoch ``first_epoch``, and each iteration that reads at least one element, a look
    at the first one included, adds one. To resume training after ``e`` epochs, build the dataset with
    ``first_epoch=e``; to resume inside one, save its iterator in a ``tf.train.Checkpoint``.

    Args:
      path: ``"<folder>/<split>"``, such as ``"data/warm"``: the folder that `gmeta prepare` wrote and one of
        the splits in its manifest.
      tasks_per_batch: Tasks ``T`` in an element; the last element of an epoch may hold fewer.
      query: Rows ``Q`` of each task's query set. A task needs one row more, or it is too small to split.
      label: The column to predict; cast to float32.
      features: The columns to hand on, the task's column among them if you like. None: all int64 columns but
        the task, the batch, ``timestamp`` and the label.
      shuffle: Whether the order changes with the epoch, or is the files'.
      shuffle_buffer: Groups to draw the next one from; the order is uniform if it holds all of them.
      seed: Gives the orders.
      first_epoch: The number of the first iteration.
      shard: (r, N): this is rank r of N ranks, and takes every N-th element, beginning with number r. The
        k-th elements of all ranks are then, together, the k-th of one rank with N times as many
        ``tasks_per_batch``. Give all ranks the same ``seed``. None: the rank that this process is
        (``gmeta.init()``); in an elastic job that has lost ranks, an element has the tasks that those would
        have had as well (`gmeta.core.collectives.shares`). The data set says so in its options (auto-sharding
        OFF), and `fit` shards it no further.
      on_bad: ``"raise"`` or ``"skip"``, as for `group_batch`; a task that is too small to split is bad too.
        A skipped task's place is taken by the next one, so batches stay full.
      stats: Counters to count into; they name what was skipped.

    Returns:
      A dataset. An element is a dict, with ``N`` rows in its ``T`` tasks and ``S`` the longest support set
      among them::

        {"features": {name: (N,) tensor, or RaggedTensor (N, None) for a list column},
         "label": (N,) float32, "task": (T,) int64,
         "support": {"index": (T, S) int64, "mask": (T, S) float32},
         "query": {"index": (T, Q) int64, "mask": (T, Q) float32}}

      ``index`` addresses rows of ``features`` and ``label``: ``tf.gather(label, support["index"])`` is
      (T, S). Padding has index 0 and mask 0. With ``on_bad="raise"`` the dataset's cardinality is known,
      ``ceil(groups / tasks_per_batch)`` or its N-th part; with ``"skip"`` it isn't, because what will be left
      out isn't.

    Raises:
      ConfigError: An argument makes no sense, or names a split or column that isn't there.
      DataError: No manifest, or one that doesn't match its shards.
      tf.errors.DataLossError, tf.errors.InvalidArgumentError: While iterating, as for `group_batch`.

    Example:
      >>> warm = tasks("data/warm", tasks_per_batch=32, query=10)
      >>> model.fit(warm, epochs=20)
    """
    if tasks_per_batch < 1 or query < 1 or shuffle_buffer < 1 or first_epoch < 0:
        raise ConfigError(
            f"tasks: tasks_per_batch={tasks_per_batch}, query={query} and shuffle_buffer={shuffle_buffer} "
            f"must be at least 1, first_epoch={first_epoch} at least 0"
        )
    check_on_bad(on_bad)
    if shard is not None and not 0 <= shard[0] < shard[1]:
        raise ConfigError(f"tasks: shard={tuple(shard)} names no rank: give (r, N) with 0 <= r < N")
    shares = collectives.world().shares if shard is None else Shares.of(*shard)
    schema, split, files = _open(Path(path), on_bad)
    names = _features(schema, features, label)

    def read(numbers: Any) -> tf.data.Dataset:
        elements = group_batch(
            files,
            schema,
            groups_per_element=tasks_per_batch,
            shuffle_buffer=min(shuffle_buffer, split.groups) if shuffle else 0,
            seed=numbers,
            min_rows=query + 1,
            on_bad=on_bad,
            stats=stats,
        )
        return _groups_of(elements, shares)

    groups = _epochs(first_epoch).flat_map(lambda epoch: read([seed, epoch])) if shuffle else read(seed)
    batches = groups.map(
        lambda element: _task_batch(element, names, label, query, schema.task),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    if on_bad == "raise":
        # tf.data raises where an epoch has another length, and skipping makes it shorter: no promise then.
        elements = -(-split.groups // tasks_per_batch)
        batches = batches.apply(tf.data.experimental.assert_cardinality(shares.steps(elements)))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The one state outside is the epoch counter, and what was read from it is part of a saved iterator.
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return batches.prefetch(tf.data.AUTOTUNE).with_options(options)


def _groups_of(elements: tf.data.Dataset, shares: Shares) -> tf.data.Dataset:
    """The groups that are of some shares, those of a step in one element.

    They are joined here, where lengths say whose rows are whose, rather than when they are cut and indices
    do.
    """
    if shares.count == 1:
        return part_of(elements, shares)

    def measured(element: dict[str, Any]) -> dict[str, Any]:
        splits = element["row_splits"]
        return {**element, "row_splits": splits[1:] - splits[:-1]}

    def split(element: dict[str, Any]) -> dict[str, Any]:
        return {**element, "row_splits": tf.concat([[0], tf.cumsum(element["row_splits"])], axis=0)}

    return part_of(elements.map(measured), shares).map(split)


def _epochs(first: int) -> tf.data.Dataset:
    """A dataset of one element, the epoch's number, which is one more at each iteration.

    tf.data's own ways don't serve: ``shuffle(reshuffle_each_iteration=True)`` and
    ``random(rerandomize_each_iteration=True)`` draw each epoch's seed from a generator, so epoch e can't be
    had without the e before it, and ``counter().flat_map`` makes one endless epoch. So a variable counts. It
    is read in a stage of its own: downstream, the number is an ordinary element, which a saved iterator
    restores instead of counting again.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        counter = tf.Variable(first, dtype=tf.int64, trainable=False, name="epoch")
    return tf.data.Dataset.range(1).map(lambda _: counter.assign_add(1, read_value=True) - 1)


def _open(path: Path, on_bad: OnBad) -> tuple[Schema, Split, list[str]]:
    """The schema, the split and the shards that a path such as ``data/warm`` names."""
    manifest = Manifest.load(path.parent, check_shards=on_bad == "raise")
    if path.name not in manifest.splits:
        raise ConfigError(
            f"{path.parent} has no split {path.name!r}; it has {', '.join(manifest.splits) or 'none'}"
        )
    if manifest.layout != "example":
        raise DataError(f"layout {manifest.layout!r} can't be read as tasks", path=path.parent)
    split = manifest.splits[path.name]
    if split.groups == 0:
        raise DataError("the split holds no group", path=path, advice="prepare it with more data")
    for shard in split.shards:
        file = path.parent / shard.name
        if on_bad == "skip" and file.exists() and file.stat().st_size != shard.bytes:
            # A file cut between two records looks whole to the reader.
            warnings.warn(f"{file}: not as long as the manifest says; reading what is there", stacklevel=3)
    # With few tasks and many shards some are empty; a file without a record is otherwise a fault.
    full = [shard for shard in split.shards if shard.groups > 0]
    return manifest.schema, split, [str(path.parent / shard.name) for shard in full]


def _features(schema: Schema, features: Sequence[str] | None, label: str) -> list[str]:
    if schema[label].is_list or label in (schema.task, schema.batch):
        raise ConfigError(f"tasks: label={label!r} must be a column of one value a record, and not the key's")
    if features is None:
        kept_back = (schema.task, schema.batch, "timestamp", label)
        return [c.name for c in schema if c.dtype == "int64" and c.name not in kept_back]
    for name in features:
        if schema[name].name == schema.batch:
            raise ConfigError(f"tasks: {name!r} numbers the batches of a task, it is no feature")
    return list(features)


def _task_batch(
    element: dict[str, Any], names: list[str], label: str, query: int, task_column: str
) -> dict[str, Any]:
    """Cut every group of an element, all at once."""
    columns, splits = element["columns"], element["row_splits"]
    starts, lengths = splits[:-1], splits[1:] - splits[:-1]
    if task_column in names:
        columns = {**columns, task_column: tf.repeat(element["task"], lengths)}
    support = lengths - query

    def part(start: tf.Tensor, length: tf.Tensor, longest: Any) -> dict[str, tf.Tensor]:
        mask = tf.sequence_mask(length, longest)
        index = start[:, None] + tf.range(tf.cast(longest, tf.int64))
        return {"index": tf.where(mask, index, 0), "mask": tf.cast(mask, tf.float32)}

    return {
        "features": {name: columns[name] for name in names},
        "label": tf.cast(columns[label], tf.float32),
        "task": element["task"],
        "support": part(starts, support, tf.reduce_max(support)),
        "query": part(starts + support, tf.fill(tf.shape(support), tf.constant(query, tf.int64)), query),
    }
