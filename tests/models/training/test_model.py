"""A Model with an EmbeddingCollection in ordinary Keras scripts, beside Keras' own embeddings."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from gmeta.optimizers import SGD, Adam
from support.cells import slow_but

USERS, ITEMS, DIM = 5, 7, 4
FEATURES = (
    FeatureConfig("user", TableConfig("user", DIM, initializer=Normal(0.0, 0.5))),
    FeatureConfig("item", TableConfig("item", DIM, initializer=Normal(0.0, 0.5))),
)


def data(batches=3, size=24, seed=0):
    """Batches that each have every user and every item, so that a lazy optimizer is the dense one."""
    rng = np.random.default_rng(seed)
    n = batches * size
    x = {
        "user": np.concatenate([rng.permutation(np.arange(size) % USERS) for _ in range(batches)]),
        "item": np.concatenate([rng.permutation(np.arange(size) % ITEMS) for _ in range(batches)]),
    }
    return x, rng.integers(0, 2, n).astype(np.float32), rng.uniform(0.5, 2.0, n).astype(np.float32)


def inputs():
    return {name: tf.keras.Input([], name=name, dtype=tf.int64) for name in ("user", "item")}


def head(vectors):
    kernel = tf.keras.initializers.GlorotUniform(seed=1)
    x = tf.keras.layers.Concatenate()([vectors["user"], vectors["item"]])
    return tf.keras.layers.Dense(1, kernel_initializer=kernel, dtype="float32")(x)


def ours(optimizer=None):
    x = inputs()
    return Model(x, head(EmbeddingCollection(FEATURES, optimizer=optimizer or Adam(None))(x)))


def collection_of(model):
    (found,) = [layer for layer in model.layers if isinstance(layer, EmbeddingCollection)]
    return found


def rows_of(model):
    every = {"user": np.arange(USERS), "item": np.arange(ITEMS)}
    collection = collection_of(model)
    return {
        name: collection.embed(collection.lookup({**every, name: ids}, insert=False))[name].numpy()
        for name, ids in every.items()
    }


def keras():
    """The same model with tf.keras.layers.Embedding, its weights those that our rows start with."""
    x, start = inputs(), rows_of(ours())
    vectors = {
        name: tf.keras.layers.Embedding(
            len(start[name]), DIM, embeddings_initializer=tf.constant_initializer(start[name])
        )(ids)
        for name, ids in x.items()
    }
    return tf.keras.Model(x, head(vectors))


def schedule():
    return tf.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


LOSS = tf.keras.losses.BinaryCrossentropy(from_logits=True)
METRICS = {"metrics": [tf.keras.metrics.BinaryAccuracy(threshold=0.0)], "weighted_metrics": ["mse"]}


@pytest.mark.parametrize(
    ("sparse", "dense", "options"),
    [
        (SGD(None), lambda: tf.keras.optimizers.SGD(0.5), {}),
        (Adam(None), lambda: tf.keras.optimizers.Adam(0.05), {"run_eagerly": True}),
        (Adam(None), lambda: tf.keras.optimizers.Adam(schedule()), {"steps_per_execution": 2}),
        # Quick: adam-schedule-two-steps, and for a legacy optimizer's rows test_table_rule.py.
        pytest.param(
            *(Adam(None), lambda: tf.keras.optimizers.legacy.Adam(schedule()), {}), marks=pytest.mark.slow
        ),
    ],
    ids=["sgd", "adam-eager", "adam-schedule-two-steps", "legacy"],
)
@pytest.mark.shown_by(case="sgd")
def test_fit_evaluate_predict_equal_keras_with_weights_metrics_and_schedules(sparse, dense, options):
    x, y, weight = data()
    results = []
    for model in (ours(sparse), keras()):
        model.compile(
            dense(),
            LOSS,
            metrics=[tf.keras.metrics.BinaryAccuracy(threshold=0.0)],
            weighted_metrics=["mse"],
            **options,
        )
        settings = {"batch_size": 24, "shuffle": False, "verbose": 0}
        first = model.fit(x, y, epochs=2, sample_weight=weight, validation_data=(x, y), **settings)
        second = model.fit(x, y, epochs=2, class_weight={0: 1.0, 1: 3.0}, **settings)
        results.append(
            (
                first.history,
                second.history,
                model.evaluate(x, y, verbose=0, return_dict=True),
                model.predict(x, verbose=0),
            )
        )
    for mine, other in zip(*results, strict=True):
        if isinstance(mine, dict):
            assert mine.keys() == other.keys()
            for name, values in mine.items():
                np.testing.assert_allclose(values, other[name], rtol=2e-4, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-4)


class Towers(Model):
    """Calls one collection twice a step."""

    def __init__(self, width=1):
        super().__init__()
        self.collection = EmbeddingCollection(FEATURES, optimizer=SGD(None))
        self.out = tf.keras.layers.Dense(width)

    def call(self, x, training=None):
        swapped = {"user": x["item"], "item": x["user"]}
        one, two = (self.collection(each, training=training) for each in (x, swapped))
        if training is None:
            training = False
        return self.out(one["user"] * two["user"])


def test_functional_and_subclassed_models_live_side_by_side():
    x, y, _ = data()
    functional = ours()
    for model in (Towers(), functional, Towers()):
        model.compile(tf.keras.optimizers.SGD(0.02), "mse")
        losses = model.fit(x, y, epochs=3, verbose=0, batch_size=24).history["loss"]
        assert losses[-1] < losses[0]
        assert isinstance(model, Model)


def test_a_functional_model_of_a_subclass_is_of_that_class():
    class Ranker(Model):
        def __init__(self, scale):
            x = inputs()
            super().__init__(x, head(EmbeddingCollection(FEATURES)(x)))
            self.scale = scale

    model = Ranker(3.0)
    assert isinstance(model, Ranker)
    assert model.scale == 3.0
    assert set(model.input_names) == {"user", "item"}
    assert Ranker.__bases__ == (Model,)  # nothing was done to the class itself


def test_a_collection_called_twice_in_a_step_makes_one_update_a_step():
    x, y, _ = data()
    model = Towers()
    model.compile("sgd", "mse")
    model.fit(x, y, epochs=2, verbose=0, batch_size=24, shuffle=False)  # or a batch may lack an item
    (table,) = model.collection.tables
    assert int(table.step()) == 6
    assert int(table.statistics().updates) == 6 * ITEMS  # "user" of the one call and "item" of the other


class Dots(Model):
    """Two towers and their product; the loss has no gradient of the spare layers."""

    def __init__(self, layers):
        super().__init__()
        self.collection = EmbeddingCollection(FEATURES, optimizer=SGD(None), name="collection")
        self.spare = [tf.keras.layers.Dense(DIM, kernel_initializer="ones") for _ in range(layers)]

    def call(self, inputs, training=None):
        vectors = self.collection(inputs, training=training)
        for layer in self.spare:
            vectors["user"] += tf.stop_gradient(layer(vectors["item"]))
        return tf.reduce_sum(vectors["user"] * vectors["item"], axis=1, keepdims=True)


# Quick: each value of each, in two cells.
@pytest.mark.parametrize(
    ("built", "layers", "scaled"),
    slow_but([(False, 1, True), (True, 0, False)], itertools.product([False, True], [0, 1], [False, True])),
)
@pytest.mark.shown_by(case="True-0-False")
def test_without_dense_gradients_rows_train_steps_count_and_the_schedule_goes_on(built, layers, scaled):
    x, y, _ = data()
    model = Dots(layers)
    rate = tf.keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.0])
    optimizer = tf.keras.optimizers.SGD(rate)
    if scaled:
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=8.0)
    model.compile(optimizer, "mse")
    if built:  # as on several ranks
        model({name: ids[:1] for name, ids in x.items()})
        optimizer.build(model.trainable_variables)
    model.fit(x, y, verbose=0, batch_size=24)
    trained = rows_of(model)
    assert int(optimizer.iterations) == 3
    assert not scaled or int(optimizer.dynamic_counter) == 3
    model.fit(x, y, verbose=0, batch_size=24)  # the rate has come down to 0
    assert float(optimizer.learning_rate) == 0.0
    for name, rows in rows_of(model).items():
        np.testing.assert_array_equal(rows, trained[name])
        assert not np.array_equal(rows, rows_of(ours())[name])


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}], ids=["each batch", "accumulated"])
def test_a_weight_without_a_gradient_does_not_decay_and_has_moving_averages(options):
    x, y, _ = data()
    model = Dots(1)
    model.compile(tf.keras.optimizers.AdamW(0.1, weight_decay=0.5, use_ema=True), "mse", **options)
    model.fit(x, y, verbose=0, batch_size=24)
    np.testing.assert_array_equal(model.spare[0].kernel, np.ones([DIM, DIM]))


def test_a_loss_that_depends_on_nothing_is_an_error_as_in_keras():
    model = Dots(1)
    model.collection.trainable = False
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        model.fit(*data()[:2], verbose=0)


def test_callbacks_change_the_tables_rate_and_a_rate_of_its_own_stays():
    x, y, _ = data()
    still = tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.0)
    for optimizer, moves in ((SGD(None), False), (SGD(0.5), True)):
        model = ours(optimizer)
        before = rows_of(model)["user"]
        model.compile(tf.keras.optimizers.SGD(0.5), LOSS)
        model.fit(x, y, verbose=0, batch_size=24, callbacks=[still])
        assert (not np.array_equal(rows_of(model)["user"], before)) is moves


def test_evaluate_and_predict_store_nothing():
    x, y, _ = data()
    model = ours()
    model.compile("sgd", LOSS)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    assert int(collection_of(model).tables[0].size()) == 0
    model.fit(x, y, verbose=0)
    assert int(collection_of(model).tables[0].size()) == USERS + ITEMS


@pytest.mark.parametrize(
    "strategy", [tf.distribute.get_strategy, lambda: tf.distribute.OneDeviceStrategy("CPU:0")]
)
@pytest.mark.shown_by(case="<lambda>")
def test_under_a_strategy_of_one_replica(strategy):
    x, y, _ = data()
    with strategy().scope():
        model = ours()
        model.compile("adam", LOSS)
    model.fit(x, y, verbose=0, batch_size=24)
    assert int(collection_of(model).tables[0].step()) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate_steps": 0}, "from 1 on, got 0"),
        (
            {"accumulate_steps": 2, "loss": tf.keras.losses.MeanSquaredError(reduction="sum")},
            "reduced by SUM",
        ),
    ],
)
def test_settings_that_tables_cannot_follow_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ours().compile(**{"loss": "mse", **settings})


# Quick: each value of each, in three cells.
@pytest.mark.parametrize(
    ("traced", "trained", "whole"),
    slow_but(
        [(True, True, False), (False, True, True), (True, False, True)],
        itertools.product([False, True], repeat=3),
    ),
)
@pytest.mark.shown_by(case="True-True-False")
def test_trainable_that_is_set_after_compile_waits_for_the_next_with_a_warning(traced, trained, whole):
    model, (x, y, _) = ours(SGD(0.1)), data()
    layer = model if whole else collection_of(model)
    layer.trainable = not trained
    model.compile("sgd", "mse")
    if traced:
        model.fit(x, y, verbose=0)
    layer.trainable = trained
    before = rows_of(model)["user"]
    kind = "is not trained" if trained else "is trained"
    with pytest.warns(UserWarning, match=f"set after compile.*'embeddings' {kind}") as found:
        model.fit(x, y, verbose=0)
    model.train_on_batch(x, y)  # one warning is enough
    assert len(found) == 1
    assert (rows_of(model)["user"] == before).all() == trained
    model.compile("sgd", "mse")
    before = rows_of(model)["user"]
    model.fit(x, y, verbose=0)
    assert (rows_of(model)["user"] != before).any() == trained
    with pytest.raises(ConfigError, match="can't be frozen alone"):
        collection_of(model).tables[0].trainable = False
