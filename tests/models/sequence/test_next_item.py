"""A model of the next item: what it learns, by how many lookups, and that users stand alone."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.losses import SampledSoftmax
from gmeta.models import NextItemModel
from gmeta.ops import jagged
from gmeta.optimizers import Adam

ITEMS = 12


def make_model(time="time", eager=False, **settings):
    hashed = np.ndim(settings.get("items", 0)) > 0
    collection = EmbeddingCollection(
        [FeatureConfig("item", TableConfig("item", 8, initializer=Normal(0.0, 0.3)), hash=hashed)],
        optimizer=Adam(0.01),
    )
    backbone = HSTU(
        blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=6, bias_by_time=time is not None
    )
    settings = {"items": ITEMS, "max_length": 6, "negatives": 8, "ks": (1, 5)} | settings
    model = NextItemModel(collection, backbone, time=time, **settings)
    model.compile(tf.keras.optimizers.Adam(0.01), run_eagerly=eager)
    return model


def histories(users, seed=0):
    """Each item is followed by the same one, always."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(users):
        items = [int(random.integers(ITEMS))]
        for _ in range(random.integers(1, 6)):
            items.append((5 * items[-1] + 1) % ITEMS)
        found.append(items)
    times = [list(np.cumsum(random.integers(1, 999, len(items)))) for items in found]
    return {name: tf.ragged.constant(rows, tf.int64) for name, rows in (("item", found), ("time", times))}


def user(batch, number):
    return {name: column[number : number + 1] for name, column in batch.items()}


def test_jagged_histories_are_as_ragged_ones():
    model, batch = make_model(eager=True), histories(7)
    form = {name: jagged.from_ragged(column) for name, column in batch.items()}
    np.testing.assert_array_equal(model(form), model(batch))
    assert np.isfinite(model.fit(tf.data.Dataset.from_tensors(form), verbose=0).history["loss"][0])


# Quick: test_a_catalogue_of_any_ids_is_learnt_and_recommended[texts], which learns the same.
@pytest.mark.slow
def test_it_learns_what_follows_what():
    model, batch = make_model(), histories(64)
    data = tf.data.Dataset.from_tensor_slices(batch).batch(16)
    before = model.evaluate(data, verbose=0, return_dict=True)
    losses = model.fit(data, epochs=25, verbose=0).history["loss"]
    after = model.evaluate(data, verbose=0, return_dict=True)
    assert losses[-1] < losses[0] / 2
    assert after["ndcg@5"] > 0.9 > before["ndcg@5"]
    # What is nearest to the query of a history is what follows its last item.
    nearest = (model.predict(data, verbose=0) @ model.item_vectors().numpy().T).argmax(axis=1)
    assert np.mean(nearest == (5 * batch["item"][:, -1:].values.numpy() + 1) % ITEMS) > 0.9


class Asks(HSTU):
    """Counts the calls in which the first user has one item."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.short = tf.Variable(0, trainable=False)

    def call(self, x, **settings):
        if x.offsets[1] == 1:
            self.short.assign_add(1)
        return super().call(x, **settings)


@pytest.mark.shown_by("models/test_users_branches.py::test_fit_and_evaluate_convert_what_users_wrote")
def test_a_backbone_may_ask_tensors():
    backbone = Asks(blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=6, bias_by_time=False)
    collection = EmbeddingCollection([FeatureConfig("item", dim=8)])
    model = NextItemModel(collection, backbone, items=ITEMS, max_length=6, negatives=4)
    model.compile("sgd")
    items = tf.ragged.constant([[3], [1, 2, 3, 4], [5, 6], [7, 8]], tf.int64)
    data = tf.data.Dataset.from_tensor_slices({"item": items}).batch(2)
    before = int(backbone.short)  # of the call that made the weights
    model.predict(data, verbose=0)
    assert int(backbone.short) - before == 1
    model.evaluate(data, verbose=0)  # it reads what comes before the last item, as training does
    assert int(backbone.short) - before == 2
    model.fit(data, shuffle=False, verbose=0)
    assert int(backbone.short) - before == 3


def test_a_step_makes_one_lookup(monkeypatch):
    model, calls = make_model(), []
    lookup = model.collection.lookup
    monkeypatch.setattr(
        model.collection, "lookup", lambda *args, **kwargs: calls.append(args) or lookup(*args, **kwargs)
    )
    model.train_step(histories(5))
    assert len(calls) == 1


def test_the_loss_is_the_mean_over_tokens_of_each_user_alone(monkeypatch):
    model, batch = make_model(), histories(4)
    found = []

    def watched(self, queries, positives, ids, **kwargs):
        found.append((queries.numpy(), ids.numpy()))
        return tf.reduce_sum(queries * positives, axis=1)

    monkeypatch.setattr(SampledSoftmax, "__call__", watched)
    loss, samples, _ = learnt(model, batch)
    alone = [learnt(model, user(batch, number)) for number in range(4)]
    lengths = batch["item"].row_lengths().numpy() - 1
    assert samples == lengths.sum()
    np.testing.assert_allclose(loss, np.average([each[0] for each in alone], weights=lengths), rtol=1e-5)
    np.testing.assert_allclose(
        found[0][0], np.concatenate([each[0] for each in found[1:]]), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(found[0][1], batch["item"][:, 1:].values)


def learnt(model, batch):
    from gmeta.layers import record_lookups

    with tf.GradientTape() as tape, record_lookups(tape):
        return model.learn(batch)


def test_a_users_rank_does_not_depend_on_others():
    model, batch = make_model(), histories(3)
    together = model.test_step(batch)["mrr"]
    alone = []
    for number in range(3):
        model.reset_metrics()
        alone.append(model.test_step(user(batch, number))["mrr"])
    np.testing.assert_allclose(together, np.mean(alone), rtol=1e-6)


def test_of_a_long_history_the_last_items_are_read():
    model = make_model()
    long = {"item": tf.ragged.constant([[*range(9)]], tf.int64), "time": tf.ragged.constant([[*range(9)]])}
    short = {name: column[:, -6:] for name, column in long.items()}
    np.testing.assert_allclose(model(long), model(short), rtol=1e-6)


def test_histories_of_one_item_and_none():
    model = make_model(time=None)
    batch = {"item": tf.ragged.constant([[3], [], [1, 6]], tf.int64, ragged_rank=1)}
    assert model(batch).shape == (3, 8)
    assert int(learnt(model, batch)[1]) == 1
    model.test_step(batch)
    assert float(model.ranking.weight) == 1


def test_what_it_cannot_read_is_named():
    model, batch = make_model(), histories(2)
    with pytest.raises(ConfigError, match=r"lacks time; it has item"):
        model({"item": batch["item"]})
    with pytest.raises(ConfigError, match="item must be ragged"):
        model({**batch, "item": batch["item"].to_tensor()})
    with pytest.raises(ConfigError, match="item='film' isn't a feature"):
        make_model(item="film")
    with pytest.raises(ConfigError, match="item must be integers or texts, got float32"):
        model({**batch, "item": tf.cast(batch["item"], tf.float32)})
    with pytest.raises(ConfigError, match="time must be integers, such as seconds, got float32"):
        model({**batch, "time": tf.cast(batch["time"], tf.float64)})
    with pytest.raises(ConfigError, match=r"next_item: hstu.* needs times: name their column by time="):
        NextItemModel(model.collection, model.backbone, items=ITEMS, max_length=6)


def test_evaluation_by_labels_and_without_items_seen():
    """Against plain NumPy: the same query, several right items, with and without the history's items."""
    model = make_model(time=None, repeats=False, eager=True)
    batch = {"item": tf.ragged.constant([[3, 5], [7], [1, 2, 4]], tf.int64)}
    right = tf.ragged.constant([[0, 9], [], [11]], tf.int64)
    scores = model.predict(batch, verbose=0) @ model.item_vectors().numpy().T

    def expected(left_out):
        hits = []
        for user, (history, wanted) in enumerate(zip(batch["item"].to_list(), right.to_list(), strict=True)):
            own = scores[user].copy()
            own[history if left_out else []] = -np.inf
            hits += [np.mean([np.sum(own >= own[item]) <= 5 for item in wanted])] if wanted else []
        return np.mean(hits)

    data = tf.data.Dataset.from_tensors((batch, right))
    for left_out in (True, False, True):
        found = model.evaluate(data, verbose=0, return_dict=True, leave_out_seen=left_out)
        assert found["recall@5"] == pytest.approx(expected(left_out))
        assert {"hr@5", "ndcg@5"} < set(found)
    one = tf.data.Dataset.from_tensors((batch, tf.ragged.constant([[0], [9], [11]], tf.int64)))
    whole = {"item": tf.ragged.constant([[3, 5, 0], [7, 9], [1, 2, 4, 11]], tf.int64)}
    for left_out in (True, False):  # a label is the last item of a longer history
        by_label = model.evaluate(one, verbose=0, return_dict=True, leave_out_seen=left_out)
        by_last = model.evaluate(
            tf.data.Dataset.from_tensors(whole), verbose=0, return_dict=True, leave_out_seen=left_out
        )
        assert by_label["ndcg@5"] == pytest.approx(by_last["ndcg@5"])


def test_checkpoints_have_no_metric_that_earlier_versions_lack():
    assert "retrieval" not in dict(make_model()._trackable_children())


def test_labels_and_weights_beside_a_batch_are_refused():
    model, batch = make_model(), histories(3)
    for data, told in (((batch, tf.ones(3)), "labels"), ((batch, None, tf.ones(3)), "sample weights")):
        with pytest.raises(ConfigError, match=told):
            model.fit(tf.data.Dataset.from_tensors(data), verbose=0)
        with pytest.raises(ConfigError, match=told):
            model.evaluate(tf.data.Dataset.from_tensors(data), verbose=0)


def test_items_beyond_the_catalogue_are_refused_in_fit_and_evaluate():
    batch = histories(3)
    for wrong, run in ((ITEMS, make_model(eager=True).fit), (-1, make_model().evaluate)):
        values = tf.concat([batch["item"].values[:-2], [wrong], batch["item"].values[-1:]], axis=0)
        data = tf.data.Dataset.from_tensors({**batch, "item": batch["item"].with_values(values)})
        said = f"next_item: item {wrong} is not in the catalogue; items=12"
        with pytest.raises(ConfigError, match=said):
            run(data, verbose=0)


@pytest.mark.parametrize("kind", [pytest.param("numbers", marks=pytest.mark.slow), "texts"])
def test_a_catalogue_of_any_ids_is_learnt_and_recommended(tmp_path, kind):
    batch = histories(64)
    ids = (
        np.arange(-5, ITEMS - 5) * 10**17 + 7
        if kind == "numbers"
        else np.char.add("ö", np.arange(ITEMS).astype("U"))
    )
    ids = ids if kind == "numbers" else np.array([each.encode() for each in ids], object)
    model = make_model(items=ids, negatives=64)
    other = {**batch, "item": batch["item"].with_values(tf.gather(ids, batch["item"].values))}
    data = tf.data.Dataset.from_tensor_slices(other).batch(16)
    model.fit(data, epochs=25, verbose=0)
    assert model.evaluate(data, verbose=0, return_dict=True)["ndcg@5"] > 0.9
    model.save(tmp_path / "model.keras")
    for each in (model, tf.keras.models.load_model(tmp_path / "model.keras")):
        items, scores = each.recommend(other, 3)
        expected = ids[(5 * batch["item"][:, -1:].values.numpy() + 1) % ITEMS]
        assert np.mean(items[:, 0].numpy() == expected) > 0.9
        products = each(other).numpy() @ each.item_vectors().numpy().T
        for row, own in enumerate(batch["item"].to_list()):
            products[row, list(set(own))] += float(each.repeat_bias)
        np.testing.assert_allclose(scores, -np.sort(-products, axis=1)[:, :3], rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ConfigError, match=r"next_item: item \d+ is not in the catalogue; items= has 12 others"
    ):
        make_model(items=ids, eager=True).fit(tf.data.Dataset.from_tensors(batch), verbose=0)


def test_items_that_were_seen_are_left_out_of_recommendations():
    model, batch = make_model(), histories(8)
    items, scores = model.recommend(batch, ITEMS, leave_out_seen=True)
    for row, found, score in zip(batch["item"].to_list(), items.numpy(), scores.numpy(), strict=True):
        left = ITEMS - len(set(row))
        assert set(found[:left]) == set(range(ITEMS)) - set(row)
        assert (found[left:] == -1).all()
        assert np.isneginf(score[left:]).all()
    with pytest.raises(ConfigError, match="k must be at most 12"):
        model.recommend(batch, ITEMS + 1)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"items": 0}, "items must be a whole number from 1 on, got 0"),
        ({"items": [3, 4, 3]}, "items must be distinct ids, got 3 twice"),
        ({"items": [3, -1]}, "items can't hold -1"),
        ({"items": ["a", ""]}, "items can't hold b''"),
        ({"items": [0.5, 1.5]}, "integers or texts, got float64"),
        ({"items": []}, "of shape"),
    ],
)
def test_catalogues_that_make_no_sense_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        make_model(**settings)


def test_features_that_nothing_would_read_are_refused():
    backbone = HSTU(blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=6, bias_by_time=False)
    two = EmbeddingCollection([FeatureConfig("item", dim=8), FeatureConfig("city", dim=8)])
    with pytest.raises(ConfigError, match="embeds city besides 'item'"):
        NextItemModel(two, backbone, items=ITEMS, max_length=6)
    pooled = EmbeddingCollection([FeatureConfig("item", dim=8, combiner="mean")])
    with pytest.raises(ConfigError, match="has a combiner"):
        NextItemModel(pooled, backbone, items=ITEMS, max_length=6)


def test_it_is_saved_whole(tmp_path):
    loss = SampledSoftmax(temperature=0.1, in_batch=False)
    model, batch = make_model(negatives=4, loss=loss, eager=True), histories(9)
    model.fit(tf.data.Dataset.from_tensors(batch), epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    other = tf.keras.models.load_model(tmp_path / "model.keras")
    for name, value in model.get_config().items():
        assert name in ("collection", "backbone") or other.get_config()[name] == value
    np.testing.assert_array_equal(other(batch), model(batch))
    # It goes on where the other one stands, negatives included.
    found = [float(each.train_step(batch)["loss"]) for each in (other, model) if not each.reset_metrics()]
    assert found[0] == found[1]


def test_that_nobody_has_an_item_twice_is_learnt():
    rows = [np.random.default_rng(user).permutation(ITEMS)[:6].tolist() for user in range(96)]
    batch = {"item": tf.ragged.constant(rows, tf.int64)}
    data = tf.data.Dataset.from_tensor_slices(batch).batch(16)
    model = make_model(time=None)
    model.fit(data, epochs=15, verbose=0)
    assert float(model.repeat_bias) < -3
    items, _ = model.recommend(batch, 3)
    assert all(not set(row) & set(found) for row, found in zip(rows, items.numpy(), strict=True))


# Quick: test_that_nobody_has_an_item_twice_is_learnt learns the same number, downwards.
@pytest.mark.slow
def test_that_all_have_an_item_again_is_learnt():
    rows = [np.random.default_rng(user).permutation(ITEMS)[:6].tolist() for user in range(96)]
    again = make_model(time=None)
    always = {"item": tf.ragged.constant([[row[0]] * 6 for row in rows], tf.int64)}
    again.fit(tf.data.Dataset.from_tensor_slices(always).batch(16), epochs=15, verbose=0)
    assert float(again.repeat_bias) > 0


@pytest.mark.parametrize(
    ("per", "repeats"),
    [
        ("user", False),
        ("position", True),
        # Quick: the two above.
        pytest.param("user", True, marks=pytest.mark.slow),
        pytest.param("position", False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.shown_by(case="user-False")
def test_negatives_of_a_user_or_a_position_are_learnt_from(per, repeats):
    model, batch = make_model(negatives_per=per, repeats=repeats), histories(32)
    losses = model.fit(tf.data.Dataset.from_tensor_slices(batch).batch(16), epochs=8, verbose=0).history[
        "loss"
    ]
    assert losses[-1] < losses[0]


def test_a_config_without_newer_settings_makes_the_model_of_its_time():
    config = make_model().get_config()
    for name in ("negatives_per", "law", "repeats", "token_scale", "places", "norm", "popularity"):
        del config[name]
    model = NextItemModel.from_config(config)
    assert (model.repeats, model.norm, model.counted_from) == (False, False, "from_start")
    assert model.token_scale == 8**0.5
    assert len(model.trainable_variables) == len(make_model().trainable_variables) - 3


def test_negatives_drawn_by_popularity_are_corrected_for(monkeypatch):
    counts = np.arange(ITEMS) + 1
    model, batch, found = make_model(law="popularity", popularity=counts, negatives=5), histories(6), {}

    def watched(self, queries, positives, ids, **kwargs):
        found.update(kwargs, ids=ids)
        return tf.reduce_sum(queries * positives, axis=1)

    with monkeypatch.context() as patch:
        patch.setattr(SampledSoftmax, "__call__", watched)
        learnt(model, batch)
    for numbers, log_q in ((found["ids"], found["log_q"]), (found["negative_ids"], found["negative_log_q"])):
        np.testing.assert_allclose(log_q, np.log(5 * counts[numbers.numpy()] / counts.sum()), rtol=1e-5)
    again = NextItemModel.from_config(model.get_config())
    np.testing.assert_array_equal(again.draw(None, 3), model.draw(None, 3))


def test_popularity_is_kept_and_refused_where_nothing_reads_it():
    loss = SampledSoftmax(temperature=1.0, normalize=False)
    model = make_model(popularity=np.arange(ITEMS), loss=loss, eager=True)
    losses = model.fit(tf.data.Dataset.from_tensors(histories(9)), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(
        model.get_config()["popularity"], np.arange(ITEMS) / np.arange(ITEMS).sum(), rtol=1e-6
    )
    for settings, told in (
        ({"popularity": np.ones(ITEMS)}, "there are neither"),
        ({"law": "popularity"}, "the law 'popularity' draws items in proportion to their counts"),
        ({"law": "in-batch"}, "law must be 'uniform' or 'popularity', got 'in-batch'"),
        ({"popularity": np.ones(3), "loss": loss}, "must be 12 numbers from 0 on"),
        ({"negatives_per": "batch"}, "must be 'step', 'user' or 'position', got 'batch'"),
        ({"places": "middle"}, "must be 'from_start' or 'from_end', got 'middle'"),
        ({"negatives": 0}, "negatives must be a whole number from 1 on, got 0"),
    ):
        with pytest.raises(ConfigError, match=told):
            make_model(**settings)
