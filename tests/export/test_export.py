"""Exported models answer, in a process without gmeta, what the trained model answers."""

import ctypes
import gc

import numpy as np
import pytest
import tensorflow as tf

from gmeta import initializers, optimizers
from gmeta.core.errors import ConfigError, NotFiniteError
from gmeta.export.saved_model import PADDING, Signature, export_model, feature_inputs
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from support.serving import ask

FEATURES = (
    FeatureConfig("user", TableConfig("user", 4, initializer=initializers.Normal(0, 1))),
    FeatureConfig("item", TableConfig("item", 4, initializer=initializers.Normal(0, 1))),
    FeatureConfig("seen", TableConfig("item", 4, initializer=initializers.Normal(0, 1)), combiner="mean"),
    FeatureConfig("place", TableConfig("place", 3, initializer=initializers.TruncatedNormal(0, 1))),
)


def ids(samples, seed=0):
    """Ids of which half were never seen; ragged ones are padded anywhere, and a sample has none."""
    random = np.random.default_rng(seed)
    wide = random.integers(0, 60, (samples, 5))
    wide[random.random(wide.shape) < 0.4] = PADDING
    wide[0] = PADDING
    return {
        "user": random.integers(0, 60, samples),
        "item": random.integers(0, 60, samples),
        "seen": wide,
        "place": random.integers(0, 60, samples) * 2**50,
    }


def ragged(inputs):
    seen = [[value for value in row if value != PADDING] for row in inputs["seen"].tolist()]
    return {
        **inputs,
        "seen": tf.RaggedTensor.from_row_splits(
            tf.constant([v for row in seen for v in row], tf.int64), np.cumsum([0, *map(len, seen)])
        ),
    }


def ask_here(folder, signature, inputs):
    """As `ask`, without a process of its own."""
    served = tf.saved_model.load(folder).signatures[signature]
    return served(**{name: tf.constant(value) for name, value in inputs.items()})


class Scores(tf.keras.Model):
    """A subclassed model, with a collection that it calls twice and a preprocessing layer's table."""

    def __init__(self):
        super().__init__()
        self.collection = EmbeddingCollection(FEATURES, optimizer=optimizers.SGD(0.5), seed=3)
        self.dense = tf.keras.layers.Dense(1)
        self.boundaries = tf.keras.layers.IntegerLookup(vocabulary=list(range(0, 60, 2)))

    def call(self, inputs, training=False):
        vectors = self.collection(inputs, training=training)
        again = self.collection({**inputs, "user": inputs["item"]}, training=training)
        x = tf.concat([*vectors.values(), again["user"]], axis=-1)
        known = tf.cast(self.boundaries(inputs["user"]) > 0, tf.float32)
        return tf.sigmoid(self.dense(x)[:, 0]) + known


@pytest.fixture(scope="module")
def model():
    model = Scores()
    random = np.random.default_rng(7)
    for seed in range(3):
        inputs = ragged({name: value // 2 for name, value in ids(40, seed).items()})
        lookup = model.collection.lookup(inputs, insert=True)
        gradients = [random.normal(size=rows.shape).astype(np.float32) for rows in lookup.rows]
        model.collection.apply_gradients(lookup, [tf.constant(g) for g in gradients])
    model(ragged(ids(4)))
    return model


def test_a_subclassed_model_answers_as_it_does_in_training(model, tmp_path):
    sizes = [int(table.size()) for table in model.collection.tables]
    exported = export_model(model, tmp_path / "1")
    assert exported.rows == sum(sizes) > 0
    inputs = ids(200, seed=9)
    answer = ask(tmp_path / "1", "serving_default", inputs)
    np.testing.assert_allclose(answer["output"], model(ragged(inputs)), rtol=1e-6, atol=1e-7)
    assert [int(table.size()) for table in model.collection.tables] == sizes
    # The trained model is as it was, and goes on with its own tables.
    assert model.collection.lookup(ragged(inputs), insert=True).keys[0].shape[0] > 0
    assert [int(table.size()) for table in model.collection.tables] > sizes


def vectors_of(collection):
    return {
        "vectors": Signature(
            lambda inputs: collection.embed(collection.lookup(inputs, insert=False)),
            feature_inputs(collection.features),
        )
    }


def test_vectors_of_known_and_unknown_ids_are_the_same_to_the_last_bit(model, tmp_path):
    collection = model.collection
    export_model(model, tmp_path / "1", signatures=vectors_of(collection))
    for seed in (11, 12):
        inputs = ids(100, seed)
        answer = ask(tmp_path / "1", "vectors", inputs)
        expected = collection.embed(collection.lookup(ragged(inputs), insert=False))
        assert answer.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(answer[name], value, name)


@pytest.mark.parametrize("unknown", ["zeros", {"item": [1, 2, 3, 4], "place": np.ones(3)}])
def test_unknown_ids_read_the_given_rows(model, tmp_path, unknown):
    collection = model.collection
    export_model(model, tmp_path / "1", signatures=vectors_of(collection), unknown=unknown)
    new = {"user": [2**40], "item": [2**41], "place": [2**42], "seen": [[2**41, PADDING]]}
    answer = ask_here(tmp_path / "1", "vectors", {name: np.array(value) for name, value in new.items()})
    initial = collection.embed(
        collection.lookup(ragged({k: np.array(v) for k, v in new.items()}), insert=False)
    )
    rows = dict.fromkeys(("user", "item", "place", "seen"), 0.0)
    if unknown != "zeros":
        rows = {"user": initial["user"], "item": [[1, 2, 3, 4]], "place": 1.0, "seen": [[1, 2, 3, 4]]}
    for name, value in answer.items():
        np.testing.assert_array_equal(value, np.broadcast_to(rows[name], value.shape), name)


def test_ids_out_of_range_are_refused_by_name(model, tmp_path):
    export_model(model, tmp_path / "1", signatures=vectors_of(model.collection))
    served = tf.saved_model.load(tmp_path / "1").signatures["vectors"]
    for name, value in (("item", -1), ("place", 2**62), ("seen", -2)):
        inputs = ids(3)
        inputs[name].flat[-1] = value
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"feature '?{name}'?"):
            served(**{name: tf.constant(value) for name, value in inputs.items()})


# Quick: initial, and test_unknown_ids_read_the_given_rows.
@pytest.mark.parametrize(
    "unknown", ["initial", pytest.param({"by_city": np.ones(3)}, marks=pytest.mark.slow)]
)
def test_a_feature_of_several_tables_is_one_input(tmp_path, unknown):
    both = (FEATURES[1].table, "by_city")
    features = [
        FeatureConfig("item", both, dim=(4, 3), hash=True),
        FeatureConfig("tags", ("a", "b"), dim=5, combiner="mean", join="sum"),
    ]
    collection = EmbeddingCollection(features, optimizer=optimizers.SGD(1.0))
    trained = {"item": ["a", "b", "c"], "tags": tf.ragged.constant([[1, 2], [], [7]], tf.int64)}
    lookup = collection.lookup(trained)
    collection.apply_gradients(lookup, [tf.ones_like(rows) for rows in lookup.rows])
    exported = export_model(collection, tmp_path / "1", signatures=vectors_of(collection), unknown=unknown)
    assert list(exported.signatures["vectors"]) == ["item", "tags"]
    sent = {"item": ["a", "new", "c"], "tags": np.array([[1, 2], [-1, -1], [7, 9]])}
    answer = ask_here(tmp_path / "1", "vectors", sent)
    expected = {name: vectors.numpy() for name, vectors in collection(sent).items()}
    if unknown != "initial":
        expected["item"][1, 4:] = 1.0
    for name, vectors in expected.items():
        np.testing.assert_array_equal(answer[name], vectors, name)


def test_a_functional_model_has_its_own_inputs(tmp_path):
    collection = EmbeddingCollection([FEATURES[1], FEATURES[2]])
    given = {
        "item": tf.keras.Input([], dtype=tf.int64, name="item"),
        "seen": tf.keras.Input([None], dtype=tf.int64, name="seen", ragged=True),
        "price": tf.keras.Input([2], name="price"),
    }
    vectors = collection({name: given[name] for name in ("item", "seen")})
    score = tf.keras.layers.Dense(1)(tf.concat([*vectors.values(), given["price"]], axis=-1))
    model = tf.keras.Model(given, {"score": score})
    collection.lookup(
        {"item": tf.range(20, dtype=tf.int64), "seen": tf.ragged.constant([[1]], dtype=tf.int64)}
    )
    export_model(model, tmp_path / "1")
    inputs = {name: value for name, value in ids(30).items() if name in given}
    inputs["price"] = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
    answer = ask(tmp_path / "1", "serving_default", inputs)
    np.testing.assert_allclose(answer["score"], model(ragged(inputs))["score"], rtol=1e-6, atol=1e-7)


@pytest.mark.shown_by("test_vectors_of_known_and_unknown_ids_are_the_same_to_the_last_bit")
def test_an_untrained_model_is_all_initial_rows(tmp_path):
    model = Scores()
    inputs = ids(10)
    expected = model(ragged(inputs))
    assert export_model(model, tmp_path / "1").rows == 0
    np.testing.assert_allclose(
        ask(tmp_path / "1", "serving_default", inputs)["output"], expected, rtol=1e-6, atol=1e-7
    )


def test_what_cannot_be_exported_says_why(model, tmp_path):
    collection = model.collection
    inputs = feature_inputs(FEATURES)
    with pytest.raises(ConfigError, match="stores no rows; look up with insert=False"):
        export_model(
            model,
            tmp_path / "1",
            signatures={
                "p": Signature(
                    lambda given: collection.embed(collection.lookup(given, insert=True))["user"], inputs
                )
            },
        )
    with pytest.raises(ConfigError, match="signature 'size' still has GmetaHashTableSize"):
        export_model(
            model,
            tmp_path / "1",
            signatures={"size": Signature(lambda given: collection.tables[0].size(), inputs)},
        )
    with pytest.raises(ConfigError, match="unknown names color, but the tables are user, item, place"):
        export_model(model, tmp_path / "1", unknown={"color": [1.0]})
    with pytest.raises(ConfigError, match=r"unknown\['user'\] must have shape \(4,\).*got \(2,\)"):
        export_model(model, tmp_path / "1", unknown={"user": [1.0, 2.0]})
    with pytest.raises(ConfigError, match="unknown must be"):
        export_model(model, tmp_path / "1", unknown="mean")
    with pytest.raises(ConfigError, match="no inputs or features of its own: give signatures"):
        export_model(tf.keras.Sequential([tf.keras.layers.Dense(1)]), tmp_path / "1")
    with pytest.raises(ConfigError, match="'w' must be a TensorSpec or a RaggedTensorSpec of ids"):
        export_model(
            model,
            tmp_path / "1",
            signatures={
                "p": Signature(lambda given: given["w"], {"w": tf.RaggedTensorSpec([None, None], tf.float32)})
            },
        )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "1").mkdir()
    with pytest.raises(ConfigError, match="1 exists: name a new folder"):
        export_model(model, tmp_path / "1")


class Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in "abcdefghij")


def bytes_in_use():
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    found = libc.mallinfo2()
    return found.e + found.h  # mapped, and in the heap


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.shown_by("test_a_load_outlives_another_of_the_same_folder_and_sessions_find_their_table")
def test_exports_and_loads_keep_no_bytes(model, tmp_path):
    rows = 100_000  # a static hash table of them takes over 4 MB

    class Reads(tf.Module):
        def __init__(self):
            self.collection = EmbeddingCollection([FeatureConfig("user", dim=1)])
            self.collection.lookup({"user": np.arange(rows)})

        def __call__(self, inputs, training=False):
            return tf.nn.silu(self.collection(inputs)["user"])  # with a gradient of its own

    reads, used = Reads(), []
    wanted = np.array([rows - 1, rows + 1])
    for number in range(4):
        signature = Signature(reads, feature_inputs(reads.collection.features))
        export_model(model, tmp_path / str(number), signatures={"rows": signature})
        used.append(bytes_in_use())
    assert max(used[1:]) - used[0] < 2e6
    used = []
    for number in range(4):
        found = ask_here(str(tmp_path / str(number)), "rows", {"user": wanted})
        np.testing.assert_array_equal(found["output"], reads({"user": wanted}))
        used.append(bytes_in_use())
    assert max(used[1:]) - used[0] < 2e6


def test_a_load_outlives_another_of_the_same_folder_and_sessions_find_their_table(tmp_path):
    collection = EmbeddingCollection(FEATURES[:1])
    collection.lookup({"user": np.arange(4)})
    export_model(collection, tmp_path / "1", signatures=vectors_of(collection))
    kept, gone = (tf.saved_model.load(str(tmp_path / "1")) for _ in range(2))
    del gone
    gc.collect()
    users = np.arange(6)  # of which two have no row
    expected = collection({"user": users})["user"].numpy()
    served = kept.signatures["vectors"](user=tf.constant(users))
    np.testing.assert_array_equal(served["user"], expected)
    with tf.compat.v1.Session(graph=tf.Graph()) as session:  # as TensorFlow Serving runs it
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "1"))
        signature = meta.signature_def["vectors"]
        for _ in range(2):
            found = session.run(signature.outputs["user"].name, {signature.inputs["user"].name: users})
            np.testing.assert_array_equal(found, expected)


def test_rows_that_are_not_finite_are_refused_and_named(tmp_path):
    collection = EmbeddingCollection(FEATURES[:2], optimizer=optimizers.SGD(1.0))
    lookup = collection.lookup({"user": [7, 8, 9], "item": [7, 8, 9]})
    gradient = np.zeros(lookup.rows[0].shape, np.float32)
    gradient[[1, 5]] = np.inf
    lookups = collection.recording_of(lookup)
    lookups.apply_gradients([tf.constant(gradient)], finite=False)
    user = tf.keras.Input([], name="user", dtype=tf.int64)
    item = tf.keras.Input([], name="item", dtype=tf.int64)
    model = tf.keras.Model([user, item], collection({"user": user, "item": item}))
    told = "the rows of id 8 of table 'user', id 9 of table 'item' hold NaN or infinity: load an earlier"
    with pytest.raises(NotFiniteError, match=told):
        export_model(model, tmp_path / "1")
    assert list(tmp_path.iterdir()) == []
    collection.tables[0].remove(tf.gather(lookup.keys[0], [1, 5]))
    assert export_model(model, tmp_path / "1", unknown={"user": [1.0, 0, 0, 0]}).rows == 4
    with pytest.raises(ConfigError, match=r"unknown\['user'\] must hold finite numbers, got \[nan"):
        export_model(model, tmp_path / "2", unknown={"user": [np.nan, 0, 0, 0]})


def test_columns_of_any_name_are_sent_by_the_names_that_are_printed(tmp_path):
    names = ["User-ID", "class", "1st", "price"]
    inputs = {name: tf.TensorSpec([None], tf.float32) for name in names}

    def add(given):
        return tf.add_n([given[name] * 10.0**place for place, name in enumerate(names)])

    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    exported = export_model(model, tmp_path / "1", signatures={"add": Signature(add, inputs)})
    sent = list(exported.signatures["add"])
    assert sent == ["User_ID", "class_", "arg_1st", "price"]
    values = {name: np.array([float(place + 1)], np.float32) for place, name in enumerate(sent)}
    (answer,) = ask_here(tmp_path / "1", "add", values).values()
    assert float(answer[0]) == 4321.0
    clash = {name: tf.TensorSpec([None], tf.float32) for name in ("a b", "a-b")}
    with pytest.raises(ConfigError, match="'a b' and 'a-b' would both be 'a_b'"):
        export_model(model, tmp_path / "2", signatures={"add": Signature(add, clash)})
