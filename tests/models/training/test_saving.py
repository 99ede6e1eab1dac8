"""What is saved of a model with tables comes back whole; what can't be saved whole is refused."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from gmeta.checkpoint import ShardedCheckpoint
from gmeta.checkpoint.manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.layers.embedding.table_weights import tables_of
from gmeta.meta import InnerLoop, Momentum
from gmeta.metrics import NDCG
from gmeta.models import MetaModel, Model
from gmeta.optimizers import Adagrad, Adam
from support.drawn_batches import make_batch
from support.tables import assert_same_tables

FEATURES = (
    FeatureConfig("user", dim=4),
    FeatureConfig("item", TableConfig("item", 4, initializer=Normal(0.0, 1.0))),
)


def make(features=FEATURES, optimizer=None, k=1):
    """A model that runs eagerly: a few batches cost less than their graphs."""
    x = {f.name: tf.keras.Input([], name=f.name, dtype=tf.int64) for f in features}
    collection = EmbeddingCollection(features, optimizer=optimizer or Adam(None), seed=3, name="collection")
    vectors = collection(x)
    model = Model(x, tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()(list(vectors.values()))))
    model.compile(tf.keras.optimizers.Adam(0.01), "mse", accumulate_steps=k, run_eagerly=True)
    return model


def tables(model):
    return model.get_layer("collection").tables


@pytest.fixture(scope="module")
def trained():
    model = make()
    rng = np.random.default_rng(0)
    x = {"user": rng.integers(0, 20, 32), "item": rng.integers(0, 20, 32)}
    model.fit(x, rng.normal(size=32), batch_size=8, epochs=2, verbose=0)
    return model, x


def assert_same_models(mine, other, x):
    for a, b in zip(tables(mine), tables(other), strict=True):
        assert_same_tables(a, b)
    np.testing.assert_array_equal(mine.predict(x, verbose=0), other.predict(x, verbose=0))


@pytest.mark.parametrize("name", ["weights", "model.weights.h5"])
def test_weights_come_back_with_whole_tables(trained, tmp_path, name):
    model, x = trained
    model.save_weights(tmp_path / name)
    other = make()
    tables(other)[0].lookup([999])  # what it held goes
    other.load_weights(tmp_path / name)
    assert_same_models(model, other, x)


def test_a_keras_file_holds_model_tables_and_compilation(trained, tmp_path):
    model, x = trained
    model.save(tmp_path / "model.keras")
    other = tf.keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(other, Model)
    assert other.loss == "mse"
    assert_same_models(model, other, x)
    # The next step is the same too.
    y = np.ones(len(x["user"]))
    for each in (model, other):
        each.train_on_batch(x, y)
    for a, b in zip(tables(model), tables(other), strict=True):
        np.testing.assert_array_equal(np.sort(a.export().rows, axis=0), np.sort(b.export().rows, axis=0))


def test_accumulation_is_part_of_the_compilation(tmp_path):
    make(k=3).save(tmp_path / "model.keras")
    assert tf.keras.models.load_model(tmp_path / "model.keras").get_compile_config()["accumulate_steps"] == 3


def test_a_checkpoint_carries_model_and_optimizer(trained, tmp_path):
    model, x = trained
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "at")
    other = make()
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    assert_same_models(model, other, x)
    assert int(other.optimizer.iterations) == int(model.optimizer.iterations)


def test_a_checkpointing_callback_writes_what_loads(trained, tmp_path):
    _, x = trained
    model = make()
    callback = tf.keras.callbacks.ModelCheckpoint(tmp_path / "best", save_weights_only=True)
    model.fit(x, np.ones(32), verbose=0, callbacks=[callback])
    other = make()
    other.load_weights(tmp_path / "best")
    assert_same_models(model, other, x)


class Killed(tf.keras.callbacks.Callback):
    """Ends training as a signal would, after the third batch of the second epoch."""

    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 2):
            raise KeyboardInterrupt


@pytest.mark.parametrize("save_freq", [1, pytest.param("epoch", marks=pytest.mark.slow)])  # quick: 1
def test_a_backup_waits_for_the_step_of_accumulated_gradients_and_training_goes_on_as_it_was(
    tmp_path, save_freq
):
    batch = {"user": np.arange(8), "item": np.arange(8) % 5}, np.arange(8.0)
    data = tf.data.Dataset.from_tensors(batch).repeat(4)  # Keras resumes an epoch with its first batches
    uninterrupted, killed, resumed = (make(k=2) for _ in range(3))
    uninterrupted.save_weights(tmp_path / "start")
    killed.load_weights(tmp_path / "start")
    uninterrupted.fit(data, epochs=3, verbose=0)

    def backup():
        return tf.keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=save_freq)

    with pytest.raises(KeyboardInterrupt):
        killed.fit(data, epochs=3, verbose=0, callbacks=[backup(), Killed()])
    within = pytest.warns(UserWarning, match="2 steps")
    with within if save_freq == 1 else contextlib.nullcontext():
        resumed.fit(data, epochs=3, verbose=0, callbacks=[backup()])
    assert_same_models(uninterrupted, resumed, batch[0])
    assert int(resumed.optimizer.iterations) == int(uninterrupted.optimizer.iterations) == 6
    assert not (tmp_path / "backup" / "chief").exists()
    resumed.fit(data, verbose=0)  # without the callback
    assert int(resumed.optimizer.iterations) == 8


def test_a_clone_is_the_model_with_rows_anew(trained):
    model, x = trained
    clone = tf.keras.models.clone_model(model)
    assert isinstance(clone, Model)
    assert [int(table.size()) for table in tables(clone)] == [0, 0]
    assert [table.seed for table in tables(clone)] == [3, 3]
    clone.compile("adam", "mse")
    clone.fit(x, np.ones(32), verbose=0)
    assert [int(t.size()) for t in tables(clone)] == [int(t.size()) for t in tables(model)]


@pytest.mark.parametrize("name", ["weights.h5", "weights.hdf5"])
def test_the_older_hdf5_is_refused_because_it_would_leave_the_tables_out(trained, tmp_path, name):
    model, _ = trained
    with pytest.raises(ConfigError, match=r"would leave the dynamic tables out: use .* \.weights\.h5"):
        model.save_weights(tmp_path / name)
    with pytest.raises(ConfigError, match="tables out"):
        model.load_weights(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_saved_model_of_keras_is_refused(trained, tmp_path):
    model, _ = trained
    with pytest.raises(ConfigError, match=r"saved whole as `\.keras` alone"):
        model.save(tmp_path / "folder")
    with pytest.raises(ConfigError, match="export_model writes a SavedModel"):
        model.export(tmp_path / "folder")
    meta = MetaModel(EmbeddingCollection([FeatureConfig("item", dim=8)]), MLP({"out": 1}))
    with pytest.raises(ConfigError, match="tables out"):
        meta.save_weights(tmp_path / "weights.h5")


def in_a_module(model, folder):
    module = tf.Module()
    module.model = model
    tf.saved_model.save(module, folder)


@pytest.mark.parametrize(
    "write",
    [
        tf.saved_model.save,
        in_a_module,
        lambda model, path: tf.saved_model.save(model.get_layer("collection"), path),
        lambda model, path: tf.keras.models.save_model(model, path, include_optimizer=False),
        lambda model, path: tf.keras.models.save_model(model, f"{path}.h5"),
        lambda model, path: tf.saved_model.save(tf.keras.Model(model.inputs, model.outputs), path),
    ],
    ids=["saved_model", "of a module", "of a layer", "save_model", "hdf5", "of a model of Keras"],
)
@pytest.mark.shown_by(case="saved_model")
def test_other_ways_to_formats_without_tables_are_refused_and_the_model_trains_on(trained, tmp_path, write):
    model, x = trained
    before, optimizer = model.predict(x, verbose=0), model.optimizer
    with pytest.raises(ConfigError, match="can't hold dynamic tables, and nothing was written"):
        write(model, str(tmp_path / "it"))
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)
    assert model.optimizer is optimizer
    model.fit(x, np.ones(32), verbose=0)
    assert (model.predict(x, verbose=0) != before).all()
    model.save(tmp_path / "model.keras")
    again = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))


OTHER_PLAN = r"has the tables .*; item.* but what is loaded was saved with user \("


@pytest.mark.parametrize("name", ["weights", "model.weights.h5"])
def test_rows_of_other_features_are_refused(trained, tmp_path, name):
    model, _ = trained
    model.save_weights(tmp_path / name)
    with pytest.raises(ConfigError, match=OTHER_PLAN):
        make([FeatureConfig("other", dim=4), *FEATURES[1:]]).load_weights(tmp_path / name)


def test_rows_of_a_plan_with_fewer_tables_are_refused(trained, tmp_path):
    path = tf.train.Checkpoint(trained[0].get_layer("collection")).save(tmp_path / "at")
    other = EmbeddingCollection([FeatureConfig("user", dim=4), FeatureConfig("more", dim=4), *FEATURES[1:]])
    with pytest.raises(ConfigError, match=OTHER_PLAN):
        tf.train.Checkpoint(other).restore(path)


@pytest.mark.parametrize("name", ["weights", "model.weights.h5"])
def test_rows_of_another_optimizer_are_refused(trained, tmp_path, name):
    model, _ = trained
    model.save_weights(tmp_path / name)
    with pytest.raises(ConfigError, match="the checkpoint has"):
        make(optimizer=Adagrad(0.1)).load_weights(tmp_path / name)


def make_meta():
    network = tf.keras.Sequential(
        [tf.keras.layers.Dense(4, "relu", name="fc"), tf.keras.layers.Dense(1, name="out")]
    )
    features = [FeatureConfig("user", dim=4), FeatureConfig("item", dim=4)]
    inner = InnerLoop("meta-sgd", optimizer=Momentum(0.5), adapt=["out", "embeddings"])
    model = MetaModel(EmbeddingCollection(features, seed=3), network, inner=inner, reduction="task")
    settings = {"accumulate_steps": 2, "run_eagerly": True}
    model.compile(tf.keras.optimizers.Adam(0.01), "mse", ["mae", NDCG(2)], **settings)
    return model


@pytest.fixture(scope="module")
def trained_meta():
    model, batch = make_meta(), make_batch([3, 2])
    batch["label"] = tf.abs(batch["label"])
    model.fit(tf.data.Dataset.from_tensors(batch).repeat(4), verbose=0)
    return model, batch


# Quick: model.weights.h5, and of an ordinary model test_weights_come_back_with_whole_tables[weights].
@pytest.mark.parametrize("name", [pytest.param("weights", marks=pytest.mark.slow), "model.weights.h5"])
def test_a_meta_models_weights_and_learned_rates_come_back(trained_meta, tmp_path, name):
    model, batch = trained_meta
    model.save_weights(tmp_path / name)
    other = make_meta()
    other.load_weights(tmp_path / name)
    np.testing.assert_array_equal(other(batch), model(batch))
    assert_same_tables(other.collection.tables[0], model.collection.tables[0])


def test_a_keras_file_holds_a_meta_model_whole(trained_meta, tmp_path):
    model, batch = trained_meta
    model.save(tmp_path / "model.keras")
    other = tf.keras.models.load_model(tmp_path / "model.keras")
    assert (other.inner, other.reduction) == (model.inner, "task")
    np.testing.assert_array_equal(other(batch), model(batch))
    data = tf.data.Dataset.from_tensors(batch).repeat(2)
    one, two = (each.fit(data, verbose=0).history for each in (model, other))
    assert one == two
    assert set(one) == {"loss", "mae", "ndcg@2"}
    np.testing.assert_array_equal(other(batch), model(batch))


def make_towers():
    """Two collections without names, with tables of one name."""
    x = {name: tf.keras.Input([], name=name, dtype=tf.int64) for name in ("user", "friend")}
    features = [FeatureConfig("user", dim=4)]
    mine, other = EmbeddingCollection(features, seed=1), EmbeddingCollection(features, seed=2)
    vectors = [mine({"user": x["user"]})["user"], other({"user": x["friend"]})["user"]]
    model = Model(x, tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()(vectors)))
    model.compile(tf.keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    return model


def test_two_collections_without_names_in_a_model_are_told_apart(tmp_path):
    model, x = make_towers(), {"user": np.arange(16), "friend": np.arange(16)[::-1]}
    keeps = ShardedCheckpoint(tmp_path / "sharded")
    model.fit(x, np.linspace(0, 1, 16), epochs=2, verbose=0, callbacks=[keeps])
    expected = model.predict(x, verbose=0)
    names = ["embeddings/user", "embeddings_1/user"]
    assert [table.name for table in tables_of(model)] == names
    assert sorted(Manifest.load(keeps.store.latest()).tables) == names
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded, restored, again = (
        tf.keras.models.load_model(tmp_path / "model.keras"),
        make_towers(),
        make_towers(),
    )
    again.load_weights(tmp_path / "model.weights.h5")
    ShardedCheckpoint(tmp_path / "sharded").restore(restored)
    for other in (loaded, restored, again):
        np.testing.assert_array_equal(other.predict(x, verbose=0), expected)
        assert [table.name for table in tables_of(other)] == names
    one = EmbeddingCollection([FeatureConfig("user", dim=4)])  # named as ever, however many there were
    assert one.tables[0].name == names[0]
