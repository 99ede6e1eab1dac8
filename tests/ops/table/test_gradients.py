from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gmeta import initializers, ops, optimizers

pytestmark = pytest.mark.usefixtures("table_device")


def test_doubles_in_one_update_are_summed_first():
    table = ops.HashTable(
        2, optimizers.Adagrad(1.0, initial_accumulator_value=0.0, epsilon=0.0), initializers.Zeros()
    )
    table.lookup([4, 9])
    table.apply_gradients([9, 4, 9, 9], tf.constant([[1.0, 2], [5, 5], [1, -4], [1, 1]]))
    # One Adagrad step from zero has length 1 whatever the sum's size: (3, -1) gives (-1, +1).
    np.testing.assert_allclose(table.lookup([9, 4]).rows, [[-1, 1], [-1, -1]], rtol=1e-6)
    assert int(table.statistics().updates) == 2


def test_a_gather_leaves_slices_and_they_are_taken_as_they_are():
    table = ops.HashTable(2, optimizers.SGD(1.0), initializers.Zeros())
    lookup = table.lookup([3, 8, 5])
    with tf.GradientTape() as tape:
        tape.watch(lookup.rows)
        loss = tf.reduce_sum(tf.gather(lookup.rows, [0, 2, 0]))
    grads = tape.gradient(loss, lookup.rows)
    assert isinstance(grads, tf.IndexedSlices)
    table.apply_gradients(lookup.keys, grads)
    np.testing.assert_array_equal(table.lookup([3, 8, 5]).rows, [[-2, -2], [0, 0], [-1, -1]])
    assert int(table.statistics().updates) == 2  # 8 had no gradient


@pytest.mark.parametrize("kind", [optimizers.Adam, optimizers.RowWiseAdagrad])
@pytest.mark.parametrize("slices", [False, True])
def test_keys_known_to_be_distinct_are_updated_alike(kind, slices):
    """The bits are the same, and keys that no slice names stay as they are, whatever their moments."""
    random = np.random.default_rng(0)
    tables = [ops.HashTable(5, kind(0.1), initializers.Normal(0, 1), seed=1) for _ in range(2)]
    for _ in range(4):
        keys = random.choice(60, 40, replace=False)
        positions = random.integers(0, 40, 900) if slices else np.arange(40)
        positions[:300] = 3 if slices else positions[:300]
        values = tf.constant(random.normal(size=(len(positions), 5)).astype(np.float32))
        gradient = tf.IndexedSlices(values, tf.constant(positions), [40, 5]) if slices else values
        for table, distinct in zip(tables, (False, True), strict=True):
            table.lookup(keys[:30])
            table.apply_gradients(keys, gradient, distinct=distinct)
    known, found = [], []
    for table in tables:
        records, statistics = table.export(), table.statistics()
        order = np.argsort(records.keys)
        known.append([np.array(each)[order] for each in records[:5]])
        found.append((int(statistics.updates), int(statistics.ignored)))
    for ours, theirs in zip(*known, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert found[0] == found[1]


def test_absent_keys_have_nothing_to_update():
    table = ops.HashTable(2, optimizers.SGD(1.0), initializers.Zeros())
    table.apply_gradients([1, 2], tf.ones([2, 2]))
    assert int(table.size()) == 0
    assert int(table.statistics().ignored) == 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
def test_many_lookups_in_one_step_keep_apart(compiled):
    table = ops.HashTable(3, optimizers.SGD(1.0), initializers.Normal(0, 1))
    ids = [np.array(group) for group in ([1, 2, 2], [2, 3], [[3, 4], [1, 1]], [9])]

    def step() -> list[tf.Tensor]:
        lookups = [table.lookup(group) for group in ids]
        with tf.GradientTape() as tape:
            tape.watch([lookup.rows for lookup in lookups])
            terms = [tf.reduce_sum(tf.gather(each.rows, each.inverse) ** 2) for each in lookups]
            loss = tf.add_n([weight * term for weight, term in enumerate(terms, 1)])
        grads = tape.gradient(loss, [lookup.rows for lookup in lookups])
        keys = tf.concat([lookup.keys for lookup in lookups], 0)
        table.apply_gradients(keys, tf.concat([tf.convert_to_tensor(g) for g in grads], 0))
        return [lookup.rows for lookup in lookups]

    before = {key: table.lookup_keys([key]).numpy()[0] for key in (1, 2, 3, 4, 9)}
    (tf.function(step) if compiled else step)()
    times = {1: 1 + 3 * 2, 2: 1 * 2 + 2, 3: 2 + 3, 4: 3, 9: 4}  # sum over groups of weight * count
    for key, count in times.items():
        expected = before[key] - count * 2 * before[key]
        np.testing.assert_allclose(table.lookup_keys([key])[0], expected, rtol=1e-5, atol=1e-6)
    assert int(table.step()) == 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
def test_nested_tapes_reach_the_rows_through_an_inner_step(compiled):
    # One inner step on loss r^3 / 3: r' = r - a r^2; outer loss r'^2 / 2: d/dr = r' (1 - 2 a r).
    table = ops.HashTable(2, optimizers.SGD(1.0), initializers.Constant(0.5))
    a = 0.25

    def outer() -> tf.Tensor:
        lookup = table.lookup([[7, 7], [8, 9]])
        with tf.GradientTape() as tape:
            tape.watch(lookup.rows)
            with tf.GradientTape() as inner:
                inner.watch(lookup.rows)
                support = tf.reduce_sum(lookup.rows**3) / 3
            fast = lookup.rows - a * inner.gradient(support, lookup.rows)
            query = tf.reduce_sum(tf.gather(fast, tf.gather(lookup.inverse, 0)) ** 2) / 2
        grads = tape.gradient(query, lookup.rows)
        table.apply_gradients(lookup.keys, grads)
        return tf.convert_to_tensor(grads)

    grads = (tf.function(outer) if compiled else outer)()
    fast = 0.5 - a * 0.25
    expected = 2 * fast * (1 - 2 * a * 0.5)  # 7 stands twice in the query, 8 and 9 not at all
    np.testing.assert_allclose(grads, [[expected] * 2, [0, 0], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(table.lookup_keys([7, 8])[:, 0], [0.5 - expected, 0.5], rtol=1e-6)


def test_lookups_and_updates_of_a_function_happen_in_their_order():
    table = ops.HashTable(1, optimizers.SGD(1.0), initializers.Zeros())

    @tf.function
    def step() -> tuple[tf.Tensor, tf.Tensor]:
        before = table.lookup([1]).rows
        table.apply_gradients([1], tf.ones([1, 1]))
        return before[0, 0], table.lookup([1]).rows[0, 0]

    for i in range(5):
        before, after = step()
        assert (float(before), float(after)) == (-i, -i - 1)


def test_shapes_are_known_in_a_graph():
    table = ops.HashTable(6)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
    def shapes(ids: tf.Tensor) -> tf.Tensor:
        lookup = table.lookup(ids)
        assert lookup.rows.shape.as_list() == [None, 6]
        assert lookup.inverse.shape.as_list() == [None, 3]
        assert table.export().rows.shape.as_list() == [None, 6]
        return tf.gather(lookup.rows, lookup.inverse)

    assert shapes(tf.zeros([2, 3], tf.int64)).shape == (2, 3, 6)


def test_a_rate_that_is_a_number_waits_for_nothing():
    table = ops.HashTable(2, optimizers.SGD(0.5), initializers.Zeros())

    @tf.function
    def step(grads):
        with tf.control_dependencies([tf.exp(grads)]):
            table.apply_gradients([1, 2], grads)

    operations = step.get_concrete_function(tf.zeros([2, 2])).graph.get_operations()
    (rate,) = [each.op for op in operations if op.type == "GmetaHashTableUpdate" for each in op.inputs[3:4]]
    assert (rate.type, list(rate.control_inputs)) == ("Const", [])
    assert "CPU" in rate.device


def test_insert_may_be_a_tensor():
    table = ops.HashTable(2)

    @tf.function
    def look(training: tf.Tensor) -> None:
        table.lookup([1, 2], insert=training)

    look(tf.constant(False))
    assert int(table.size()) == 0
    look(tf.constant(True))
    assert int(table.size()) == 2
