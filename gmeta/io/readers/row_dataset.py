"""Batches of the rows of groups, whatever group they are of."""

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
    """Deal the rows of elements of groups out in batches; a batch goes on where the last one ended.

    The rows of an element are permuted among each other, by Fisher and Yates, in an order that is a function
    of (``shuffle_seed``, the element's epoch, its cursor). A native op writes each column of a batch once,
    straight from the element. An iterator's state is its input's, and the elements that wait.

    Args:
      elements: Of `gmeta.io.groups`, from one range: its cursor is one number.
      structure: What a batch is: tuples and dicts of columns. One whose dtype isn't the data's is cast.
      task: The name of the task's column.
      batch_size: Rows of a batch; the last one may hold fewer.
      shuffle_seed: Gives the orders. None: rows stay in the order in which they come.
      drop_remainder: Leave out the last batch if it isn't full.

    Returns:
      A dataset of ``structure`` with (batch,) tensors for columns, or RaggedTensor (batch, None) for list
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

    @tf.autograph.experimental.do_not_convert  # has no Python branch on a tensor: tracing is quicker so
    def tensors(element: dict[str, Any]) -> tuple[tf.Tensor, ...]:
        draws = tf.zeros((0,), tf.int64)
        if shuffle_seed is not None:
            # Of each element of each epoch another one: the cursor says where in its range it ends.
            draws = tf.stack([tf.constant(shuffle_seed, tf.int64), element["epoch"], element["cursor"][0]])
        found = [draws, element["row_splits"]]
        for column in columns:
            values = element["task"] if column.name == task else element["columns"][column.name]
            values = tf.cast(values, column.dtype)
            found += [values.values, values.row_splits] if column.is_list else [values]
        return tuple(found)

    @tf.autograph.experimental.do_not_convert
    def structured(*parts: Any) -> Any:
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
        # A map costs as much as the batch: tf.data runs it on a thread of its own, and here it isn't needed.
        lists = any(column.is_list for column in columns)
        spec = tuple(flat) if lists else tf.nest.pack_sequence_as(structure, flat)
        found = tf.data.experimental.from_variant(variant, spec)
        return found.map(structured) if lists else found

    # `apply` keeps the input, and so its epoch's counter, as long as what is made of it.
    return cast(tf.data.Dataset, elements.map(tensors).apply(batches))
