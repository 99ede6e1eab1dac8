"""Collectives of tensors on GPUs by NCCL, each rank with a GPU of its own: `make test-gpu-ranks`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core import collectives
from gmeta.core.collectives.lane import lane_kind
from gmeta.core.errors import CollectiveError, RanksError
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from gmeta.models.zoo.dlrm_model import DLRMNetwork
from gmeta.optimizers import Adagrad
from support.gpu.cuda_library import count_gpus_apart
from support.process_ranks import run_ranks
from support.tables import sorted_records

_GPUS = count_gpus_apart()
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(_GPUS < 2, reason=f"needs 2 GPUs, there are {_GPUS}"),
]
SIZES = [pytest.param(n, marks=pytest.mark.skipif(n > _GPUS, reason=f"needs {n} GPUs")) for n in (2, 3, 4)]


def values(size: int, dtype: str, seed: int) -> np.ndarray:
    """Whole numbers, so that sums don't depend on their order."""
    return np.random.default_rng(seed).integers(0, 50, size).astype(tf.as_dtype(dtype).as_numpy_dtype)


def exchange_examples() -> list[str]:
    """Runs on every rank, which all draw the same examples; compares with NumPy."""
    here = collectives.world()
    devices = set()

    @settings(derandomize=True, database=None, deadline=None, max_examples=40)
    @given(
        dtype=st.sampled_from(["float32", "float64", "int32", "int64", "float16", "bfloat16", "bool"]),
        width=st.sampled_from([(), (1,), (3,), (2, 5), (0,)]),
        sizes=st.lists(
            st.integers(0, 3) | st.integers(0, 2000), min_size=here.size**2, max_size=here.size**2
        ),
        known=st.booleans(),
        traced=st.booleans(),
    )
    def check(dtype: str, width: tuple[int, ...], sizes: list[int], known: bool, traced: bool) -> None:
        table = np.reshape(sizes, [here.size, here.size])
        sent = [
            [values((table[a, b], *width), dtype, 10 * a + b) for b in range(here.size)]
            for a in range(here.size)
        ]
        own = tf.constant(np.concatenate(sent[here.rank]), dtype)
        received = tf.constant(table[:, here.rank], tf.int32) if known else None

        def run(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            splits = tf.constant(table[here.rank], tf.int32)
            name = f"rows_{dtype}_{len(width)}_{sum(width)}"
            return collectives.alltoall(rows, splits, name=name, place="gpu", received_splits=received)

        rows, splits = (tf.function(run) if traced else run)(own)
        devices.add(rows.device.rpartition("device:")[2])
        expected = np.concatenate([sent[a][here.rank] for a in range(here.size)])
        np.testing.assert_array_equal(rows.numpy(), expected)
        np.testing.assert_array_equal(splits.numpy(), table[:, here.rank])

    check()
    return [lane_kind("cpu"), lane_kind("gpu"), *sorted(devices)]


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_any_type_and_sizes_arrive(size: int) -> None:
    for kinds in run_ranks(exchange_examples, size):
        assert kinds[:2] == ["tcp", "nccl"]
        assert "GPU:0" in kinds


def sum_examples() -> str:
    """Runs on every rank: sums of several tensors, some empty, equal NumPy's, and equal bits everywhere."""
    here = collectives.world()

    @settings(derandomize=True, database=None, deadline=None, max_examples=40)
    @given(
        dtype=st.sampled_from(["float32", "float64", "int32", "int64", "float16", "bfloat16"]),
        sizes=st.lists(st.integers(0, 5) | st.integers(0, 100_000), min_size=1, max_size=4),
        traced=st.booleans(),
    )
    def check(dtype: str, sizes: list[int], traced: bool) -> None:
        terms = [[values(n, dtype, 100 * rank + i) for i, n in enumerate(sizes)] for rank in range(here.size)]

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            return collectives.allreduce_sum(tensors, name="sums", place="gpu")

        sums = (tf.function(run) if traced else run)(*[tf.constant(t, dtype) for t in terms[here.rank]])
        for i, total in enumerate(sums):
            np.testing.assert_array_equal(total.numpy(), sum(terms[rank][i] for rank in range(here.size)))

    check()
    rough = tf.constant(np.random.default_rng(here.rank).normal(size=300_001), tf.float32)
    (total,) = collectives.allreduce_sum([rough], name="rough", place="gpu")
    assert len(set(collectives.allgather_objects(total.numpy().tobytes()))) == 1
    expected = sum(np.random.default_rng(r).normal(size=300_001).astype("f4") for r in range(here.size))
    np.testing.assert_allclose(total.numpy(), expected, rtol=1e-4, atol=1e-5)
    return lane_kind("gpu")


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_any_type_and_sizes_arrive(size: int) -> None:
    assert run_ranks(sum_examples, size) == ["nccl"] * size


def differentiate(eagerly: bool) -> list[np.ndarray]:
    """The gradients of an exchange and of a sum."""
    here = collectives.world()
    rows = tf.Variable(tf.random.stateless_normal([3 * here.size, 4], [7, here.rank]))
    splits = tf.fill([here.size], 3)

    def run() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            came, _ = collectives.alltoall(rows, splits, name="rows", place="gpu", received_splits=splits)
            (total,) = collectives.allreduce_sum([rows[0]], name="sum", place="gpu")
            loss = (here.rank + 1.0) * tf.reduce_sum(came) + (here.rank + 1.0) * tf.reduce_sum(total)
        return [tf.convert_to_tensor(tape.gradient(loss, rows))]

    return [gradient.numpy() for gradient in (run if eagerly else tf.function(run))()]


@pytest.mark.parametrize("eagerly", [True, False])
def test_gradients_go_back(eagerly: bool) -> None:
    for (gradient,) in run_ranks(differentiate, 2, eagerly):
        expected = np.repeat([[1.0], [2.0]], 3, axis=0) * np.ones([1, 4])  # by the rank that has the row
        expected[0] += 3.0  # of the sum, which both ranks' losses have
        np.testing.assert_allclose(gradient, expected)


def die(hang: bool) -> None:
    """Rank 1 is killed, or sleeps, in the third of ten steps."""
    here = collectives.world()
    ones = tf.ones([here.size], tf.int32)

    @tf.function
    def step(rows: tf.Tensor) -> tf.Tensor:
        return collectives.alltoall(rows, ones, name="rows", place="gpu", received_splits=ones)[0]

    for number in range(10):
        if number == 2 and here.rank == 1:
            time.sleep(1)  # until the others wait in NCCL
            time.sleep(600 if hang else 0)
            os.kill(os.getpid(), signal.SIGKILL)
        with collectives.name_failures("a step"):
            step(tf.range(here.size, dtype=tf.float32))


def test_a_killed_rank_is_named_within_a_minute() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(die, 2, False)
    assert time.monotonic() - start < 60 + 60  # the start of the ranks included
    said = str(caught.value)
    assert said.startswith("the job was ended: rank 1 of 2 was killed by SIGKILL")
    assert "rank 0 of 2 lost its peers during a step, in gmeta_rows: gmeta lane: " in said
    assert "connection closed by rank 1, while rank 0 is in alltoall 'rows' of float" in said


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(die, 2, True, environment={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"}, grace=2)
    assert "timed out: rank 1 did not come" in str(caught.value) or "has waited" in str(caught.value)


def differ() -> str:
    """Rank 1 traces another step than rank 0."""
    here = collectives.world()
    ones = tf.ones([here.size], tf.int32)

    @tf.function
    def step() -> None:
        if here.rank == 0:
            collectives.alltoall(tf.ones([2]), ones, name="rows", place="gpu", received_splits=ones)
        else:
            collectives.allreduce_sum([tf.constant([1.0])], name="dense", place="gpu")

    try:
        with collectives.name_failures("a step"):
            step()
    except CollectiveError as error:
        return str(error)
    return "none"


def test_ranks_that_trace_different_steps_are_told_both() -> None:
    for said in run_ranks(differ, 2):
        assert "alltoall 'rows' of float, 4 bytes a row, number 0" in said
        assert "allreduce 'dense_float32' of float, 1 elements, number 0" in said


def fail_alone() -> str:
    """Rank 0's step fails beside a collective to which rank 1 doesn't come."""
    here = collectives.world()
    ones = tf.ones([here.size], tf.int32)
    if here.rank == 1:
        time.sleep(20)
        return "none"

    @tf.function
    def step(divisor: tf.Tensor) -> tf.Tensor:
        rows, _ = collectives.alltoall(tf.ones([2]), ones, name="rows", place="gpu", received_splits=ones)
        return tf.reduce_sum(rows) + tf.cast(1 // divisor, tf.float32)

    start = time.monotonic()
    with pytest.raises(tf.errors.InvalidArgumentError, match="division by zero"):
        step(tf.constant(0))
    return "ended" if time.monotonic() - start < 15 else "late"


def test_a_step_that_fails_does_not_wait_for_the_others() -> None:
    assert run_ranks(fail_alone, 2) == ["ended", "none"]


FEATURES = ("user", "item", "tag")
UNITS, STEPS = 64, 12


def train_dlrm(device: str) -> dict[str, Any]:
    """A DLRM on this rank's part of the global batches."""
    here = collectives.world()
    configs = [FeatureConfig(name, TableConfig(name, 8, optimizer=Adagrad(0.05))) for name in FEATURES]
    inputs = {name: tf.keras.Input([], name=name, dtype=tf.int64) for name in FEATURES}
    collection = EmbeddingCollection(configs, device=device, name="collection")
    model = Model(inputs, DLRMNetwork(FEATURES, 8)(collection(inputs)))
    model.compile(tf.keras.optimizers.SGD(0.1), "binary_crossentropy")
    rng = np.random.default_rng(5)
    columns = {name: np.minimum(rng.zipf(1.2, UNITS * STEPS), 500) for name in FEATURES}
    label = (rng.random([UNITS * STEPS, 1]) < 0.4).astype("f4")
    share = UNITS // here.size
    own = (
        np.arange(UNITS * STEPS).reshape(STEPS, UNITS)[:, here.rank * share : (here.rank + 1) * share].ravel()
    )
    x = {name: tf.constant(column[own], tf.int64) for name, column in columns.items()}
    data = tf.data.Dataset.from_tensor_slices((x, label[own])).batch(share)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    with collectives.count_collectives() as counts:
        model.fit(data.with_options(options), verbose=0)
    return {
        "kinds": [lane_kind("cpu"), lane_kind("gpu")],
        "devices": [table.device for table in collection.tables],
        "tables": [sorted_records(table) for table in collection.tables],
        "dense": [weight.numpy() for weight in model.trainable_variables],
        "calls": counts.calls,
    }


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_dlrm_on_two_ranks_is_that_on_one(device: str) -> None:
    (alone,), ranks = run_ranks(train_dlrm, 1, device), run_ranks(train_dlrm, 2, device)
    for rank in ranks:
        assert rank["kinds"] == ["tcp", "nccl"]
        assert set(rank["devices"]) == {device}
        for weights, expected, first in zip(rank["dense"], alone["dense"], ranks[0]["dense"], strict=True):
            np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(weights, first)
    for table, records in enumerate(alone["tables"]):
        keys = np.concatenate([rank["tables"][table]["keys"] for rank in ranks])
        order = np.argsort(keys)
        np.testing.assert_array_equal(keys[order], records["keys"])
        rows = np.concatenate([rank["tables"][table]["rows"] for rank in ranks])[order]
        np.testing.assert_allclose(rows, records["rows"], rtol=1e-4, atol=1e-5)
