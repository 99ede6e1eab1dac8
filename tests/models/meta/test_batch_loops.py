"""Keras' methods of one batch, class weights and `summary` of a `MetaModel`."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError, NotFiniteError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from support.drawn_batches import make_batch

FEATURES = [
    FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0.0, 1.0))) for name in ("user", "item")
]


def make(**options):
    model = MetaModel(EmbeddingCollection(FEATURES), MLP({"fc": 6, "out": 1}, seed=3), inner=InnerLoop())
    model.compile("sgd", "mse", ["mae"], **options)
    return model


def batch(binary=False):
    made = make_batch([3, 4, 2])
    if binary:
        made["label"] = tf.cast(made["label"] > 0, tf.float32)
    return made


def data(of):
    return tf.data.Dataset.from_tensors(of)


def weights(model):
    rows = model.collection.tables[0].lookup(np.arange(9), insert=False).rows
    return [*(variable.numpy() for variable in model.trainable_variables), rows.numpy()]


def assert_same(one, other):
    for first, second in zip(weights(one), weights(other), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-6)


def test_one_batch_is_trained_and_measured_as_in_fit_and_evaluate():
    one, other = (make(run_eagerly=True) for _ in range(2))
    logs = one.train_on_batch(batch(), return_dict=True)
    history = other.fit(data(batch()), verbose=0).history
    assert logs == pytest.approx({name: values[0] for name, values in history.items()})
    assert_same(one, other)
    assert one.test_on_batch(batch()) == pytest.approx(other.evaluate(data(batch()), verbose=0))
    np.testing.assert_allclose(
        one.predict_on_batch(batch()), other.predict(data(batch()), verbose=0), rtol=1e-6
    )


def test_metrics_of_batches_add_up_where_they_are_not_reset():
    model = make()
    first = model.test_on_batch(batch(), reset_metrics=False)
    assert model.test_on_batch(batch(), reset_metrics=False) == pytest.approx(first)
    assert int(model.metrics[0].count) == 12


def test_what_a_batch_of_tasks_has_in_it_is_not_taken_beside_it():
    with pytest.raises(ConfigError, match="leave y and sample_weight out"):
        make().train_on_batch(batch(), [1.0], [1.0])
    with pytest.raises(ConfigError, match="batches of tasks, as gmeta"):
        make().train_on_batch({"user": [1]})
    bad = {**batch(), "label": batch()["label"] + np.nan}
    with pytest.raises(NotFiniteError, match="label of tasks 0, 1, 2"):
        make().train_on_batch(bad)


def test_class_weights_weigh_the_inner_and_the_outer_loss():
    one, other, plain = (make(run_eagerly=True) for _ in range(3))
    by_hand = batch(binary=True)
    weight = tf.where(by_hand["label"] > 0, 3.0, 0.5)
    for part in ("support", "query"):
        mask = by_hand[part]["mask"] * tf.gather(weight, by_hand[part]["index"])
        by_hand[part] = {**by_hand[part], "mask": mask}
    by_class = {0: 0.5, 1: 3.0}
    one.fit(data(batch(binary=True)), class_weight=by_class, verbose=0)
    other.train_on_batch(by_hand)
    plain.train_on_batch(batch(binary=True))
    assert_same(one, other)
    assert np.abs(weights(one)[0] - weights(plain)[0]).max() > 1e-4
    one.train_on_batch(batch(binary=True), class_weight=by_class)
    other.train_on_batch(by_hand)
    assert_same(one, other)


def test_class_weights_that_say_nothing_are_refused():
    several = {**batch(), "label": tf.stack([batch()["label"]] * 2, axis=1)}
    with pytest.raises(ConfigError, match="one label per sample"):
        make().train_on_batch(several, class_weight={0: 1.0})
    with pytest.raises(ConfigError, match="numbers from 0 on"):
        make().train_on_batch(batch(), class_weight={0: -1.0})
    with pytest.raises(ConfigError, match=r"tf\.data\.Dataset of task batches, .* got dict"):
        make().fit(batch(), class_weight={0: 1.0})


def test_summary_shows_tables_with_rows_width_and_bytes():
    model = make()
    model.train_on_batch(batch())
    lines = []
    model.summary(print_fn=lines.append)
    table = model.collection.tables[0]
    rows, size = int(table.size()), int(table.statistics().bytes)
    assert lines[-2].split() == ["Table", "Rows", "Width", "Bytes", "Optimizer"]
    assert lines[-1].split() == [table.name, str(rows), "4", f"{size:,}", "SGD"]
    assert rows == len({(name, each) for name, ids in batch()["features"].items() for each in ids.numpy()})
