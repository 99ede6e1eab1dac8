"""Graphs write what the safetensors library reads, and read what it writes."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load, save

from gmeta.export.delta_strings import Decoder, encode

NAMES = st.text('abz/:+.é"\\(', min_size=1, max_size=6)
TENSORS = st.dictionaries(
    NAMES,
    st.sampled_from([np.float32, np.float16, np.int64]).flatmap(
        lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.dictionaries(NAMES, NAMES, max_size=2))
def test_the_library_reads_what_a_graph_writes(tensors, metadata):
    written = encode({name: tf.constant(value)[None] for name, value in tensors.items()}, metadata, 1)[
        0
    ].numpy()
    for name, value in load(written).items():
        assert value.dtype == tensors[name].dtype
        np.testing.assert_array_equal(value, tensors[name])
    header = int.from_bytes(written[:8], "little")
    assert header % 8 == 0
    theirs = save(tensors, metadata=metadata)
    assert len(written) - header == len(theirs) - int.from_bytes(theirs[:8], "little")


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.booleans())
def test_a_graph_reads_what_the_library_writes(tensors, open_first):
    decoder = Decoder(tf.constant(save(tensors, metadata={"x": "1"})), "these bytes", "do this")
    decoder.expect("x", "1", "are no x")
    for name, value in tensors.items():
        dtype = tf.int64 if value.dtype == np.int64 else tf.float32
        shape = [None, *value.shape[1:]] if open_first and value.shape and value.size else value.shape
        read = decoder.tensor(name, dtype, tf.TensorShape(shape)).numpy()
        np.testing.assert_array_equal(read, value.astype(read.dtype))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bytes_that_are_cut_are_refused(data):
    whole = save({"a": np.ones(3, np.float32)}, metadata={"x": "1"})
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"these bytes (is|has) .*: do this"):
        Decoder(tf.constant(cut), "these bytes", "do this").tensor("a", tf.float32, tf.TensorShape([3]))


def test_bytes_behind_the_end_are_refused():
    whole = save({"a": np.ones(3, np.float32), "b": np.ones(1, np.int64)}, metadata={"x": "1"})
    with pytest.raises(tf.errors.InvalidArgumentError, match="these bytes has bytes behind its end: do this"):
        Decoder(tf.constant(whole + b"1"), "these bytes", "do this").tensor(
            "a", tf.float32, tf.TensorShape([3])
        )


def test_what_is_not_there_is_named():
    decoder = Decoder(
        tf.constant(save({"a": np.ones(3, np.float32)}, metadata={"x": "1"})), "this", "do that"
    )
    for name, dtype, shape in (("b", tf.float32, [3]), ("a", tf.int64, [3]), ("a", tf.float32, [2])):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"this has no {name} of shape .*: do that"):
            decoder.tensor(name, dtype, tf.TensorShape(shape))
    with pytest.raises(tf.errors.InvalidArgumentError, match="this is of another x: do that"):
        decoder.expect("x", "2", "is of another x")
