"""An exported MetaModel predicts and adapts, in a process without gmeta, as the trained one does here."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.numpy import save

from gmeta.core.errors import ConfigError, DataError, NotFiniteError
from gmeta.export.meta_models import meta_signatures, sample_inputs
from gmeta.export.saved_model import PADDING, export_model
from gmeta.initializers import Constant, Uniform
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import CBML, MetaModel, dlrm, factor_ridge
from gmeta.models.meta.fast_weights import FastWeights
from gmeta.optimizers import SGD
from support.serving import ask_all

K = tf.keras
FEATURES = (
    FeatureConfig("user", TableConfig("user", 3, initializer=Uniform(-1, 1))),
    FeatureConfig("item", TableConfig("item", 3, initializer=Uniform(-1, 1))),
    FeatureConfig("tags", TableConfig("item2", 4, initializer=Uniform(-1, 1)), combiner="mean"),
)
# One table whose initial rows take no graph to compute, where cold ids aren't what is tested.
PLAIN = tuple(
    FeatureConfig(each.name, TableConfig(each.table.name, 3, initializer=Constant(0.5)), each.combiner)
    for each in FEATURES
)
INNER = {
    "maml": InnerLoop("maml", steps=1, serving_steps=2, clip_norm=1.0),
    "fomaml": InnerLoop("fomaml", optimizer="momentum"),
    "anil": InnerLoop("anil"),
    "boil": InnerLoop("boil"),
    "meta-sgd": InnerLoop("meta-sgd"),
    "reptile": InnerLoop("reptile"),
    "ridge": InnerLoop("ridge"),
    "ridge rows": InnerLoop("ridge", steps=2, adapt="all"),
    "all": InnerLoop(steps=2, adapt="all", optimizer="adam", learn_learning_rate="parameter"),
    "keras": InnerLoop(steps=2, adapt="all", learning_rate=0.1),
    "cbml": InnerLoop(),
    "dlrm": InnerLoop(),
    "joint": InnerLoop(steps=0),
    "factors": InnerLoop("ridge"),
}
QUICK = ("all", "keras")  # MAML in its largest form, and a network of Keras layers with all kinds of inputs


def made(name):
    """A model whose tables have some ids of which others are cold."""
    inner = INNER[name]
    features_of = {"all": FEATURES, "keras": (*FEATURES, FeatureConfig("seen", dim=3))}.get(name, PLAIN)
    if name == "cbml":
        model = CBML.of(
            features_of, items=["item"], hidden=[5], clusters=2, dim=3, inner=inner, optimizer=SGD(0.1)
        )
    elif name == "dlrm":
        model = dlrm(features_of, floats=["price"], head="rating", inner=inner, optimizer=SGD(0.1))
    elif name == "factors":
        roles = {"lists": ["tags"], "user": ["user"], "floats": {"price": (0.5, 0.3)}}
        model = factor_ridge("item", **roles, samples=100, learning_rate=0.1)
    else:
        collection = EmbeddingCollection(features_of, seed=3, optimizer=SGD(0.1))
        network = functional() if name == "keras" else MLP({"fc": 6, "out": 1})
        model = MetaModel(collection, network, inner=inner)
    model.compile("adam", "mse")
    lookup = model.collection.lookup(features(samples(40, more=True, ids=10)))
    model.collection.apply_gradients(lookup, [tf.ones_like(rows) for rows in lookup.rows])
    return model


def functional():
    shapes = {"user": [3], "item": [3], "tags": [4], "seen": [2, 3], "price": [1], "place": [2]}
    parts = {name: K.Input(shape, name=name) for name, shape in shapes.items()}
    x = K.layers.LayerNormalization(name="norm")(
        K.layers.Dense(5, "tanh", name="fc")(
            tf.concat([K.layers.Flatten()(part) for part in parts.values()], -1)
        )
    )
    return K.Model(parts, K.layers.Dense(2, name="out")(x))


def samples(count, seed=0, more=False, ids=20):
    """As a client sends them: ids of which half were never trained, lists padded anywhere."""
    random = np.random.default_rng(seed)
    tags = random.integers(0, ids, (count, 3))
    tags[random.random(tags.shape) < 0.4] = PADDING
    found = {"user": random.integers(0, ids, count), "item": random.integers(0, ids, count), "tags": tags}
    if more:
        found["seen"] = random.integers(0, ids, (count, 2))
        found["price"] = random.random(count).astype(np.float32)
        found["place"] = random.random((count, 2)).astype(np.float32)
    return found


def features(sent):
    """As they are handed to a model here."""
    return {**sent, "tags": tf.ragged.boolean_mask(tf.constant(sent["tags"]), sent["tags"] != PADDING)}


def as_sent(data):
    return np.array(data, object)


def serve(folder, names):
    """Name -> the model, its fast weights, and what the exported one answers to the three signatures."""
    models, requests = {}, []
    for name in names:
        model, own = made(name), name == "keras"
        taken = sample_inputs(model)
        support, query = (
            {column: values for column, values in samples(*size, more=True).items() if column in taken}
            for size in ((6, 1), (9, 2))
        )
        label = np.random.default_rng(3).random((6, 2) if own else 6).astype(np.float32)
        fast = model.adapt(features(support), label)
        notes = export_model(model, str(folder / name)).notes
        assert bool(notes) == (name not in ("ridge", "ridge rows", "joint", "factors"))
        models[name] = model, fast, features(query)
        requests += [
            (folder / name, "predict", query),
            (folder / name, "adapt", {**support, "label": label}),
            (folder / name, "predict_with", {**query, "weights_bytes": as_sent(fast.to_bytes())}),
        ]
    answers = iter(ask_all(requests))
    return {name: (*given, *(next(answers) for _ in range(3))) for name, given in models.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    return folder, serve(folder, ["all"])


@pytest.fixture(scope="module")
def of_keras(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keras")
    return folder, serve(folder, ["keras"])


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.shown_by(case="all")
def test_three_signatures_answer_as_the_model_does(request, name):
    _, models = request.getfixturevalue("served" if name == "all" else "of_keras")
    assert_same_answers(name, *models[name])


@pytest.mark.slow
def test_those_of_the_other_algorithms_do_too(tmp_path):
    names = [name for name in INNER if name not in QUICK]
    for name, found in serve(tmp_path, names).items():
        assert_same_answers(name, *found)


def assert_same_answers(name, model, fast, query, predicted, adapted, predicted_with):
    shape = (9, 2) if name == "keras" else (9,)
    assert predicted["rating"].shape == predicted_with["rating"].shape == shape
    np.testing.assert_allclose(predicted["rating"], model.predict(query), rtol=1e-5, atol=1e-6)
    expected = model.predict(query, weights=fast)
    np.testing.assert_allclose(predicted_with["rating"], expected, rtol=1e-5, atol=1e-6)
    assert np.allclose(expected, predicted["rating"]) == (name == "joint")
    received = FastWeights.from_bytes(adapted["weights_bytes"].item())
    assert received.metadata() == fast.metadata()
    assert received.deltas.keys() == fast.deltas.keys()
    for key, delta in fast.deltas.items():
        np.testing.assert_allclose(received.deltas[key], delta, rtol=1e-4, atol=1e-6)
    assert received.rows.keys() == fast.rows.keys()
    assert bool(fast.rows) == (name in ("all", "keras", "reptile", "ridge rows"))
    for table, (keys, deltas) in fast.rows.items():
        np.testing.assert_array_equal(received.rows[table].keys, keys)
        np.testing.assert_allclose(received.rows[table].deltas, deltas, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(model.predict(query, weights=received), expected, rtol=1e-4, atol=1e-6)


def test_what_adapt_answers_goes_through_a_store_as_it_is(served):
    folder, models = served
    _, _, _, _, adapted, predicted_with = models["all"]
    again = here(
        folder / "all", "predict_with", {**samples(9, 2), "weights_bytes": adapted["weights_bytes"].item()}
    )
    np.testing.assert_allclose(again["rating"], predicted_with["rating"], rtol=1e-5)


@functools.cache
def loaded(folder):
    return tf.saved_model.load(folder)


def here(folder, signature, inputs):
    """As `ask_all`, without a process of its own."""
    answers = loaded(folder).signatures[signature](**{n: tf.constant(v) for n, v in inputs.items()})
    return {name: value.numpy() for name, value in answers.items()}


def test_an_id_that_neither_has_seen_adapts_alike(served):
    """Its row starts the same, so it is moved by the same delta, and another cold id is not moved."""
    folder, models = served
    model = models["all"][0]
    cold = {"user": np.array([2**40]), "item": np.array([2**41]), "tags": np.array([[2**42, PADDING]])}
    label = np.array([2.0], np.float32)
    fast = model.adapt(features(cold), label)
    moved = here(folder / "all", "adapt", {**cold, "label": label})["weights_bytes"]
    for table, (keys, deltas) in FastWeights.from_bytes(moved).rows.items():
        np.testing.assert_array_equal(keys, fast.rows[table].keys)
        np.testing.assert_allclose(deltas, fast.rows[table].deltas, rtol=1e-5)
    other = {**cold, "item": np.array([2**43])}
    for query in (cold, other):
        answer = here(folder / "all", "predict_with", {**query, "weights_bytes": moved})["rating"]
        np.testing.assert_allclose(answer, model.predict(features(query), weights=fast), rtol=1e-5)


def of_tasks(sizes, seed=0):
    """Samples of several tasks, as ``adapt_many`` takes them, and of each as ``adapt`` does."""
    given = samples(sum(sizes), seed)
    given["label"] = np.random.default_rng(seed).random(sum(sizes)).astype(np.float32)
    ends = np.cumsum(sizes)
    of_each = [
        {name: each[end - size : end] for name, each in given.items()}
        for size, end in zip(sizes, ends, strict=True)
    ]
    return {**given, "samples_per_user": np.int64(sizes)}, of_each


@hypothesis_settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(0, 6), max_size=5), seed=st.integers(0, 9))
@example(sizes=[], seed=0)
@example(sizes=[0, 0], seed=0)
def test_many_tasks_adapt_as_each_does(served, sizes, seed):
    many, of_each = of_tasks(sizes, seed)
    answered = here(served[0] / "all", "adapt_many", many)["weights_bytes"]
    assert answered.shape == (len(sizes),)
    for data, each in zip(answered, of_each, strict=True):
        one = FastWeights.from_bytes(here(served[0] / "all", "adapt", each)["weights_bytes"])
        found = FastWeights.from_bytes(data)
        assert found.metadata() == one.metadata()
        assert found.deltas.keys() == one.deltas.keys()
        assert found.rows.keys() == one.rows.keys()
        for name, delta in one.deltas.items():
            np.testing.assert_allclose(found.deltas[name], delta, rtol=1e-4, atol=1e-5)
        for name, (keys, deltas) in one.rows.items():
            np.testing.assert_array_equal(found.rows[name].keys, keys)
            np.testing.assert_allclose(found.rows[name].deltas, deltas, rtol=1e-4, atol=1e-5)


def test_one_of_many_tasks_diverges_alone(served):
    many, of_each = of_tasks([2, 3, 1])
    many["label"][2] = 1e30
    answered = here(served[0] / "all", "adapt_many", many)["weights_bytes"]
    assert answered[1] == b""
    one = here(served[0] / "all", "adapt", of_each[2])["weights_bytes"]
    assert FastWeights.from_bytes(answered[2]).metadata() == FastWeights.from_bytes(one).metadata()


@pytest.mark.parametrize("counts", [[2, 2], [7, -1], [6, 1], []])
def test_counts_that_are_not_of_the_samples_are_refused(served, counts):
    many, _ = of_tasks([2, 4])
    with pytest.raises(tf.errors.InvalidArgumentError, match="samples_per_user must be 0 or more and add up"):
        here(served[0] / "all", "adapt_many", {**many, "samples_per_user": np.int64(counts)})


def test_a_task_of_no_samples_and_one_of_half_the_bytes(served, tmp_path):
    model, fast, query, predicted, *_ = served[1]["all"]
    none = {**samples(0), "label": np.zeros(0, np.float32)}
    nothing = here(served[0] / "all", "adapt", none)["weights_bytes"]
    answer = here(served[0] / "all", "predict_with", {**samples(9, 2), "weights_bytes": nothing})
    np.testing.assert_array_equal(answer["rating"], predicted["rating"])
    half = {**samples(9, 2), "weights_bytes": fast.to_bytes("float16")}
    expected = model.predict(query, weights=FastWeights.from_bytes(half["weights_bytes"]))
    np.testing.assert_allclose(here(served[0] / "all", "predict_with", half)["rating"], expected, rtol=1e-5)
    model = served[1]["all"][0]
    adapt = {"adapt": meta_signatures(model, dtype="float16", steps=1)["adapt"]}
    export_model(model, tmp_path / "1", signatures=adapt, unknown="zeros")
    given = {**samples(6, 1), "label": np.ones(6, np.float32)}
    answered = here(tmp_path / "1", "adapt", given)["weights_bytes"]
    assert FastWeights.from_bytes(answered).steps == 1
    whole = here(served[0] / "all", "adapt", given)["weights_bytes"]
    fast = FastWeights.from_bytes(whole)
    rows = [deltas for _, deltas in fast.rows.values()]
    numbers = sum(delta.size for delta in [*fast.deltas.values(), *rows])
    assert abs(len(whole) - len(answered) - 2 * numbers) <= 16  # of the header, which names sizes


def test_weights_that_are_damaged_or_of_others_are_refused(served, tmp_path):
    folder, models = served
    model, fast = models["all"][:2]
    data = fast.to_bytes()
    other = replace(fast, fingerprint="0" * 16).to_bytes()
    renamed = {name.replace("kernel", "KERNEL"): delta for name, delta in fast.deltas.items()}
    for sent, message in (
        (b"", "weights_bytes is shorter than a header: adapt the task again"),
        (data[:-1], "weights_bytes is cut"),
        (b"a" * 99, "weights_bytes is not a safetensors file, or is truncated"),
        (data.replace(b"gmeta.fast_weights", b"gmeta.slow_weights"), "is not a result of `adapt`"),
        (data.replace(b'"version":"1"', b'"version":"2"'), "is not version 1 of the format"),
        (data.replace(b"fc/kernel", b"fc/KERNEL"), "is damaged: its checksum differs: adapt the task"),
        (data + b"\0", "weights_bytes has bytes behind its end: adapt the task again"),
        (replace(fast, deltas=renamed).to_bytes(), "has no fc/kernel of shape"),
        (other, f"has deltas from other shared weights than these, {fast.fingerprint}"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            here(folder / "all", "predict_with", {**samples(9, 2), "weights_bytes": sent})
    predict_with = {"predict_with": meta_signatures(model, stale="apply")["predict_with"]}
    export_model(model, tmp_path / "1", signatures=predict_with)
    answer = here(tmp_path / "1", "predict_with", {**samples(9, 2), "weights_bytes": other})
    np.testing.assert_allclose(answer["rating"], models["all"][5]["rating"], rtol=1e-5)


def of_an_earlier_gmeta(fast):
    """As bytes were before they had a checksum."""
    tensors = {**fast.deltas}
    for table, (keys, deltas) in fast.rows.items():
        tensors |= {f"{table}:keys": keys, f"{table}:rows": deltas}
    return save(tensors, metadata=fast.metadata())


def test_bytes_of_an_earlier_gmeta_are_taken(served):
    folder, models = served
    fast, predicted_with = models["all"][1], models["all"][5]
    earlier = of_an_earlier_gmeta(fast)
    assert b"checksum" not in earlier
    assert FastWeights.from_bytes(earlier).fingerprint == fast.fingerprint
    answer = here(folder / "all", "predict_with", {**samples(9, 2), "weights_bytes": earlier})
    np.testing.assert_allclose(answer["rating"], predicted_with["rating"], rtol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has bytes behind its end"):
        here(folder / "all", "predict_with", {**samples(9, 2), "weights_bytes": earlier + b"12"})


def damaged(data, rng):
    """Bits flipped, a piece cut out, bytes appended, or two pieces that have changed places."""
    begin, end = sorted(rng.integers(0, len(data) + 1, 2).tolist())
    match rng.integers(5):
        case 0:
            changed = np.frombuffer(data, np.uint8).copy()
            changed[rng.integers(0, len(data), rng.integers(1, 4))] ^= np.uint8(1 << rng.integers(8))
            return changed.tobytes()
        case 1:
            return data[:begin] + data[end:]
        case 2:
            return data + rng.bytes(rng.integers(1, 20))
        case 3:
            changed = bytearray(data)
            one, other = rng.integers(0, len(data), 2)
            changed[one], changed[other] = data[other], data[one]
            return bytes(changed)
        case _:
            size = int(rng.integers(1, 9))
            one, other = sorted(rng.integers(0, len(data) // size, 2) * size)
            a, b = data[one : one + size], data[other : other + size]
            return (
                data[:one] + b + data[one + size : other] + a + data[other + size :] if one < other else data
            )


def test_damaged_bytes_are_refused_or_answer_what_whole_ones_do(served):
    folder, models = served
    rng = np.random.default_rng(5)
    query = samples(9, 2)
    serve = functools.partial(here, folder / "all", "predict_with")
    sound = [models["all"][1].to_bytes(dtype) for dtype in ("float32", "float16")]
    answers = [serve({**query, "weights_bytes": data})["rating"] for data in sound]
    for number in range(400):
        data, expected = sound[number % 2], answers[number % 2]
        bad = damaged(data, rng)
        try:
            answer = serve({**query, "weights_bytes": bad})["rating"]
        except tf.errors.InvalidArgumentError:
            pass
        else:
            np.testing.assert_array_equal(answer, expected)
        try:
            read = FastWeights.from_bytes(bad)
        except DataError:
            continue
        assert_same_tensors(read, FastWeights.from_bytes(data))


def assert_same_tensors(one, other):
    for field in ("model", "algorithm", "steps", "fingerprint"):
        assert getattr(one, field) == getattr(other, field)
    assert one.deltas.keys() == other.deltas.keys()
    assert one.rows.keys() == other.rows.keys()
    for name, delta in one.deltas.items():
        np.testing.assert_array_equal(delta, other.deltas[name])
    for name, rows in one.rows.items():
        for mine, theirs in zip(rows, other.rows[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label": np.ones(5, np.float32)}, r"equal numbers of samples.*\[label\] \[5\]"),
        ({"item": np.arange(4)}, r"equal numbers of samples.*\[item\] \[4\]"),
        ({"label": np.array([1, np.nan, 2, 3, 4, 5], np.float32)}, "label holds NaN or infinity"),
    ],
    ids=["labels", "ids", "nan"],
)
def test_samples_that_do_not_go_together_are_refused_by_the_server(served, changed, message):
    given = {**samples(6, 1), "label": np.ones(6, np.float32), **changed}
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        here(served[0] / "all", "adapt", given)


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("label", 1e6, r"\[label\] \[from\] \[0.0.*\] \[to\] \[1e\+06\]"),
        ("label", -1e19, r"\[label\] \[from\] \[-1e\+19\] \[to\]"),
        ("price", np.nan, r"\[price\] \[from\] .*nan"),
    ],
)
@pytest.mark.shown_by("test_deltas_that_are_not_finite_are_refused")
def test_samples_on_which_the_steps_diverge_are_refused(of_keras, column, value, told):
    folder, models = of_keras
    model = models["keras"][0]
    given = {name: each for name, each in samples(6, 1, more=True).items() if name in sample_inputs(model)}
    given["label"] = np.random.default_rng(3).random((6, 2)).astype(np.float32)
    given[column][4] = value
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"adapt: the 2 inner steps diverge on .*{told}"):
        here(folder / "keras", "adapt", given)
    label = given.pop("label")
    error, told = (
        (ConfigError, "'price'.* holds nan in sample 4")
        if column == "price"
        else (
            NotFiniteError,
            r"the 2 inner steps diverge on 6 samples with labels from .*1e\+\d+.*: their predictions",
        )
    )
    with pytest.raises(error, match=told):
        model.adapt(features(given), label)


def test_deltas_that_are_not_finite_are_refused(served, tmp_path):
    folder, models = served
    model, fast, query = models["all"][:3]
    bad = {**fast.deltas, "fc/bias": np.full(6, np.nan, np.float32)}
    sent = of_an_earlier_gmeta(replace(fast, deltas=bad))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"weights_bytes holds NaN, infinity.*: adapt the"
    ):
        here(folder / "all", "predict_with", {**samples(9, 2), "weights_bytes": sent})
    with pytest.raises(DataError, match="fast weights: fc/bias holds NaN or infinity; adapt the task again"):
        FastWeights.from_bytes(sent)
    for use in (lambda each: each.to_bytes(), lambda each: model.predict(query, weights=each)):
        with pytest.raises(
            NotFiniteError, match="fast weights: fc/bias holds NaN or infinity: adapt the task"
        ):
            use(replace(fast, deltas=bad))
    model = made("ridge")
    adapt = {"adapt": meta_signatures(model, dtype="float16")["adapt"]}
    export_model(model, tmp_path / "1", signatures=adapt)
    given = {**samples(6, 1), "label": np.full(6, 1e6, np.float32)}
    with pytest.raises(tf.errors.InvalidArgumentError, match="float16 ends at 65,504, and a delta is larger"):
        here(tmp_path / "1", "adapt", given)


def test_a_model_that_has_diverged_is_not_exported(tmp_path):
    model = made("maml")
    model.network.task_weights()["fc/bias"].assign(np.full(6, np.nan))
    with pytest.raises(NotFiniteError, match=r"fc/bias.* hold NaN or infinity: training has diverged"):
        export_model(model, tmp_path / "1")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_served_says_why():
    def model(name="item"):
        return MetaModel(EmbeddingCollection([FeatureConfig(name, dim=2)]), MLP({"out": 1}))

    compiled = model()
    compiled.compile()
    for settings, message in (
        ({"steps": -1}, "steps must be a whole number from 0 on, got -1"),
        ({"dtype": "int8"}, "dtype must be 'float32' or 'float16', got 'int8'"),
        ({"stale": "keep"}, "stale must be 'refuse' or 'apply', got 'keep'"),
    ):
        with pytest.raises(ConfigError, match=message):
            meta_signatures(compiled, **settings)
    with pytest.raises(ConfigError, match="compile the model first"):
        meta_signatures(model())
    named = model("label")
    named.compile()
    with pytest.raises(ConfigError, match="label can't be the name of a feature"):
        meta_signatures(named)
