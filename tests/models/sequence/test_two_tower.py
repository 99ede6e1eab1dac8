"""The two-tower model: its loss is that of loops for every law of negatives, and it learns."""

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import TwoTower
from gmeta.optimizers import Adam

ITEMS, DIM = 12, 8
COUNTS = np.arange(1, ITEMS + 1)
LAWS = ["uniform", "in-batch", "popularity", ("in-batch", "uniform")]


def make_model(law="uniform", extra=(), **settings):
    names = ["item", "user", "history", *extra]
    features = [FeatureConfig(name, TableConfig(name, DIM, initializer=Normal(0.0, 0.3))) for name in names]
    features.append(FeatureConfig("bias", TableConfig("bias", 1, initializer=Normal(0.0, 0.3))))
    popularity = COUNTS if law != "uniform" else None
    settings = {
        "items": ITEMS,
        "history": "history",
        "bias": "bias",
        "ks": (1, 3),
        "popularity": popularity,
    } | settings
    model = TwoTower(EmbeddingCollection(features, optimizer=Adam(0.02)), law=law, **settings)
    model.compile(tf.keras.optimizers.Adam(0.02))
    return model


def users(count, seed=0):
    """Items of a user are all even or all odd."""
    rng = np.random.default_rng(seed)
    own = [(2 * rng.permutation(ITEMS // 2)[: rng.integers(2, 5)] + n % 2).tolist() for n in range(count)]
    return {"user": tf.range(count, dtype=tf.int64), "item": tf.ragged.constant(own, tf.int64)}


def rows(model, batch):
    """All vectors of the tables, by feature."""
    every = tf.range(ITEMS, dtype=tf.int64)
    found = model.collection({"item": every, "history": every, "bias": every, "user": batch["user"]})
    return {name: vectors.numpy().astype(np.float64) for name, vectors in found.items()}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_is_that_of_loops(law, normalize):
    model = make_model(law, negatives=6, item_dropout=0.0, normalize=normalize, temperature=0.5, pooling=1.0)
    batch = users(5)
    x, read = model._read(batch)
    vectors, laws = rows(model, x), (law,) if isinstance(law, str) else law
    drawn = {each: draw(read.right, 0).numpy() for each, draw in model.negatives.draws.items()}
    own = batch["item"].to_list()
    right = [item for items in own for item in items]
    shares = COUNTS / COUNTS.sum()
    q = np.zeros(ITEMS)
    for each in laws:
        q += {"in-batch": (len(right) - 1) * shares, "uniform": 6 / ITEMS, "popularity": 6 * shares}[each]
    q = q if law != "uniform" else np.ones(ITEMS)
    negatives = [*(right if "in-batch" in laws else []), *np.concatenate([[], *drawn.values()]).astype(int)]
    losses = []

    def unit(vector):
        return vector / np.linalg.norm(vector) if normalize else vector

    for user, items in enumerate(own):
        query = unit(vectors["user"][user] + np.mean([vectors["history"][item] for item in items], axis=0))
        weight = {
            j: np.exp(query @ unit(vectors["item"][j]) / 0.5 + vectors["bias"][j, 0]) / q[j]
            for j in range(ITEMS)
        }
        others = sum(weight[j] for j in negatives if j not in items)
        losses += [-np.log(weight[item] / (weight[item] + others)) for item in items]
    with tf.GradientTape() as tape, gmeta.layers.record_lookups(tape):
        loss, samples, _ = model.learn(batch)
    assert int(samples) == len(right)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-5)


# Quick: test_the_loss_is_that_of_loops, of every law.
@pytest.mark.parametrize("law", [LAWS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in LAWS[1:])])
def test_it_learns_what_belongs_together(law):
    model, batch = make_model(law), users(48)
    labels = tf.ragged.constant([[int(own[-1])] for own in batch["item"].to_list()], tf.int64)
    known = {**batch, "item": batch["item"][:, :-1]}
    test = tf.data.Dataset.from_tensor_slices((known, labels)).batch(16)
    model.fit(tf.data.Dataset.from_tensor_slices(known).batch(16), epochs=12, verbose=0)
    found = model.recommend(known, 3)[0].numpy()
    assert np.mean(found % 2 == batch["user"].numpy()[:, np.newaxis] % 2) > 0.9
    assert not any(
        set(items) & set(own) for items, own in zip(found.tolist(), known["item"].to_list(), strict=True)
    )
    measured = model.evaluate(test, verbose=0, return_dict=True)
    ranks = [
        items.index(right[0]) if right[0] in items else 9
        for items, right in zip(found.tolist(), labels.to_list(), strict=True)
    ]
    assert measured["hr@1"] == pytest.approx(np.mean(np.array(ranks) == 0), abs=0.05)  # but for ties
    assert measured["recall@3"] == pytest.approx(np.mean(np.array(ranks) < 3), abs=0.05)


def test_columns_of_items_and_users_reach_the_towers():
    """Items that nobody has had are found by their genre alone."""
    genre = np.arange(ITEMS) % 2
    model = make_model(extra=("genre", "club"), item_columns={"genre": genre}, negatives=8, hidden=(16,))
    batch = users(64)
    batch["item"] = tf.ragged.constant(
        [[i for i in own if i < 10] for own in batch["item"].to_list()], tf.int64
    )
    batch["club"] = batch["user"] % 2
    model.fit(tf.data.Dataset.from_tensor_slices(batch).batch(16), epochs=15, verbose=0)
    stranger = {
        "user": tf.constant([900, 901], tf.int64),
        "club": tf.constant([0, 1], tf.int64),
        "item": tf.RaggedTensor.from_row_lengths(tf.zeros([0], tf.int64), [0, 0]),
    }
    scores = model.predict(stranger, verbose=0) @ model.item_vectors().numpy().T
    assert scores[0, 10] > scores[0, 11]
    assert scores[1, 11] > scores[1, 10]
    again = TwoTower.from_config(model.get_config())
    again.set_weights(model.get_weights())
    np.testing.assert_allclose(
        again.predict(stranger, verbose=0), model.predict(stranger, verbose=0), rtol=1e-5
    )


@pytest.mark.shown_by("models/training/test_pipeline.py::test_all_numbers_are_those_of_depth_0")
def test_it_trains_alike_with_a_pipeline_and_from_a_file(tmp_path):
    batch = users(12)
    data = tf.data.Dataset.from_tensor_slices(batch).batch(4)
    found = []
    for pipeline in (None, gmeta.Pipeline(depth=1)):
        model = make_model(("in-batch", "popularity"), negatives=5, dropout=0.2)
        model.compile(tf.keras.optimizers.Adam(0.02), pipeline=pipeline)
        model.fit(data, epochs=2, shuffle=False, verbose=0)
        found.append(model.item_vectors().numpy())
    np.testing.assert_array_equal(*found)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(batch, verbose=0), model.predict(batch, verbose=0))


@pytest.mark.parametrize("ids", ["numbers", "texts"])
@pytest.mark.shown_by(case="numbers")
def test_an_export_answers_what_the_model_does(tmp_path, ids):
    from gmeta.export import export_model

    numbers = ids == "numbers"
    every = np.arange(ITEMS + 1) * 1000 + 7 if numbers else np.array([f"sku/{n}" for n in range(ITEMS + 1)])
    *known, new = every.tolist()
    features = [
        FeatureConfig(name, dim=DIM, hash=name != "user") for name in ("user", "item", "history", "club")
    ]
    model = TwoTower(EmbeddingCollection(features), items=known, history="history")
    model.compile("adam", run_eagerly=True)
    batch = users(6)
    own = [[known[item] for item in items] for items in batch["item"].to_list()]
    batch = {
        "user": batch["user"],
        "item": tf.ragged.constant(own, tf.int64 if numbers else tf.string),
        "club": tf.constant([1, 2] * 3, tf.int64) if numbers else tf.constant(["a", "b"] * 3),
    }
    model.fit(tf.data.Dataset.from_tensors(batch), epochs=2, verbose=0)
    export_model(model, tmp_path / "1", text_ids=not numbers)
    served = tf.saved_model.load(str(tmp_path / "1")).signatures
    longer = tf.ragged.constant([[*items, new] for items in own], batch["item"].dtype)
    padded = {**batch, "item": longer.to_tensor(-1 if numbers else "")}
    answer = served["recommend"](**padded)
    items, scores = model.recommend(batch, 10)
    np.testing.assert_array_equal(answer["items"], items)
    np.testing.assert_allclose(answer["scores"], scores, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(served["query"](**padded)["query"], model.predict(batch, verbose=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"law": "in-batch", "popularity": None}, "needs popularity="),
        ({"law": "popularity", "popularity": None}, "in proportion to their counts"),
        ({"popularity": np.ones(ITEMS)}, "there are neither"),
        ({"law": "rare"}, "law must be"),
        ({"history": "past"}, "the collection lacks past"),
        ({"item_columns": {"user": [1]}}, "has 1 values of 'user', and the catalogue 12 items"),
        ({"item_dropout": 1.0}, "at least 0 and below 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"bias": "user"}, "must have width 1"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        make_model(**settings)


def test_evaluation_needs_right_items():
    with pytest.raises(ConfigError, match="right items as labels"):
        make_model().evaluate(tf.data.Dataset.from_tensors(users(3)), verbose=0)


def test_new_items_have_the_vectors_of_their_columns():
    kinds = np.arange(ITEMS) % 2
    model = make_model(extra=["kind"], item_columns={"kind": kinds}, negatives=None)
    data = tf.data.Dataset.from_tensor_slices(users(64)).batch(16)
    model.fit(data, epochs=10, verbose=0)
    known, new = model.item_vectors().numpy(), model.new_item_vectors({"kind": [0, 1]}).numpy()
    assert new.shape == (2, DIM + 1)
    own = model.collection({**_nothing(model), "kind": tf.constant([0, 1])}, training=False)["kind"]
    np.testing.assert_allclose(new[:, :DIM], own)
    np.testing.assert_allclose(new[:, DIM], 0.0)
    queries = model(users(64), training=False).numpy()
    scores = queries[:, :DIM] @ new[:, :DIM].T
    assert (scores.argmax(axis=1) == np.arange(64) % 2).mean() > 0.9
    assert known.shape == (ITEMS, DIM + 1)
    with pytest.raises(ConfigError, match="new_item_vectors needs kind, and got nothing"):
        model.new_item_vectors({})
    with pytest.raises(ConfigError, match="needs a model with item_columns="):
        make_model().new_item_vectors({"kind": [0]})


def _nothing(model):
    return {feature.name: tf.zeros([0], tf.int64) for feature in model.collection.features}
