"""A rank's part of the data, and the batches without samples that follow it."""

import time
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.shares import SHARES, Shares
from gmeta.training import rank_data
from gmeta.training.rank_data import (
    empty_batch,
    in_lockstep,
    near_gpu,
    pad_for_ever,
    rank_dataset,
    take_strided,
)

RAGGED = tf.ragged.constant([[1, 2], [], [3], [4, 5, 6], [7]], tf.int64)
SIGNATURE = (
    {"wide": tf.TensorSpec([None, None]), "tags": tf.RaggedTensorSpec([None, None], tf.int64)},
    tf.TensorSpec([None]),
)


def parts(data, size):
    return [take_strided(data, Shares.of(rank, size)) for rank in range(size)]


@given(n=st.integers(0, 9), size=st.integers(1, 4))
def test_ranks_share_out_all_samples_in_turn(n, size):
    x = np.arange(2 * n).reshape(n, 2)
    found = parts({"array": x, "tensor": tf.constant(x), "none": None}, size)
    for rank, part in enumerate(found):
        np.testing.assert_array_equal(part["array"], x[rank::size])
        np.testing.assert_array_equal(part["tensor"], x[rank::size])
        assert part["none"] is None


@pytest.mark.parametrize("size", [2, 3])
def test_ragged_and_sparse_samples_stay_whole(size):
    for rank, (ragged, sparse) in enumerate(
        zip(parts(RAGGED, size), parts(RAGGED.to_sparse(), size), strict=True)
    ):
        expected = RAGGED.to_list()[rank::size]
        assert ragged.to_list() == expected
        np.testing.assert_array_equal(
            tf.sparse.to_dense(sparse), tf.sparse.to_dense(RAGGED.to_sparse()).numpy()[rank::size]
        )


@pytest.mark.parametrize("samples", [0, 4, 11])
def test_a_rank_of_several_shares_takes_their_samples_in_order(samples):
    x = np.arange(1, samples + 1)[:, None]
    for shares in (Shares.of(0, 2, 5), Shares.of(1, 2, 5), Shares(0, 5, 5)):
        own = [i for i in range(samples) if shares.first <= i % 5 < shares.first + shares.count]
        for kind in (np.asarray, tf.constant, tf.RaggedTensor.from_tensor):
            found = take_strided(kind(x), shares)
            dense = found.to_tensor() if isinstance(found, tf.RaggedTensor) else found
            np.testing.assert_array_equal(dense, x[own].reshape(dense.shape))
            assert found.shape[0] == len(own)
        found = tf.sparse.to_dense(take_strided(tf.sparse.from_dense(x), shares))
        np.testing.assert_array_equal(found, x[own])


@settings(max_examples=4)  # each one traces a few functions
@given(sizes=st.lists(st.integers(1, 4), max_size=3), width=st.integers(1, 5))
def test_batches_without_samples_follow_and_have_the_last_ones_width(sizes, width):
    def batches():
        for size in sizes:
            x = {"wide": tf.ones([size, width]), "tags": tf.ragged.constant([[1]] * size, tf.int64)}
            yield x, tf.ones([size])

    data = tf.data.Dataset.from_generator(batches, output_signature=SIGNATURE)
    found = list(pad_for_ever(data).take(len(sizes) + 2))
    assert [int(y.shape[0]) for _, y in found] == [*sizes, 0, 0]
    for x, y in found:
        assert x["wide"].shape == (y.shape[0], width if sizes else 1)
        assert x["tags"].nrows() == y.shape[0]
    for x, _ in found[: len(sizes)]:
        np.testing.assert_array_equal(x["wide"], np.ones(x["wide"].shape))


def test_a_batch_without_samples_has_the_elements_structure():
    spec = {
        "ids": tf.TensorSpec([32], tf.int64),
        "image": tf.TensorSpec([None, 8, 3]),
        "text": tf.TensorSpec([None], tf.string),
        "sparse": tf.SparseTensorSpec([None, 7], tf.int64),
        "deep": tf.RaggedTensorSpec([None, None, None, 2], tf.float32, ragged_rank=2),
        "rate": tf.TensorSpec([], tf.float32),
    }
    found = empty_batch(spec)
    shapes = {name: found[name].shape.as_list() for name in ("ids", "image", "text", "rate")}
    assert shapes == {"ids": [0], "image": [0, 8, 3], "text": [0], "rate": []}
    assert found["sparse"].shape == (0, 7)
    assert found["deep"].nrows() == 0
    assert spec["deep"].is_compatible_with(found["deep"])
    assert {name: part.dtype for name, part in found.items()} == {n: s.dtype for n, s in spec.items()}


@pytest.mark.parametrize("spec", [tf.TensorSpec(None), tf.data.DatasetSpec(tf.TensorSpec([]))])
def test_data_of_unknown_form_is_refused(spec):
    with pytest.raises(ConfigError, match=r"batch of no samples.*output_signature"):
        empty_batch(spec)


def on_rank(monkeypatch, rank, size, total):
    monkeypatch.setenv(SHARES, str(total))
    monkeypatch.setattr(collectives, "world", lambda: collectives.World(rank, size, rank))
    monkeypatch.setattr(collectives, "allgather_objects", lambda mine: [mine] * size)


def whole_steps(parts):
    """Of each step, what all ranks have, sorted; steps without samples left out."""
    steps = [[part[k] if k < len(part) else [] for part in parts] for k in range(max(map(len, parts)))]
    found = [sorted(sample for batch in step for sample in batch) for step in steps]
    return [step for step in found if step]


@pytest.mark.parametrize("samples", [37, pytest.param(48, marks=pytest.mark.slow)])  # quick: 37
def test_steps_are_the_same_samples_on_fewer_ranks(monkeypatch, samples):
    x = np.arange(samples)
    found = {}
    for size in (1, 2, 3, 4):
        arrays, elements = [], []
        for rank in range(size):
            on_rank(monkeypatch, rank, size, total=4)
            batches = rank_dataset(x, tf.constant(x), batch_size=3, shuffle=False).dataset
            arrays.append([a.numpy().tolist() for a, _ in batches])
            for a, b in batches:
                np.testing.assert_array_equal(a, b)
            data = rank_dataset(tf.data.Dataset.from_tensor_slices(x).batch(3)).dataset
            elements.append([a.numpy().tolist() for a in data])
        found[size] = whole_steps(arrays), whole_steps(elements)
    assert len({str(steps) for steps in found.values()}) == 1
    assert [len(step) for step in found[1][0]] == [len(step) for step in found[1][1]]
    for steps in found[1]:
        assert sorted(sample for step in steps for sample in step) == x.tolist()


def test_one_rank_takes_no_steps_without_samples(monkeypatch):
    on_rank(monkeypatch, 0, 1, total=3)
    data = tf.data.Dataset.range(4).batch(1)
    assert in_lockstep(data) is data


class Pair(NamedTuple):
    """A batch that tf.data passes to a function whole, unlike a plain tuple."""

    x: tf.Tensor
    y: tf.Tensor


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(rank_data, "compute_place", lambda: "gpu")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("form", [lambda x, y: x, lambda x, y: (x, y), lambda x, y: (x,), Pair])
def test_batches_near_a_gpu_are_the_same(form):
    x = {
        "wide": tf.reshape(tf.range(12.0), [4, 3]),
        "flags": tf.constant([True, False, True, True]),
        "names": tf.constant(["a", "b", "c", "d"]),
        "tags": tf.ragged.constant([[1, 2], [], [3], [4]], tf.int64),
        "empty": tf.zeros([4, 0], tf.bfloat16),
        "long": tf.reshape(tf.range(400_004.0), [4, 100_001]),  # several threads copy it
        "sparse": tf.sparse.from_dense([[1, 0], [0, 2], [0, 0], [3, 0]]),
    }
    data = tf.data.Dataset.from_tensor_slices(form(x, tf.range(4))).batch(3)
    found = near_gpu(data)
    assert found.element_spec == data.element_spec
    assert int(found.cardinality()) == 2
    for one, other in zip(found, data, strict=True):
        parts = (tf.nest.flatten(element, expand_composites=True) for element in (one, other))
        for found_part, part in zip(*parts, strict=True):
            np.testing.assert_array_equal(found_part, part)


@pytest.mark.usefixtures("gpu")
def test_batches_near_a_gpu_are_taken_only_when_they_are_wanted_if_a_position_counts_them():
    taken, options = tf.Variable(0, dtype=tf.int64), tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    data = tf.data.Dataset.range(50).map(lambda x: tf.identity(x) + 0 * taken.assign_add(1, read_value=True))
    for count, _ in enumerate(near_gpu(data.with_options(options)), 1):
        time.sleep(0.002)
        assert int(taken) == count


def test_arrays_and_all_data_without_a_gpu_stay_as_they_are(monkeypatch):
    data = tf.data.Dataset.range(3)
    assert near_gpu(data) is data
    monkeypatch.setattr(rank_data, "compute_place", lambda: "gpu")
    assert near_gpu(x := np.ones(3)) is x


def test_named_tuples_stay_whole():
    data = tf.data.Dataset.from_tensor_slices(Pair(tf.ones([4, 2]), tf.range(4))).batch(2)
    for found in (pad_for_ever(data).take(3), rank_data._with_digest(data)[0]):
        assert found.element_spec.__class__ is Pair
        assert len(list(found)) >= 2
