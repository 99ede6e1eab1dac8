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
from gmeta.core.graph import in_order_of_use
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import Model
from gmeta.ops.device import compute_place
from gmeta.training import mean_gradients
from gmeta.training.mean_gradients import pack_gradients, sum_early
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
    sums = [gradient_of(size) for size in sizes]
    buckets: list[list[int]] = []

    def add_up(terms: list[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        assert name == "step/dense/early"
        buckets.append([term.shape[0] * 4 for term in terms])
        return [2 * term for term in terms]

    limits = {"MOST_NUMBERS": 5, "LEAST_BUCKET": least, "MOST_BUCKETS": most, "compute_place": lambda: "cpu"}
    with (
        mock.patch.multiple(mean_gradients, **limits),
        mock.patch.object(collectives, "allreduce_sum", add_up),
    ):
        packed = pack_gradients(sums)
        found = sum_early(packed, [tf.Variable(0.0) for _ in sums])

    vectors = len(packed.parts) - len(packed.alone)
    large = [n for n in packed.alone if isinstance(sizes[n], int) and sizes[n] > 5]
    summed = [n for n, total in zip(packed.alone, found[vectors:], strict=True) if total is not None]
    assert found[:vectors] == [None] * vectors, "vectors have parts of all gradients"
    assert summed == large[len(large) - len(summed) :], "the first gradients are left, the last are summed"
    assert [4 * sizes[n] for n in reversed(summed)] == [size for bucket in buckets for size in bucket]
    for n in summed:
        np.testing.assert_array_equal(found[vectors + packed.alone.index(n)], 2 * sums[n])
    assert all(sum(bucket) >= least for bucket in buckets)
    assert len(buckets) < most, "one bucket is left for the end"


def test_the_order_is_that_of_first_use() -> None:
    variables = [tf.Variable([1.0, 2.0], name=name) for name in "abcd"]
    orders = []

    @tf.function
    def step(many: tf.Tensor) -> tf.Tensor:
        total = tf.reduce_sum(variables[2] * 2.0)
        if many:
            total += tf.reduce_sum(variables[0])  # used in a branch's own graph
        total += tf.reduce_sum(variables[3]) + tf.reduce_sum(variables[2])
        orders.append(in_order_of_use(variables))
        return total

    step(tf.constant(True))
    assert orders == [[1, 2, 0, 3]], "one that isn't used comes first"
    assert in_order_of_use(variables) == [0, 1, 2, 3]


class Noted(tf.keras.layers.Layer):
    """Multiplies by NaN on rank 1 from a step on, if it is told to."""

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
    model = Model(x, Noted(bad_after)(hidden))
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
    for late, early in run_ranks(both, 2, options):
        tf.nest.map_structure(np.testing.assert_array_equal, late["dense"], early["dense"])
        tf.nest.map_structure(np.testing.assert_array_equal, late["tables"], early["tables"])
        assert (early["sums"] > late["sums"]) == (not options and early["place"] == "cpu")


def fail() -> str:
    with pytest.raises(NotFiniteError) as raised:
        learn(True, bad_after=2)
    return str(raised.value)


@pytest.mark.ranks
def test_a_gradient_that_is_not_finite_ends_all_ranks() -> None:
    for message in run_ranks(fail, 2):
        assert "rank 1" in message
