"""Training stops at a loss or gradient that isn't finite, before the step, and says what is at fault."""

import gc
import os
import weakref

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.core.errors import ConfigError, NotFiniteError
from gmeta.initializers import Normal, Zeros
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel, Model
from support.drawn_batches import make_batch
from support.process_ranks import run_ranks

USERS = np.arange(20) % 5
LABELS = (USERS % 2).astype(np.float32)
PRICES = np.linspace(0, 1, 20, dtype=np.float32)
NORMAL = Normal(0.0, 0.5)


def with_nan(values, place=7):
    values = np.array(values, np.float32)
    values[place] = np.nan
    return values


def make(optimizer="sgd", **options):
    user = tf.keras.Input([], name="user", dtype=tf.int64)
    price = tf.keras.Input([1], name="price")
    collection = EmbeddingCollection([FeatureConfig("user", TableConfig("user", 4, initializer=NORMAL))])
    both = tf.keras.layers.Concatenate()([collection({"user": user})["user"], price])
    model = Model({"user": user, "price": price}, tf.keras.layers.Dense(1, name="d", dtype="float32")(both))
    model.compile(optimizer, "mse", **options)
    return model


def fit(model, price=PRICES, labels=LABELS, batch_size=10, **kwargs):
    return model.fit(
        {"user": USERS, "price": price}, labels, batch_size=batch_size, verbose=0, shuffle=False, **kwargs
    )


BAD = [
    ({"labels": with_nan(LABELS)}, "1 of 10 values of label in the batch .* first is nan at place 7"),
    ({"price": with_nan(PRICES)}, "1 of 10 values of feature 'price'"),
    ({"labels": with_nan(LABELS), "sample_weight": with_nan(PRICES)}, "label"),
    ({"sample_weight": with_nan(PRICES)}, "values of sample weight"),
]


@pytest.mark.parametrize(
    ("bad", "said", "options"),
    [
        *((*each, {}) for each in BAD),
        *(
            (*BAD[1], each)
            for each in ({"run_eagerly": True}, {"accumulate_steps": 3}, {"steps_per_execution": 2})
        ),
    ],
)
def test_a_bad_column_ends_training_before_its_step_and_is_named(bad, said, options):
    model = make(**options)
    before = [np.array(weight) for weight in model.get_weights()]
    with pytest.raises(NotFiniteError, match=rf"no step was made: .*{said}") as raised:
        fit(model, **bad)
    assert "\n" not in str(raised.value)
    for weight, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)
    assert int(model.optimizer.iterations) == 0


def test_a_rate_that_diverges_is_told_from_bad_data():
    model = make(tf.keras.optimizers.SGD(1e15))
    with pytest.raises(NotFiniteError, match="training diverges: lower the learning rate"):
        fit(model, epochs=20)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_allowed_training_goes_on():
    model = make(nan="allow")
    assert np.isnan(fit(model, labels=with_nan(LABELS)).history["loss"][0])
    with pytest.raises(ConfigError, match="nan must be 'raise' or 'allow', got 'no'"):
        make(nan="no")


def test_one_batch_is_guarded_too():
    with pytest.raises(NotFiniteError, match="label"):
        make().train_on_batch({"user": USERS, "price": PRICES}, with_nan(LABELS))


def test_loss_scaling_leaves_out_what_overflows_but_not_bad_data():
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
    model = make(optimizer)
    fit(model, price=PRICES * 1e30)  # the loss overflows, the data is fine
    assert int(optimizer.iterations) == 2  # steps that Keras left out count
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    with pytest.raises(NotFiniteError, match="label"):
        fit(model, labels=with_nan(LABELS))


class Distances(Model):
    """Distances between users; the derivative of a distance of 0 is NaN, and the distance is not."""

    def __init__(self, offset="ones"):
        super().__init__()
        users, items = TableConfig("user", 4, NORMAL), TableConfig("item", 3, NORMAL)
        pairs = {"user": users, "other": users, "item": items}
        self.vectors = EmbeddingCollection([FeatureConfig(*each) for each in pairs.items()])
        self.offset = self.add_weight("offset", [4], initializer=offset)

    def call(self, x, training=None):
        found = self.vectors(x, training=training)
        distance = tf.norm(found["user"] - found["other"], axis=1)
        return distance * tf.reduce_sum(found["item"], axis=1) + tf.norm(self.offset)


def make_distances(optimizer="adam", offset="ones", **options):
    model = Distances(offset)
    model.compile(optimizer, "mse", **options)
    return model


def fit_distances(model, users, others, **kwargs):
    x = {"user": np.array(users), "other": np.array(others), "item": np.arange(len(users)) % 3}
    model.fit(x, np.ones(len(users)), batch_size=2, verbose=0, shuffle=False, **kwargs)


def rows_of(model):
    tables = [table for part in model.submodules for table in getattr(part, "tables", ())]
    return [np.asarray(table.export().rows) for table in tables]


WAYS = {
    "one batch a step": {},
    "eagerly": {"run_eagerly": True},
    "accumulated": {"accumulate_steps": 2},
    "several steps an execution": {"steps_per_execution": 2},
    "ahead": {"pipeline": gmeta.Pipeline(depth=1)},
    "micro-batches": {"pipeline": gmeta.Pipeline(depth=0, micro_batches=2)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.shown_by(case="one batch a step")
def test_a_gradient_of_rows_that_is_not_finite_is_refused_before_it_changes_anything(way):
    model = make_distances(**WAYS[way])
    told = "the loss is finite, but not its gradient for id 7 of table 'user', and no step was made"
    with pytest.raises(NotFiniteError, match=rf"{told}: a derivative .* like that of tf.norm") as raised:
        fit_distances(model, [6, 7, 7, 9], [8, 7, 8, 6])
    assert "\n" not in str(raised.value)
    assert all(np.isfinite(rows).all() for rows in rows_of(model))
    np.testing.assert_array_equal(model.offset, np.ones(4))
    assert int(model.optimizer.iterations) == 0


def test_a_gradient_of_a_dense_weight_that_is_not_finite_is_named_and_changes_no_row():
    model = make_distances(offset="zeros")
    model.vectors.lookup({"user": [7, 8], "other": [8, 7], "item": [0, 1]})
    before = rows_of(model)
    with pytest.raises(NotFiniteError, match="but not its gradient for offset:0, and no step was made"):
        fit_distances(model, [7, 8], [8, 7])
    for rows, start in zip(rows_of(model), before, strict=True):
        np.testing.assert_array_equal(rows, start)
    np.testing.assert_array_equal(model.offset, np.zeros(4))


def test_a_large_gradient_whose_square_overflows_is_no_fault():
    model = make(tf.keras.optimizers.SGD(1e-36))
    fit(model, price=PRICES * 1e18, labels=LABELS)
    assert int(model.optimizer.iterations) == 2


def test_a_loss_scale_leaves_out_gradients_that_are_not_finite():
    model = make_distances(tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1)))
    fit_distances(model, [7, 6], [7, 8])
    assert all(np.isfinite(rows).all() for rows in rows_of(model))
    np.testing.assert_array_equal(model.offset, np.ones(4))


def test_a_meta_model_names_the_row_whose_gradient_is_not_finite():
    batch = make_batch([3, 4, 2])
    x = tf.keras.Input([8])
    length = tf.keras.layers.Lambda(lambda x: tf.norm(x[:, :4], axis=1, keepdims=True))(x)
    network = tf.keras.Model(x, tf.keras.layers.Dense(1, name="out")(length))
    features = [FeatureConfig("user", TableConfig("user", 4, Zeros())), FeatureConfig("item", dim=4)]
    model = MetaModel(EmbeddingCollection(features), network, inner=InnerLoop(steps=1))
    model.compile("sgd", "mse")
    with pytest.raises(NotFiniteError, match=r"meta_model: .* not its gradient for id \d+ of table 'user'"):
        meta_fit(model, batch)
    assert all(np.isfinite(rows).all() for rows in rows_of(model))


def test_rows_that_are_not_finite_are_named_by_the_next_error():
    model = make_distances(nan="allow")
    fit_distances(model, [7, 6], [7, 8])
    model.compile("adam", "mse")
    told = "no step was made: the rows of id 7 of table 'user' hold NaN or infinity: load an earlier"
    with pytest.raises(NotFiniteError, match=told):
        fit_distances(model, [7, 6], [5, 8])


def make_meta(inner, **options):
    features = [
        FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0.0, 1.0))) for name in ("user", "item")
    ]
    model = MetaModel(EmbeddingCollection(features), MLP({"fc": 6, "out": 1}, seed=3), inner=inner)
    model.compile("sgd", "mse", **options)
    return model


def meta_fit(model, batch):
    model.fit(tf.data.Dataset.from_tensors(batch), verbose=0)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
def test_a_meta_model_names_the_task_of_a_bad_label(options):
    batch = make_batch([3, 4, 2])
    batch["task"] = tf.constant([70, 80, 90], tf.int64)
    batch["label"] = tf.constant(with_nan(batch["label"], 6))  # task 80's
    model = make_meta(InnerLoop(steps=1, learning_rate=0.01), **options)
    with pytest.raises(NotFiniteError, match="no step was made: label of task 80 is not finite"):
        meta_fit(model, batch)


def test_a_meta_model_tells_a_diverging_inner_loop():
    batch = make_batch([3, 4, 2])
    model = make_meta(InnerLoop(steps=3, learning_rate=1e10), run_eagerly=True)
    with pytest.raises(NotFiniteError, match=r"the inner loop diverges at tasks 0, 1, 2.*now 10000000000.0"):
        meta_fit(model, batch)


def on_rank(make, fit, nan, labels):
    from gmeta.core import collectives

    model = make()
    try:
        fit(model, labels=labels if collectives.world().rank == 0 else nan)
    except NotFiniteError as error:
        return str(error)
    return ""


# Quick: test_ranks_under_a_loss_scale_refuse_bad_data_and_name_it.
@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_stop_together_and_the_one_with_bad_labels_says_so():
    bad = np.full(20, np.nan, np.float32)
    first, second = run_ranks(on_rank, 2, make, fit, bad, LABELS)
    assert "the gradient of rank 1 of 2 isn't finite" in first
    assert "rank 1: 10 of 10 values of label" in second


def distances_on_rank(make, fit, ways):
    """What a rank's error is if rank 1 has a gradient that isn't finite, and whether nothing has moved."""

    def outcome(options):
        model = make(**options)
        others = [8, 9, 5, 7, 6, 9, 8, 5]  # every second sample is rank 1's
        try:
            fit(model, [6, 8, 6, 7, 9, 5, 9, 6], others)
        except NotFiniteError as error:
            return str(error), bool(np.all(model.offset == 1))
        return "", False

    return [outcome(options) for options in ways]


@pytest.mark.ranks
def test_ranks_refuse_a_gradient_that_is_not_finite_and_name_its_id():
    every = ("one batch a step", "accumulated", "ahead", "micro-batches")
    # On one rank, each way runs above: test_a_gradient_of_rows_that_is_not_finite_is_refused_before_...
    ways = [WAYS[each] for each in (every if "GMETA_ALL_CASES" in os.environ else every[1:2])]
    for first, second in zip(
        *run_ranks(distances_on_rank, 2, make_distances, fit_distances, ways), strict=True
    ):
        assert "the gradient of rank 1 of 2 isn't finite, and no rank has made the step: look" in first[0]
        assert "rank 1: the loss is finite, but not its gradient for id 7 of table 'user': a der" in second[0]
        assert first[1:] == second[1:] == (True,)


SCALED = {"in a graph": {}, "eagerly": {"run_eagerly": True}, "accumulated": {"accumulate_steps": 2}}


def scaled_on_rank(make, fit, options, data):
    """What a dynamic loss scale comes to on a rank: the error, whether nothing has moved, and the scale."""
    inner = tf.keras.optimizers.SGD(0.1)
    model = make(tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=8.0), **options)
    model.get_layer("d").kernel.assign(tf.ones([5, 1]))  # ranks begin alike
    seen = {"user": USERS, "price": PRICES}
    before = model.predict(seen, verbose=0)
    try:
        fit(model, batch_size=5, **data)
        said = ""
    except NotFiniteError as error:
        said = str(error)
    same = np.array_equal(model.predict(seen, verbose=0), before)
    return said, same, float(model.optimizer.loss_scale)


PLACE = np.arange(20)  # rank 1 has those that are odd, in two batches of five
HUGE = np.where((PLACE % 2 == 1) & (PLACE > 10), np.float32(1e30), PRICES)  # its second batch overflows


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("way", "what", "bad"),
    [
        ("in a graph", "label", {"labels": with_nan(LABELS, 1)}),
        ("eagerly", "feature 'price'", {"price": with_nan(PRICES, 3)}),
        ("accumulated", "sample weight", {"sample_weight": with_nan(np.ones(20), 5), "price": HUGE}),
    ],
    ids=SCALED,
)
@pytest.mark.shown_by("test_ranks_refuse_a_gradient_that_is_not_finite_and_name_its_id")
def test_ranks_under_a_loss_scale_refuse_bad_data_and_name_it(way, what, bad):
    first, second = run_ranks(scaled_on_rank, 2, make, fit, SCALED[way], bad)
    assert "the data of rank 1 of 2 isn't finite, and no rank has made the step: mend" in first[0]
    assert f"rank 1: 1 of 5 values of {what} in the batch are not finite" in second[0]
    assert first[1:] == second[1:] == (True, 8.0)


@pytest.mark.ranks
@pytest.mark.parametrize("way", SCALED)
@pytest.mark.shown_by(case="eagerly")
def test_ranks_under_a_loss_scale_leave_out_what_overflows_on_one_of_them(way):
    huge = {"price": np.where(PLACE % 2, np.float32(1e30), PRICES)}
    steps = 1 if way == "accumulated" else 2  # each of them halves the scale
    assert run_ranks(scaled_on_rank, 2, make, fit, SCALED[way], huge) == [("", True, 8.0 / 2**steps)] * 2


def test_a_model_that_is_used_no_more_is_freed_with_its_tables():
    model = make()
    fit(model)
    gone = [weakref.ref(model), weakref.ref(model.layers[1].tables[0])]
    del model
    gc.collect()
    assert [each() for each in gone] == [None, None]
