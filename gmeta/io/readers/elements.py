"""The tensors of a native reader's element: how its op receives and returns a schema's columns."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.data.schema import Column, Schema


def columns_attributes(schema: Schema) -> dict[str, Any]:
    """Return the attributes that tell a reader's op what its records hold."""
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
    """Return the same tensors by name, as `gmeta.io.group_batch` describes them."""
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
