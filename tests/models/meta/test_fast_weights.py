"""What adapt gives is what a task batch adapts to, as a value that is kept, refused or applied."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import Adam, InnerLoop
from gmeta.models import CBML, MetaModel
from gmeta.models.meta.fast_weights import FastWeights, RowDeltas
from support.drawn_batches import drawn_alone as alone
from support.drawn_batches import make_batch

ALGORITHMS = {
    "maml": InnerLoop("maml", steps=3),
    "fomaml": InnerLoop("fomaml", steps=2),
    "anil": InnerLoop("anil", steps=2),
    "boil": InnerLoop("boil", steps=2),
    "meta-sgd": InnerLoop("meta-sgd", steps=2),
    "reptile": InnerLoop("reptile", steps=2),
    "all": InnerLoop("maml", steps=2, adapt="all", learning_rate=0.1),
    "adam": InnerLoop("maml", steps=2, adapt="all", optimizer=Adam(), clip_norm=0.5),
    "learned": InnerLoop("maml", steps=2, adapt=["out", "embeddings"], learn_learning_rate="layer"),
    "none": InnerLoop("maml", steps=0),
}


START = Normal(0, 1)


def make(inner, hidden=8, seed=0, table_seed=1, start=START):
    features = [FeatureConfig(name, TableConfig(name, 4, initializer=start)) for name in ("user", "item")]
    model = MetaModel(
        EmbeddingCollection(features, seed=table_seed),
        MLP({"fc": hidden, "out": 1}, seed=seed),
        inner=inner,
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


def sides(batch, task):
    """Support samples, their labels, and query samples of one task."""
    one = alone(batch, task)

    def part(name):
        index = one[name]["index"][0]
        features = {feature: tf.gather(ids, index).numpy() for feature, ids in one["features"].items()}
        return features, tf.gather(one["label"], index).numpy()

    return *part("support"), part("query")[0]


@pytest.fixture(scope="module")
def model():
    return make(ALGORITHMS["all"])


@pytest.fixture(scope="module")
def fast(model):
    x, y, _ = sides(make_batch([4]), 0)
    return model.adapt(x, y)


def assert_same(one, other, rtol=1e-5):
    assert one.deltas.keys() == other.deltas.keys()
    assert one.rows.keys() == other.rows.keys()
    for name, delta in one.deltas.items():
        np.testing.assert_allclose(other.deltas[name], delta, rtol, 1e-7)
    for name, (keys, deltas) in one.rows.items():
        np.testing.assert_array_equal(other.rows[name].keys, keys)
        np.testing.assert_allclose(other.rows[name].deltas, deltas, rtol, 1e-7)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.shown_by(case="all")
def test_it_predicts_what_the_batch_predicts_that_adapts_by_itself(name):
    inner, batch = ALGORITHMS[name], make_batch([3, 1, 5], pad=2)
    model = make(inner)
    model.collection.lookup({"user": [0, 1], "item": [2, 3]})  # others are cold
    sizes, before = [int(t.size()) for t in model.collection.tables], model.get_weights()
    expected = model.predict_after(batch, [inner.steps])[inner.steps]
    unadapted = model.predict_after(batch, [0])[0]
    many = model.adapt_many(batch)
    for task in range(3):
        x, y, query = sides(batch, task)
        fast = model.adapt(x, y)
        assert_same(fast, many[task])
        np.testing.assert_allclose(model.predict(query, weights=fast), expected[task], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(model.predict(query), unadapted[task], rtol=1e-5, atol=1e-6)
        assert (fast.algorithm, fast.steps) == (inner.algorithm, inner.steps)
    assert [int(t.size()) for t in model.collection.tables] == sizes
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


def test_a_model_whose_tasks_do_not_start_alike():
    features = [
        FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0, 1))) for name in ("user", "item")
    ]
    model = CBML.of(features, items=["item"], hidden=[6], clusters=2, dim=4, inner=InnerLoop(steps=2))
    model.compile("adam", "mse")
    batch = make_batch([3, 0, 5], pad=1)
    expected = model.predict_after(batch, [2])[2]
    for task in range(3):
        x, y, query = sides(batch, task)
        fast = model.adapt(x, y)
        np.testing.assert_allclose(model.predict(query, weights=fast), expected[task], rtol=1e-5, atol=1e-6)
        if not len(y):
            np.testing.assert_allclose(model.predict(query), expected[task], rtol=1e-5, atol=1e-6)


def test_a_keras_network_with_inputs_by_name():
    features = [
        FeatureConfig("item", dim=4),
        FeatureConfig("tags", dim=4, combiner="mean"),
        FeatureConfig("seen", dim=4),
    ]
    shapes = {"item": [4], "tags": [4], "seen": [2, 4], "price": [1], "place": [2]}
    parts = {name: tf.keras.Input(shape, name=name) for name, shape in shapes.items()}
    flat = [tf.keras.layers.Flatten()(part) for part in parts.values()]
    x = tf.keras.layers.Dense(6, "tanh", name="fc")(tf.concat(flat, axis=-1))
    network = tf.keras.Model(parts, tf.keras.layers.Dense(2, name="out")(x))
    model = MetaModel(
        EmbeddingCollection(features), network, inner=InnerLoop(steps=2, learning_rate=0.1, adapt="all")
    )
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)

    def samples(count):
        return {
            "item": rng.integers(0, 9, count),
            "tags": [list(rng.integers(0, 9, rng.integers(0, 4))) for _ in range(count)],
            "seen": rng.integers(0, 9, (count, 2)),
            "price": list(rng.random(count)),
            "place": rng.random((count, 2)),
        }

    tasks = [(samples(count), rng.random((count, 2))) for count in (3, 0, 2)]
    query = samples(4)
    ragged = {**query, "tags": tf.ragged.constant(query["tags"], dtype=tf.int64)}
    for (x, y), many in zip(tasks, model.adapt_many(tasks), strict=True):
        fast = model.adapt(x, y)
        assert_same(fast, many)
        predicted = model.predict(query, weights=fast)
        assert predicted.shape == (4, 2)
        assert np.allclose(predicted, model.predict(ragged)) == (not len(y))


@settings(max_examples=4, deadline=None)
@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4), steps=st.integers(0, 2))
def test_many_are_as_one_by_one(model, sizes, steps):
    batch = make_batch(sizes)
    tasks = [sides(batch, task)[:2] for task in range(len(sizes))]
    many = model.adapt_many(tasks, steps=steps)
    for own, (x, y) in zip(many, tasks, strict=True):
        assert_same(own, model.adapt(x, y, steps))
        if not len(y) * steps:
            assert all(not delta.any() for delta in own.deltas.values())
            assert all(not len(rows.keys) for rows in own.rows.values())


def test_a_graph_is_traced_once_for_all_numbers_of_samples(model):
    calls, task_outputs = [], model.learner.task_outputs
    model.learner.task_outputs = lambda *args, **kwargs: calls.append(1) or task_outputs(*args, **kwargs)
    for size in (2, 5, 3):
        x, y, query = sides(make_batch([size]), 0)
        model.predict(query, weights=model.adapt(x, y, steps=4))
        if size == 2:
            first = len(calls)
    del model.learner.task_outputs
    assert len(calls) == first > 0


def test_another_inner_loop_or_loss_is_heeded():
    model, (x, y, _) = make(ALGORITHMS["maml"]), sides(make_batch([4]), 0)
    before = model.adapt(x, y, steps=1)
    model.compile("adam", "mse", inner=InnerLoop("maml", learning_rate=0.02))
    assert_same(
        FastWeights(*[""] * 4, {n: 2 * d for n, d in before.deltas.items()}), model.adapt(x, y, steps=1), 1e-3
    )
    model.compile("adam", "mae")
    assert not np.allclose(model.adapt(x, y, steps=1).deltas["out/bias"], 2 * before.deltas["out/bias"])


def test_bytes_are_whole_and_small(model, fast, tmp_path):
    fast.save(tmp_path / "user")
    again = FastWeights.load(tmp_path / "user")
    assert_same(fast, again, rtol=0)
    assert (again.model, again.algorithm, again.steps, again.fingerprint) == (
        fast.model,
        fast.algorithm,
        fast.steps,
        fast.fingerprint,
    )
    numbers = 8 * 8 + 8 + 8 + 1 + 4 * len(fast.rows["embeddings/user+item"].keys)
    keys = 8 * len(fast.rows["embeddings/user+item"].keys)
    assert fast.nbytes == 4 * numbers + keys
    for dtype, size in (("float32", 4), ("float16", 2)):
        header = len(fast.to_bytes(dtype)) - size * numbers - keys
        assert 0 < header < 800
    assert list(tmp_path.iterdir()) == [tmp_path / "user"]
    with pytest.raises(GmetaError, match="can't write fast weights"):
        fast.save(tmp_path / "no" / "folder")
    with pytest.raises(DataError, match="other: can't read fast weights: No such file"):
        FastWeights.load(tmp_path / "other")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=20))
def test_half_the_bytes_cost_one_part_in_2048(values):
    delta = np.array(values, np.float32)
    fast = FastWeights("m", "maml", 1, "", {"w": delta}, {"t": RowDeltas(np.zeros(1, np.int64), delta[None])})
    again = FastWeights.from_bytes(fast.to_bytes("float16"))
    for got in (again.deltas["w"], again.rows["t"].deltas[0]):
        assert got.dtype == np.float32
        assert np.all(np.abs(got - delta) <= np.maximum(np.abs(delta) / 2048, 3e-8))


def test_what_float16_cannot_hold_is_said():
    fast = FastWeights("m", "maml", 1, "", {"w": np.array([7e4], np.float32)})
    with pytest.raises(ConfigError, match=r"w has deltas up to 7e[+]04, and float16 ends at 65,504"):
        fast.to_bytes("float16")
    with pytest.raises(ConfigError, match="dtype must be 'float32' or 'float16', got 'int8'"):
        fast.to_bytes("int8")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_that_are_cut_are_refused(fast, data):
    whole = fast.to_bytes()
    with pytest.raises(DataError, match=r"aren't fast weights .*adapt the task again"):
        FastWeights.from_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_other_bytes_are_refused(fast):
    numbers, about = {"w": np.zeros(2, np.float32)}, fast.metadata()
    for metadata, message in (
        (None, "safetensors of the format 'none', not of 'gmeta.fast_weights'"),
        ({**about, "version": "9"}, "of version '9', where this gmeta reads 1; read them with a later gmeta"),
        ({k: v for k, v in about.items() if k != "steps"}, "incomplete fast weights: 'steps'"),
    ):
        with pytest.raises(DataError, match=message):
            FastWeights.from_bytes(save(numbers, metadata=metadata))
    assert FastWeights.from_bytes(bytearray(fast.to_bytes())).steps == fast.steps
    with pytest.raises(DataError, match="fast weights are bytes, got NoneType; pass the unchanged result"):
        FastWeights.from_bytes(None)
    tensors = load(fast.to_bytes())
    table = "embeddings/user+item"
    with pytest.raises(DataError, match=f"incomplete fast weights: '{table}:rows'".replace("+", "[+]")):
        FastWeights.from_bytes(save({k: v for k, v in tensors.items() if ":rows" not in k}, metadata=about))
    with pytest.raises(DataError, match=r"has keys int64 \(1,\) for rows of shape"):
        FastWeights.from_bytes(save({**tensors, f"{table}:keys": np.zeros(1, np.int64)}, metadata=about))


def test_deltas_of_a_model_that_trained_on_are_refused_until_they_are_rebased():
    model, batch = make(InnerLoop("maml", steps=2)), make_batch([4, 3])
    model.run_eagerly = True
    x, y, query = sides(batch, 0)
    fast = model.adapt(x, y)
    model.evaluate(tf.data.Dataset.from_tensors(batch), verbose=0)
    model.predict(query, weights=fast)  # measuring changes nothing
    model.fit(tf.data.Dataset.from_tensors(batch), verbose=0)
    with pytest.raises(ConfigError, match=r"other shared weights .*Adapt the task again.*fast\.rebase"):
        model.predict(query, weights=fast)
    predicted = model.predict(query, weights=fast.rebase(model))
    for name, variable in model.network.task_weights().items():
        variable.assign_add(fast.deltas[name])
    np.testing.assert_allclose(predicted, model.predict(query), rtol=1e-5)


def test_deltas_of_tables_that_start_otherwise_are_refused():
    x, y, query = sides(make_batch([4]), 0)
    fast = make(ALGORITHMS["all"]).adapt(x, y)
    assert np.isfinite(make(ALGORITHMS["all"]).predict(query, weights=fast)).all()  # a model made alike
    for other in ({"table_seed": 2}, {"start": Normal(0, 2)}):
        with pytest.raises(ConfigError, match="its tables start otherwise"):
            make(ALGORITHMS["all"], **other).predict(query, weights=fast)


def test_deltas_are_added_to_rows_as_they_are_now():
    model, batch = make(InnerLoop(steps=2, adapt="all", learning_rate=0.1)), make_batch([4])
    x, y, query = sides(batch, 0)
    fast = model.adapt(x, y)
    lookup = model.collection.lookup(x)
    updates = [tf.ones_like(rows) for rows in lookup.rows]
    model.collection.apply_gradients(lookup, updates, learning_rate=0.1)
    found = model.predict(query, weights=fast)
    shared, lookup = model.network.task_weights(), model.collection.lookup(query, insert=False)
    moved = dict(zip(*fast.rows["embeddings/user+item"], strict=True))
    rows = [
        row + moved.get(key, 0)
        for key, row in zip(lookup.keys[0].numpy(), lookup.rows[0].numpy(), strict=True)
    ]
    for name, delta in fast.deltas.items():
        shared[name].assign_add(delta)
    inputs = model.collection.concat(lookup._replace(rows=(tf.stack(rows),)))
    np.testing.assert_allclose(found, model.network(inputs[tf.newaxis])[0, :, 0], rtol=1e-5)


def test_weights_of_another_network_are_refused(model, fast):
    _, _, query = sides(make_batch([2]), 0)
    with pytest.raises(ConfigError, match=r"another network .*fc/kernel of shape \(8, 8\), here \(8, 6\)"):
        make(ALGORITHMS["all"], hidden=6).predict(query, weights=fast)
    with pytest.raises(ConfigError, match="it lacks fc/kernel"):
        model.predict(query, weights=make(ALGORITHMS["anil"]).adapt(*sides(make_batch([2]), 0)[:2]))
    with pytest.raises(ConfigError, match=r"must be what model\.adapt gave, got bytes"):
        model.predict(query, weights=fast.to_bytes())
    with pytest.raises(ConfigError, match="task batches adapt by themselves"):
        model.predict(tf.data.Dataset.from_tensors(make_batch([2])), weights=fast)


def test_what_a_samples_prediction_would_ignore_is_refused(model, fast):
    samples = {name: [1, 2] for name in ("user", "item")}
    with pytest.raises(ConfigError, match="take weights= alone, got FastWeights, batch_size beside them"):
        model.predict(samples, fast, batch_size=8)
    np.testing.assert_array_equal(model.predict(samples, verbose=0), model.predict(samples))


def test_a_data_frame_holds_samples_too(model, fast):
    pandas = pytest.importorskip("pandas")
    x, y, query = sides(make_batch([3]), 0)
    frames = [
        pandas.DataFrame({name: np.asarray(column) for name, column in each.items()}) for each in (x, query)
    ]
    found = model.predict(frames[1], weights=model.adapt(frames[0], pandas.Series(np.asarray(y))))
    np.testing.assert_array_equal(found, model.predict(query, weights=model.adapt(x, y)))


def test_samples_that_cannot_be_used_are_refused_by_name(model):
    x, y, _ = sides(make_batch([3]), 0)
    for samples, labels, message in (
        ({"user": [1]}, [1], "support_x lacks item; it has user"),
        ({**x, "item": [1]}, y, "different numbers of samples: user 3, item 1"),
        (x, y[:2], "support_y has 2 labels for 3 samples"),
        ({**x, "item": [0.5] * 3}, y, r"support_x\['item'\] must be integer ids, got float64"),
        ({**x, "item": None}, y, r"support_x\['item'\] must have ids for each sample, got None"),
        ({**x, "item": [3, -1, 2]}, y, r"support_x\['item'\] holds the id -1; ids are from 0 on"),
        ({**x, "item": np.array([1, 2, 2**63], np.uint64)}, y, f"holds the id {2**63}"),
        ({**x, "item": [1, 2, 2**61]}, y, f"the id {2**61}; ids are from 0 on and below {2**61}"),
        (x, ["a", "b", "c"], "support_y must be numbers: got text, such as 'a'"),
        (x, ["1", "2", "3"], "support_y must be numbers: got text"),
        (x, [1.0, np.nan, 2.0], "support_y holds nan in sample 1"),
        (x, [[1.0, 2.0]] * 3, "labels have 2 values a sample and the network has 1 output"),
        (x, 3.0, "support_y must have one value for each sample"),
        ([1, 2], y, "support_x must map features to values, got list"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.adapt(samples, labels)
    with pytest.raises(ConfigError, match="support_x of task 1 lacks item"):
        model.adapt_many([(x, y), ({"user": [1]}, [1])])
    with pytest.raises(ConfigError, match=r"takes pairs of samples and labels, .*; task 0 is dict"):
        model.adapt_many((x, y, y))
    with pytest.raises(ConfigError, match=r"batches of tasks, .*; got a dict of user, item"):
        model.adapt_many(x)
    with pytest.raises(ConfigError, match="steps must be a whole number from 0 on, got -1"):
        model.adapt(x, y, steps=-1)
    with pytest.raises(ConfigError, match="compile the model first"):
        MetaModel(model.collection, MLP({"out": 1})).adapt(x, y)
    assert model.adapt_many([]) == []
