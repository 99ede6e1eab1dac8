from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import tensorflow as tf

from gmeta import io, ops, optimizers
from gmeta.checkpoint.callback import ShardedCheckpoint, tables_by_name
from gmeta.checkpoint.manifest import Manifest
from gmeta.checkpoint.store import CheckpointStore
from gmeta.core import collectives
from gmeta.core.collectives.shared_data import part_of
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.shares import SHARES
from gmeta.io import AfterSteps
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import Model
from support.grouped_data import write_folder
from support.tables import assert_same_tables


class Scorer(tf.keras.Model):
    """Two embeddings and a dense layer, trained as users do it: a train step of their own."""

    def __init__(self, units: int = 1, name: str = "scores") -> None:
        super().__init__()
        features = [FeatureConfig("user", dim=4), FeatureConfig("item", dim=2)]
        self.embeddings = EmbeddingCollection(features, optimizer=optimizers.Adam(0.05), name=name)
        self.dense = tf.keras.layers.Dense(units)

    def call(self, inputs, training=False):
        return self.dense(self.embeddings.concat(self.embeddings.lookup(inputs, insert=training)))

    def train_step(self, data):
        inputs, label = data
        lookup = self.embeddings.lookup(inputs)
        with tf.GradientTape() as tape:
            tape.watch(lookup.rows)
            loss = self.compute_loss(y=label, y_pred=self.dense(self.embeddings.concat(lookup)))
        rows, weights = tape.gradient(loss, (lookup.rows, self.dense.trainable_variables))
        self.embeddings.apply_gradients(lookup, rows)
        self.optimizer.apply_gradients(zip(weights, self.dense.trainable_variables, strict=True))
        return {"loss": loss}


def data(batches: int = 5) -> tf.data.Dataset:
    rng = np.random.default_rng(2)
    n = 8 * batches
    features = {name: rng.integers(0, 50, n) for name in ("user", "item")}
    return tf.data.Dataset.from_tensor_slices((features, rng.normal(size=(n, 1)).astype("float32"))).batch(8)


def compiled(**arguments) -> Scorer:
    """A model that steps eagerly: so few steps take less time than to trace one."""
    random.seed(3)
    model = Scorer(**arguments)
    model.compile(tf.keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    return model


def assert_same_models(a: Scorer, b: Scorer) -> None:
    for mine, other in zip(a.weights + a.optimizer.variables, b.weights + b.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine, other)
    others = tables_by_name(b)
    for name, table in tables_by_name(a).items():
        assert int(table.size()) > 0
        assert_same_tables(table, others[name])


def names(checkpoints: ShardedCheckpoint) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints.store.checkpoints()]


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    whole = compiled()
    whole.fit(data(), epochs=4, verbose=0)

    first = compiled()
    checkpoints = ShardedCheckpoint(tmp_path)
    assert checkpoints.restore(first) == 0
    first.fit(data(), epochs=2, verbose=0, callbacks=[checkpoints])
    assert names(checkpoints) == [5, 10]

    second = compiled()
    checkpoints = ShardedCheckpoint(tmp_path)
    assert checkpoints.restore(second) == 2
    second.fit(data(), initial_epoch=2, epochs=4, verbose=0, callbacks=[checkpoints])
    assert_same_models(second, whole)
    assert checkpoints.batches == 20
    assert names(checkpoints) == [5, 10, 15, 20]  # the last three, and what they continue


def test_every_few_batches_and_at_the_end_of_an_epoch(tmp_path):
    checkpoints = ShardedCheckpoint(CheckpointStore(tmp_path, keep=100), every=2)
    model = compiled()
    model.fit(data(6), epochs=1, verbose=0, callbacks=[checkpoints])
    assert names(checkpoints) == [2, 4, 6]
    done = [Manifest.load(path).metadata for path in checkpoints.store.checkpoints()]
    assert done == [
        {"epochs": 0, "batches": 2, "batches_of_epoch": 2, "shares": 1},
        {"epochs": 0, "batches": 4, "batches_of_epoch": 4, "shares": 1},
        {"epochs": 1, "batches": 6, "batches_of_epoch": 0, "shares": 1},
    ]
    assert ShardedCheckpoint(tmp_path).restore(compiled(), checkpoints.store.checkpoints()[0]) == 0


def test_a_run_resumed_in_the_middle_of_an_epoch_is_the_uninterrupted_one(tmp_path):
    whole = compiled()
    store = CheckpointStore(tmp_path, keep=100)
    whole.fit(data(6), epochs=3, verbose=0, callbacks=[ShardedCheckpoint(store, every=4)])
    middle = store.checkpoints()[2]
    assert middle.name == "step-000000000008"  # two batches into the second epoch

    again = compiled()
    checkpoints = ShardedCheckpoint(CheckpointStore(tmp_path / "again", keep=100), every=1)
    assert checkpoints.restore(again, middle) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert checkpoints.batches_of_epoch == 2
        rest = checkpoints.rest_of_epoch(data(6))
        again.fit(rest, initial_epoch=1, epochs=2, verbose=0, callbacks=[checkpoints])
        again.fit(data(6), initial_epoch=2, epochs=3, verbose=0, callbacks=[checkpoints])
    assert names(checkpoints) == list(range(9, 19))
    done = [Manifest.load(path).metadata["batches_of_epoch"] for path in checkpoints.store.checkpoints()]
    assert done == [3, 4, 5, 0, 1, 2, 3, 4, 5, 0]
    assert_same_models(again, whole)


def test_batches_that_are_trained_again_are_told(tmp_path):
    store = CheckpointStore(tmp_path, keep=100)
    compiled().fit(data(6), epochs=1, verbose=0, callbacks=[ShardedCheckpoint(store, every=4)])
    model, checkpoints = compiled(), ShardedCheckpoint(store)
    first = checkpoints.restore(model, store.checkpoints()[0])
    with pytest.warns(UserWarning, match=r"4 batches of epoch 1 are in the weights, and are trained again"):
        model.fit(data(6), initial_epoch=first, epochs=2, verbose=0, callbacks=[checkpoints])
    assert checkpoints.batches == 4 + 12


def test_data_of_unknown_length_is_saved_once_at_the_end_of_an_epoch(tmp_path):
    model, checkpoints = compiled(), ShardedCheckpoint(tmp_path, every=3)
    unknown = data(6).filter(lambda *_: True)
    model.fit(unknown, epochs=1, verbose=0, callbacks=[checkpoints])
    assert names(checkpoints) == [3, 6]
    metadata = Manifest.load(checkpoints.store.latest()).metadata
    assert metadata == {"epochs": 1, "batches": 6, "batches_of_epoch": 0, "shares": 1}
    again = compiled()
    assert ShardedCheckpoint(tmp_path).restore(again) == 1
    again(next(iter(data()))[0])
    # The optimizer's count of steps aside: Keras' graph raises it for the batch that wasn't there.
    np.testing.assert_array_equal(again.dense.kernel, model.dense.kernel)
    for name, table in tables_by_name(model).items():
        assert_same_tables(tables_by_name(again)[name], table)


def test_a_save_waits_for_accumulated_gradients(tmp_path):
    inputs = {"user": tf.keras.Input([], dtype=tf.int64, name="user")}
    table = EmbeddingCollection(
        [FeatureConfig("user", dim=4)], optimizer=optimizers.SGD(0.1), name="accumulated"
    )
    model = Model(inputs, tf.keras.layers.Dense(1)(table(inputs)["user"]))
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", accumulate_steps=3)
    checkpoints = ShardedCheckpoint(CheckpointStore(tmp_path, keep=100), every=2)
    batches = data(8).map(lambda x, y: ({"user": x["user"]}, y))
    model.fit(batches, epochs=1, verbose=0, callbacks=[checkpoints])
    assert names(checkpoints) == [3, 6, 8]
    assert not model.is_accumulating


def test_several_steps_in_an_execution(tmp_path):
    checkpoints = ShardedCheckpoint(CheckpointStore(tmp_path, keep=100), every=3)
    model = compiled()
    model.compile(model.optimizer, "mse", steps_per_execution=2)
    model.fit(data(8), epochs=1, verbose=0, callbacks=[checkpoints])
    assert names(checkpoints) == [4, 6, 8]


def test_the_dense_files_hold_no_table(tmp_path):
    model = compiled()
    checkpoints = ShardedCheckpoint(tmp_path)
    model.fit(data(), epochs=1, verbose=0, callbacks=[checkpoints])
    prefix = str(checkpoints.store.latest() / "dense" / "dense")
    assert not [name for name, _ in tf.train.list_variables(prefix) if "-keys" in name or "-rows" in name]
    # And outside the callback, TensorFlow's own checkpoints have the tables as ever.
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "own"))
    assert [name for name, _ in tf.train.list_variables(path) if name.endswith("-rows")]
    again = compiled()
    tf.train.Checkpoint(model=again).read(path).expect_partial()
    assert tables_by_name(again).keys() == tables_by_name(model).keys()
    for name, table in tables_by_name(model).items():
        assert_same_tables(tables_by_name(again)[name], table)


def test_what_does_not_fit_is_named(tmp_path):
    checkpoints = ShardedCheckpoint(tmp_path)
    compiled().fit(data(), epochs=1, verbose=0, callbacks=[checkpoints])
    with pytest.raises(DataError, match="no table 'other/user' in this checkpoint; it has"):
        checkpoints.restore(compiled(name="other"))
    wide = compiled(units=2)
    wide(next(iter(data()))[0])
    with pytest.raises(DataError, match=r"its dense weights don't fit this model: .*build the model as it"):
        checkpoints.restore(wide)
    (path,) = checkpoints.store.latest().glob("dense/dense.data*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}: damaged"):
        checkpoints.restore(compiled())


class Ends(tf.keras.callbacks.Callback):
    """Something ends the process, before a batch or an epoch's end."""

    def __init__(self, batch: int | None = None) -> None:
        super().__init__()
        self.seen, self.batch = 0, batch

    def on_train_batch_begin(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.batch:
            raise KeyboardInterrupt

    def on_test_begin(self, logs=None):
        if self.batch is None:
            raise KeyboardInterrupt


def measured(form=lambda data: data):
    """A model with metrics; `fit` of a callback's, on an epoch's own data, and validation."""
    features = {"user": tf.keras.Input([], dtype=tf.int64, name="user")}
    collection = EmbeddingCollection(
        [FeatureConfig("user", dim=4)], optimizer=optimizers.SGD(0.1), name="measured"
    )
    kernel = tf.keras.initializers.GlorotUniform(seed=1)
    model = Model(features, tf.keras.layers.Dense(1, kernel_initializer=kernel)(collection(features)["user"]))
    metrics = [
        tf.keras.metrics.MeanSquaredError(name="mse"),
        tf.keras.metrics.RootMeanSquaredError(name="rmse"),
    ]
    model.compile(tf.keras.optimizers.SGD(0.1), "mae", metrics=metrics)
    batches = data(7).map(lambda x, y: ({"user": x["user"]}, y))

    def fit(checkpoints, *callbacks):
        options = {"validation_data": batches.take(2), "verbose": 0, "callbacks": callbacks}
        return checkpoints.fit(model, lambda epoch: form(batches), epochs=3, **options)

    return fit


@pytest.mark.parametrize("batch", [4, pytest.param(12, marks=pytest.mark.slow)])  # quick: 4
def test_the_metrics_of_an_epoch_are_of_all_its_batches_before_and_after_an_end(tmp_path, batch):
    whole = measured()(ShardedCheckpoint(tmp_path / "whole")).history
    with pytest.raises(KeyboardInterrupt):
        measured()(ShardedCheckpoint(tmp_path / "a", every=2), Ends(batch))
    checkpoints = ShardedCheckpoint(tmp_path / "a", every=2)
    history = measured()(checkpoints)
    assert (history.epoch, checkpoints.batches) == ([0, 1, 2][batch // 8 :], 21)
    assert (
        history.history.keys()
        == whole.keys()
        == {f"{v}{m}" for v in ("", "val_") for m in ("loss", "mse", "rmse")}
    )
    for name, values in history.history.items():
        np.testing.assert_allclose(values, whole[name][batch // 8 :], rtol=1e-6, err_msg=name)


def test_an_epoch_that_ended_in_its_validation_is_ended_without_a_batch(tmp_path):
    def unknown(batches):
        return batches.filter(lambda *_: True)

    whole = measured(unknown)(ShardedCheckpoint(tmp_path / "whole")).history
    with pytest.raises(KeyboardInterrupt):
        measured(unknown)(ShardedCheckpoint(tmp_path / "a", every=7), Ends())
    checkpoints = ShardedCheckpoint(tmp_path / "a", every=7)
    history = measured(unknown)(checkpoints)
    assert (history.epoch, names(checkpoints)) == ([0, 1, 2], [7, 14, 21])
    for name, values in whole.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-6, err_msg=name)


def test_the_rest_of_an_epoch_is_counted_in_steps_of_all_shares(tmp_path, monkeypatch):
    monkeypatch.setenv(SHARES, "3")  # which one rank takes: a step has 3 batches
    checkpoints = ShardedCheckpoint(CheckpointStore(tmp_path, keep=100), every=1)
    measured(lambda batches: batches.take(7))(checkpoints)
    first = checkpoints.store.checkpoints()[0]
    assert Manifest.load(first).metadata == {"epochs": 0, "batches": 1, "batches_of_epoch": 3, "shares": 3}

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    numbers = tf.data.Dataset.range(8).batch(1)
    again = ShardedCheckpoint(checkpoints.store)
    for size, expected in ((2, [[[3], [6]], [[4, 5], [7]]]), (3, [[[3], [6]], [[4], [7]], [[5]]])):
        for rank, left in enumerate(expected):
            monkeypatch.setattr(
                collectives, "world", lambda place=(rank, size, rank): collectives.World(*place)
            )
            again._before = ((3, 1),)
            own = part_of(numbers, collectives.world().shares).with_options(options)
            assert [batch.numpy().tolist() for batch in again.rest_of_epoch(own)] == left
            assert [int(batch[0]) for batch in again.rest_of_epoch(numbers)] == [3, 4, 5, 6, 7]
    again._before = ((4, 1),)  # of a job of another number of shares
    monkeypatch.setattr(collectives, "world", lambda: collectives.World(1, 2, 1))
    with pytest.raises(ConfigError, match="4 batches of epoch 1, which are no whole steps of 3: finish"):
        again.rest_of_epoch(numbers.with_options(options))


def test_options_that_a_checkpoint_decides_are_refused(tmp_path):
    for option in ("initial_epoch", "steps_per_epoch"):
        with pytest.raises(ConfigError, match=f"{option}=3: the checkpoint determines where"):
            ShardedCheckpoint(tmp_path).fit(compiled(), data(), epochs=5, **{option: 3})


def test_misuse_is_refused():
    with pytest.raises(ConfigError, match="every must be at least 1, or a time such as"):
        ShardedCheckpoint("x", every=0)
    model = tf.keras.Sequential()
    model.a, model.b = ops.HashTable(2, name="t"), ops.HashTable(2, name="t")
    with pytest.raises(ConfigError, match="two tables of the model are named 't'"):
        tables_by_name(model)


def test_another_number_of_ranks_goes_on_in_the_ranges_that_are_left(tmp_path):
    """Four ranks' steps, then three's, then one's, through checkpoints alone: every task is trained once."""
    path = write_folder(tmp_path, [3, 4, 5, 3] * 4, [4, 3] * 4)
    seen, stages, epoch = [], (), 2
    for ranks, steps in ((4, 1), (3, 1), (1, 99)):
        for rank in range(ranks):
            data = io.tasks(
                path,
                tasks_per_batch=2,
                query=2,
                start=AfterSteps(stages, epoch=epoch),
                options=io.ReadOptions(shard=(rank, ranks)),
            )
            seen += [task for batch in data.take(steps) for task in batch["task"].numpy().tolist()]
        stages = (*stages, (ranks, steps))
    assert sorted(seen) == list(range(24))


def test_ranges_that_others_began_arent_passed_over_in_steps(tmp_path):
    path, checkpoints = write_folder(tmp_path, [3] * 8), ShardedCheckpoint(tmp_path / "ckpt")
    checkpoints._before = ((2, 1),)
    with pytest.raises(ConfigError, match=r"begun with 1 steps of 2 ranks, and 1 ranks read other ranges"):
        checkpoints.rest_of_epoch(io.tasks(path, query=2).map(lambda batch: batch["task"]).prefetch(1))
