"""Large dense gradients are summed in buckets during the backward pass; steps stay the same to the bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core import collectives
from gmeta.core.errors import NotFiniteError
from gmeta.layers import EmbeddingCollection, FeatureConfig, record_lookups
from gmeta.models import JointOptimizer, Model
from gmeta.ops.device import compute_place
from gmeta.training import mean_gradients
from gmeta.training.mean_gradients import sum_early
from support.process_ranks import run_ranks
from support.tables import sorted_records


def gradient_of(numbers: int | str) -> Any:
    if numbers == "none":
        return None
    if numbers == "slices":
        return tf.IndexedSlices(tf.ones([2, 90]), tf.constant([1, 0]), tf.constant([40, 90]))
    return tf.fill([numbers], tf.cast(numbers, tf.float32))


@given(
    sizes=st.lists(st.sampled_from(["none", "slices"]) | st.integers(0, 60), max_size=12),
    least=st.integers(1, 400),
    most=st.integers(1, 4),
)
def test_buckets_go_from_the_last_gradient_to_the_first(
    sizes: list[int | str], least: int, most: int
) -> None:
    buckets: list[list[tf.Tensor]] = []

    def add_up(terms: list[tf.Tensor], *, name: str, place: str) -> list[tf.Tensor]:
        assert name == "step/dense/early"
        buckets.append(terms)
        return [tf.identity(term, name=f"twice_{term.op.name}") for term in terms]

    limits = {"MOST_NUMBERS": 5, "LEAST_BUCKET": least, "MOST_BUCKETS": most, "lane_kind": lambda _: "tcp"}
    with (
        mock.patch.multiple(mean_gradients, **limits),
        mock.patch.object(collectives, "allreduce_sum", add_up),
        tf.Graph().as_default(),
    ):
        sums = [gradient_of(size) for size in sizes]
        found = sum_early(sums)

    large = [n for n, size in enumerate(sizes) if isinstance(size, int) and size > 5]
    summed = [n for n, total in enumerate(found) if total is not None]
    assert summed == large[len(large) - len(summed) :], "the first gradients are left, the last are summed"
    assert [sums[n] for n in reversed(summed)] == [term for bucket in buckets for term in bucket]
    assert [found[n].name for n in summed] == [f"twice_{sums[n].op.name}:0" for n in summed]
    assert all(sum(4 * term.shape[0] for term in bucket) >= least for bucket in buckets)
    assert len(buckets) < most, "one bucket is left for the end"


class BadOnRank1(tf.keras.layers.Layer):
    """Multiplies by NaN on rank 1 after a number of calls; None: never."""

    def __init__(self, bad_after: int | None) -> None:
        super().__init__()
        self.bad_after, self.calls = bad_after, tf.Variable(0, trainable=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if self.bad_after is None or collectives.world().rank != 1:
            return inputs
        bad = self.calls.assign_add(1) > self.bad_after
        return inputs * tf.where(bad, float("nan"), 1.0)


def learn(early: bool, bad_after: int | None = None, **options: Any) -> dict[str, Any]:
    """Trains on each rank's own data, of which rank 1 has less."""
    rank = collectives.world().rank
    rng = np.random.default_rng(rank)
    features = [FeatureConfig("user", dim=4), FeatureConfig("item", dim=4)]
    x = {each.name: tf.keras.Input([], name=each.name, dtype=tf.int64) for each in features}
    hidden = tf.keras.layers.Concatenate()(list(EmbeddingCollection(features, name="tables")(x).values()))
    for units in (16, 9, 12, 1):
        start = tf.keras.initializers.GlorotUniform(seed=units)
        hidden = tf.keras.layers.Dense(units, kernel_initializer=start)(hidden)
    model = Model(x, BadOnRank1(bad_after)(hidden))
    model.compile(tf.keras.optimizers.Adam(0.02, global_clipnorm=1.0), "mse", **options)
    n = 40 - 13 * rank
    data = ({name: rng.integers(0, 30, n) for name in ("user", "item")}, rng.normal(size=n).astype("f4"))
    data = tf.data.Dataset.from_tensor_slices(data).batch(8)
    limits = {"MOST_NUMBERS": 8, "LEAST_BUCKET": 1 if early else 1 << 30}
    with mock.patch.multiple(mean_gradients, **limits), collectives.count_collectives() as counts:
        model.fit(data.with_options(_own_data()), epochs=2, verbose=0)
    return {
        "dense": [weight.numpy() for weight in model.trainable_variables],
        "tables": [sorted_records(table) for table in model.get_layer("tables").tables],
        "sums": counts.calls["allreduce"],
        "place": compute_place(),
    }


def _own_data() -> tf.data.Options:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


def both(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return learn(False, **options), learn(True, **options)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="step"),
        pytest.param({"accumulate_steps": 2}, id="accumulated"),
        pytest.param({"shard_optimizer": True}, id="divided"),
    ],
)
def test_steps_have_the_same_bits(options: dict[str, Any]) -> None:
    found = run_ranks(both, 2, options)
    for late, early in found:
        tf.nest.map_structure(np.testing.assert_array_equal, late["dense"], early["dense"])
        tf.nest.map_structure(np.testing.assert_array_equal, late["tables"], early["tables"])
        assert (early["sums"] > late["sums"]) == (not options and early["place"] == "cpu")
    tf.nest.map_structure(np.testing.assert_array_equal, *(early["dense"] for _, early in found))


def learn_unlike_traces(most: int) -> tuple[list[np.ndarray], list[str]]:
    """Rank 0 doesn't know the shape of a gradient, and reads its variables in another order."""
    rank = collectives.world().rank
    variables = [tf.Variable(tf.zeros([3, 4]), name=f"v{n}") for n in range(4)]
    joint = JointOptimizer(tf.keras.optimizers.SGD(1.0))
    with record_lookups() as nothing:
        pass

    @tf.function
    def step() -> None:
        order = variables if rank else variables[::-1]
        loss = sum(tf.reduce_sum(variable) for variable in order)
        given = [tf.fill([3, 4], float(n)) for n in range(4)]
        if not rank:
            given[1] = tf.raw_ops.PlaceholderWithDefault(input=given[1], shape=[None, 4])
        joint.step(given, variables, nothing, samples=1 + tf.cast(0 * loss, tf.int32))

    with mock.patch.multiple(mean_gradients, MOST_NUMBERS=most, LEAST_BUCKET=1):
        step()
    graph = step.get_concrete_function().graph
    ops = [op.name for op in graph.get_operations() if op.type.startswith("GmetaLane")]
    return [variable.numpy() for variable in variables], ops


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("most", "early"), [pytest.param(8, 3, id="large"), pytest.param(12, 0, id="packed")]
)
def test_ranks_that_trace_unlike_sum_the_same_gradients(most: int, early: int) -> None:
    for weights, ops in run_ranks(learn_unlike_traces, 2, most):
        assert sum("early" in name for name in ops) == early
        for number, weight in enumerate(weights):
            np.testing.assert_array_equal(weight, np.full([3, 4], -float(number)))


def fail() -> str:
    with pytest.raises(NotFiniteError) as raised:
        learn(True, bad_after=2)
    return str(raised.value)


@pytest.mark.ranks
def test_a_gradient_that_is_not_finite_ends_all_ranks() -> None:
    for message in run_ranks(fail, 2):
        assert "rank 1" in message
