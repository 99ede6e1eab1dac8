from __future__ import annotations

import gc
import resource
import weakref
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings

from gmeta import initializers, ops, optimizers
from gmeta.core.errors import ConfigError, NotFiniteError
from support.reference.table import ReferenceHashTable
from support.tables import assert_agrees, assert_same_tables, sorted_records

pytestmark = pytest.mark.usefixtures("table_device")

INT64 = np.iinfo(np.int64)
EXTREMES = [INT64.min, INT64.min + 1, -1, 0, 1, INT64.max - 1, INT64.max]
OPTIMIZERS = [
    optimizers.SGD(0.1),
    optimizers.Momentum(0.1),
    optimizers.Momentum(0.1, nesterov=True),
    optimizers.Adagrad(0.1),
    optimizers.RowWiseAdagrad(0.1),
    optimizers.Adam(0.01),
    optimizers.AdamW(0.01, weight_decay=0.1),
    optimizers.Ftrl(0.1, l1=0.01, l2=0.02, l2_shrinkage=0.03, beta=0.1),
    optimizers.Ftrl(0.1, learning_rate_power=-0.3),
]

keys_strategy = st.lists(st.one_of(st.integers(-6, 6), st.sampled_from(EXTREMES)), max_size=12)
operation = st.one_of(
    st.tuples(st.just("lookup"), keys_strategy, st.booleans()),
    st.tuples(st.just("apply"), keys_strategy, st.integers(0, 2**16)),
    st.tuples(st.just("remove"), keys_strategy, st.none()),
    st.tuples(st.just("contains"), keys_strategy, st.none()),
    st.tuples(st.just("reload"), st.just([]), st.none()),
)


@settings(max_examples=150)
@given(
    operations=st.lists(operation, max_size=25),
    optimizer=st.sampled_from(OPTIMIZERS),
    initializer=st.sampled_from(
        [
            initializers.Zeros(),
            initializers.Constant(2),
            initializers.Uniform(-1, 1),
            initializers.Normal(0, 1),
            initializers.TruncatedNormal(1, 0.1),
        ]
    ),
    dim=st.integers(1, 40),
    seed=st.integers(INT64.min, INT64.max),
)
def test_any_sequence_of_operations_agrees_with_the_reference(operations, optimizer, initializer, dim, seed):
    table = ops.HashTable(dim, optimizer, initializer, seed)
    model = ReferenceHashTable(dim, optimizer, initializer, seed)
    for kind, keys, argument in operations:
        keys = np.array(keys, np.int64)
        if kind == "lookup":
            rows, found, inverse = table.lookup(keys, insert=argument)
            expected = model.lookup(keys, argument)
            np.testing.assert_allclose(rows, expected[0], rtol=2e-6, atol=1e-7)
            np.testing.assert_array_equal(found, expected[1])
            np.testing.assert_array_equal(inverse, expected[2])
        elif kind == "apply":
            grads = np.random.default_rng(argument).normal(size=(len(keys), dim)).astype(np.float32)
            table.apply_gradients(keys, grads)
            model.apply_gradients(keys, grads, optimizer.learning_rate)
        elif kind == "remove":
            assert int(table.remove(keys)) == model.remove(keys)
        elif kind == "contains":
            np.testing.assert_array_equal(table.contains(keys), model.contains(keys))
        else:
            records = table.export()
            fresh = ops.HashTable(dim, optimizer, initializer, seed)
            fresh.import_(records, replace=True)
            assert_same_tables(fresh, table)
    assert_agrees(table, model)


def test_a_large_table_agrees_with_the_reference():
    random = np.random.default_rng(0)
    table = ops.HashTable(8, optimizers.Adagrad(0.1), initializers.Normal(0, 1), seed=5)
    model = ReferenceHashTable(8, optimizers.Adagrad(0.1), initializers.Normal(0, 1), seed=5)
    for _ in range(4):
        ids = random.integers(INT64.min, INT64.max, 3000) // random.choice([1, 2**50, 2**55])
        lookup, expected = table.lookup(ids), model.lookup(ids)
        np.testing.assert_allclose(lookup.rows, expected[0], rtol=2e-6, atol=1e-7)
        grads = random.normal(size=lookup.rows.shape).astype(np.float32)
        table.apply_gradients(lookup.keys, grads)
        model.apply_gradients(expected[1], grads, 0.1)
        gone = random.choice(lookup.keys.numpy(), 500)
        assert int(table.remove(gone)) == model.remove(gone)
    keys = np.array(sorted(model.records), np.int64)
    assert sorted_records(table)["keys"].tolist() == keys.tolist()
    rows = table.lookup_keys(keys, insert=False)
    np.testing.assert_allclose(rows, model.lookup(keys, False)[0], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int8, np.uint16])
def test_any_integers_that_fit_are_ids(dtype):
    table = ops.HashTable(2)
    lookup = table.lookup(np.array([[3, 1], [3, 3]], dtype))
    assert lookup.keys.numpy().tolist() == [3, 1]
    assert lookup.inverse.numpy().tolist() == [[0, 1], [0, 0]]


def test_a_reserved_table_takes_its_rows_without_growing_and_holds_the_same():
    reserved, plain = (ops.HashTable(3, optimizers.Adam(), initializers.Normal(), seed=4) for _ in range(2))
    for table in (reserved, plain):
        table.lookup(range(50))
    reserved.reserve(200_000)
    before = reserved.statistics()
    keys = np.arange(-100_000, 100_000)
    for table in (reserved, plain):
        table.lookup_keys(keys)
    after = reserved.statistics()
    assert int(after.capacity) == int(before.capacity)
    if reserved.tiers is None:
        assert int(after.bytes) < 1.01 * int(before.bytes)  # the directories of blocks grow
    assert_same_tables(reserved, plain)
    reserved.lookup_keys(np.arange(10**6, 10**6 + 200_000))  # beyond what was reserved
    assert int(reserved.size()) == 400_000
    with pytest.raises(ConfigError, match="must be >= 0, got -1"):
        plain.reserve(-1)


def test_no_ids_and_one_id():
    table = ops.HashTable(2)
    assert table.lookup([]).rows.shape == (0, 2)
    assert table.lookup(7).rows.shape == (1, 2)
    assert table.lookup(7).inverse.shape == ()
    table.apply_gradients([], tf.zeros([0, 2]))
    assert int(table.remove([])) == 0
    assert table.contains([]).shape == (0,)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def _all_is_young():
    """What a test makes stays in the youngest generation: to collect all of them takes 2 s late in a run."""
    gc.collect(1)
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_all_is_young")
def test_a_table_dies_with_its_object():
    before = resident_bytes()
    for _ in range(8):
        table = ops.HashTable(4096, optimizers.SGD(), initializers.Zeros())
        table.lookup(np.arange(3000))  # 49 MB
        seen = weakref.ref(table)
        del table
        gc.collect(0)
        assert seen() is None
    assert resident_bytes() - before < 200e6  # four of the eight tables


@pytest.mark.usefixtures("_all_is_young")
def test_a_function_keeps_the_table_that_it_uses():
    def make() -> tf.types.experimental.ConcreteFunction:
        table = ops.HashTable(2, optimizers.SGD(1.0), initializers.Zeros())

        @tf.function
        def use() -> tf.Tensor:
            table.lookup([1])
            table.apply_gradients([1], tf.ones([1, 2]))
            return table.lookup([1]).rows

        return use.get_concrete_function()

    use = make()
    gc.collect(0)
    assert [use().numpy()[0, 0] for _ in range(3)] == [-1, -2, -3]


def test_tables_of_one_name_are_different_tables():
    a, b = ops.HashTable(2, name="same"), ops.HashTable(2, name="same")
    a.lookup([1])
    assert (int(a.size()), int(b.size())) == (1, 0)


def test_errors_name_the_table_and_what_was_received():
    table = ops.HashTable(4, name="item")
    with pytest.raises(ConfigError, match=r"table 'item': ids must be integers \(int64\), got dtype float32"):
        table.lookup([1.5])
    with pytest.raises(ConfigError, match=r"table 'item': ids must be integers \(int64\), got dtype string"):
        table.lookup(["a"])
    with pytest.raises(ConfigError, match=r"table 'item': keys must be a vector, got shape \(1, 2\)"):
        table.contains([[1, 2]])
    with pytest.raises(ConfigError, match=r"table 'item': grads must have shape \(2, 4\), got \(2, 5\)"):
        table.apply_gradients([1, 2], tf.zeros([2, 5]))
    with pytest.raises(ConfigError, match=r"table 'item': grads must have shape \(2, 4\), got \(3, 4\)"):
        table.apply_gradients([1, 2], tf.zeros([3, 4]))
    with pytest.raises(ConfigError, match=r"table 'item': grads must be float32, got dtype float64"):
        table.apply_gradients([1], tf.zeros([1, 4], tf.float64))
    with pytest.raises(ConfigError, match=r"table 'item': grads is None: the loss doesn't depend"):
        table.apply_gradients([1], None)


def test_shapes_unknown_to_a_graph_are_checked_when_it_runs():
    table = ops.HashTable(4, name="item")

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def apply(grads: tf.Tensor) -> None:
        table.apply_gradients([1, 2], grads)

    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"table 'item': gradients must have shape \[2,4\]"
    ):
        apply(tf.zeros([2, 3]))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_refused_before_any_row_changes(bad):
    table = ops.HashTable(2, optimizers.SGD(1.0), name="item")
    before = table.lookup([5, 7, -2]).rows.numpy()
    gradients = tf.constant([[1.0, 1.0], [1.0, bad], [bad, 1.0], [1.0, 1.0]])
    keys, told = [5, 7, 7, -2], r"the gradient is NaN or infinite for id 7 of table .*item.*, and nothing was"
    with pytest.raises(NotFiniteError, match=told):
        table.apply_gradients(keys, gradients)
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        tf.function(lambda given: [table.apply_gradients(keys, given)][:0])(gradients)
    with pytest.raises(NotFiniteError, match="id -2 of table 'item' and 1 more, and nothing"):
        table.apply_gradients([-2, 5], tf.fill([2, 2], bad))
    np.testing.assert_array_equal(table.lookup_keys([5, 7, -2], insert=False), before)
    table.apply_gradients(keys, gradients, finite=False)
    assert not np.isfinite(table.lookup([7]).rows).any()


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="table 'x': dim must be at least 1, got 0"):
        ops.HashTable(0, name="x")
    with pytest.raises(ConfigError, match="table 'x': seed must fit int64"):
        ops.HashTable(1, seed=2**63, name="x")
    with pytest.raises(ConfigError, match=r"Adam: beta_2 must lie in \[0, 1.0\), got 1.0"):
        optimizers.Adam(beta_2=1.0)
    with pytest.raises(ConfigError, match=r"SGD: learning_rate must lie in \[0, inf\), got -1"):
        optimizers.SGD(-1)
    with pytest.raises(ConfigError, match="Uniform: low must be below high"):
        initializers.Uniform(1, 1)
    with pytest.raises(ConfigError, match="Normal: stddev must be >= 0, got -1"):
        initializers.Normal(0, -1)
