"""Features that take text and any 64-bit numbers."""

import json

import numpy as np
import pytest
import tensorflow as tf

from gmeta import checkpoint, layers, models, ops
from gmeta.checkpoint import ShardedCheckpoint
from gmeta.checkpoint.sharded import load, save
from gmeta.core.errors import ConfigError
from gmeta.export import export_model
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.ops import hash_ids
from gmeta.ops.distinct import unique
from gmeta.ops.id_hash import count_collisions
from gmeta.preprocess.plan.column_values import hash_text

TABLE = TableConfig("item", 4)
TEXTS = ["sku/1", "sku/4", "sku/1", ""]


def collection(hash=False, **settings):
    features = [
        FeatureConfig("item", TABLE, hash=hash),
        FeatureConfig("tags", TABLE, combiner="mean", hash=hash),
    ]
    return EmbeddingCollection(features, **settings)


def as_numbers(texts):
    return np.array([hash_text(text) for text in texts], np.int64)


def test_a_text_and_its_prepared_number_read_the_same_row():
    embeddings = collection(hash=True)
    tags = tf.ragged.constant([["a", "b"], [], ["sku/1"], ["c"]])
    flat = [text.decode() for text in tags.flat_values.numpy()]
    numbers = tags.with_flat_values(tf.constant(as_numbers(flat)))
    of_text = embeddings({"item": tf.constant(TEXTS), "tags": tags})
    of_numbers = embeddings({"item": as_numbers(TEXTS), "tags": numbers})
    for name in ("item", "tags"):
        np.testing.assert_array_equal(of_text[name], of_numbers[name])
    assert min(as_numbers(TEXTS)) < 0  # one that no table takes as it is


def test_numbers_that_fit_read_the_rows_that_they_read_without_hashing():
    ids = {"item": tf.constant([0, 7, 2**56 - 1]), "tags": tf.ragged.constant([[1], [2], [3]])}
    np.testing.assert_array_equal(collection(hash=True)(ids)["item"], collection()(ids)["item"])


def many(count, **settings):
    """A collection of ``count`` tables of one policy, of which the first hashes its ids."""
    others = [FeatureConfig(f"f{n}", dim=4) for n in range(1, count)]
    return EmbeddingCollection([FeatureConfig("item", dim=4, hash=True), *others], **settings)


def ids_in(embeddings, ids):
    """The ids of the first table that a lookup of these makes."""
    nothing = {feature.name: np.zeros(0, np.int64) for feature in embeddings.features}
    keys = embeddings.keys_of({**nothing, "item": ids})[0].numpy()
    return embeddings.tables[0].merged_keys.ids_of("item", keys)[1]


SLOTS = (np.arange(64)[:, None] << 54 | np.arange(1024)).reshape(-1)


@pytest.mark.parametrize("tables", [1, 30, 127, 300])
def test_ids_of_any_structure_have_the_same_ids_whatever_is_beside_them(tables):
    found = ids_in(many(tables), SLOTS)
    assert len(np.unique(found)) == len(SLOTS)  # xor gave 16,384 among 30 tables
    np.testing.assert_array_equal(found, hash_ids(SLOTS))


def test_each_hashed_number_gets_a_row_of_its_own():
    embeddings = many(30)
    ids = {feature.name: tf.zeros([0], tf.int64) for feature in embeddings.features}
    embeddings.lookup({**ids, "item": SLOTS})
    assert int(embeddings.tables[0].size()) == len(SLOTS)


def test_no_more_tables_are_merged_than_leave_a_hashed_id_its_bits():
    assert [len(merged.tables) for merged in many(300).merged] == [127, 127, 46]
    assert [len(merged.tables) for merged in many(300, fold="xor").merged] == [300]


FAR = {
    "item": np.arange(64) << 57,
    "tags": tf.RaggedTensor.from_row_lengths(-2 - np.arange(64), np.arange(64) % 2 * 2),
}


def far_model(**settings):
    """A model that has begun to train, and its collection."""
    embeddings = collection(hash=True, **settings)
    inputs = {
        "item": tf.keras.Input([], name="item", dtype=tf.int64),
        "tags": tf.keras.Input([None], name="tags", dtype=tf.int64, ragged=True),
    }
    vectors = embeddings(inputs)
    output = tf.keras.layers.Dense(1)(tf.concat([vectors["item"], vectors["tags"]], axis=1))
    model = models.Model(inputs, output)
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    model.fit(FAR, np.arange(64.0), batch_size=64, verbose=0)
    return model, embeddings


def by_weights(model, again, folder):
    model.save_weights(folder / "model.weights.h5")
    again.load_weights(folder / "model.weights.h5")


def by_tensorflow(model, again, folder):
    tf.train.Checkpoint(model=model).write(str(folder / "model"))
    tf.train.Checkpoint(model=again).read(str(folder / "model"))


def by_shards(model, again, folder):
    data = tf.data.Dataset.from_tensors((FAR, np.zeros(64)))
    ShardedCheckpoint(folder).fit(model, data, epochs=1, verbose=0)
    ShardedCheckpoint(folder).restore(again)


@pytest.mark.parametrize(
    ("saved", "fold", "other_fold"),
    [
        (by_weights, "xor", "mix"),
        (by_shards, "mix", "xor"),
        # Quick: the two above, one a door that reads a weight and one that reads rows.
        pytest.param(by_tensorflow, "xor", "mix", marks=pytest.mark.slow),
        pytest.param(by_shards, "xor", "mix", marks=pytest.mark.slow),
    ],
)
@pytest.mark.shown_by(case="by_shards-mix-xor")
def test_rows_that_are_loaded_are_found_by_the_fold_that_they_were_saved_with(
    saved, fold, other_fold, tmp_path
):
    model, embeddings = far_model(fold=fold)
    again, other = far_model(fold=other_fold)  # whose steps are traced already
    saved(model, again, tmp_path)
    assert embeddings.fold == other.fold == fold
    rows = int(embeddings.tables[0].size())
    assert int(other.tables[0].size()) == rows
    np.testing.assert_array_equal(again.predict(FAR, verbose=0), model.predict(FAR, verbose=0))
    again.fit(FAR, np.arange(64.0), batch_size=64, verbose=0)
    assert int(other.tables[0].size()) == rows  # it found them all
    assert EmbeddingCollection.from_config(other.get_config()).fold == fold
    export_model(again, tmp_path / "1", text_ids=False)
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"]
    padded = {"item": tf.constant(FAR["item"]), "tags": FAR["tags"].to_tensor(-1)}
    (found,) = served(**padded).values()
    np.testing.assert_allclose(found, again.predict(FAR, verbose=0), rtol=1e-5)


def test_what_was_saved_before_there_were_two_folds_names_none():
    collection(hash=True, fold="xor").save_own_variables(stored := {})
    assert json.loads(stored["plan"].tobytes())["tables"] == [
        {"dim": 4, "tables": ["item"], "hashed": ["item"]}
    ]
    config = collection(hash=True).get_config()
    del config["fold"]
    assert EmbeddingCollection.from_config(config).fold == "xor"


def test_a_plan_shows_an_earlier_fold():
    lines = []
    collection(hash=True, fold="xor").plan(lines.append)
    assert "item (hashed, fold xor)" in lines[0]


def test_a_checkpoint_of_more_tables_than_are_merged_now_names_the_remedy(tmp_path):
    many(128, fold="xor").save_own_variables(stored := {})
    with pytest.raises(ConfigError, match=r"merged tables, and the 127 .*: make .* with fold='xor'"):
        many(128).load_own_variables(stored)
    many(128, fold="xor").load_own_variables(stored)


def test_a_table_that_is_loaded_alone_follows_too_or_is_refused(tmp_path):
    (saved,), (other,) = many(3, fold="xor").tables, many(2).tables
    save(tmp_path / "xor", {"table": saved})
    load(tmp_path / "xor", {"table": other})
    assert other.fold == "xor"
    (larger,) = many(30).tables
    with pytest.raises(ConfigError, match=r"61 bits by the fold 'xor' with 3 merged tables, and the 30 "):
        load(tmp_path / "xor", {"table": larger})
    save(tmp_path / "mix", {"table": larger})
    load(tmp_path / "mix", {"table": other})  # whose ids are the same among any number of tables
    assert other.fold == "mix"


def test_an_unknown_fold_is_refused():
    with pytest.raises(ConfigError, match="'embeddings': fold must be 'mix' or 'xor', got 'md5'"):
        collection(hash=True, fold="md5")


def test_without_hash_text_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'item' got strings: FeatureConfig\('item', .*hash=True"):
        collection()({"item": tf.constant(TEXTS), "tags": tf.ragged.constant([[1]] * 4)})


def test_a_config_keeps_hash():
    again = EmbeddingCollection.from_config(collection(hash=True).get_config())
    assert all(feature.hash for feature in again.features)


def test_a_keras_model_trains_on_text_and_predicts_the_same_from_numbers():
    embeddings = EmbeddingCollection([FeatureConfig("item", dim=4, hash=True)])
    item = tf.keras.Input([], name="item", dtype=tf.string)
    head = tf.keras.layers.Dense(1)
    model = models.Model({"item": item}, head(embeddings({"item": item})["item"]))
    model.compile("adam", "mse")
    texts = np.array(TEXTS * 4)
    model.fit({"item": texts}, np.arange(16.0), epochs=2, verbose=0)
    assert int(embeddings.tables[0].size()) == 3
    of_numbers = head(embeddings({"item": as_numbers(TEXTS)}, training=False)["item"])
    np.testing.assert_allclose(model.predict({"item": np.array(TEXTS)}, verbose=0), of_numbers, rtol=1e-6)


def test_a_meta_model_adapts_and_predicts_by_text():
    features = [
        FeatureConfig("item", dim=4, hash=True),
        FeatureConfig("tags", dim=4, combiner="mean", hash=True),
    ]
    network = tf.keras.Sequential([tf.keras.layers.Dense(1, name="out")])
    model = models.MetaModel(layers.EmbeddingCollection(features), network)
    model.compile("adam", "mse")
    texts = {"item": ["a", "b"], "tags": [["x", "y"], []]}
    numbers = {
        "item": as_numbers(["a", "b"]),
        "tags": [as_numbers(["x", "y"]).tolist(), []],
    }
    fast = [model.adapt(each, [1.0, 2.0], steps=2) for each in (texts, numbers)]
    answers = [
        np.asarray(model.predict(each, weights=of)) for each, of in zip((texts, numbers), fast, strict=True)
    ]
    np.testing.assert_array_equal(*answers)


UNSIGNED = np.array(
    [7, 0x9E3779B97F4A7C15, 0xF39CC0605CEDC835, 2**62 + 99], np.uint64
)  # as hashes of other systems
SIGNED = UNSIGNED.view(np.int64)


def in_rows(values):
    return tf.RaggedTensor.from_row_lengths(values, [1, 2, 0, 1])


def padded(values):
    return np.stack([values, np.array([-1, 4, -1, 5]).astype(values.dtype)], axis=1)


def sparse(values):
    return tf.sparse.SparseTensor([[0, 0], [1, 0], [1, 1], [3, 0]], values, [4, 2])


@pytest.mark.parametrize("form", [in_rows, padded, sparse], ids=lambda form: form.__name__)
def test_unsigned_ids_read_the_rows_of_signed_ones_of_the_same_bits(form):
    embeddings = collection(hash=True)
    found, expected = (embeddings({"item": ids, "tags": form(ids)}) for ids in (UNSIGNED, SIGNED))
    for name in ("item", "tags"):
        np.testing.assert_array_equal(found[name], expected[name])
    small = {"item": UNSIGNED[:1], "tags": UNSIGNED[:1, np.newaxis]}
    np.testing.assert_array_equal(collection()(small)["item"], found["item"][:1])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"feature 'item': id -.*hash=True"):
        collection()({"item": UNSIGNED, "tags": in_rows(SIGNED)})


@pytest.mark.parametrize("dtype", [tf.int64, tf.uint64])
@pytest.mark.shown_by(case="dtype0")
def test_a_model_of_unsigned_ids_trains_and_is_served(tmp_path, dtype):
    embeddings = EmbeddingCollection([FeatureConfig("item", dim=4, combiner="sum", hash=True)])
    item = tf.keras.Input([None], name="item", dtype=dtype, ragged=True)
    model = models.Model({"item": item}, tf.keras.layers.Dense(1)(embeddings({"item": item})["item"]))
    model.compile("adam", "mse")
    model.fit({"item": in_rows(UNSIGNED)}, np.ones(4), verbose=0)
    assert int(embeddings.tables[0].size()) == 4
    expected = model.predict({"item": in_rows(SIGNED)}, verbose=0)
    export_model(model, tmp_path / "1", text_ids=False)
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"]
    wire = in_rows(SIGNED).to_tensor(-1)
    np.testing.assert_allclose(served(item=wire)["output"], expected, rtol=1e-6)


@pytest.mark.parametrize("ids", [UNSIGNED, tf.constant(UNSIGNED)], ids=["array", "tensor"])
def test_ops_take_unsigned_ids_by_their_bits(ids):
    np.testing.assert_array_equal(unique(ids).keys, SIGNED)
    np.testing.assert_array_equal(ops.hash_ids(ids, 61), ops.hash_ids(SIGNED, 61))
    assert count_collisions(ids) == 0
    table = ops.HashTable(2)
    np.testing.assert_array_equal(table.lookup(ids).keys, SIGNED)
    table.apply_gradients(ids, np.ones([4, 2], np.float32))
    assert int(table.statistics().updates) == 4
    assert table.contains(SIGNED).numpy().all()
    with pytest.raises(ConfigError, match=r"numpy\.array\(ids, numpy\.uint64\)"):
        table.lookup(UNSIGNED.tolist())


def test_vectors_of_unsigned_keys_are_imported_by_their_bits(tmp_path):
    for name, keys in (("unsigned", UNSIGNED), ("signed", SIGNED)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "keys.npy", keys)
        np.save(tmp_path / name / "values.npy", np.eye(4, dtype=np.float32))
    found = []
    for name in ("unsigned", "signed"):
        embeddings = collection(hash=True)
        checkpoint.import_table(embeddings, "item", tmp_path / name)
        found.append(embeddings({"item": SIGNED, "tags": in_rows(SIGNED)})["item"])
    np.testing.assert_array_equal(*found)
    np.testing.assert_array_equal(found[0], np.eye(4))
