"""Lookups within a training step: any number of calls, any nesting of tapes, one update of each table."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError, NotFiniteError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig, record_lookups
from gmeta.ops import HashTable
from gmeta.optimizers import SGD, Adam

START = Normal(0.0, 1.0)


def collection(optimizer=None, **tables):
    made = [FeatureConfig(name, TableConfig(table, 4, initializer=START)) for name, table in tables.items()]
    return EmbeddingCollection(made, optimizer=optimizer or SGD(1.0))


def items(*ids):
    return {"item": tf.constant(ids, tf.int64)}


def rows(layer, *ids):
    return layer.tables[0].lookup_keys(ids, insert=False).numpy()  # table 0's prefix is 0


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_two_calls_in_a_step_make_one_update_with_the_sum_for_a_key_of_both(traced):
    layer = collection(Adam(0.1), item="item")
    layer.lookup(items(1, 2, 3))
    expected = HashTable(4, Adam(0.1), START)
    expected.lookup([1, 2, 3])
    weights = tf.constant([1.0, 2.0, 3.0, 5.0])

    def step():
        with tf.GradientTape() as tape, record_lookups(tape) as lookups:
            first, second = layer(items(1, 2), training=True), layer(items(2, 3), training=True)
            loss = tf.reduce_sum(weights * first["item"]) + 2.0 * tf.reduce_sum(weights * second["item"] ** 2)
        lookups.apply_gradients(tape.gradient(loss, lookups.rows))

    (tf.function(step) if traced else step)()
    two, three = (expected.lookup_keys([key], insert=False)[0] for key in (2, 3))
    gradients = [weights, weights + 4 * weights * two, 4 * weights * three]
    expected.apply_gradients([1, 2, 3], tf.stack(gradients))
    # Two updates in a row would have made other steps: Adam's first step has the length of the rate, whatever
    # the gradient.
    np.testing.assert_allclose(
        rows(layer, 1, 2, 3), expected.lookup_keys([1, 2, 3], insert=False), rtol=1e-6, atol=1e-6
    )
    (table,) = layer.tables
    assert int(table.step()) == 1
    assert int(table.statistics().updates) == 3


def test_a_table_steps_with_its_own_optimizer():
    """The others with the collection's, at the rate that they are handed."""
    own = FeatureConfig("own", TableConfig("own", 4, initializer=START, optimizer=SGD(0.5)))
    other = FeatureConfig("other", TableConfig("other", 4, initializer=START))
    layer = EmbeddingCollection([own, other], optimizer=SGD(None))
    ids = {"own": [3], "other": [3]}
    lookup = layer.lookup(ids)
    before = layer.embed(lookup)
    layer.apply_gradients(lookup, [tf.ones_like(rows) for rows in lookup.rows], 0.1)
    after = layer.embed(layer.lookup(ids))
    np.testing.assert_allclose(after["own"], before["own"] - 0.5, rtol=1e-6)
    np.testing.assert_allclose(after["other"], before["other"] - 0.1, rtol=1e-6)


def test_towers_share_a_collection():
    layer = collection(item="item", other="item")
    before = rows(layer, 7)
    ids = tf.constant([7, 7], tf.int64)
    with tf.GradientTape() as tape, record_lookups(tape) as lookups:
        tower = layer({"item": ids, "other": ids}, training=True)
        again = layer({"item": ids, "other": ids}, training=True)
        loss = tf.reduce_sum(tower["item"] + 10 * tower["other"] + 100 * again["item"])
    lookups.apply_gradients(tape.gradient(loss, lookups.rows))
    np.testing.assert_allclose(rows(layer, 7), before - 2 * 111.0, rtol=1e-5)
    assert int(layer.tables[0].statistics().updates) == 1


def test_calls_inside_nested_tapes_give_second_order_gradients():
    layer = collection(item="item")
    before = rows(layer, 1, 2)
    with tf.GradientTape() as outer, record_lookups(outer) as lookups:
        with tf.GradientTape() as inner:
            vectors = layer(items(1, 2), training=True)["item"]
            inner.watch(vectors)
            energy = tf.reduce_sum(vectors**3)
        slope = inner.gradient(energy, vectors)
        loss = tf.reduce_sum(slope**2) + tf.reduce_sum(layer(items(2), training=True)["item"])
    lookups.apply_gradients(outer.gradient(loss, lookups.rows))
    # d/dx (3 x^2)^2 = 36 x^3, and 1 more where the second call read the row.
    expected = before - 36 * before**3 - np.array([[0.0], [1.0]])
    np.testing.assert_allclose(rows(layer, 1, 2), expected, rtol=1e-4)


def test_the_same_step_again_records_anew():
    layer = collection(item="item")
    before = rows(layer, 1, 2)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape, record_lookups(tape) as lookups:
            loss = tf.reduce_sum(layer({"item": ids}, training=True)["item"])
        lookups.apply_gradients(tape.gradient(loss, lookups.rows))

    step(tf.constant([1], tf.int64))
    step(tf.constant([2, 1], tf.int64))
    np.testing.assert_allclose(rows(layer, 1, 2), before - [[2.0], [1.0]], rtol=1e-5)


def test_a_rate_of_its_own_is_kept_and_none_is_given():
    own, follows = collection(SGD(1.0), item="item"), collection(SGD(None), item="item")
    for layer, rate in ((own, 1.0), (follows, 0.125)):
        before = rows(layer, 1)
        with tf.GradientTape() as tape, record_lookups(tape) as lookups:
            loss = tf.reduce_sum(layer(items(1), training=True)["item"])
        lookups.apply_gradients(tape.gradient(loss, lookups.rows), learning_rate=0.125)
        np.testing.assert_allclose(rows(layer, 1), before - rate, rtol=1e-6)
    with pytest.raises(ConfigError, match="its optimizer has learning_rate=None"):
        follows.apply_gradients(follows.lookup(items(1)), [tf.ones([1, 4])])


def test_the_inner_recording_sees_the_lookups():
    layer = collection(item="item")
    with record_lookups() as outer:
        with record_lookups() as inner:
            layer(items(1), training=True)
        layer(items(1, 2), training=True)
    assert [len(each) for each in inner.rows] == [1]
    assert [len(each) for each in outer.rows] == [2]


def test_training_unrecorded_is_refused_because_rows_would_not_be_trained():
    layer = collection(item="item")
    with pytest.raises(
        ConfigError, match=r"nothing records its lookups.*gmeta\.models\.Model.*record_lookups"
    ):
        layer(items(1), training=True)


def test_a_plain_keras_model_says_what_to_use():
    layer = collection(item="item")
    ids = tf.keras.Input([], dtype=tf.int64)
    model = tf.keras.Model(ids, layer({"item": ids})["item"])
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ConfigError, match=r"use gmeta\.models\.Model in place of tf\.keras\.Model"):
        model.fit(np.array([1, 2]), np.zeros([2, 4]), verbose=0)


def test_a_frozen_collection_reads_and_stores_nothing():
    layer = collection(item="item")
    layer.trainable = False
    with record_lookups() as lookups:
        layer(items(1), training=True)
    assert lookups.rows == []
    assert int(layer.tables[0].size()) == 0


@pytest.mark.parametrize("kind", ["function", "loop"])
def test_lookups_out_of_the_reach_of_gradients_are_refused(kind):
    layer = collection(item="item")

    def call(i):
        return tf.reduce_sum(layer(items(1), training=True)["item"]) + tf.cast(i, tf.float32)

    def step():
        with tf.GradientTape() as tape, record_lookups(tape):
            if kind == "function":
                return tf.function(call)(0)
            return tf.while_loop(lambda i, _: i < 3, lambda i, _: (i + 1, call(i)), (0, 0.0))[1]

    # AutoGraph may put an error of its own around ours.
    with pytest.raises(Exception, match=r"inside a tf\.function, tf\.cond or tf\.while_loop"):
        tf.function(step)()


def test_a_table_that_the_loss_does_not_depend_on_is_named():
    layer = EmbeddingCollection([FeatureConfig("item", dim=4), FeatureConfig("wide", dim=8)], name="e")
    with tf.GradientTape() as tape, record_lookups(tape) as lookups:
        vectors = layer({**items(1), "wide": tf.constant([1], tf.int64)}, training=True)
        loss = tf.reduce_sum(vectors["item"])
    with pytest.warns(UserWarning, match="no gradient for table 'e/wide'"):
        (found,) = lookups.by_table(tape.gradient(loss, lookups.rows))
    assert found.table is layer.tables[0]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_gradient_that_is_not_finite_changes_no_table_and_its_id_is_named(traced):
    features = [FeatureConfig("item", dim=4), FeatureConfig("user", dim=4), FeatureConfig("wide", dim=8)]
    layer = EmbeddingCollection(features, optimizer=SGD(1.0))
    ids = {"wide": tf.constant([3, 5]), "user": tf.constant([8, 9]), "item": tf.constant([8, 9])}
    layer.lookup(ids)
    before = [table.export().rows.numpy() for table in layer.tables]

    def step():
        with tf.GradientTape() as tape, record_lookups(tape) as lookups:
            found = layer(ids, training=True)
            loss = tf.reduce_sum(found["wide"]) + tf.norm(
                found["user"][1] - tf.stop_gradient(found["user"][1])
            )
        lookups.apply_gradients(tape.gradient(loss, lookups.rows))

    error = tf.errors.InvalidArgumentError if traced else NotFiniteError
    with pytest.raises(error, match=r"NaN or infinite for id 9 of table .*user.*, and nothing was updated"):
        (tf.function(step) if traced else step)()
    for table, rows in zip(layer.tables, before, strict=True):
        np.testing.assert_array_equal(table.export().rows, rows)
