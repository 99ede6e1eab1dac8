"""What native attention takes beside its heads: a plan of the batch, and a bias."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.core.native import load_op_library
from gmeta.ops.attention.relative_bias import RelativeBias, bucket_starts

_native = load_op_library("ops")
tf.no_gradient("GmetaHstuPlan")
tf.no_gradient("GmetaHstuTimeMap")


def batch_inputs(offsets: tf.Tensor, visible: tf.Tensor, bias: RelativeBias | None) -> dict[str, Any]:
    """Make the native ops' inputs and attribute of a batch; an absent term of a bias has no elements.

    On a GPU a plan says which scores to compute, and a map has the bucket of every pair's times: a byte for
    each pair that may see each other. All layers need the same ones; a graph makes them once.
    """
    bias = bias or RelativeBias()
    plan = _native.gmeta_hstu_plan(offsets=offsets, visible=visible)
    tables = [tf.zeros([0]) if x is None else tf.cast(x, tf.float32) for x in bias[:2]]
    times = [tf.zeros([0], tf.int64) if x is None else x for x in bias[2:]]
    starts = bucket_starts().tolist()
    time_map = tf.zeros([0], tf.uint8)
    if bias.time_buckets is not None:
        rows, columns = times
        time_map = _native.gmeta_hstu_time_map(
            offsets=offsets, plan=plan, row_times=rows, column_times=columns, bucket_starts=starts
        )
    named = dict(zip(RelativeBias._fields, [*tables, *times], strict=True))
    return {
        "offsets": offsets,
        "visible": visible,
        "plan": plan,
        "time_map": time_map,
        "bucket_starts": starts,
        **named,
    }
