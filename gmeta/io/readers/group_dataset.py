"""The native GroupBatch dataset, which reads records into groups of one task (G-Meta, section 2.2)."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.group_index import Layout
from gmeta.core.native import load_op_library
from gmeta.core.schema import Column, OnBad, Schema, check_on_bad
from gmeta.io.reader_stats import ReaderStats
from gmeta.io.readers.remote import locate

# The tensors of a native reader's element: how its op receives and returns a schema's columns.


def columns_attributes(schema: Schema) -> dict[str, Any]:
    """Return the attributes that describe the records to a reader's op."""
    return {
        "column_names": [column.name for column in schema],
        "column_types": [column.dtype for column in schema],
        "column_lists": [column.is_list for column in schema],
        "task_column": schema.task,
        "batch_column": schema.batch,
    }


def columns_specs(schema: Schema) -> list[tf.TensorSpec]:
    """Return the specs of task, batch and row splits, then of each other column's values (and row splits)."""
    vector = tf.TensorSpec((None,), tf.int64)
    specs = [vector, vector, vector]
    for column in _columns(schema):
        specs += [tf.TensorSpec((None,), column.dtype)] + [vector] * column.is_list
    return specs


def columns_as_dict(
    schema: Schema, task: tf.Tensor, batch: tf.Tensor, splits: tf.Tensor, *rest: tf.Tensor
) -> dict[str, Any]:
    """Return the same tensors by name, as `gmeta.io.readers.group_dataset.group_batch` describes them."""
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


Path: TypeAlias = str | os.PathLike[str]


def group_batch(
    files: Path | Sequence[Path] | tf.Tensor,
    schema: Schema,
    *,
    groups_per_element: int = 1,
    layout: Layout = "example",
    shuffle_buffer: int = 0,
    seed: int | tf.Tensor | None = None,
    min_rows: int = 1,
    on_bad: OnBad = "raise",
    stats: ReaderStats | None = None,
) -> tf.data.Dataset:
    """Read TFRecord files from beginning to end and group consecutive records of one key.

    The key is (task, batch). Records of a key must be consecutive, in one file, as `gmeta prepare` writes
    them. One native source op reads, parses and groups, from local paths and every file system that
    TensorFlow knows. It takes any files and needs no manifest or index; `gmeta.io.groups` reads ranges of a
    prepared data set, on several threads.

    Args:
      files: One path, several, or a string tensor of shape (F,).
      schema: The columns of every record. Other features of a record are ignored.
      layout: ``"example"``, a ``tf.train.Example`` for each row, or ``"columnar"``, a record for each group.
      groups_per_element: Groups ``G`` in an element; the last element may hold fewer.
      shuffle_buffer: 0 keeps the files' order. Otherwise files are permuted, and groups drawn from a buffer
        of this many groups; the order is uniform if the buffer holds all groups.
      seed: The seed of that order, which is a pure function of it. An int ``s`` stands for ``[s, 0]``; a
        tensor of shape (2,), int64, may come from another dataset's element, such as (seed, epoch). None
        draws a seed now, and each iteration over the dataset has the same order.
      min_rows: A group with fewer rows is bad.
      on_bad: ``"raise"`` reports the first bad record, file or group. ``"skip"`` leaves it out and counts it:
        a bad record alone, the rest of a file whose framing is lost, or all rows of a bad group. A file that
        can't be opened or read is reported in both cases.
      stats: The counters to update.

    Returns:
      A dataset of unknown cardinality. An element is a dict of ``G`` groups with ``N`` rows in all::

        {"task": (G,) int64, "batch_id": (G,) int64, "row_splits": (G + 1,) int64,
         "columns": {name: (N,) tensor, or RaggedTensor (N, None) for a list column}}

      ``columns`` holds all columns except those of the key. Group ``g`` is rows
      ``row_splits[g]:row_splits[g + 1]``. Iterators can be saved in a ``tf.train.Checkpoint``; restoring one
      reads from the start again.

    Raises:
      ConfigError: An argument is invalid.
      NativeLibraryError: The native op was never built.
      tf.errors.DataLossError, tf.errors.InvalidArgumentError: While iterating: "FILE at byte OFFSET: what;
        what to do". `gmeta.io.reader_stats.as_data_error` extracts that line.

    Example:
      >>> for element in group_batch(["warm-00000-of-00001.tfrecord"], schema, groups_per_element=32):
      ...     ratings = tf.RaggedTensor.from_row_splits(element["columns"]["rating"], element["row_splits"])
    """
    if groups_per_element < 1 or shuffle_buffer < 0 or min_rows < 1:
        raise ConfigError(
            f"group_batch: groups_per_element={groups_per_element} and min_rows={min_rows} must be at least "
            f"1, shuffle_buffer={shuffle_buffer} at least 0"
        )
    check_on_bad(on_bad)
    flat = columns_specs(schema)
    variant = load_op_library("io").gmeta_group_batch_dataset(
        files=_files(files),
        seed=_seed(seed),
        groups_per_element=groups_per_element,
        shuffle_buffer=shuffle_buffer,
        min_rows=min_rows,
        stats=0 if stats is None else stats.id,
        layout=layout,
        on_bad=on_bad,
        **columns_attributes(schema),
        output_types=[spec.dtype for spec in flat],
        output_shapes=[spec.shape for spec in flat],
    )
    # This map needs no thread of its own: it only names tensors.
    elements = tf.data.experimental.from_variant(variant, tuple(flat))
    return elements.map(functools.partial(columns_as_dict, schema))


def _files(files: Path | Sequence[Path] | tf.Tensor) -> tf.Tensor:
    if isinstance(files, (str, os.PathLike)):
        files = [files]
    if not tf.is_tensor(files):
        if not files:
            raise ConfigError("group_batch: no files given")
        files = [os.fspath(locate(path)) for path in files]
    return tf.convert_to_tensor(files, tf.string)


def _seed(seed: int | tf.Tensor | None) -> tf.Tensor:
    if seed is None:
        seed = int.from_bytes(os.urandom(7), "little")
    if isinstance(seed, int):
        seed = [seed, 0]
    return tf.convert_to_tensor(seed, tf.int64)
