from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.ops import row_buffers
from gmeta.ops import row_buffers as gpu_rows


@given(
    counts=st.integers(1, 3).flatmap(
        lambda tables: st.lists(
            st.lists(st.integers(0, 4), min_size=tables, max_size=tables), min_size=1, max_size=4
        )
    ),
    data=st.data(),
    wire_dtype=st.sampled_from(gpu_rows.DTYPES),
)
def test_what_is_packed_on_a_device_is_what_the_native_op_packs(counts, data, wire_dtype):
    counts = np.array(counts, np.int32)
    dims = [data.draw(st.integers(1, 5)) for _ in range(counts.shape[1])]
    random = np.random.default_rng(0)
    rows = [
        random.normal(size=(n, dim)).astype(np.float32)
        for n, dim in zip(counts.sum(axis=0), dims, strict=True)
    ]
    rows, counts = [tf.constant(matrix) for matrix in rows], tf.constant(counts)
    packed = gpu_rows.pack(rows, None, counts, wire_dtype=wire_dtype)
    native = row_buffers.pack_rows(rows, None, counts, wire_dtype=wire_dtype)
    assert packed.buffer.dtype == wire_dtype
    np.testing.assert_array_equal(tf.cast(packed.buffer, tf.float32), tf.cast(native.buffer, tf.float32))
    np.testing.assert_array_equal(packed.splits, native.splits)
    twice = [tf.constant(random.integers(0, n, n) if n else [], tf.int32) for n in map(len, rows)]
    np.testing.assert_array_equal(
        gpu_rows.pack(rows, twice, counts).buffer, row_buffers.pack_rows(rows, twice, counts).buffer
    )
    unpacked = gpu_rows.unpack(packed.buffer, counts, dims=dims)
    for mine, other in zip(unpacked, row_buffers.unpack_rows(native.buffer, counts, dims=dims), strict=True):
        assert mine.dtype == tf.float32
        np.testing.assert_array_equal(mine, other)
