"""Large batches of small ones: each row once, in an order that the seed gives."""

from itertools import chain

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.io.service.served_epochs import rebatch


def base_batches(sizes):
    """Rows (0, 1, …) in every form, in batches of these sizes."""
    ends = np.cumsum(sizes)

    def batches():
        for end, size in zip(ends, sizes, strict=True):
            row = np.arange(end - size, end)
            lists = tf.RaggedTensor.from_row_lengths(np.repeat(row, row % 3), row % 3)
            yield {"row": row, "name": [str(r) for r in row], "list": lists}, np.stack([row, row], 1)

    ragged = tf.RaggedTensorSpec([None, None], tf.int64, 1)
    names = tf.TensorSpec([None], tf.string)
    parts = {"row": tf.TensorSpec([None], tf.int64), "name": names, "list": ragged}
    return tf.data.Dataset.from_generator(
        batches, output_signature=(parts, tf.TensorSpec([None, 2], tf.int64))
    )


def rows_of(batch):
    """The numbers of a batch's rows; all its parts belong to them."""
    parts, pair = batch
    row = parts["row"].numpy()
    assert parts["name"].numpy().tolist() == [str(r).encode() for r in row]
    assert parts["list"].to_list() == [[r] * (r % 3) for r in row]
    np.testing.assert_array_equal(pair.numpy(), np.stack([row, row], 1))
    return row.tolist()


@settings(deadline=None, max_examples=8)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    batches=st.integers(1, 3),
    more=st.integers(0, 4),
    seed=st.integers(0, 2**40),
)
@pytest.mark.shown_by("test_blocks_are_permuted_by_seed_and_number")
def test_each_row_comes_once_in_batches_of_equal_size(sizes, batches, more, seed):
    shuffle = batches + more
    dataset = rebatch(base_batches(sizes), batches, shuffle=shuffle, seed=seed)
    found = [rows_of(batch) for batch in dataset]
    assert found == [rows_of(batch) for batch in dataset]
    begin = 0
    for first in range(0, len(sizes), shuffle):
        block = sizes[first : first + shuffle]
        count = -(-len(block) // batches)
        own, found = found[:count], found[count:]
        assert sorted(chain(*own)) == list(range(begin, begin + sum(block)))
        shares = [min(batches, len(block) - k * batches) * sum(block) / len(block) for k in range(count)]
        assert all(abs(len(rows) - share) < 1 for rows, share in zip(own, shares, strict=True))
        begin += sum(block)
    assert not found


def test_blocks_are_permuted_by_seed_and_number():
    def order(seed):
        return [rows_of(batch) for batch in rebatch(base_batches([8] * 8), 2, shuffle=4, seed=seed)]

    first, second = list(chain(*order(0)[:2])), [row - 32 for row in chain(*order(0)[2:])]
    assert sorted(first) == sorted(second) == list(range(32))
    assert first != second != sorted(second)
    assert order(1) != order(0)


def test_without_shuffle_rows_keep_their_order():
    assert [rows_of(batch) for batch in rebatch(base_batches([2, 0, 3, 1]), 3)] == [[0, 1, 2, 3, 4], [5]]


def test_what_has_no_rows_is_refused():
    with pytest.raises(ConfigError, match="has no rows"):
        rebatch(tf.data.Dataset.from_tensors({"epoch": 1}), 2)
    with pytest.raises(ConfigError, match="shuffle must be a whole number from 3 on, got 2"):
        rebatch(base_batches([1]), 3, shuffle=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="differ in their number of rows"):
        list(rebatch(tf.data.Dataset.from_tensors((tf.zeros([3]), tf.zeros([2]))), 1))
