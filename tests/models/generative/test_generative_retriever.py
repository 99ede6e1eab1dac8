"""A model that generates codes: its probabilities, its search against all items, and what it learns."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from gmeta import Pipeline
from gmeta.core.errors import ConfigError
from gmeta.core.semantic_ids import Codebooks, SemanticIds
from gmeta.initializers import Normal
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, TableConfig, record_lookups
from gmeta.models import GenerativeRetriever
from gmeta.ops import jagged
from gmeta.optimizers import Adam

ITEMS, CODES, LONGEST = 40, (4, 3), 6


def make_ids(items=ITEMS, sizes=CODES, seed=0, ids=None):
    """Codes at random, some shared by several items."""
    random = np.random.default_rng(seed)
    digits = np.column_stack([random.integers(0, size, items) for size in sizes])
    _, groups = np.unique(digits, axis=0, return_inverse=True)
    last = [int((groups[:place] == group).sum()) for place, group in enumerate(groups)]
    books = Codebooks(tuple(random.normal(size=(size, 2)).astype(np.float32) for size in sizes))
    digits = np.column_stack([digits, last]).astype(np.int32)
    return SemanticIds(np.arange(items) if ids is None else ids, digits, books, "kmeans")


def make_model(ids=None, *, hashed=False, time=None, **settings):
    table = TableConfig("item", 8, initializer=Normal(0.0, 0.3))
    collection = EmbeddingCollection([FeatureConfig("item", table, hash=hashed)], optimizer=Adam(0.01))
    backbone = HSTU(
        blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=LONGEST, bias_by_time=time is not None
    )
    settings = {"max_length": LONGEST, "width": 8, "ks": (1, 5), "beam": 20, "negatives": 8} | settings
    model = GenerativeRetriever(collection, backbone, ids or make_ids(), time=time, **settings)
    model.compile(tf.keras.optimizers.Adam(0.01))
    return model


def scatter(model, seed=0):
    """Give all weights numbers apart from their initial ones, so that no two items are alike."""
    random = np.random.default_rng(seed)
    for weight in model.trainable_variables:
        weight.assign_add(random.normal(0, 0.5, weight.shape))
    return model


def histories(users, seed=0):
    """Each item is followed by the same one, always, and none comes again."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(users):
        items = [int(random.integers(ITEMS))]
        for _ in range(random.integers(1, 6)):
            items.append((7 * items[-1] + 1) % ITEMS)
        found.append(items)
    return {"item": tf.ragged.constant(found, tf.int64)}


@pytest.mark.parametrize(("sizes", "depth"), [((3,), None), ((4, 3), None), ((4, 3), 1), ((3, 2, 3), 2)])
def test_the_probabilities_of_all_items_sum_to_one(sizes, depth):
    model = scatter(make_model(make_ids(sizes=sizes), depth=depth))
    logs = model.item_log_probs(histories(5)).numpy()
    assert logs.shape == (5, ITEMS)
    np.testing.assert_allclose(np.exp(logs).sum(axis=1), 1, rtol=1e-5)
    assert np.ptp(logs) > 1


@pytest.mark.parametrize(("sizes", "depth"), [((3,), None), ((4, 3), None), ((4, 3), 1), ((3, 2, 3), 3)])
@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.shown_by(case="2-sizes3-3")
def test_a_beam_as_wide_as_the_catalogue_is_a_search_of_all_items(sizes, depth, blocks):
    model = scatter(make_model(make_ids(sizes=sizes), depth=depth, blocks=blocks))
    batch = histories(5)
    logs = model.item_log_probs(batch).numpy()
    items, scores = model.retrieve(batch, k=ITEMS, beam=ITEMS)
    np.testing.assert_array_equal(np.sort(items.numpy()), [np.arange(ITEMS)] * 5)
    np.testing.assert_allclose(scores, -np.sort(-logs), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(logs, items.numpy(), 1), scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.shown_by(case="0")
def test_under_masks_what_comes_out_is_valid_and_distinct(seed):
    random = np.random.default_rng(seed)
    model, batch = scatter(make_model(), seed), histories(6, seed)
    mask = random.random(ITEMS) < random.choice([0.1, 0.5, 0.9])
    mask[random.integers(ITEMS)] = True
    items, scores = (each.numpy() for each in model.retrieve(batch, k=12, beam=12, allow=mask))
    logs = model.item_log_probs(batch).numpy()
    for row, own in zip(items, scores, strict=True):
        found = row[row >= 0]
        assert len(found) == len(set(found))
        assert mask[found].all()
        assert (row[len(found) :] == -1).all()
        assert np.isinf(own[len(found) :]).all()
        assert len(found) >= min(12, mask.sum())  # a beam of 12 prefixes leads to 12 items or all
    everything, whole = (each.numpy() for each in model.retrieve(batch, k=ITEMS, beam=ITEMS, allow=mask))
    assert (np.sort(everything)[:, -mask.sum() :] == np.flatnonzero(mask)).all()
    np.testing.assert_allclose(np.exp(whole).sum(axis=1), 1, rtol=1e-5)
    assert np.isfinite(logs).all()


def test_items_of_the_history_are_left_out():
    model, batch = scatter(make_model()), histories(6)
    items = model.retrieve(batch, k=10, beam=ITEMS, leave_out_seen=True)[0].numpy()
    every = model.retrieve(batch, k=ITEMS, beam=ITEMS)[0].numpy()
    for user, row in enumerate(items):
        seen = batch["item"][user].numpy()
        assert not set(seen) & set(row)
        np.testing.assert_array_equal(row, [item for item in every[user] if item not in seen][:10])
    narrow = model.retrieve(
        {"item": tf.ragged.constant([[*range(6)]], tf.int64)}, 3, beam=3, leave_out_seen=True
    )
    assert ((narrow[0].numpy() == -1) == np.isinf(narrow[1].numpy())).all()


def test_the_loss_is_minus_the_logs_of_the_next_items_by_hand():
    model, batch = scatter(make_model(sampled=0.0)), histories(3)
    model.places.assign(tf.zeros_like(model.places))  # they are counted from the whole history's end
    with tf.GradientTape() as tape, record_lookups(tape):
        loss, samples, _ = model.learn(batch)
    logs = []
    for row in batch["item"].to_list():
        for end in range(1, len(row)):
            x = {"item": tf.ragged.constant([row[:end]], tf.int64)}
            logs.append(model.item_log_probs(x).numpy()[0, row[end]])
    assert samples == len(logs)
    np.testing.assert_allclose(loss, -np.mean(logs), rtol=1e-5)


def test_what_a_history_has_gets_beta_more_among_its_siblings():
    model = scatter(make_model(make_ids(sizes=(2,))))
    batch = {"item": tf.ragged.constant([[3, 7, 5, 9]], tf.int64)}
    model.repeat.assign(0.0)
    before = model.digit_log_probs(batch, [[*range(ITEMS)]]).numpy()[0]
    model.repeat.assign(-1.0)
    after = model.digit_log_probs(batch, [[*range(ITEMS)]]).numpy()[0]
    np.testing.assert_array_equal(before[:, 0], after[:, 0])
    seen = np.isin(np.arange(ITEMS), [3, 7, 5, 9])
    assert (after[seen, 1] < before[seen, 1] - 20).all()
    assert (after[~seen, 1] >= before[~seen, 1]).all()


def test_the_last_digit_is_told_by_the_items_vectors():
    model = scatter(make_model(make_ids(sizes=(3, 4)), depth=1, repeats=False))
    model.scorer.decoder.leave.assign(tf.zeros_like(model.scorer.decoder.leave))  # then every query is h
    batch = histories(4)
    logs = model.digit_log_probs(batch, tf.tile(tf.range(ITEMS)[tf.newaxis], [4, 1])).numpy()[..., -1]
    scores = model(batch).numpy() @ model.item_vectors().numpy().T
    for code in range(3):
        own = model.ids.digits[:, 0] == code
        expected = scores[:, own] - np.logaddexp.reduce(scores[:, own], axis=1, keepdims=True)
        np.testing.assert_allclose(logs[:, own], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.shown_by("models/generative/test_flat_retriever.py::test_it_learns_what_follows_what")
def test_it_learns_what_follows_what_and_evaluate_measures_the_search():
    model, batch = make_model(), histories(96)
    data = tf.data.Dataset.from_tensor_slices(batch).batch(16)
    before = model.evaluate(data, verbose=0, return_dict=True)
    losses = model.fit(data, epochs=25, verbose=0).history
    after = model.evaluate(data, verbose=0, return_dict=True)
    assert losses["code_loss"][-1] < losses["code_loss"][0] / 3
    assert after["ndcg@5"] > 0.9 > before["ndcg@5"]
    items = model.retrieve({"item": batch["item"][:, :-1]}, k=5, beam=20)[0].numpy()
    hits = (items == batch["item"][:, -1:].to_tensor().numpy()).any(axis=1)
    assert hits.mean() == pytest.approx(after["hr@5"])
    assert model.recommend(batch, k=3)[0].shape == (96, 3)


def test_a_step_makes_one_lookup_and_reaches_every_weight(monkeypatch):
    model, calls = make_model(), []
    lookup = model.collection.lookup
    monkeypatch.setattr(
        model.collection, "lookup", lambda *args, **kwargs: calls.append(args) or lookup(*args, **kwargs)
    )
    model.scorer.decoder.leave.assign_add(tf.ones_like(model.scorer.decoder.leave))
    with tf.GradientTape() as tape, record_lookups(tape) as lookups:
        loss, _, _ = model.learn(histories(8))
    assert len(calls) == 1
    gradients = tape.gradient(loss, [*model.trainable_variables, *lookups.rows])
    assert [each is not None for each in gradients] == [True] * len(gradients)
    assert all(float(tf.reduce_sum(tf.abs(each))) > 0 for each in gradients)
    ((_, inputs),) = model.lookup_inputs(histories(8))
    assert inputs["item"].shape == calls[0][0]["item"].shape


# Quick: tests/models/training/test_pipeline.py, test_all_numbers_are_those_of_depth_0[next item-1].
@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline", [{"depth": 2}, pytest.param({"depth": 1, "micro_batches": 2}, marks=pytest.mark.slow)]
)
def test_a_pipeline_learns_the_same(pipeline):
    data = tf.data.Dataset.from_tensor_slices(histories(24)).batch(8)
    found = []
    for settings in ({}, {"pipeline": Pipeline(**pipeline)}):
        model = make_model()
        model.compile(tf.keras.optimizers.Adam(0.01), **settings)
        losses = model.fit(data, epochs=2, verbose=0).history["loss"]
        found.append((losses, [weight.numpy() for weight in model.trainable_variables]))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    for own, expected in zip(found[1][1], found[0][1], strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-5)


def test_gradients_of_given_items_reach_weights_and_rows():
    model = scatter(make_model())
    with tf.GradientTape() as tape, record_lookups(tape) as lookups:
        logs = model.digit_log_probs(histories(4), tf.reshape(tf.range(12), [4, 3]), training=True)
        total = tf.reduce_sum(logs)
    assert logs.shape == (4, 3, 3)
    gradients = tape.gradient(total, [model.scorer.vectors, model.scorer.decoder.enter, *lookups.rows])
    assert all(float(tf.reduce_sum(tf.abs(each))) > 0 for each in gradients)


def test_users_stand_alone_and_jagged_histories_are_as_ragged_ones():
    model, batch = scatter(make_model()), histories(5)
    items, scores = model.retrieve(batch, k=8)
    for user in range(5):
        alone = model.retrieve({"item": batch["item"][user : user + 1]}, k=8)
        np.testing.assert_array_equal(alone[0][0], items[user])
        np.testing.assert_allclose(alone[1][0], scores[user], rtol=1e-4, atol=1e-5)
    form = {"item": jagged.from_ragged(batch["item"])}
    np.testing.assert_array_equal(model.retrieve(form, k=8)[0], items)


def test_histories_of_one_item_none_and_unknown_ones():
    model = make_model()
    batch = {"item": tf.ragged.constant([[3], [], [1, 6]], tf.int64, ragged_rank=1)}
    assert model.retrieve(batch, k=4)[0].shape == (3, 4)
    model.test_step(batch)
    assert float(model.ranking.weight) == 1
    strange = {"item": tf.ragged.constant([[3, 999]], tf.int64)}
    assert np.isfinite(model.retrieve(strange, k=4)[1]).all()
    with pytest.raises(ConfigError, match="item 999 is not in the catalogue"):
        model.test_step(strange)
    nobody = {"item": tf.ragged.constant([], tf.int64, ragged_rank=1)}
    assert model.retrieve(nobody, k=4)[0].shape == (0, 4)


@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.shown_by(case="True")
def test_a_graph_finds_what_is_found_without_one(left_out):
    model, batch = scatter(make_model()), histories(5)
    settings = {"k": 6, "allow": np.arange(ITEMS) % 3 > 0, "leave_out_seen": left_out}
    found = tf.function(lambda x: model.retrieve(x, **settings))(batch)
    np.testing.assert_array_equal(found[0], model.retrieve(batch, **settings)[0])


def test_ids_of_any_kind_come_out_as_they_are():
    random = np.random.default_rng(5)
    ids = random.choice(2**40, ITEMS, replace=False) - 2**39
    model = scatter(make_model(make_ids(ids=ids), hashed=True))
    plain = scatter(make_model(make_ids()))
    batch = histories(4)
    items = model.retrieve({"item": batch["item"].with_values(tf.gather(ids, batch["item"].values))}, k=5)[0]
    assert np.isin(items.numpy(), ids).all()
    assert plain.retrieve(batch, k=5)[0].numpy().max() < ITEMS


def test_it_is_saved_and_loaded_whole(tmp_path):
    model, batch = make_model(depth=1), histories(16)
    model.run_eagerly = True  # a few batches cost less than their graph
    data = tf.data.Dataset.from_tensor_slices(batch).batch(8)
    model.fit(data, epochs=2, verbose=0)
    items, scores = model.retrieve(batch, k=5)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.ids.digest == model.ids.digest
    np.testing.assert_array_equal(loaded.retrieve(batch, k=5)[0], items)
    np.testing.assert_allclose(loaded.retrieve(batch, k=5)[1], scores, rtol=1e-5)
    other = make_model(depth=1)
    other(batch)  # which makes its weights
    model.save_weights(tmp_path / "weights" / "model")
    other.load_weights(tmp_path / "weights" / "model")
    np.testing.assert_array_equal(other.retrieve(batch, k=5)[0], items)
    # Codes dealt out in another way have weights of the same shapes.
    digits = np.roll(model.ids.digits, 1, axis=0)
    strange = make_model(replace(model.ids, digits=digits), depth=1)
    strange(batch)
    with pytest.raises(
        ConfigError, match="with other semantic ids: item 0 has another code there; make the model with"
    ):
        strange.load_weights(tmp_path / "weights" / "model")


def test_what_makes_no_sense_is_named():
    model, batch = make_model(), histories(2)
    for call, told in (
        (lambda: model.retrieve(batch, k=10, beam=9), "beam must be at least 10, the items wanted, got 9"),
        (lambda: model.retrieve(batch, k=0), "k must be a whole number from 1 on, got 0"),
        (lambda: model.retrieve(batch, allow=np.zeros(ITEMS, bool)), "forbids every item"),
        (lambda: model.retrieve(batch, allow=np.ones(3, bool)), r"must be bool \(40,\), got bool \(3,\)"),
        (lambda: model.retrieve({"film": 0}), "lacks item; it has film"),
        (lambda: model.digit_log_probs(batch, [[1], [77]]), "item 77 is not in the catalogue"),
        (lambda: make_model(beam=3), "beam must be at least 5, the items wanted, got 3"),
        (lambda: make_model(heads=3), "heads must divide the decoder's width, got 3 and 8"),
        (lambda: make_model(sampled=-1.0), "sampled must be at least 0, got -1.0"),
        (lambda: make_model(depth=3), "depth must be at most 2, the codes of an item, got 3"),
        (lambda: make_model(depth=0), "depth must be a whole number from 1 on, got 0"),
        (lambda: make_model(width=0), "width must be a whole number from 1 on, got 0"),
    ):
        with pytest.raises(ConfigError, match=told) as error:
            call()
        assert "\n" not in str(error.value)
