"""Ops that compute on a GPU read a copy of a batch's column there; all others read the column itself.

Where ops compute follows from the kernels that TensorFlow has registered, so these tests need no GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.kernels import get_registered_kernels_for_op

from gmeta.core.graph import assert_first
from gmeta.ops import device
from gmeta.ops.device import copy_to_gpu, from_caller, read_copy

pytestmark = pytest.mark.skipif(
    all(each.device_type == "CPU" for each in get_registered_kernels_for_op("Sigmoid").kernel),
    reason="this TensorFlow has no kernels for GPUs",
)
COLUMN, COPY = np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32)


def read(readers, column=COLUMN, copy=COPY):
    """Return whether ops read the copy, and what `readers` returns; the copy has other numbers."""
    found = []

    @tf.function(autograph=False)
    def step(column, copy):
        results = readers(column)
        found.append(read_copy(column, copy))
        return results

    results = step(tf.constant(column), tf.constant(copy))
    return found[0], results


@pytest.mark.parametrize(
    "reader",
    [
        tf.negative,
        lambda x: tf.concat([tf.zeros_like(x), x, x], 0)[2:4],  # its axis is in host memory, x isn't
        lambda x: tf.identity_n([tf.constant([0, 1]), x])[1],
        lambda x: tf.reshape(x, [-1]),
    ],
)
def test_an_op_of_a_gpu_reads_the_copy(reader):
    moved, result = read(reader)
    assert moved
    np.testing.assert_array_equal(result, reader(tf.constant(COPY)))


def on_host(x):
    with tf.device("CPU:0"):
        return -x


@pytest.mark.parametrize(
    "reader",
    [
        on_host,
        tf.shape,
        lambda x: tf.size(x) + tf.rank(x),
        lambda x: tf.cond(tf.constant(True), lambda: -x, lambda: x),
        lambda x: tf.strings.as_string(x),  # for which a GPU has no kernel
    ],
)
def test_other_ops_read_the_column(reader):
    moved, result = read(reader)
    assert not moved
    np.testing.assert_array_equal(result, reader(tf.constant(COLUMN)))


def test_an_op_with_a_variable_reads_where_the_variable_is():
    with tf.device("CPU:0"):
        rows = tf.Variable([5.0, 6.0, 7.0, 8.0, 9.0])
    moved, result = read(lambda x: tf.gather(rows, x), np.array([1, 2]), np.array([3, 4]))
    assert not moved
    np.testing.assert_array_equal(result, [6.0, 7.0])


def test_sizes_that_kernels_read_in_host_memory_are_the_columns():
    sizes, other = np.array([2, 3], np.int32), np.array([3, 2], np.int32)
    moved, result = read(lambda x: tf.broadcast_to(tf.constant(7.0), x), sizes, other)
    assert not moved
    assert result.shape == (2, 3)
    moved, result = read(lambda x: tf.reshape(tf.range(6.0), x), sizes, other)
    assert not moved
    assert result.shape == (2, 3)


@pytest.mark.parametrize("holds", [True, False])
def test_a_checked_column_is_read_as_a_copy_after_its_check(holds):
    def readers(x):
        with tf.device("CPU:0"):
            checked = assert_first(x, tf.reduce_all(x > (0.0 if holds else 1.5)), ["too small"])
        return checked * 2.0, on_host(checked)

    if not holds:
        with pytest.raises(tf.errors.InvalidArgumentError, match="too small"):
            read(readers)
        return
    moved, (there, here) = read(readers)
    assert moved
    np.testing.assert_array_equal(there, 2.0 * COPY)
    np.testing.assert_array_equal(here, -COLUMN)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.bool, tf.float16, tf.bfloat16, tf.uint8])
def test_copies_leave_a_function_and_enter_it_as_they_were(dtype, monkeypatch):
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "_is_in_gpu_memory", lambda tensor: tensor.op.type == "GmetaToGpu")
    column = tf.cast(tf.constant([[0, 1, -1], [0x7F800001, 0, 1]]), dtype)  # two are NaN to float32
    leave, enter = tf.function(copy_to_gpu), tf.function(from_caller)
    for each in (column, column[:0]):
        crossing = leave(each)
        assert (crossing.dtype != dtype) == (dtype == tf.int32)  # which a function would return on the host
        np.testing.assert_array_equal(enter(crossing, dtype), each)


def test_an_op_whose_kernels_depend_on_numbers_reads_the_column():
    moved, _ = read(lambda x: tf.math.approx_max_k(x, 1)[0])
    assert not moved
