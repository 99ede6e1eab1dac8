"""`get_weights` and `set_weights` with the rows of tables, and what Keras does with them."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.layers.embedding.table_weights import Weights
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel, Model
from gmeta.policies import LRU
from support.drawn_batches import make_batch
from support.process_ranks import run_ranks

USERS = np.arange(60) % 12
LABELS = (USERS % 2).astype(np.float32)


def make(optimizer="adam", name="user", **options):
    user = tf.keras.Input([], name="user", dtype=tf.int64)
    table = TableConfig(name, 4, initializer=Normal(0.0, 0.5), **options)
    collection = EmbeddingCollection([FeatureConfig("user", table)])
    model = Model({"user": user}, tf.keras.layers.Dense(1)(collection({"user": user})["user"]))
    model.compile(optimizer, "mse", run_eagerly=True)  # a few batches cost less than their graphs
    return model


def predicted(model):
    return model.predict({"user": np.arange(20)}, verbose=0)


class Remember(tf.keras.callbacks.Callback):
    """Predictions after each epoch, and a loss that is best after the second."""

    def __init__(self, predict):
        super().__init__()
        self._predict, self.seen = predict, []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(self._predict(self.model))
        logs["watched"] = (3.0, 1.0, 2.0, 4.0, 5.0, 6.0)[epoch]


def stopping(**kwargs):
    return tf.keras.callbacks.EarlyStopping("watched", restore_best_weights=True, mode="min", **kwargs)


def fit_and_stop(model, predict, x, y=None):
    remember = Remember(predict)
    model.fit(x, y, epochs=6, verbose=0, callbacks=[remember, stopping(patience=2)])
    assert len(remember.seen) == 4
    return remember.seen, predict(model)


@pytest.mark.parametrize("options", [{}, {"eviction": LRU(max_rows=6)}])
@pytest.mark.shown_by(case="options1")
def test_early_stopping_restores_the_predictions_of_the_best_epoch(options):
    model = make(tf.keras.optimizers.Adam(0.1), **options)
    seen, after = fit_and_stop(model, predicted, {"user": USERS}, LABELS)
    np.testing.assert_array_equal(after, seen[1])
    assert np.abs(after - seen[3]).max() > 1e-3


def test_early_stopping_restores_a_meta_model_too():
    features = [
        FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0.0, 1.0))) for name in ("user", "item")
    ]
    model = MetaModel(EmbeddingCollection(features), MLP({"fc": 6, "out": 1}, seed=3), inner=InnerLoop())
    model.compile(tf.keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
    batch = make_batch([3, 4, 2])
    data = tf.data.Dataset.from_tensors(batch)
    seen, after = fit_and_stop(model, lambda m: m.predict(data, verbose=0), data)
    np.testing.assert_array_equal(after, seen[1])
    assert np.abs(after - seen[3]).max() > 1e-4


def test_training_goes_on_from_restored_weights_as_it_did_from_them():
    model = make(tf.keras.optimizers.SGD(0.1, momentum=0.9))
    batch = {"user": USERS}, LABELS
    model.train_on_batch(*batch)
    for variable in model.optimizer.variables:
        if "iteration" not in variable.name and "learning_rate" not in variable.name:
            variable.assign(tf.zeros_like(variable))  # of the dense optimizer, which weights don't have
    kept = model.get_weights()
    state = [variable.numpy() for variable in model.optimizer.variables]
    losses = [model.train_on_batch(*batch) for _ in range(3)]
    model.set_weights(kept)
    for variable, value in zip(model.optimizer.variables, state, strict=True):
        variable.assign(value)
    assert [model.train_on_batch(*batch) for _ in range(3)] == losses


def test_weights_are_a_list_of_arrays_that_can_be_copied_and_not_pickled():
    model = make()
    weights = model.get_weights()
    assert [weight.shape for weight in weights] == [(4, 1), (1,)]
    before = predicted(model)
    model.fit({"user": USERS}, LABELS, verbose=0)
    for again in (weights, copy.copy(weights), copy.deepcopy(weights)):
        assert isinstance(again, Weights)
        model.set_weights(again)
        np.testing.assert_array_equal(predicted(model), before)
    with pytest.raises(ConfigError, match="save them with save_weights"):
        pickle.dumps(weights)


def test_arrays_alone_and_weights_of_other_tables_are_refused_before_anything_changes():
    model = make()
    weights, before = model.get_weights(), predicted(model)
    with pytest.raises(ConfigError, match="without the rows of its table"):
        model.set_weights([weight + 1 for weight in weights])
    with pytest.raises(
        ConfigError,
        match=r"tables of another model, .*user is reinitialized: it was not saved; the rows of 0/item",
    ):
        model.set_weights(make(name="item").get_weights())
    np.testing.assert_array_equal(predicted(model), before)
    layer = model.layers[1]
    layer.set_weights(layer.get_weights())
    with pytest.raises(ConfigError, match="embeddings: set_weights"):
        layer.set_weights([])


def on_rank(make, fit_and_stop, predicted, users, labels):
    model = make(tf.keras.optimizers.Adam(0.1))
    seen, after = fit_and_stop(model, predicted, {"user": users}, labels)
    return seen, after


@pytest.mark.ranks
def test_early_stopping_restores_the_rows_of_every_rank():
    for seen, after in run_ranks(on_rank, 2, make, fit_and_stop, predicted, USERS, LABELS):
        np.testing.assert_array_equal(after, seen[1])
        assert np.abs(after - seen[3]).max() > 1e-3


def test_a_deep_copy_of_a_collection_has_rows_of_its_own():
    collection, ids = EmbeddingCollection([FeatureConfig("user", dim=4)]), {"user": np.arange(4)}
    collection.lookup(ids)
    target = copy.deepcopy(collection)
    np.testing.assert_array_equal(target(ids)["user"], collection(ids)["user"])
    target.lookup({"user": [9]})
    target.tables[0].apply_gradients([0], np.ones([1, 4], np.float32), learning_rate=0.1)
    assert [int(each.tables[0].size()) for each in (collection, target)] == [4, 5]
    assert (target(ids)["user"][0] != collection(ids)["user"][0]).numpy().all()
