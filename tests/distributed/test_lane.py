"""Steps whose tensors go through the lane: results, order, and errors that name the ranks."""

from __future__ import annotations

import os
import re
import signal
import threading
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
from support.process_ranks import run_ranks

pytestmark = pytest.mark.ranks
TCP = {"GMETA_LANE": "tcp"}


def draw_sizes() -> str:
    """Runs on every rank, which all draw the same examples: what each sends to each."""
    here = collectives.world()

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.bfloat16), tf.TensorSpec([None], tf.int32)])
    def step(rows: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, ...]:
        first = collectives.alltoall(rows, splits, name="rows")
        second = collectives.alltoall(tf.cast(rows, tf.int64), splits, name="rows")
        return *first, *second

    def sent(sender: int, receiver: int, rows: int) -> np.ndarray:
        return np.full([rows, 3], 10 * sender + receiver)

    @settings(derandomize=True, database=None, deadline=None, max_examples=60)
    @given(st.lists(st.integers(0, 300), min_size=here.size**2, max_size=here.size**2))
    def check(sizes: list[int]) -> None:
        table = np.reshape(sizes, [here.size, here.size])
        parts = [sent(here.rank, to, table[here.rank, to]) for to in range(here.size)]
        rows, splits, wide, _ = step(
            tf.cast(np.concatenate(parts), tf.bfloat16), tf.constant(table[here.rank], tf.int32)
        )
        came = np.concatenate([sent(who, here.rank, table[who, here.rank]) for who in range(here.size)])
        np.testing.assert_array_equal(tf.cast(rows, tf.int32), came)
        np.testing.assert_array_equal(wide, came)
        np.testing.assert_array_equal(splits, table[:, here.rank])

    check()
    hollow = tf.zeros([here.size * 2, 0], tf.bool)
    _, came = collectives.alltoall(hollow, tf.fill([here.size], 2), name="hollow")
    assert came.numpy().tolist() == [2] * here.size
    return lane_kind()


def test_rows_of_any_sizes_arrive() -> None:
    assert run_ranks(draw_sizes, 2, environment=TCP) == ["tcp", "tcp"]


def walk(steps: int, delays: float) -> Any:
    """A step of four collectives that depend on little, on ranks that are late at random."""
    here = collectives.world()
    late, drawn = np.random.default_rng(here.rank), np.random.default_rng(here.rank)
    weights = tf.Variable(tf.ones([40]))

    @tf.function
    def step(ids: tf.Tensor, splits: tf.Tensor, gradient: tf.Tensor) -> None:
        _, others = collectives.alltoall(ids, splits, name="ids")
        collectives.alltoall(tf.cast(ids, tf.float32), splits, name="nobody_reads_this")
        (summed,) = collectives.allreduce_sum([gradient], name="dense")
        (count,) = collectives.allreduce_sum([tf.size(ids)], name="count")
        weights.assign(0.9 * weights + summed + 1e-3 * tf.cast(count + tf.reduce_sum(others) * 0, tf.float32))

    for _ in range(steps):
        if late.random() < 0.05:
            time.sleep(delays * late.random())
        splits = drawn.integers(0, 9, here.size)
        ids = drawn.integers(0, 99, splits.sum())
        gradient = tf.constant(drawn.normal(size=40), tf.float32)
        step(tf.constant(ids), tf.constant(splits, tf.int32), gradient)
    return lane_kind(), weights.numpy().tobytes()


@pytest.mark.parametrize(
    ("size", "steps"),
    [(3, 200), *(pytest.param(size, 100_000, marks=pytest.mark.slow) for size in (3, 4))],
)
def test_steps_of_late_ranks_end_with_equal_bits(size: int, steps: int) -> None:
    ends = run_ranks(walk, size, steps, 0.002, environment=TCP, timeout=1800)
    assert ends == [ends[0]] * size
    assert ends[0][0] == "tcp"


def differ() -> str:
    """Rank 1 traces another step than rank 0."""
    here = collectives.world()

    @tf.function
    def step() -> None:
        if here.rank == 0:
            collectives.alltoall(tf.range(here.size), tf.ones([here.size], tf.int32), name="keys")
        else:
            collectives.allreduce_sum([tf.constant([1.0])], name="dense")

    try:
        with collectives.name_failures("a step"):
            step()
    except CollectiveError as error:
        return str(error)
    return "none"


def test_ranks_that_trace_different_steps_are_told_both() -> None:
    for said in run_ranks(differ, 2, environment=TCP):
        (number,) = set(re.findall(r"number (\d+)", said))  # without Horovod objects went before
        assert f"alltoall 'keys' of int32, 4 bytes a row, number {number}" in said
        assert f"allreduce 'dense_float32' of float, 1 elements, number {number}" in said
        assert "the ranks make different collectives" in said


def exchange_ahead() -> tuple[str, int]:
    """The main thread's steps, and beside them another thread's, in whatever order."""
    here = collectives.world()
    ones = tf.ones([here.size], tf.int32)

    def run(name: str, times: int) -> None:
        for number in range(times):
            rows, _ = collectives.alltoall(tf.fill([here.size], number), ones, name=name)
            assert rows.numpy().tolist() == [number] * here.size

    thread = threading.Thread(target=run, args=("ahead", 20))
    thread.start()
    run("rows", 200)
    thread.join()
    with collectives.count_collectives() as counts:
        run("rows", 2)
    return lane_kind(), counts.calls["alltoall"]


@pytest.mark.usefixtures("ranks_by")
@pytest.mark.shown_by(case="gmeta")
def test_another_thread_exchanges_beside_the_lane() -> None:
    assert run_ranks(exchange_ahead, 2, environment=TCP) == [("tcp", 2)] * 2


def die() -> None:
    """Rank 1 is killed in the third of ten steps."""
    here = collectives.world()

    @tf.function
    def step(rows: tf.Tensor) -> tf.Tensor:
        return collectives.alltoall(rows, tf.ones([here.size], tf.int32), name="rows")[0]

    for number in range(10):
        if number == 2 and here.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with collectives.name_failures("a step"):
            step(tf.range(here.size))


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(die, 2, environment=TCP)
    assert str(caught.value).startswith("the job was ended: rank 1 of 2 was killed by SIGKILL")
    said = "rank 0 of 2 lost its peers during a step, in gmeta_rows: gmeta lane: connection closed by rank 1"
    assert said in str(caught.value)


def hang() -> None:
    """Rank 1 doesn't come to the second step."""
    here = collectives.world()
    for number in range(2):
        if number == 1 and here.rank == 1:
            time.sleep(600)
        collectives.alltoall(tf.range(here.size), tf.ones([here.size], tf.int32), name="rows")


@pytest.mark.shown_by("test_a_killed_rank_is_named")
def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(hang, 2, environment={**TCP, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"}, grace=2)
    assert "timed out: rank 1 did not come" in str(caught.value) or "has waited" in str(caught.value)


def test_an_unknown_lane_is_refused() -> None:
    with pytest.raises(RanksError, match="GMETA_LANE='udp': give one of auto, tcp, horovod"):
        run_ranks(die, 2, environment={"GMETA_LANE": "udp"})
