"""Exported models over sequences answer, in a process without gmeta, what the trained ones do here."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.export.meta_models import meta_sequence_signatures
from gmeta.export.saved_model import PADDING, export_model
from gmeta.export.sequence_models import next_item_signatures
from gmeta.initializers import Constant
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, FuXi, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import GRM, MetaGRM, NextItemModel
from gmeta.models.meta.fast_weights import FastWeights
from gmeta.optimizers import SGD
from gmeta.preprocess.plan.column_values import hash_text
from support.drawn_batches import draw_exposures, of_user, with_targets
from support.serving import ask_all

CLOSE = {"rtol": 2e-5, "atol": 2e-6}
START = Constant(0.1)  # initial rows that take no graph to compute: unknown ids are tested elsewhere
ITEMS = {
    "numbers": 12,
    "hashes": np.arange(-6, 6) * 10**17 + 3,
    "texts": np.array([f"sku/{n}".encode() for n in range(12)], object),
}


def next_item(items, backbone=HSTU):
    hashed = np.ndim(items) > 0
    collection = EmbeddingCollection(
        [FeatureConfig("item", TableConfig("item", 8, initializer=START), hash=hashed)], optimizer=SGD(0.5)
    )
    blocks = backbone(blocks=1, heads=2, attention_dim=4, value_dim=4, max_length=6)
    model = NextItemModel(collection, blocks, items=items, max_length=6, time="time")
    return with_rows(model, {"item": model.catalogue.all_keys})


def with_rows(model, ids):
    """The model with rows of these ids that are unlike each other."""
    lookup, random = model.collection.lookup(ids), np.random.default_rng(1)
    gradients = [tf.constant(random.normal(size=rows.shape), tf.float32) for rows in lookup.rows]
    model.collection.apply_gradients(lookup, gradients, 0.5)
    return model


def histories(items, seed=0):
    """Of 9 users, one of none and one of more than is read."""
    random = np.random.default_rng(seed)
    lengths = [4, 0, 9, *random.integers(1, 7, 6)]
    ids = np.arange(items) if np.ndim(items) == 0 else items
    found = {
        "item": tf.constant(random.choice(ids, sum(lengths))),
        "time": tf.constant(np.cumsum(random.integers(1, 999, sum(lengths)))),
    }
    return {name: tf.RaggedTensor.from_row_lengths(column, lengths) for name, column in found.items()}


def with_strangers(batch, stranger):
    """With another id in place of every third, and how many of them each user's last six items have."""
    items = batch["item"]
    values = np.where(np.arange(items.values.shape[0]) % 3 == 1, stranger, items.values.numpy())
    items = items.with_values(tf.constant(values, items.dtype))
    unknown = [sum(item == stranger for item in row[-6:]) for row in items.to_list()]
    assert 0 < sum(unknown) < sum(item == stranger for row in items.to_list() for item in row)
    return {**batch, "item": items}, unknown


def matrices(columns, prefix=""):
    """As a client sends them: filled up on the left, where the model isn't to look."""
    found = {}
    for name, column in columns.items():
        if isinstance(column, tf.RaggedTensor):
            fill = "" if column.dtype == tf.string else PADDING
            padded = tf.reverse(column, [1]).to_tensor(fill)
            column = tf.reverse(padded, [1])
        found[prefix + name] = np.asarray(column)
    return found


# Quick: test_clients_send_texts_and_what_they_had_is_left_out[texts], and of numbers
# tests/models/generative/test_flat_retriever.py, test_an_exported_model_answers_as_here.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numbers", "hashes"])
def test_what_comes_next_is_answered_as_here(kind, tmp_path):
    items = ITEMS[kind]
    model, batch = next_item(items, FuXi if kind == "hashes" else HSTU), histories(items)
    batch, unknown = with_strangers(batch, 10**6)
    exported = export_model(model, tmp_path / "1", text_ids=False)
    assert list(exported.signatures) == ["recommend", "query"]
    sent = matrices(batch)
    best, query = ask_all([(tmp_path / "1", name, sent) for name in ("serving_default", "query")])
    np.testing.assert_allclose(query["query"], model.predict(batch, verbose=0), **CLOSE)
    items, scores = model.recommend(batch, 10)
    np.testing.assert_array_equal(best["items"], items)
    np.testing.assert_allclose(best["scores"], scores, **CLOSE)
    np.testing.assert_array_equal(best["unknown_history"], unknown)


@pytest.mark.shown_by("cli/test_next_item.py::test_the_export_answers_what_recommend_writes")
@pytest.mark.parametrize("kind", [pytest.param("hashes", marks=pytest.mark.slow), "texts"])
def test_clients_send_texts_and_what_they_had_is_left_out(kind, tmp_path):
    texts = ITEMS["texts"]
    items = texts if kind == "texts" else np.array([hash_text(text.decode()) for text in texts])
    model, (batch, unknown) = next_item(items), with_strangers(histories(texts), b"sku/new")
    export_model(model, tmp_path / "1", signatures=next_item_signatures(model, k=12, leave_out_seen=True))
    (answer,) = ask_all([(tmp_path / "1", "recommend", matrices(batch))])
    items, scores = model.recommend(batch, 12, leave_out_seen=True)
    np.testing.assert_array_equal(answer["items"], items)
    np.testing.assert_allclose(answer["scores"], scores, **CLOSE)
    np.testing.assert_array_equal(answer["unknown_history"], unknown)
    for row, found in zip(batch["item"][:, -6:].to_list(), answer["items"].tolist(), strict=True):
        had = set(row) if kind == "texts" else {hash_text(text.decode()) for text in row}
        assert not had & set(found)


def ranker(text=False, **settings):
    features = [
        FeatureConfig(name, TableConfig(name, 8, initializer=START), hash=text)
        for name in ("item", "category", "city", "age")
    ]
    features += [
        FeatureConfig("action", TableConfig("action", 4, initializer=START)),
        FeatureConfig("tags", TableConfig("tags", 8, initializer=START), combiner="mean", hash=text),
    ]
    settings = {"time": "time", "backbone": "hstu", "by_time": True} | settings
    model = GRM.of(
        features,
        contexts=["city", "age", "tags"],
        history=["item", "category", "action"],
        targets=["item", "category"],
        dim=8,
        blocks=1,
        max_length=10,
        expert_units=[8],
        tower_units=[8],
        optimizer=SGD(0.5),
        **settings,
    )
    drawn = draw_exposures(3, [40, 40], [40, 40], tags=True)
    return with_rows(model, model.columns.ids(as_texts(drawn) if text else drawn))


def as_texts(batch, names=("item", "category", "city", "age", "tags")):
    return {
        part: {
            name: tf.strings.as_string(column) if name in names else column
            for name, column in columns.items()
        }
        if isinstance(columns, dict)
        else columns
        for part, columns in batch.items()
    }


def sent_of(model, batch, labels=()):
    columns = model.columns
    found = {}
    for part in ("contexts", "history", "targets"):
        names = [*getattr(columns, part), *([columns.time] if columns.time and part != "contexts" else [])]
        names += [columns.scenario] if columns.scenario and part == "targets" else []
        found |= matrices({name: batch[part][name] for name in names}, f"{part}_")
    return found | matrices({name: batch["labels"][name] for name in labels}, "labels_")


# Quick: test_a_ranker_adapts_to_a_user_on_the_server, whose `predict` ranks alike.
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"text": True}, marks=pytest.mark.slow),
        pytest.param({"backbone": "fuxi", "by_time": False}, marks=pytest.mark.slow),
        pytest.param(
            {"time": None, "by_time": False, "scenario": "scene", "scenarios": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=["hstu", "texts", "fuxi", "scenarios"],
)
def test_exposures_are_ranked_as_here(settings, tmp_path):
    model = ranker(**settings)
    batch = draw_exposures(3, [4, 0, 6, 1], [3, 2, 4, 0], tags=True)
    strange = {"item": [0, 2], "category": [0, 1]}
    for name, users in strange.items():  # an id that has no row, at the end of these users' histories
        rows = [
            [*row[:-1], 900] if user in users and row else row
            for user, row in enumerate(batch["history"][name].to_list())
        ]
        batch["history"][name] = tf.ragged.constant(rows, batch["history"][name].dtype)
    batch = as_texts(batch) if settings.get("text") else batch
    export_model(model, tmp_path / "1")
    (answer,) = ask_all([(tmp_path / "1", "serving_default", sent_of(model, batch))])
    logits = model(batch)
    np.testing.assert_array_equal(answer.pop("unknown_history"), [2, 0, 1, 0])
    assert set(answer) == {f"{name}{end}" for name in ("click", "cvr", "buy") for end in ("", "_logit")}
    for task, name in (("ctr", "click"), ("cvr", "cvr"), ("ctcvr", "buy")):
        expected = tf.reverse(tf.reverse(logits[task], [1]).to_tensor(0), [1])
        np.testing.assert_allclose(answer[f"{name}_logit"], expected, **CLOSE)
        there = tf.reverse(tf.reverse(tf.ones_like(logits[task]), [1]).to_tensor(0), [1]).numpy()
        np.testing.assert_allclose(answer[name], there / (1 + np.exp(-expected)), **CLOSE)


def adapting():
    model = MetaGRM(
        ranker(report=None, weights={"ctcvr": 2.0}),
        inner=InnerLoop(steps=2, learning_rate=0.3, adapt=["mixture", "heads"]),
    )
    model.compile("sgd")
    return model


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory):
    """A model that adapts, and where it is exported."""
    model, folder = adapting(), tmp_path_factory.mktemp("adaptive") / "1"
    export_model(model, folder)
    return model, folder


@pytest.mark.shown_by("export/test_export_meta.py::test_three_signatures_answer_as_the_model_does")
def test_a_ranker_adapts_to_a_user_on_the_server(adaptive):
    model, folder = adaptive
    batch = draw_exposures(5, [5, 3], [6, 4], tags=True)
    user = of_user(batch, 0)
    shown, new = (
        with_targets(user, lambda column, cut=cut: column[:, cut]) for cut in (slice(3), slice(3, 6))
    )
    everybody, adapted, many, *each = ask_all(
        [
            (folder, "predict", sent_of(model.ranker, batch)),
            (folder, "adapt", sent_of(model.ranker, shown, ["click", "buy"])),
            (folder, "adapt_many", sent_of(model.ranker, batch, ["click", "buy"])),
            *(
                (folder, "adapt", sent_of(model.ranker, of_user(batch, user), ["click", "buy"]))
                for user in (0, 1)
            ),
        ]
    )
    for found, one in zip(many["weights_bytes"], each, strict=True):
        deltas, expected = (
            FastWeights.from_bytes(data).deltas for data in (found, one["weights_bytes"].item())
        )
        assert deltas.keys() == expected.keys()
        for name, delta in expected.items():
            np.testing.assert_allclose(deltas[name], delta, rtol=1e-4, atol=1e-6)
    whole = model.ranker(batch)
    np.testing.assert_allclose(everybody["click_logit"][0], whole["ctr"][0], **CLOSE)
    data = adapted["weights_bytes"].item()
    assert FastWeights.from_bytes(data).steps == 2
    sent = {**sent_of(model.ranker, new), "weights_bytes": np.array(data, object)}
    (answer,) = ask_all([(folder, "predict_with", sent)])
    after = model.predict_after(user, [0, 2])
    for steps, close in ((2, True), (0, False)):
        expected = model.by_label(after[steps])["ctcvr"]
        assert np.allclose(answer["buy_logit"], expected, rtol=1e-4, atol=1e-5) == close
    np.testing.assert_allclose(answer["buy"], 1 / (1 + np.exp(-answer["buy_logit"])), **CLOSE)


@pytest.mark.shown_by(
    "export/test_export_meta.py::test_samples_that_do_not_go_together_are_refused_by_the_server"
)
def test_requests_that_do_not_go_together_are_refused_by_the_server(adaptive):
    model, folder = adaptive
    batch = draw_exposures(5, [5, 3], [6, 4], tags=True)
    sent = sent_of(model.ranker, batch, ["click", "buy"])
    one = sent_of(model.ranker, of_user(batch, 0), ["click", "buy"])
    predict, adapt = (tf.saved_model.load(folder).signatures[name] for name in ("predict", "adapt"))
    plain = {name: value for name, value in sent.items() if not name.startswith("labels_")}
    wrong = plain["history_action"].copy()
    wrong[0, -1] = PADDING
    for signature, given, told in (
        (adapt, sent, "one user per request"),
        (adapt, {**one, "labels_click": one["labels_click"] * np.nan}, "labels_click holds NaN"),
        (adapt, {**one, "labels_buy": one["labels_buy"][:, :2]}, "labels_buy must have the shape"),
        (predict, {**plain, "history_action": wrong}, "history_action and history_item must be padded"),
        (
            predict,
            {**plain, "targets_time": plain["targets_time"][:, :1]},
            "targets_time must have the shape",
        ),
        (predict, {**plain, "contexts_age": plain["contexts_age"][:1]}, "contexts_age and targets_item"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=told):
            signature(**{name: tf.constant(value) for name, value in given.items()})


def test_what_cannot_be_served_says_why(tmp_path):
    with pytest.raises(ConfigError, match="k must be at most 12, the catalogue's size, got 13"):
        next_item_signatures(next_item(12), k=13)
    with pytest.raises(ConfigError, match="label='click' has no use"):
        export_model(ranker(), tmp_path / "1", label="click")
    with pytest.raises(ConfigError, match="stale must be 'refuse' or 'apply', got 'keep'"):
        meta_sequence_signatures(adapting(), stale="keep")


def test_an_ordinary_model_answers_by_its_label_with_the_probability_beside_the_logit(tmp_path):
    collection = EmbeddingCollection([FeatureConfig("item", dim=4)])
    given = {"item": tf.keras.Input([], dtype=tf.int64, name="item")}
    model = tf.keras.Model(given, tf.keras.layers.Dense(1)(collection(given)["item"]))
    model.compile("adam", tf.keras.losses.BinaryCrossentropy(from_logits=True))
    export_model(model, tmp_path / "1", label="click")
    sent = {"item": np.arange(5)}
    (answer,) = ask_all([(tmp_path / "1", "serving_default", sent)])
    np.testing.assert_allclose(answer["click_logit"], model(sent), **CLOSE)
    np.testing.assert_allclose(answer["click"], tf.sigmoid(model(sent)), rtol=1e-6)
    model.compile("adam", "mse")
    assert set(export_model(model, tmp_path / "2", label="price").answers["serving_default"]) == {"price"}
