"""A model of exposures: each is scored by its own user's past alone, all are trained alike, by one lookup."""

import numpy as np
import pytest
import tensorflow as tf
from sklearn.metrics import roc_auc_score

from gmeta.core.collectives.shared_data import empty_batch
from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import HSTU, FeatureConfig, TableConfig, record_lookups
from gmeta.losses.multi_task import product_cross_entropy
from gmeta.metrics import AUC
from gmeta.models import GRM
from gmeta.ops import jagged
from gmeta.optimizers import Adam
from support.drawn_batches import draw_exposures, of_user, with_targets

START = Normal(0.0, 0.3)


def make_model(tags=False, **settings):
    features = [
        FeatureConfig(name, TableConfig(name, 8, initializer=START))
        for name in ("item", "category", "city", "age")
    ]
    features.append(FeatureConfig("action", TableConfig("action", 4, initializer=START)))
    contexts = ["city", "age"]
    if tags:
        features.append(FeatureConfig("tags", TableConfig("tags", 8, initializer=START), combiner="mean"))
        contexts.append("tags")
    settings = {
        "contexts": contexts,
        "history": ["item", "category", "action"],
        "targets": ["item", "category"],
        "time": "time",
        "dim": 8,
        "blocks": 1,
        "max_length": 10,
        "expert_units": [8],
        "tower_units": [8],
        "optimizer": Adam(0.01),
    } | settings
    model = GRM.of(features, **settings)
    model.compile(tf.keras.optimizers.Adam(0.01))
    return model


def learnt(model, batch):
    with tf.GradientTape() as tape, record_lookups(tape):
        loss, samples, measure = model.learn(batch)
        measure()
        return float(loss), int(samples)


# Inputs that a GPU's ops read in host memory, of those whose numbers TensorFlow would compute on the GPU.
HOST_INPUTS = {"Range": (0, 1, 2), "Assert": (0,), "If": (0,), "SplitV": (1,)}


def test_sizes_and_conditions_of_a_step_are_computed_in_host_memory():
    model = make_model(tags=True, scenario="scene", scenarios=2)
    step = tf.function(lambda batch: model.train_step(batch))
    ops = step.get_concrete_function(
        draw_exposures(3, [4, 0, 6], [3, 2, 4], tags=True)
    ).graph.get_operations()
    read = [
        (op.name, each)
        for op in ops
        for number in HOST_INPUTS.get(op.type, ())
        for each in [op.inputs[number].op]
        if op.inputs[number].dtype in (tf.bool, tf.int64)
    ]
    assert len(read) > 20
    given = ("Const", "Placeholder", "ReadVariableOp", "Shape", "Size")

    def on_gpu(op):
        return "CPU" not in op.device and op.type not in given

    assert not [(name, each.name) for name, each in read if on_gpu(each)]
    # Nor does the host read anything else that TensorFlow would compute on a GPU.
    of_trunk = [op for op in ops if op.name.startswith("trunk/") and "CPU" in op.device]
    assert len(of_trunk) > 50
    assert not [(op.name, each.op.name) for op in of_trunk for each in op.inputs if on_gpu(each.op)]


def flat(logits, task="ctcvr"):
    return logits[task].values.numpy()


@pytest.mark.parametrize(
    "settings",
    [
        {"by_time": True, "blocks": 2},
        {"backbone": "fuxi"},
        {"time": None, "tags": True},
        {"scenario": "scene", "scenarios": 2},
    ],
    ids=["by_time", "fuxi", "without_times", "scenarios"],
)
def test_an_exposure_depends_on_its_own_user_and_on_no_other_exposure(settings):
    model = make_model(**settings)
    batch = draw_exposures(3, [4, 0, 6], [3, 2, 4], tags=True)
    together = model(batch)
    alone = [model(of_user(batch, user)) for user in range(3)]
    for task in ("ctr", "cvr", "ctcvr"):
        expected = np.concatenate([flat(each, task) for each in alone])
        np.testing.assert_allclose(flat(together, task), expected, rtol=2e-5, atol=1e-6)
    # Without the others of its user too, wherever it stands among them.
    last = model(with_targets(batch, lambda column: column[:, -1:]))
    np.testing.assert_allclose(flat(last), together["ctcvr"][:, -1:].values, rtol=2e-5, atol=1e-6)


def test_with_a_mask_by_time_an_exposure_sees_what_came_before_it():
    model = make_model(by_time=True)
    batch = draw_exposures(5, [6], [4])
    times = batch["history"]["time"]
    batch["targets"]["time"] = tf.RaggedTensor.from_row_lengths(times.values[1:5], [4])
    before = flat(model(batch))
    batch["history"]["item"] = tf.RaggedTensor.from_row_lengths(
        tf.concat([batch["history"]["item"].values[:3], [1, 2, 3]], axis=0), [6]
    )
    after = flat(model(batch))
    np.testing.assert_array_equal(after[:3], before[:3])
    assert after[3] != before[3]


def test_with_a_mask_by_time_no_later_time_reaches_an_exposure():
    model = make_model(by_time=True, blocks=2)
    batch = draw_exposures(5, [6], [4])
    times = batch["history"]["time"].values
    batch["targets"]["time"] = tf.RaggedTensor.from_row_lengths(tf.repeat(times[3:4], 4), [4])
    before = flat(model(batch))
    later = tf.concat([times[:4], times[4:] + 10**6], axis=0)
    batch["history"]["time"] = tf.RaggedTensor.from_row_lengths(later, [6])
    np.testing.assert_array_equal(flat(model(batch)), before)
    later = tf.concat([times[:3], times[3:] + 10**6], axis=0)  # the event at the exposures' own time
    batch["history"]["time"] = tf.RaggedTensor.from_row_lengths(later, [6])
    np.testing.assert_array_equal(flat(model(batch)), before)


def test_contexts_history_and_the_exposure_itself_make_the_score():
    model = make_model()
    batch = draw_exposures(7, [5], [2])
    score = flat(model(batch))
    for part, name in [
        ("contexts", "city"),
        ("history", "action"),
        ("targets", "category"),
        ("targets", "time"),
    ]:
        changed = {**batch, part: {**batch[part], name: batch[part][name] + 10**7}}
        assert np.all(flat(model(changed)) != score), (part, name)


def test_the_loss_is_the_mean_over_exposures_of_click_and_of_click_and_purchase():
    model = make_model(weights={"ctcvr": 2.0})
    batch = draw_exposures(11, [4, 3, 0, 2], [3, 7, 1, 0])
    loss, samples = learnt(model, batch)
    logits, labels = model(batch), batch["labels"]
    ctr = product_cross_entropy(labels["click"].values, [flat(logits, "ctr")])
    both = product_cross_entropy(labels["buy"].values, [flat(logits, "ctr"), flat(logits, "cvr")])
    assert samples == 11
    np.testing.assert_allclose(loss, np.mean(ctr) + 2 * np.mean(both), rtol=1e-5)
    assert learnt(model, draw_exposures(1, [3, 2], [0, 0])) == (0.0, 0)
    assert learnt(model, draw_exposures(1, [], [])) == (0.0, 0)


def test_a_step_makes_one_lookup_and_moves_the_rows_of_all_parts(monkeypatch):
    model, batch, calls = make_model(tags=True), draw_exposures(2, [3, 2], [2, 2], tags=True), []
    before = flat(model(batch))
    lookup = model.collection.lookup
    monkeypatch.setattr(
        model.collection, "lookup", lambda *args, **kwargs: calls.append(args) or lookup(*args, **kwargs)
    )
    logs = model.train_step(batch)
    assert len(calls) == 1
    assert not np.allclose(flat(model(batch)), before)
    assert {"loss", "ctr_loss", "ctcvr_loss", "mixture/ctr/load_cv2"} <= set(logs)
    rows = model.collection.lookup(model.columns.ids(batch), insert=False)
    found = sum(int(tf.size(keys)) for keys in rows.keys)
    assert found == sum(table.size() for table in model.collection.tables)


def test_hstu_starts_by_seeing_the_last_hour_unless_told_otherwise():
    def horizons(**settings):
        backbone = make_model(**settings).trunk.backbone
        return {getattr(block, "horizon", None) for block in backbone.blocks}

    assert horizons(blocks=2) == {3600.0}
    assert horizons(horizon=60.0) == {60.0}
    assert horizons(horizon=None) == horizons(time=None) == horizons(backbone="fuxi") == {None}


def test_a_config_of_before_makes_the_model_of_before():
    model, plain = make_model(), make_model(horizon=None)
    config = model.get_config()
    assert config["backbone"]["config"].pop("horizon") == 3600
    batch = draw_exposures(3, [4, 2], [2, 1])
    for made in (former := GRM.from_config(config), plain):
        made(batch)
    for one, other in zip(former.trunk.weights, plain.trunk.weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_learns_and_measures_by_user(tmp_path):
    model = make_model(top_k=2)
    model.compile(tf.keras.optimizers.Adam(0.05), run_eagerly=True)  # graphs take longer
    data = tf.data.Dataset.from_tensors(draw_exposures(13, [5] * 12, [6] * 12))
    before = model.evaluate(data, verbose=0, return_dict=True)
    model.fit(data, epochs=8, verbose=0)
    after = model.evaluate(data, verbose=0, return_dict=True)
    assert before["gauc_ctr"] < 0.8 < 0.95 < after["gauc_ctr"]
    # By other means: each user's own AUC, weighted by exposures, of those who clicked and didn't.
    (batch,) = data.take(1)
    predicted = model.predict(data.take(1), verbose=0)
    labels = batch["labels"]["buy"]
    own = [(y, p) for y, p in zip(labels, predicted["ctcvr"], strict=True) if 0 < np.mean(y) < 1]
    np.testing.assert_allclose(
        after["gauc_ctcvr"],
        np.average([roc_auc_score(y, p) for y, p in own], weights=[len(y) for y, _ in own]),
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        after["auc_ctcvr"], roc_auc_score(labels.values, predicted["ctcvr"].values), rtol=1e-6
    )
    model.save(tmp_path / "model.keras")
    other = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(flat(other(batch)), flat(model(batch)))
    assert float(other.train_step(batch)["loss"]) == pytest.approx(learnt(model, batch)[0], rel=1e-6)


def test_metrics_of_compile_are_measured_label_by_label(tmp_path):
    model, batch = make_model(), draw_exposures(13, [5] * 8, [6] * 8)
    data = tf.data.Dataset.from_tensor_slices(batch).batch(5)
    metrics = {"ctr": ["accuracy", tf.keras.metrics.AUC(name="area")], "ctcvr": "mae"}
    model.compile("adam", metrics=metrics, run_eagerly=True)  # a few batches cost less than their graphs
    assert {"accuracy_ctr", "area_ctr", "mae_ctcvr"} <= set(model.fit(data, verbose=0).history)
    measured = model.evaluate(data, verbose=0, return_dict=True)
    logits, labels = model(batch), batch["labels"]
    click, buy = (labels[name].values.numpy() for name in ("click", "buy"))
    np.testing.assert_allclose(measured["accuracy_ctr"], np.mean((flat(logits, "ctr") > 0) == click))
    probability = 1 / (1 + np.exp(-flat(logits, "ctcvr").astype(np.float64)))
    np.testing.assert_allclose(measured["mae_ctcvr"], np.mean(np.abs(probability - buy)), rtol=1e-5)
    model.compile("adam", metrics=["mse"], run_eagerly=True)
    assert {"mse_ctr", "mse_ctcvr"} <= set(model.evaluate(data, verbose=0, return_dict=True))
    model.save(tmp_path / "model.keras")
    other = tf.keras.models.load_model(tmp_path / "model.keras")
    assert {"mse_ctr", "mse_ctcvr"} <= set(other.evaluate(data, verbose=0, return_dict=True))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"metrics": {"cvr": "mae"}}, "metrics name 'cvr', but the labels are ctr, ctcvr"),
        ({"metrics": [AUC()]}, "auc_ctr and gauc_ctr are always measured"),
        ({"metrics": ["mae", "mae"]}, "mae_ctcvr, mae_ctr would be measured twice"),
    ],
)
def test_metrics_that_it_cannot_measure_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        make_model().compile("adam", **settings)


def test_labels_and_weights_beside_a_batch_are_refused():
    model, batch = make_model(), draw_exposures(2, [3, 2], [2, 2])
    with pytest.raises(ConfigError, match=r"labels \(y\) beside it"):
        model.fit(tf.data.Dataset.from_tensors((batch, tf.ones(2))), verbose=0)
    with pytest.raises(ConfigError, match="sample weights beside it"):
        model.evaluate(tf.data.Dataset.from_tensors((batch, None, tf.ones(2))), verbose=0)


def test_labels_outside_of_their_domain_are_refused_and_named():
    model, batch = make_model(), draw_exposures(2, [3, 2], [2, 2])
    rated = batch["labels"]["buy"].with_values(tf.constant([0.0, 1.0, 5.0, 0.0]))
    batch = {**batch, "labels": {**batch["labels"], "buy": rated}}
    with pytest.raises(ConfigError, match=r"^labels 'buy' must lie between 0 and 1, got 5$"):
        model.evaluate(tf.data.Dataset.from_tensors(batch), verbose=0)


def test_a_label_can_be_what_was_done_with_an_event_and_never_what_is_shown():
    features = [
        FeatureConfig("item", dim=8),
        FeatureConfig("click", TableConfig("click", 8, initializer=START)),
    ]
    settings = {"contexts": [], "labels": {"ctr": "click"}, "dim": 8, "blocks": 1}
    model = GRM.of(features, history=["item", "click"], targets=["item"], **settings)
    batch = draw_exposures(2, [3, 2], [2, 2])
    clicked = tf.cast(batch["history"]["action"] % 2, tf.float32)
    score, other = (
        flat(model({**batch, "history": {**batch["history"], "click": each}}), "ctr")
        for each in (clicked, 1 - clicked)
    )
    assert not np.allclose(score, other, rtol=1e-7)
    with pytest.raises(ConfigError, match="'click' has labels that are not whole numbers"):
        model({**batch, "history": {**batch["history"], "click": clicked + 0.5}})
    with pytest.raises(ConfigError, match="targets has click, which labels= are to predict"):
        GRM.of(features, history=["item"], targets=["item", "click"], **settings)


def test_float_ids_and_times_are_refused():
    model, batch = make_model(), draw_exposures(2, [3, 2], [2, 2])
    for name, told in (("item", "feature 'item' must be integer ids"), ("time", "'time' must be times as")):
        wrong = {**batch, "history": {**batch["history"], name: tf.cast(batch["history"][name], tf.float32)}}
        with pytest.raises(ConfigError, match=told):
            model(wrong)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"backbone": HSTU(blocks=1, heads=1, attention_dim=4, value_dim=4, max_length=5)}, "bias of places"),
        ({"time": None, "by_time": True}, "needs times"),
        ({"time": None, "horizon": 60.0}, "a column of times"),
        ({"backbone": "fuxi", "horizon": 60.0}, "a column of times"),
        ({"combine": "sum"}, "action"),
        ({"targets": ["film"]}, "'film'"),
        ({"targets": ["item"], "history": ["item", "action"]}, "category are in no part"),
    ],
)
def test_what_does_not_go_together_is_told(settings, told):
    with pytest.raises(ConfigError, match=told):
        make_model(**settings)


@pytest.mark.parametrize(
    ("labels", "told"), [({"ctr": "click"}, "no label trains cvr"), ({"cart": "cart"}, "got cart")]
)
def test_labels_are_of_towers_and_train_all_of_them(labels, told):
    model = make_model()
    config = {name: getattr(model.columns, name) for name in ("contexts", "history", "targets", "time")}
    with pytest.raises(ConfigError, match=told):
        GRM(
            model.collection, model.trunk.backbone, model.mixture, model.heads, labels=labels, dim=8, **config
        )


def test_jagged_columns_are_as_ragged_ones():
    model, batch = make_model(tags=True), draw_exposures(1, [2, 0, 3], [1, 2, 1], tags=True)
    model.run_eagerly = True  # a batch costs less than its graph
    form = {
        part: {
            name: jagged.from_ragged(column) if isinstance(column, tf.RaggedTensor) else column
            for name, column in columns.items()
        }
        if isinstance(columns, dict)
        else columns
        for part, columns in batch.items()
    }
    expected = model(batch)
    for task, logits in model(form).items():
        np.testing.assert_array_equal(logits.values, expected[task].values)
    data = tf.data.Dataset.from_tensors(form)
    assert np.isfinite(model.fit(data, verbose=0).history["loss"][0])
    # A rank whose data have ended takes steps on this.
    assert len(model(empty_batch(data.element_spec))["ctr"].values) == 0


def test_batches_that_cannot_be_read_are_told():
    model, batch = make_model(), draw_exposures(1, [2, 1], [1, 1])
    with pytest.raises(ConfigError, match="lacks 'age' among its contexts; it has contexts city"):
        model({**batch, "contexts": {"city": batch["contexts"]["city"]}})
    with pytest.raises(ConfigError, match="history 'item' must be ragged"):
        model({**batch, "history": {**batch["history"], "item": batch["history"]["item"].to_tensor()}})
    with pytest.raises(ConfigError, match="lacks 'task'"):
        model.test_step({part: columns for part, columns in batch.items() if part != "task"})
    with pytest.raises(tf.errors.InvalidArgumentError, match="'action' have other lengths"):
        model({**batch, "history": {**batch["history"], "action": batch["targets"]["category"]}})
