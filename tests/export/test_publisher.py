"""A running server takes deltas, and then answers as an export of the trained model would."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta import initializers, optimizers, policies
from gmeta.checkpoint.sharded import load, save
from gmeta.core.errors import ConfigError, DataError, GmetaError, NotFiniteError
from gmeta.core.row_formats import RowFormat
from gmeta.export import Publisher, export_model
from gmeta.export.delivery import catch_up, deliver
from gmeta.export.delta_signatures import Updates, layout_of, named_tables, tables_of
from gmeta.export.model_deltas import Delta, Layout, TableChange, combine
from gmeta.export.published_folder import PublishedFolder, span_name
from gmeta.export.saved_model import Signature, feature_inputs
from gmeta.export.servers import server_at
from gmeta.layers import HSTU, MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel, Model, NextItemModel
from gmeta.models.meta.fast_weights import FastWeights
from support.reference.table import read_as
from support.serving import ask, ask_all, grpc_server, rest_server

NORMAL, START = initializers.Normal(0, 1), initializers.Constant(0.5)
EVICTS = policies.LRU(max_rows=400)
FEATURES = (
    FeatureConfig("user", TableConfig("user", 4, initializer=NORMAL)),
    FeatureConfig("item", TableConfig("item", 4, initializer=NORMAL)),  # merged with users
    FeatureConfig("place", TableConfig("place", 3, initializer=NORMAL, eviction=EVICTS)),
)
IDS = {feature.name: np.arange(900) for feature in FEATURES}


class Scores(Model):
    def __init__(self):
        super().__init__(name="scores")
        self.collection = EmbeddingCollection(FEATURES, optimizer=optimizers.Adam(0.1), seed=3)
        self.dense = tf.keras.layers.Dense(1)

    def call(self, inputs, training=False):
        vectors = self.collection(inputs, training=training)
        return self.dense(tf.concat([*vectors.values()], axis=-1))[:, 0]


@pytest.fixture
def model():
    model = Scores()
    model({name: tf.constant(values[:2]) for name, values in IDS.items()})
    return model


def train(model, seed, most=900):
    """A step by gradients that a seed draws; half of its ids are new, and `place` evicts others."""
    random = np.random.default_rng(seed)
    ids = {name: tf.constant(random.integers(0, most, 400)) for name in IDS}
    if "place" in ids:
        ids["place"] = tf.constant(random.integers(400 * seed, 400 * seed + 900, 400))
    lookup = model.collection.lookup(ids, insert=True)
    model.collection.apply_gradients(
        lookup, [tf.constant(random.normal(size=rows.shape), tf.float32) for rows in lookup.rows]
    )
    for weight in model.dense.weights:
        weight.assign_add(tf.constant(random.normal(size=weight.shape), tf.float32))


def vectors(model):
    """A signature whose answers are rows, to be compared to the last bit, and scores."""
    collection = model.collection
    return {
        "signatures": {
            "vectors": Signature(
                lambda ids: {
                    **collection.embed(collection.lookup(ids, insert=False)),
                    "score": model(ids, training=False),
                },
                feature_inputs(collection.features),
            )
        }
    }


def asked(seed=0):
    return {name: np.arange(3000) for name in IDS}


def expected(model):
    ids = {name: tf.constant(values) for name, values in asked().items()}
    found = model.collection.embed(model.collection.lookup(ids, insert=False))
    return {name: value.numpy() for name, value in found.items()}


def send(published):
    return {"delta_bytes": np.array(published.path.read_bytes(), object)}


@pytest.mark.shown_by(case="True")
@pytest.mark.parametrize("checkpoints", [False, True])
def test_each_delta_makes_the_answers_of_an_export_to_the_last_bit(model, tmp_path, checkpoints):
    """Rows that are new, changed, removed, and new again; checkpoints empty the journals meanwhile."""
    train(model, 0)
    publisher = Publisher(model, tmp_path / "online", export=vectors(model))
    base = publisher.publish().path
    tables = {table.name: table for table in tables_of(model)}
    requests, right, removed, touched = [], [], 0, 0
    for seed in range(1, 6):
        train(model, seed)
        if checkpoints:
            before = tmp_path / f"checkpoint-{seed - 1}"
            save(
                tmp_path / f"checkpoint-{seed}",
                tables,
                base=before if before.exists() else None,
                journal=10_000,
            )
            train(model, seed + 100)
        if seed == 3:
            tables_of(model)[-1].remove(tf.range(40, dtype=tf.int64))
        published = publisher.publish()
        removed, touched = removed + published.removed, touched + published.rows
        requests += [(base, "apply_delta", send(published)), (base, "vectors", asked())]
        scores = model({name: tf.constant(values) for name, values in asked().items()})
        right.append((published.version, expected(model), scores))
    assert removed > 500
    assert touched < 5 * sum(int(table.size()) for table in tables.values()) * 0.9
    answers = ask_all(requests)
    for (version, rows, scores), taken, answer in zip(right, answers[::2], answers[1::2], strict=True):
        assert taken["delta_version"] == version
        for name, value in rows.items():
            np.testing.assert_array_equal(answer[name], value, name)
        np.testing.assert_allclose(answer["score"], scores, rtol=1e-5, atol=1e-5)
    # A checkpoint of increments beside it is whole: a new model that loads it answers alike.
    if checkpoints:
        info = save(tmp_path / "last", tables, base=tmp_path / "checkpoint-5", journal=10_000)
        assert set(info.kinds.values()) == {"increment"}
        other = Scores()
        other({name: tf.constant(values[:2]) for name, values in IDS.items()})
        load(tmp_path / "last", {table.name: table for table in tables_of(other)})
        for name, value in expected(other).items():
            np.testing.assert_array_equal(value, expected(model)[name], name)


@pytest.mark.shown_by("export/test_derived.py::test_each_delta_makes_the_answers_of_an_export")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_server_with_rows_of_few_bits_reads_what_an_export_of_them_does(model, tmp_path, dtype):
    train(model, 0)
    publisher = Publisher(model, tmp_path / "online", dtype=dtype, export=vectors(model))
    base = publisher.publish().path
    requests = []
    for seed in (1, 2, 3):
        train(model, seed)
        published = publisher.publish(dense=seed == 3)
        requests += [(base, "apply_delta", send(published)), (base, "vectors", asked())]
    answer = ask_all(requests)[-1]
    export_model(model, tmp_path / "whole", dtype=dtype, **vectors(model))
    whole = ask(tmp_path / "whole", "vectors", asked())
    for full, table in named_tables(model).items():
        name = full.rpartition("/")[2]
        (physical,) = (each for each in tables_of(model) if each.name == table.physical)
        held = physical.contains(asked()[name] | table.prefix).numpy()
        right = expected(model)[name]
        right = np.where(held[:, np.newaxis], read_as(right, dtype), right)
        assert 0.1 < held.mean() < 0.9
        np.testing.assert_array_equal(answer[name], right, name)
        np.testing.assert_array_equal(whole[name], right, name)
    np.testing.assert_array_equal(answer["score"], whole["score"])
    ids_and_rows = published.rows * (8 + 4 * RowFormat(dtype, 4).width)
    assert published.bytes < ids_and_rows + 8 * published.removed + 500


def test_a_folder_is_continued_with_rows_of_the_same_dtype(model, tmp_path):
    train(model, 0)
    publisher = Publisher(model, tmp_path / "online", dtype="int8")
    publisher.publish()
    publisher.close()
    layout = Layout.load(tmp_path / "online/stream.json")
    assert (layout.rows, layout.fingerprint) == ("int8", layout_of(model, layout.stream, "int8").fingerprint)
    assert layout.fingerprint != layout_of(model, layout.stream).fingerprint
    with pytest.raises(ConfigError, match="has rows of int8: continue it with dtype='int8'"):
        Publisher(model, tmp_path / "online").publish()
    with pytest.raises(ConfigError, match=r"give Publisher\(\.\.\., dtype=\.\.\.\)"):
        Publisher(model, tmp_path / "other", export={"dtype": "int8"})
    with pytest.raises(ConfigError, match="rows must be float32, bfloat16, int8, got dtype='int4'"):
        Publisher(model, tmp_path / "other", dtype="int4")
    with pytest.raises(
        ConfigError, match="deltas with rows of int8 can't update an export with dtype='float32'"
    ):
        export_model(model, tmp_path / "1", updates=Updates(layout, 1))
    text = (tmp_path / "online/stream.json").read_text().replace('"rows": "int8"', '"rows": "int4"')
    (tmp_path / "online/stream.json").write_text(text)
    with pytest.raises(DataError, match="rows must be float32"):
        Layout.load(tmp_path / "online/stream.json")
    table = tables_of(model)[0]
    table.import_(table.export()._replace(rows=table.export().rows * np.nan))
    with pytest.raises(NotFiniteError, match="NaN or infinity"):
        export_model(model, tmp_path / "2", dtype="int8")


def test_a_server_checks_order_repeats_damage_and_origin(model, tmp_path):
    train(model, 0)
    publisher = Publisher(model, tmp_path / "online", export=vectors(model))
    base = publisher.publish().path
    deltas = []
    for seed in (1, 2):
        train(model, seed)
        deltas.append(publisher.publish())
    assert [delta.version for delta in deltas] == [2, 3]
    with pytest.raises(RuntimeError, match=r"continues version.*2.*this replica has version.*1"):
        ask(base, "apply_delta", send(deltas[1]))
    damaged = bytearray(deltas[0].path.read_bytes())
    for place in (3, 12, 30, 90, len(damaged) // 2, len(damaged) - 1):
        changed = damaged.copy()
        changed[place] ^= 8
        with pytest.raises(RuntimeError, match=r"damaged|not a delta|another model"):
            ask(base, "apply_delta", {"delta_bytes": np.array(bytes(changed), object)})
    for cut in (b"", b"gmdelta1", bytes(damaged[:64]), bytes(damaged[:-8]), bytes(damaged[:-3])):
        with pytest.raises(RuntimeError, match=r"damaged|not a delta|multiple|size"):
            ask(base, "apply_delta", {"delta_bytes": np.array(cut, object)})
    other = Publisher(model, tmp_path / "other", export=vectors(model))
    other.publish()
    train(model, 3)
    with pytest.raises(RuntimeError, match="of another model or training"):
        ask(base, "apply_delta", send(other.publish()))
    versions = ask_all(
        [(base, "apply_delta", send(delta)) for delta in (deltas[0], deltas[0], deltas[1], deltas[0])]
    )
    assert [int(each["delta_version"]) for each in versions] == [2, 2, 3, 3]


@pytest.mark.shown_by("test_deltas_that_are_combined_do_what_they_do_in_turn")
def test_servers_catch_up_from_whatever_version_they_have(model, tmp_path):
    train(model, 0)
    folder = tmp_path / "online"
    publisher = Publisher(model, folder, export=vectors(model))
    publisher.publish()
    for seed in (1, 2, 3):
        train(model, seed)
        publisher.publish(dense=seed == 2)
    said = []
    with rest_server(folder) as port:
        url = f"http://127.0.0.1:{port}/v1/models/model"
        assert deliver(folder, [url], say=said.append) == {url: 4}
        assert len(said) == 1  # three deltas as one
        answer = ask(folder / "model/1", "vectors", asked())
        for name, value in expected(model).items():
            np.testing.assert_array_equal(answer[name], value, name)
        assert deliver(folder, [url], say=said.append) == {url: 4}
        assert len(said) == 1
        train(model, 4)
        publisher.publish()
        for content in (False, True):
            with grpc_server(folder, content) as other:
                same = f"grpc://127.0.0.1:{other}/model/versions/1"
                assert deliver(folder, [same], say=said.append) == {same: 5}
        assert len(said) == 2
        answer = ask(folder / "model/1", "vectors", asked())
        for name, value in expected(model).items():
            np.testing.assert_array_equal(answer[name], value, name)
        train(model, 5)
        publisher.publish()
        gone = folder / span_name(5, 6)
        kept = gone.read_bytes()
        gone.write_bytes(kept[:-8] + bytes(8))
        with pytest.raises(DataError, match="damaged"):
            catch_up(folder, server_at(url), say=said.append)
        gone.write_bytes(kept)
        publisher.publish_base()
        train(model, 6)
        publisher.publish()
        assert catch_up(folder, server_at(url), say=said.append) == 8  # it has loaded version 7 by itself
        closed = "http://127.0.0.1:9/v1/models/model"
        with pytest.raises(Exception, match="can't be reached"):
            deliver(folder, [closed, url], say=said.append)
        (folder / span_name(7, 8)).unlink()
        with pytest.raises(DataError, match="the server has version 8, and the last one here is 7"):
            catch_up(folder, server_at(url), say=said.append)


def test_fit_publishes_and_a_new_process_continues_the_folder(model, tmp_path):
    publisher = Publisher(model, tmp_path / "online", every="0", dense_every="0")
    model.compile("adam", "mse")
    data = {name: values[:64] for name, values in IDS.items()}, np.ones(64, np.float32)
    model.fit(*data, batch_size=16, epochs=1, verbose=0, callbacks=[publisher])
    found = PublishedFolder(tmp_path / "online").contents()
    assert found.models == (1,)
    assert [delta.version for delta in found.deltas] == [2, 3, 4, 5]
    with pytest.raises(GmetaError, match="another Publisher"):
        Publisher(model, tmp_path / "online")
    publisher.close()
    again = Publisher(model, tmp_path / "online")
    assert again.publish().path.name == "6"
    assert again.publish(dense=False).rows <= 3 * 16  # those of the last step come twice
    for version in (8, 9):
        again.publish_base()
        assert again.version == version
    found = PublishedFolder(tmp_path / "online").contents()
    assert (found.models, found.deltas) == ((8, 9), ())
    other = Scores()
    other.dense = tf.keras.layers.Dense(2)
    other({name: tf.constant(values[:2]) for name, values in IDS.items()})
    again.close()
    with pytest.raises(ConfigError, match="another model"):
        Publisher(other, tmp_path / "online").publish()


def test_an_increment_never_continues_a_journal_that_a_publisher_has_started(model, tmp_path):
    """Or it would lack what was removed before."""
    tables = {table.name: table for table in tables_of(model)}
    train(model, 0)
    save(tmp_path / "a", tables, journal=8)
    model.collection.tables[-1].remove(tf.range(900, dtype=tf.int64))  # more than the journal notes
    publisher = Publisher(model, tmp_path / "online")
    publisher.publish()
    train(model, 1)
    publisher.publish()
    info = save(tmp_path / "b", tables, base=tmp_path / "a", journal=10_000)
    evicting = model.collection.tables[-1].name
    assert info.kinds[evicting] == "full"
    assert "journal" in info.reasons[evicting]
    other = Scores()
    other({name: tf.constant(values[:2]) for name, values in IDS.items()})
    load(tmp_path / "b", {table.name: table for table in tables_of(other)})
    for name, value in expected(other).items():
        np.testing.assert_array_equal(value, expected(model)[name], name)


@pytest.mark.shown_by("test_an_increment_never_continues_a_journal_that_a_publisher_has_started")
def test_what_breaks_the_journal_is_followed_by_a_whole_model(model, tmp_path):
    train(model, 0)
    tables = {table.name: table for table in tables_of(model)}
    save(tmp_path / "checkpoint", tables)
    publisher = Publisher(model, tmp_path / "online", journal=64)
    publisher.publish()
    train(model, 1)
    load(tmp_path / "checkpoint", tables)
    assert publisher.publish().path.parent.name == "model"
    model.collection.tables[-1].remove(tf.range(5000, dtype=tf.int64))  # far more than 64
    train(model, 2)
    found = publisher.publish()
    assert found.path.parent.name == "model" or found.removed


@pytest.mark.shown_by("test_fit_publishes_and_a_new_process_continues_the_folder")
def test_a_model_that_has_diverged_is_not_published_and_the_next_delta_has_all(model, tmp_path):
    train(model, 0)
    publisher = Publisher(model, tmp_path / "online", export=vectors(model))
    base = publisher.publish().path
    train(model, 1)
    good = model.dense.weights[0].numpy()
    model.dense.weights[0].assign(np.full_like(good, np.nan))
    with pytest.raises(NotFiniteError, match="diverged"):
        publisher.publish()
    model.dense.weights[0].assign(good)
    train(model, 2)
    answers = ask_all([(base, "apply_delta", send(publisher.publish())), (base, "vectors", asked())])
    for name, value in expected(model).items():
        np.testing.assert_array_equal(answers[1][name], value, name)


def test_a_graph_that_holds_what_the_export_has_computed_is_refused(tmp_path):
    collection = EmbeddingCollection(
        [FeatureConfig("item", TableConfig("item", 8))], optimizer=optimizers.SGD(0.5)
    )
    blocks = HSTU(blocks=1, heads=2, attention_dim=4, value_dim=4, max_length=6, bias_by_time=False)
    model = NextItemModel(collection, blocks, items=12, max_length=6)
    model({"item": tf.ragged.constant([[1, 2, 3]], dtype=tf.int64)})
    vectors = tf.Variable(model.item_vectors(), name="my_vectors")
    held = Signature(lambda given: {"vectors": vectors.read_value()}, {"x": tf.TensorSpec([None], tf.int64)})
    with pytest.raises(ConfigError, match=r"can't be updated by deltas: its graph reads my_vectors.*Derived"):
        Publisher(model, tmp_path / "online", export={"signatures": {"held": held}}).publish()


def test_deltas_that_are_combined_do_what_they_do_in_turn():
    """On a dict in place of a server, for changes drawn at random."""
    random = np.random.default_rng(5)
    layout = Layout(
        "s", {"a": 3, "b": 2}, {"w": ((2, 2), "float32"), "h": ((3,), "float16"), "n": ((), "int64")}
    )

    def draw(version):
        tables = {}
        for name, dim in layout.tables.items():
            ids = random.permutation(12)[: random.integers(0, 9)].astype(np.int64)
            removed = random.permutation(12)[: random.integers(0, 5)].astype(np.int64)
            tables[name] = TableChange(ids, random.normal(size=(len(ids), dim)).astype(np.float32), removed)
        dense = {
            name: (100 * random.normal(size=shape)).astype(dtype)
            for name, (shape, dtype) in layout.dense.items()
            if random.random() < 0.5
        }
        return Delta(version - 1, version, tables, dense)

    def apply(state, delta):
        for name, change in delta.tables.items():
            for key in change.removed.tolist():
                state.pop((name, key), None)
            state |= {
                (name, key): row.tobytes() for key, row in zip(change.ids.tolist(), change.rows, strict=True)
            }
        return state | {name: value.tobytes() for name, value in delta.dense.items()}

    for _ in range(200):
        deltas = [draw(version) for version in range(2, 2 + random.integers(1, 6))]
        start = {("a", key): b"" for key in range(0, 12, 2)} | {"w": b"", "n": b""}
        apart = start.copy()
        for delta in deltas:
            read = Delta.decode(delta.encode(layout), layout)
            apart = apply(apart, read)
        one = combine(deltas)
        assert (one.after, one.version) == (1, deltas[-1].version)
        assert apply(start.copy(), Delta.decode(one.encode(layout), layout)) == apart


def test_an_export_without_deltas_is_as_before(model, tmp_path):
    assert set(export_model(model, tmp_path / "1").signatures) == {"serving_default"}
    layout = layout_of(model, "s")
    (tmp_path / "stream.json").write_text(layout.to_json())
    assert Layout.load(tmp_path / "stream.json") == layout
    (tmp_path / "stream.json").write_text(
        (tmp_path / "stream.json").read_text().replace('place": 3', 'place": 4')
    )
    with pytest.raises(DataError, match="fingerprint"):
        Layout.load(tmp_path / "stream.json")


def test_a_server_adapts_by_the_weights_of_its_version_and_refuses_what_was_adapted_before(tmp_path):
    """Bytes of `adapt` are differences from the shared weights, which a delta changes."""
    features = [FeatureConfig(name, TableConfig(name, 3, initializer=START)) for name in ("user", "item")]
    collection = EmbeddingCollection(features, optimizer=optimizers.SGD(0.1))
    model = MetaModel(collection, MLP({"fc": 4, "out": 1}), inner=InnerLoop(steps=1, learning_rate=0.1))
    model.compile("adam", "mse")
    label = np.array([5.0, 1.0, 3.0], np.float32)
    task = {name: np.arange(3) for name in ("user", "item")}
    model.adapt(task, label)
    publisher = Publisher(model, tmp_path / "online")
    base = publisher.publish().path
    for weight in model.learner.network.trainable_weights:
        weight.assign_add(tf.fill(weight.shape, 0.05))
    collection.lookup({name: tf.constant(ids) for name, ids in task.items()}, insert=True)
    delta = publisher.publish()
    before, _, after = ask_all(
        [
            (base, "adapt", {**task, "label": label}),
            (base, "apply_delta", send(delta)),
            (base, "adapt", {**task, "label": label}),
        ]
    )
    with pytest.raises(RuntimeError, match="has deltas from other shared weights than these"):
        ask(base, "predict_with", {**task, **before})
    answer = ask(base, "predict_with", {**task, **after})
    fast = model.adapt(task, label)
    np.testing.assert_allclose(answer["rating"], model.predict(task, weights=fast), rtol=1e-4)
    assert FastWeights.from_bytes(after["weights_bytes"].item()).fingerprint == fast.fingerprint


def test_the_state_of_metrics_is_not_part_of_a_delta(model):
    """Keras counts the metrics that a model holds among its weights, as those of `GRM`."""
    before = layout_of(model, "s")
    model.seen = tf.keras.metrics.Mean()
    assert len(model.weights) > len(model.dense.weights)
    assert layout_of(model, "s") == before
