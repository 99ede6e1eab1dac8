"""However a collection of two precisions is saved, half rows stay half, and promoted ones promoted."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gmeta import initializers, ops, optimizers, policies
from gmeta.checkpoint import sharded as sharded_checkpoint
from gmeta.export.saved_model import Signature, export_model, feature_inputs
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from support.serving import ask
from support.tables import assert_same_tables, sorted_records

THRESHOLD = 3
FEATURES = tuple(
    FeatureConfig(name, TableConfig(name, 4, initializer=initializers.Normal(0, 1), precision=precision))
    for name, precision in (("user", policies.TwoPrecisions(THRESHOLD)), ("item", None))
)


def make() -> Model:
    x = {f.name: tf.keras.Input([], name=f.name, dtype=tf.int64) for f in FEATURES}
    vectors = EmbeddingCollection(FEATURES, optimizer=optimizers.Adam(None), seed=3, name="collection")(x)
    dense = tf.keras.layers.Dense(1, kernel_initializer="ones")  # the same in every model
    model = Model(x, dense(tf.keras.layers.Concatenate()(list(vectors.values()))))
    model.compile(tf.keras.optimizers.Adam(0.01), "mse")
    return model


def train(model: Model, ids: range) -> None:
    model.train_on_batch({f.name: np.array(ids) for f in FEATURES}, np.ones(len(ids)))


def collection(model: Model) -> EmbeddingCollection:
    return model.get_layer("collection")


def named(model: Model) -> dict[str, ops.HashTable]:
    return {table.name: table for table in collection(model).tables}


def half_rows(model: Model) -> list[int]:
    return [int(table.statistics().half_rows) for table in collection(model).tables]


@pytest.fixture(scope="module")
def trained() -> Model:
    """Ids below 10 have had three uses, those below 20 two, the others one."""
    model = make()
    for end in (30, 20, 10):
        train(model, range(end))
    assert half_rows(model) == [20, 0]
    return model


def through_checkpoint(model, folder):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "at")
    again = make()
    train(again, range(5))  # what stood there goes, in either precision
    tf.train.Checkpoint(model=again, optimizer=again.optimizer).restore(path).assert_consumed()
    return again


def through_weights(name):
    def roundtrip(model, folder):
        model.save_weights(folder / name)
        again = make()
        train(again, range(5))
        again.load_weights(folder / name)
        return again

    return roundtrip


def through_keras(model, folder):
    model.save(folder / "model.keras")
    return tf.keras.models.load_model(folder / "model.keras")


def through_shards(model, folder):
    """Half of it in a full checkpoint, the rest in an increment, whose rows are promoted over half ones."""
    before = make()
    train(before, range(30))
    sharded_checkpoint.save(folder / "a", named(before), journal=1000)
    for end in (20, 10):
        train(before, range(end))
    info = sharded_checkpoint.save(folder / "b", named(before), base=folder / "a", journal=1000)
    assert set(info.kinds.values()) == {"increment"}
    again = make()
    sharded_checkpoint.load(folder / "b", named(again))
    return again


ROUNDTRIPS = {
    "checkpoint": through_checkpoint,
    "weights": through_weights("weights"),
    "h5": through_weights("model.weights.h5"),
    "keras": through_keras,
    "shards": through_shards,
}


@pytest.mark.parametrize("way", ROUNDTRIPS)
@pytest.mark.shown_by(case="shards")
def test_each_row_comes_back_in_its_precision(trained, tmp_path, way):
    again = ROUNDTRIPS[way](trained, tmp_path)
    assert collection(again).features == FEATURES
    assert half_rows(again) == [20, 0]
    mixed, full = collection(again).tables
    assert_same_tables(mixed, collection(trained).tables[0])
    assert_same_tables(full, collection(trained).tables[1])
    # The rows that are half, and no others, hold what float16 can.
    records = sorted_records(mixed)
    fits = (records["rows"] == records["rows"].astype(np.float16)).all(axis=1)
    assert fits.tolist() == (records["frequency"] < THRESHOLD).tolist()
    # The next use promotes those whose turn it is, from the values that they had.
    keys = [
        key for key, frequency in zip(records["keys"], records["frequency"], strict=True) if frequency == 2
    ]
    assert len(keys) == 10
    np.testing.assert_array_equal(mixed.lookup_keys(keys), records["rows"][records["frequency"] == 2])
    assert half_rows(again) == [10, 0]


def test_an_exported_collection_reads_what_the_table_reads(trained, tmp_path):
    embeddings = collection(trained)
    vectors = Signature(
        lambda inputs: embeddings.embed(embeddings.lookup(inputs, insert=False)), feature_inputs(FEATURES)
    )
    export_model(trained, tmp_path / "1", signatures={"vectors": vectors})
    ids = {f.name: np.arange(60) for f in FEATURES}  # half rows, promoted rows, and ids never seen
    answer = ask(tmp_path / "1", "vectors", ids)
    expected = embeddings(ids)
    for name, value in expected.items():
        np.testing.assert_array_equal(answer[name], value, name)
    unknown = answer["user"][30:]
    np.testing.assert_array_equal(unknown, unknown.astype(np.float16))
    assert (answer["item"][30:] != answer["item"][30:].astype(np.float16)).any()
