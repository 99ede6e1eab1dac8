"""Collectives on real ranks, against what NumPy makes of all ranks' inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.losses.multi_task import mean_loss
from gmeta.metrics import AUC, NextItem, UserGAUC
from gmeta.training.rank_steps import merge_over_ranks
from support.process_ranks import run_ranks

pytestmark = pytest.mark.ranks

DTYPES = ("int64", "int32", "uint8", "bool", "float16", "bfloat16", "float32", "float64")


def part(sender: int, receiver: int, round_: int) -> np.ndarray:
    """What a rank sends to another: in some rounds nothing to some, in round 2 nothing to any."""
    rows = 0 if round_ == 2 else (3 * sender + 5 * receiver + round_) % 4
    return (100 * sender + 10 * receiver + np.arange(rows * 2).reshape(rows, 2)).astype(np.int64)


def collect() -> dict[str, Any]:
    """Runs on every rank: every collective, eagerly and in a graph; returns what it saw."""
    here = collectives.world()
    seen: dict[str, Any] = {"world": here}

    @tf.function
    def exchange(rows: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return collectives.alltoall(rows, splits, name="rows")

    eagerly = lambda rows, splits: collectives.alltoall(rows, splits, name="rows")  # noqa: E731
    for way, call in (("graph", exchange), ("eager", eagerly)):
        for round_ in range(4):
            parts = [part(here.rank, to, round_) for to in range(here.size)]
            splits = tf.constant([len(p) for p in parts], tf.int32)
            rows, received = call(tf.constant(np.concatenate(parts)), splits)
            seen[f"alltoall {way} {round_}"] = rows.numpy(), received.numpy()
    for dtype in DTYPES:
        rows = tf.cast(tf.fill([here.size, 1], here.rank), dtype)
        rows, _ = collectives.alltoall(rows, tf.ones([here.size], tf.int32), name=dtype)
        seen[f"alltoall {dtype}"] = rows.dtype.name, tf.cast(rows, tf.int32).numpy().tolist()

    constant = tf.constant([1.0, 2.0])  # an eager tensor, captured

    @tf.function
    def step(weights: tf.Tensor) -> list[tf.Tensor]:
        sums = collectives.allreduce_sum([weights, tf.constant(float(here.rank))], name="dense")
        with tf.name_scope(f"scope_of_rank_{here.rank}"):  # names must not depend on scopes
            captured = collectives.allreduce_sum([constant], name="dense")
        collectives.allreduce_sum([tf.constant(1)], name="nobody_reads_this")
        return [*sums, *captured]

    with collectives.count_collectives() as counts:
        for _ in range(3):
            seen["allreduce"] = [t.numpy() for t in step(tf.fill([2, 2], float(here.rank + 1)))]
    seen["counts"] = counts
    halves = [tf.fill([3], tf.cast(1.5, t)) for t in (tf.bfloat16, tf.float16)]
    seen["halves"] = [(t.dtype.name, t.numpy().tolist()) for t in collectives.allreduce_sum(halves, name="h")]

    @tf.function
    def scatter(terms: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        parts = [terms[:rank] for rank in range(here.size)]  # for rank 0 none
        total = collectives.reduce_scatter_sum(parts, name="scattered")
        return total, collectives.allgather(total, list(range(here.size)), name="gathered")

    for dtype in ("float32", "bfloat16", "int64"):
        total, gathered = scatter(tf.cast(tf.range(here.size) + 10 * here.rank, dtype))
        seen[f"scattered {dtype}"] = total.dtype.name, [each.numpy().tolist() for each in gathered]

    @tf.function
    def sum_both_ways(terms: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        (sums,) = collectives.allreduce_sum([terms], name="all")
        return sums[here.rank], collectives.reduce_scatter_sum(tf.unstack(terms), name="own")

    terms = tf.random.stateless_normal([here.size, 99], [here.rank, 1])
    seen["sums"] = [each.numpy() for each in sum_both_ways(terms)]

    rows = tf.Variable(np.arange(3 * here.rank, dtype=np.float32))  # of rank 0 none
    with tf.GradientTape() as tape:
        share = mean_loss(rows, tf.cast(rows != 0, tf.float32), over_ranks=True)
    seen["mean_loss"] = float(share), tape.gradient(share, rows).numpy()

    measured = metrics_of(*samples(here.rank))
    merge_over_ranks([measured[0], *measured])
    seen["metrics"] = results(measured)

    variables = [tf.Variable(tf.fill([2], here.rank + 7)), tf.Variable(here.rank == 1), tf.Variable([])]
    variables.append(tf.Variable(tf.cast([here.rank], tf.bfloat16)))
    collectives.broadcast_variables(variables, root=1)
    seen["variables"] = [tf.cast(v, tf.int32).numpy().tolist() for v in variables]
    seen["allgather_objects"] = collectives.allgather_objects({"rank": here.rank, "long": "x" * here.rank})
    seen["broadcast_object"] = collectives.broadcast_object([here.rank] * 5, root=here.size - 1)
    collectives.check_agreement({"config": "abc"})
    seen["refusals"] = [refusal(collectives.check_agreement, {"config": "ab"[here.rank == 1], "seed": "1"})]
    different = [tf.Variable(tf.zeros([2, 1 + (here.rank == 1)]))]
    seen["refusals"].append(refusal(collectives.broadcast_variables, different))
    seen["refusals"].append(refusal(collectives.broadcast_object, 1, 9))
    with collectives.count_collectives() as counts:
        collectives.barrier()
    seen["barrier"] = counts.calls
    return seen


def samples(rank: int) -> list[np.ndarray]:
    """Users, labels, scores and ranks of items: of rank 0 none, and of users some on several ranks."""
    rng, size = np.random.default_rng(rank), 5 * rank
    return [rng.integers(0, 3, size), np.arange(size) % 2, rng.normal(size=size), rng.integers(1, 9, size)]


def metrics_of(users: Any, labels: Any, scores: Any, places: Any) -> tuple[tf.keras.metrics.Metric, ...]:
    auc, gauc, next_item = AUC(), UserGAUC(), NextItem([3])
    auc.update_state(labels, scores)
    gauc.update_state(labels, scores, users)
    next_item.update_state(places)
    return auc, gauc, next_item


def results(measured: Any) -> list[float]:
    auc, gauc, next_item = (metric.result() for metric in measured)
    return [float(auc), float(gauc), *map(float, next_item.values())]


def refusal(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except ConfigError as error:
        return str(error)
    return "none"


@pytest.mark.usefixtures("ranks_by")
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.shown_by(case="gmeta-3")
def test_collectives_do_what_they_say(size: int) -> None:
    by_rank = run_ranks(collect, size)
    ranks = range(size)
    for rank, seen in enumerate(by_rank):
        assert seen["world"] == collectives.World(rank, size, rank)
        for way in ("graph", "eager"):
            for round_ in range(4):
                rows, received = seen[f"alltoall {way} {round_}"]
                parts = [part(sender, rank, round_) for sender in ranks]
                np.testing.assert_array_equal(rows, np.concatenate(parts))
                assert received.tolist() == [len(p) for p in parts]
        for dtype in DTYPES:
            values = [[min(s, 1) if dtype == "bool" else s] for s in ranks]
            assert seen[f"alltoall {dtype}"] == (dtype, values)
        weights, rank_sum, captured = seen["allreduce"]
        np.testing.assert_array_equal(weights, np.full([2, 2], size * (size + 1) / 2))
        assert rank_sum == sum(ranks)
        np.testing.assert_array_equal(captured, [size, 2 * size])
        # Three steps of three collectives, one of which nobody reads.
        assert seen["counts"].calls == {"allreduce": 9}
        assert seen["counts"].bytes == {"allreduce": 3 * (16 + 4 + 8 + 4)}
        assert seen["halves"] == [("bfloat16", [1.5 * size] * 3), ("float16", [1.5 * size] * 3)]
        np.testing.assert_array_equal(*seen["sums"])  # in one order, so to the last bit
        totals = [[size * number + 10 * sum(ranks) for number in range(r)] for r in ranks]
        for dtype in ("float32", "bfloat16", "int64"):
            assert seen[f"scattered {dtype}"] == (dtype, totals)
        weight = sum(3 * r - 1 for r in ranks if r)  # one has none
        mean, gradient = seen["mean_loss"]
        assert mean == pytest.approx(sum(range(3 * rank)) / weight)
        np.testing.assert_allclose(gradient, [0.0, *[1 / weight] * (3 * rank - 1)][: 3 * rank])
        together = [np.concatenate(x) for x in zip(*map(samples, ranks), strict=True)]
        assert seen["metrics"] == pytest.approx(results(metrics_of(*together)), rel=1e-12)
        assert not any(map(np.isnan, seen["metrics"]))
        assert seen["variables"] == [[8, 8], 1, [], [1]]
        assert seen["allgather_objects"] == [{"rank": r, "long": "x" * r} for r in ranks]
        assert seen["broadcast_object"] == [size - 1] * 5
        assert seen["barrier"] == {"barrier": 1}
        config, shape, root = seen["refusals"]
        assert "b on rank 1" in config
        assert "seed" not in config
        assert "variable 0: " in shape
        assert "(2, 2) float32 on rank 1" in shape
        assert "root is rank 9" in root
