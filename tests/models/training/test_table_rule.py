"""Tables without an optimizer of their own do as the Keras optimizer of their model does."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig, record_lookups
from gmeta.models import JointOptimizer, Model
from gmeta.optimizers import SGD, Adam
from gmeta.training.table_rule import sparse_form
from support.cells import slow_but
from support.process_ranks import run_ranks

KERAS = tf.keras.optimizers
USERS = np.array([3, 5, 3, 8, 5, 3, 8, 8])
LABELS = np.array([4.0, -3.0, 2.0, 9.0, 1.0, 5.0, -7.0, 2.0], np.float32)
NORMAL = Normal(0.0, 0.5)

FOLLOWED = {
    "sgd": lambda **clip: KERAS.SGD(0.1, **clip),
    "momentum": lambda **clip: KERAS.SGD(0.1, momentum=0.8, nesterov=True, **clip),
    "adam": lambda **clip: KERAS.Adam(0.1, beta_1=0.7, epsilon=1e-3, **clip),
    "adagrad": lambda **clip: KERAS.Adagrad(0.1, initial_accumulator_value=0.3, **clip),
    "adamw": lambda **clip: KERAS.AdamW(0.1, weight_decay=0.1, **clip),
    "adam with decay": lambda **clip: KERAS.Adam(0.1, weight_decay=0.1, **clip),
    "ftrl": lambda **clip: KERAS.Ftrl(0.1, l1_regularization_strength=0.01, beta=0.2, **clip),
    "legacy adam": lambda **clip: KERAS.legacy.Adam(0.1, beta_2=0.9, decay=0.5, **clip),
    "scaled": lambda **clip: tf.keras.mixed_precision.LossScaleOptimizer(KERAS.SGD(0.1, **clip)),
}
CLIPS = ({}, {"clipvalue": 0.05}, {"clipnorm": 0.2}, {"global_clipnorm": 0.3})


def make(optimizer, own=None):
    user = tf.keras.Input([], name="user", dtype=tf.int64)
    collection = EmbeddingCollection(
        [FeatureConfig("user", TableConfig("user", 4, initializer=NORMAL))], optimizer=own, name="c"
    )
    kernel = tf.keras.initializers.GlorotUniform(seed=1)
    dense = tf.keras.layers.Dense(1, kernel_initializer=kernel, name="d")
    model = Model({"user": user}, dense(collection({"user": user})["user"]))
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


def keras_model(optimizer, rows):
    """The same with the rows as a matrix, so that gradients are of rows rather than of occurrences."""
    numbers = tf.keras.Input([3], name="user")
    table = tf.keras.layers.Dense(
        4, use_bias=False, kernel_initializer=tf.keras.initializers.Constant(rows), name="c"
    )
    kernel = tf.keras.initializers.GlorotUniform(seed=1)
    dense = tf.keras.layers.Dense(1, kernel_initializer=kernel, name="d")
    model = tf.keras.Model({"user": numbers}, dense(table(numbers)))
    model.compile(optimizer, "mse")
    return model


def rows_of(model):
    return model.get_layer("c").tables[0].lookup([3, 5, 8], insert=False).rows.numpy()


class Falls(KERAS.schedules.LearningRateSchedule):
    """Has no config, as Keras allows."""

    def __call__(self, step):
        return 0.1 / (1.0 + tf.cast(step, tf.float32))


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adagrad", "ftrl"])
def test_a_schedule_without_a_config_changes_no_other_setting(name):
    plain = FOLLOWED[name]()
    config = plain.get_config()
    scheduled = type(plain)(**{**config, "learning_rate": Falls()})
    assert sparse_form(scheduled) == sparse_form(plain)


# Quick: sgd has each way of clipping, legacy adam and a loss scale one of a norm.
@pytest.mark.parametrize(
    ("name", "clip"),
    slow_but(
        lambda name, clip: not clip or name == "sgd" or (name != "adam" and "clipnorm" in clip),
        (
            (name, clip)
            for name in FOLLOWED
            for clip in (CLIPS if name in ("sgd", "adam", "legacy adam", "scaled") else CLIPS[:1])
        ),
    ),
    ids=str,
)
def test_rows_step_as_a_matrix_that_the_same_optimizer_trains(name, clip):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make(FOLLOWED[name](**clip))
    keras = keras_model(FOLLOWED[name](**clip), rows_of(model))
    model.run_eagerly = keras.run_eagerly = True  # four batches cost less than their graphs
    numbers = np.eye(3, dtype=np.float32)[np.searchsorted([3, 5, 8], USERS)]
    for _ in range(4):
        model.train_on_batch({"user": USERS}, LABELS)
        keras.train_on_batch({"user": numbers}, LABELS)
    np.testing.assert_allclose(rows_of(model), keras.get_layer("c").get_weights()[0], rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(
        model.get_layer("d").get_weights()[0], keras.get_layer("d").get_weights()[0], rtol=2e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (KERAS.RMSprop(0.1), "without what is RMSprop's own, which has no fused form"),
        (KERAS.Adam(0.1, amsgrad=True), "without amsgrad"),
        (KERAS.SGD(0.1, weight_decay=0.1), "SGD at the rate of SGD, without its weight_decay"),
        (KERAS.SGD(0.1, use_ema=True), "without its moving averages"),
    ],
    ids=["rmsprop", "amsgrad", "weight decay", "moving averages"],
)
def test_compile_says_in_a_line_what_tables_leave_out(optimizer, said):
    with pytest.warns(UserWarning, match=said) as found:
        make(optimizer)
    assert len(found) == 1
    assert "\n" not in str(found[0].message)


def test_an_optimizer_of_the_tables_own_stays_and_is_not_clipped():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, other = (
            make(KERAS.RMSprop(0.1), own=Adam(0.1)),
            make(KERAS.RMSprop(0.1, clipvalue=1e-9), own=Adam(0.1)),
        )
    for model in (one, other):
        assert type(model.get_layer("c").tables[0].optimizer) is Adam
        model.train_on_batch({"user": USERS}, LABELS)
    np.testing.assert_array_equal(rows_of(one), rows_of(other))
    with pytest.raises(ConfigError, match=r"one of gmeta\.optimizers"):
        make("sgd", own="sgd")


def test_another_kind_at_recompile_keeps_rows_and_says_that_slots_are_reinitialized():
    model = make("adam")
    model.train_on_batch({"user": USERS}, LABELS)
    rows = rows_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.compile(KERAS.Adam(0.01, beta_1=0.5), "mse")  # has the same slots
    assert model.get_layer("c").tables[0].optimizer.beta_1 == 0.5
    assert model.get_layer("c").tables[0].export().slots.numpy().any()
    with pytest.warns(UserWarning, match="without the slots of c/user, which are reinitialized"):
        model.compile("adagrad", "mse")
    np.testing.assert_array_equal(rows_of(model), rows)
    np.testing.assert_allclose(model.get_layer("c").tables[0].export().slots, 0.1)


def sharing(collection, name):
    user = tf.keras.Input([], name="user", dtype=tf.int64)
    return Model({"user": user}, tf.keras.layers.Dense(1)(collection({"user": user})["user"]), name=name)


def change_of(collection, model, **settings):
    before = collection({"user": USERS})["user"].numpy()
    model.fit({"user": USERS}, LABELS, verbose=0, **settings)
    return np.abs(collection({"user": USERS})["user"].numpy() - before).max()


def shared_by_two(first, second):
    collection = EmbeddingCollection([FeatureConfig("user", dim=4)], name="c")
    models = sharing(collection, "one"), sharing(collection, "two")
    for model, optimizer in zip(models, (first, second), strict=True):
        model.compile(optimizer, "mse")
    return collection, *models


def test_models_that_share_a_collection_train_it_at_their_own_rates():
    collection, one, two = shared_by_two(KERAS.SGD(0.1), KERAS.SGD(0.0))
    assert change_of(collection, two) == 0
    assert change_of(collection, one) > 0
    stop = tf.keras.callbacks.LearningRateScheduler(lambda _: 0.0)
    assert change_of(collection, one, callbacks=[stop]) == 0
    two.optimizer.learning_rate = 0.1
    assert change_of(collection, two) > 0
    assert change_of(collection, one) == 0


def test_a_second_model_with_another_optimizer_is_refused_and_changes_nothing():
    rule = r"'one' trains them by SGD\(\), and 'two' would by Adam\(.*TableConfig\(optimizer=\.\.\.\)"
    collection = EmbeddingCollection([FeatureConfig("user", dim=4)], name="c")
    one, two = sharing(collection, "one"), sharing(collection, "two")
    one.compile(KERAS.SGD(0.1), "mse")
    with pytest.raises(ConfigError, match=rule):
        two.compile(KERAS.Adam(0.1), "mse")
    with pytest.raises(RuntimeError, match="compile"):
        two.fit({"user": USERS}, LABELS, verbose=0)
    assert type(collection.tables[0].optimizer) is SGD
    with pytest.raises(ConfigError, match=r"two.*share table 'c/user'"):  # hyperparameters are of the rule
        two.compile(KERAS.SGD(0.1, momentum=0.9), "mse")
    two.compile(KERAS.SGD(0.1), "mse")  # as the message says
    assert change_of(collection, two) > 0


def test_a_model_is_refused_after_another_that_shares_its_rows_has_got_another_optimizer():
    collection, one, two = shared_by_two("sgd", "sgd")
    one.fit({"user": USERS}, LABELS, verbose=0)
    two.compile("adam", "mse")
    for train in (one.fit, one.train_on_batch):
        with pytest.raises(
            ConfigError, match=r"'one' trains table 'c/user' by SGD\(\), but since then 'two' was"
        ):
            train({"user": USERS}, LABELS)
    assert change_of(collection, two) > 0
    one.compile("adam", "mse")
    assert change_of(collection, one) > 0


def test_a_model_that_is_gone_or_has_the_rows_frozen_has_no_say():
    collection, one, two = shared_by_two("sgd", "sgd")
    one.fit({"user": USERS}, LABELS, verbose=0)
    three = sharing(collection, "three")
    collection.trainable = False  # as of a discriminator within the model of a generator
    three.compile("adam", "mse")
    assert change_of(collection, three) == 0
    collection.trainable = True
    assert change_of(collection, one) > 0
    del one, two
    three.compile("adam", "mse")
    assert change_of(collection, three) > 0


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: KERAS.SGD(KERAS.schedules.ExponentialDecay(0.1, 1, 0.5), clipnorm=0.2),
        lambda: KERAS.AdamW(0.1, weight_decay=0.1, global_clipnorm=0.3),
    ],
    ids=["sgd", "adamw"],
)
def test_a_loop_of_ones_own_makes_the_steps_of_fit(optimizer, graph):
    fit, looped = make(optimizer()), make(None)
    joint = JointOptimizer(optimizer())

    def step(x, y):
        with tf.GradientTape() as tape, record_lookups(tape) as lookups:
            loss = tf.reduce_mean((looped(x, training=True)[:, 0] - y) ** 2)
        variables = looped.trainable_variables
        joint.step(tape.gradient(loss, [*variables, *lookups.rows]), variables, lookups)

    step = tf.function(step) if graph else step
    for _ in range(4):
        fit.train_on_batch({"user": USERS}, LABELS)
        step({"user": tf.constant(USERS)}, tf.constant(LABELS))
    # A graph may add the squares of a global norm in another order, depending on the processor.
    tolerance = 0.0 if graph else 3e-7
    np.testing.assert_allclose(rows_of(looped), rows_of(fit), rtol=tolerance, atol=tolerance / 10)
    kernels = [model.get_layer("d").kernel for model in (looped, fit)]
    np.testing.assert_allclose(*kernels, rtol=tolerance, atol=tolerance / 10)


def test_a_loop_is_told_of_its_mistakes():
    model = make(None)
    with tf.GradientTape() as tape, record_lookups(tape) as lookups:
        loss = tf.reduce_mean(model({"user": USERS}, training=True))
    gradients = tape.gradient(loss, [*model.trainable_variables, *lookups.rows])
    with pytest.raises(ConfigError, match=r"JointOptimizer\(optimizer\)\.step"):
        lookups.apply_gradients(gradients[-1:])
    joint = JointOptimizer(KERAS.SGD(0.1))
    with pytest.raises(ConfigError, match="which are 2 and 1, got 1"):
        joint.step(gradients[-1:], model.trainable_variables, lookups)
    joint.step(gradients, model.trainable_variables, lookups)
    with pytest.raises(ConfigError, match=r"samples=.*accumulate_steps"):
        JointOptimizer(KERAS.SGD(0.1), 2).step(gradients, model.trainable_variables, lookups)
    with pytest.raises(ConfigError, match="'a loop with Adam' and 'a loop with SGD' share table 'c/user'"):
        JointOptimizer(KERAS.Adam(0.1)).step(gradients, model.trainable_variables, lookups)


def test_checkpoints_from_before_load_their_rows_and_an_uncompiled_model_takes_what_was_saved(tmp_path):
    before = make("sgd", own=Adam(None))  # what tables were, whatever compile was given
    before.train_on_batch({"user": USERS}, LABELS)
    for name in ("old", "old.weights.h5"):
        before.save_weights(tmp_path / name)
        model = make("sgd")
        with pytest.warns(UserWarning, match="saved with Adam: its rows are loaded"):
            model.load_weights(tmp_path / name)
        np.testing.assert_array_equal(rows_of(model), rows_of(before))
    after = make("adagrad")
    after.train_on_batch({"user": USERS}, LABELS)
    after.save_weights(tmp_path / "new.weights.h5")
    model = make(None)
    model.predict({"user": USERS}, verbose=0)  # a graph from before
    model.load_weights(tmp_path / "new.weights.h5")
    np.testing.assert_array_equal(
        model.predict({"user": USERS}, verbose=0), after.predict({"user": USERS}, verbose=0)
    )
    model.compile("adagrad", "mse")
    table, expected = model.get_layer("c").tables[0], after.get_layer("c").tables[0]
    np.testing.assert_array_equal(
        np.sort(table.export().slots, axis=0), np.sort(expected.export().slots, axis=0)
    )


def test_a_saved_model_follows_its_optimizer_again(tmp_path):
    model = make("adagrad")
    model.train_on_batch({"user": USERS}, LABELS)
    model.save(tmp_path / "m.keras")
    again = tf.keras.models.load_model(tmp_path / "m.keras")
    assert again.get_layer("c").tables[0].optimizer == model.get_layer("c").tables[0].optimizer
    for each in (model, again):
        each.train_on_batch({"user": USERS}, LABELS)
    np.testing.assert_array_equal(rows_of(again), rows_of(model))


def on_rank(make, clip, users, labels):
    from gmeta.core import collectives

    here = collectives.world()
    model = make(tf.keras.optimizers.SGD(0.1, **clip))
    data = tf.data.Dataset.from_tensors(
        ({"user": users[here.rank :: here.size]}, labels[here.rank :: here.size])
    )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    model.fit(data.with_options(options), epochs=3, verbose=0)
    table = model.get_layer("c").tables[0].export()
    return dict(zip(table.keys.numpy().tolist(), table.rows.numpy(), strict=True)), model.get_layer(
        "d"
    ).kernel.numpy()


@pytest.mark.ranks
@pytest.mark.parametrize("clip", slow_but(CLIPS[3:], CLIPS[2:]), ids=str)  # quick: the global norm
def test_norms_are_of_all_ranks(clip):
    (one,) = run_ranks(on_rank, 1, make, clip, USERS, LABELS)
    first, second = run_ranks(on_rank, 2, make, clip, USERS, LABELS)
    rows = {**first[0], **second[0]}
    for key, row in one[0].items():
        np.testing.assert_allclose(rows[key], row, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first[1], one[1], rtol=1e-5, atol=1e-6)


def loop_on_rank(make, joint, clip, users, labels):
    from gmeta.core import collectives
    from gmeta.layers import record_lookups

    here, model = collectives.world(), make(None)
    optimizer = joint(tf.keras.optimizers.SGD(0.1, **clip))
    mine = slice(0, 3) if here.size == 2 and here.rank == 0 else slice(3 * (here.size - 1), None)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape, record_lookups(tape) as lookups:
            loss = tf.reduce_mean((model(x, training=True)[:, 0] - y) ** 2)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [*variables, *lookups.rows])
        optimizer.step(gradients, variables, lookups, samples=tf.size(y))

    for _ in range(3):
        step({"user": tf.constant(users[mine])}, tf.constant(labels[mine]))
    table = model.get_layer("c").tables[0].export()
    rows = dict(zip(table.keys.numpy().tolist(), table.rows.numpy(), strict=True))
    return rows, model.get_layer("d").kernel.numpy()


@pytest.mark.ranks
@pytest.mark.shown_by("test_norms_are_of_all_ranks")
def test_a_loop_on_ranks_of_unlike_batches_steps_as_on_one():
    given = (make, JointOptimizer, {"global_clipnorm": 0.3}, USERS, LABELS)
    (one,), (first, second) = (run_ranks(loop_on_rank, ranks, *given) for ranks in (1, 2))
    rows = {**first[0], **second[0]}
    for key, row in one[0].items():
        np.testing.assert_allclose(rows[key], row, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first[1], one[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second[1], one[1], rtol=1e-5, atol=1e-6)
