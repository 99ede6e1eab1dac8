"""Batches of rows, taken across groups."""

from __future__ import annotations

from typing import Any, cast

import tensorflow as tf

from gmeta.core.data.schema import Column
from gmeta.core.native import load_op_library


def row_batches(
    elements: tf.data.Dataset,
    structure: Any,
    *,
    task: str,
    batch_size: int,
    shuffle_seed: int | None,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Cut the rows of elements of groups into batches; each batch begins where the last one ended.

    The rows within an element are permuted by the Fisher-Yates shuffle, in an order that is a function of
    (``shuffle_seed``, the element's epoch, its cursor). A native op writes each column of a batch once,
    straight from the element. An iterator's state is that of its input, plus the waiting elements.

    Args:
      elements: A dataset of `gmeta.io.groups` that reads one range, so its cursor is one number.
      structure: The structure of a batch: tuples and dicts of columns. A column with another dtype than the
        data's is cast.
      task: The name of the task's column.
      batch_size: Rows of a batch; the last one may hold fewer.
      shuffle_seed: The seed of the orders. None: rows keep their order.
      drop_remainder: Leave out the last batch if it isn't full.

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
            # Different for each element of each epoch: the cursor says where in its range the element ends.
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
        # A map costs as much as the batch, as tf.data runs it on its own thread; only lists need one.
        lists = any(column.is_list for column in columns)
        spec = tuple(flat) if lists else tf.nest.pack_sequence_as(structure, flat)
        found = tf.data.experimental.from_variant(variant, spec)
        return found.map(pack) if lists else found

    # `apply` keeps the input, and so its epoch counter, alive as long as the result.
    return cast(tf.data.Dataset, elements.map(tensors).apply(batches))
