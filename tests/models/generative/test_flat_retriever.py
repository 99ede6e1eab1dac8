"""A model of flat codes: kept keys and values beside whole sequences, its search, and what it learns."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gmeta import Pipeline
from gmeta.core.errors import ConfigError
from gmeta.export import export_model
from gmeta.export.signature import PADDING
from gmeta.layers import HSTU, FuXi
from gmeta.models import FlatRetriever
from gmeta.models.generative.digit_decoder import of_items
from gmeta.ops import AttentionMask, jagged
from gmeta.preprocess import semantic_ids
from gmeta.reinforcement import GRPO, PolicyTraining, Rollouts
from gmeta.reinforcement.rewards import HitReward
from gmeta.reinforcement.rollouts import Policy
from support.serving import ask_all

ITEMS, LONGEST = 40, 6


def make_ids(levels=2, codes=4):
    """Codes of random vectors, some shared by several items."""
    return semantic_ids(np.random.default_rng(0).normal(size=(ITEMS, 3)), levels=levels, codes=codes)


def make_model(ids=None, *, time=None, window=None, form="research", blocks=1, **settings):
    backbone = HSTU(
        blocks=blocks,
        heads=2,
        attention_dim=4,
        value_dim=4,
        max_length=12,  # fewer than there are tokens: the farthest share a bias
        bias_by_time=time is not None,
        form=form,
        mask=AttentionMask(window=window),
    )
    settings = {"dim": 8, "max_length": LONGEST, "ks": (1, 5), "beam": 20} | settings
    model = FlatRetriever(backbone, ids or make_ids(), time=time, **settings)
    model.compile(tf.keras.optimizers.Adam(0.01))
    return model


def scatter(model, seed=0):
    """Give all weights numbers apart from their initial ones, so that no two items are alike."""
    random = np.random.default_rng(seed)
    for weight in model.trainable_variables:
        weight.assign_add(random.normal(0, 0.5, weight.shape))
    return model


@pytest.fixture(scope="module")
def model():
    return scatter(make_model())


def histories(users, seed=0, times=False):
    """Each item is followed by the same one, always."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(users):
        items = [int(random.integers(ITEMS))]
        for _ in range(random.integers(1, 6)):
            items.append((7 * items[-1] + 1) % ITEMS)
        found.append(items)
    columns = {"item": tf.ragged.constant(found, tf.int64)}
    if times:
        drawn = [np.sort(random.integers(0, 10**5, len(row))).tolist() for row in found]
        columns["time"] = tf.ragged.constant(drawn, tf.int64)
    return columns


@pytest.mark.parametrize(("levels", "depth"), [(1, None), (2, None), (2, 1), (3, 2)])
def test_a_beam_as_wide_as_the_catalogue_is_a_search_of_all_items(levels, depth):
    model, batch = scatter(make_model(make_ids(levels), depth=depth)), histories(5)
    logs = model.item_log_probs(batch).numpy()
    np.testing.assert_allclose(np.exp(logs).sum(axis=1), 1, rtol=1e-5)
    assert np.ptp(logs) > 1
    items, scores = model.retrieve(batch, k=ITEMS, beam=ITEMS)
    np.testing.assert_array_equal(np.sort(items.numpy()), [np.arange(ITEMS)] * 5)
    np.testing.assert_allclose(scores, -np.sort(-logs), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(logs, items.numpy(), 1), scores, rtol=1e-4, atol=1e-5)


@hypothesis_settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=4),
    depth=st.integers(1, 2),
    timed=st.booleans(),
    window=st.sampled_from([None, 2, 7]),
    form=st.sampled_from(["research", "production"]),
    seed=st.integers(0, 99),
)
def test_what_is_kept_is_as_what_is_computed_again(lengths, depth, timed, window, form, seed):
    """Training reads whole sequences; a search appends digits to the history without the last item."""
    random = np.random.default_rng(seed)
    time = "time" if timed else None
    model = scatter(make_model(depth=depth, time=time, window=window, form=form, blocks=2), seed)
    rows = [random.integers(0, ITEMS, length + 1).tolist() for length in lengths]
    batch = {"item": tf.ragged.constant(rows, tf.int64)}
    if timed:  # the next item comes at the time of the last one, which is what a search takes it for
        when = [np.sort(random.integers(0, 10**4, len(row) - 1)) for row in rows]
        batch["time"] = tf.ragged.constant([[*own, own[-1]] for own in when], tf.int64)
    total = 0.0
    for end in range(1, max(lengths) + 1):
        users = [user for user, length in enumerate(lengths) if length >= end]
        x = {name: tf.gather(column, users)[:, :end] for name, column in batch.items()}
        last = tf.gather(batch["item"], users)[:, end : end + 1].to_tensor()
        if timed and end < max(lengths):
            # What comes next comes later than a search knows: walk as evaluation does.
            ids, times = model._sequences({n: tf.gather(c, users)[:, : end + 1] for n, c in batch.items()}, 9)
            walk = model._open_before_last(ids, ids, times)
            total += float(tf.reduce_sum(of_items(walk, last)))
        else:
            total += float(tf.reduce_sum(model.digit_log_probs(x, last)))
    loss, samples, _ = model.learn(batch)
    assert samples == sum(lengths)
    np.testing.assert_allclose(loss, -total / sum(lengths), rtol=2e-4)


def test_gradients_of_given_items_are_those_of_whole_sequences(model):
    rows = [[3, 8, 1, 5], [9, 2, 2, 7]]
    with tf.GradientTape(persistent=True) as tape:
        logs = model.digit_log_probs(
            {"item": tf.ragged.constant([row[:-1] for row in rows], tf.int64)}, [[5], [7]]
        )
        kept = -tf.reduce_sum(logs)
        again = [
            model.learn({"item": tf.ragged.constant([row[:end] for row in rows], tf.int64)})[0]
            for end in (4, 3)
        ]
        whole = again[0] * 6 - again[1] * 4  # sums over three items less those over the first two
    np.testing.assert_allclose(kept, whole, rtol=1e-4)
    for weight in model.trainable_variables:
        one, other = (tape.gradient(each, weight) for each in (kept, whole))
        assert (one is None) == (other is None), weight.name
        if one is None:
            continue
        np.testing.assert_allclose(
            tf.convert_to_tensor(one), tf.convert_to_tensor(other), rtol=1e-2, atol=2e-3, err_msg=weight.name
        )


@pytest.mark.parametrize("seed", range(2))
def test_under_masks_what_comes_out_is_valid_and_distinct(model, seed):
    random = np.random.default_rng(seed)
    batch, mask = histories(6, seed), random.random(ITEMS) < 0.4
    items, scores = (each.numpy() for each in model.retrieve(batch, k=ITEMS, beam=ITEMS, allow=mask))
    assert (np.sort(items)[:, -mask.sum() :] == np.flatnonzero(mask)).all()
    np.testing.assert_allclose(np.exp(scores).sum(axis=1), 1, rtol=1e-5)
    # The same probabilities of given items; those that may not come out have none.
    every = np.tile(np.arange(ITEMS), [6, 1])
    logs = tf.reduce_sum(model.digit_log_probs(batch, every, allow=mask), axis=-1).numpy()
    assert (np.isneginf(logs) == ~mask).all()
    found, there = items[items >= 0].reshape(6, -1), scores[items >= 0].reshape(6, -1)
    np.testing.assert_allclose(np.take_along_axis(logs, found, axis=1), there, atol=1e-5)
    blocked = items[:, 1:3]
    other, _ = model.retrieve(batch, k=6, beam=ITEMS, allow=mask, leave_out=blocked)
    for own, others, row in zip(items.tolist(), blocked.tolist(), other.numpy().tolist(), strict=True):
        assert row == [item for item in own if item not in others][:6]
    left = model.retrieve(batch, k=8, beam=ITEMS, leave_out_seen=True)[0].numpy()
    assert not any(set(row) & set(seen) for row, seen in zip(left, batch["item"].to_list(), strict=True))


@pytest.mark.parametrize("method", ["sample", "without_replacement", "beam"])
def test_draws_are_a_function_of_seed_step_and_user(model, method):
    batch = histories(3)

    def draw(x, seed=1, step=0):
        return model.sample(x, 8, seed=seed, step=step, method=method)

    items, logs = (each.numpy() for each in draw(batch))
    for user in range(3):  # alone or among others
        np.testing.assert_array_equal(draw({"item": batch["item"][user : user + 1]})[0][0], items[user])
    exact = model.item_log_probs(batch).numpy()
    np.testing.assert_allclose(logs, np.take_along_axis(exact, items, 1), rtol=1e-4, atol=1e-5)
    assert method == "beam" or (draw(batch, seed=2)[0].numpy() != items).any()
    assert method == "sample" or all(len(set(row)) == 8 for row in items)


def test_users_stand_alone_and_jagged_histories_are_as_ragged_ones(model):
    batch = histories(5)
    items, scores = model.retrieve(batch, k=8)
    for user in range(5):
        alone = model.retrieve({"item": batch["item"][user : user + 1]}, k=8)
        np.testing.assert_array_equal(alone[0][0], items[user])
        np.testing.assert_allclose(alone[1][0], scores[user], rtol=1e-4, atol=1e-5)
    form = {"item": jagged.from_ragged(batch["item"])}
    np.testing.assert_array_equal(tf.function(model.retrieve)(form, k=8)[0], items)


def test_histories_of_one_item_none_and_unknown_ones():
    model = scatter(make_model(time="time"))
    batch = {
        "item": tf.ragged.constant([[3], [], [1, 6]], tf.int64, ragged_rank=1),
        "time": tf.ragged.constant([[3], [], [1, 6]], tf.int64, ragged_rank=1),
    }
    assert np.isfinite(model.retrieve(batch, k=4)[1]).all()
    model.test_step(batch)
    assert float(model.ranking.weight) == 1
    assert np.isfinite(model.learn(batch)[0])
    strange = {name: tf.ragged.constant([[3, 999]], tf.int64) for name in batch}
    assert np.isfinite(model.retrieve(strange, k=4)[1]).all()
    with pytest.raises(ConfigError, match="item 999 is not in the catalogue"):
        model.test_step(strange)
    nobody = {name: tf.ragged.constant([], tf.int64, ragged_rank=1) for name in batch}
    assert model.retrieve(nobody, k=4)[0].shape == (0, 4)


def test_without_a_trie_all_codes_may_be_written(model):
    batch, codes = histories(4), int(np.prod(model.codes.sizes))
    share = tf.function(lambda x: model.valid_share(x, codes, beam=codes))(batch)
    np.testing.assert_allclose(share, [ITEMS / codes] * 4, rtol=1e-6)
    # Codes by hand: one that no item has is worth its digits' shares of all codes of their levels.
    walk, logs = model._open(batch)[0], tf.zeros([4, 1])
    nodes, beams, digits = tf.zeros([4, 1], tf.int64), None, None
    for size in model.codes.sizes:
        logits = walk.logits(nodes, beams, digits)
        logs = tf.reshape(logs[:, :, None] + tf.nn.log_softmax(logits), [4, -1])
        many = logs.shape[1]
        beams, digits = (
            tf.tile(each(tf.range(many), size)[None], [4, 1]) for each in (tf.math.floordiv, tf.math.floormod)
        )
        nodes = tf.zeros([4, many], tf.int64)
    there = np.zeros(codes, bool)
    there[np.ravel_multi_index(model.codes.told(tf.range(ITEMS)).numpy().T, model.codes.sizes)] = True
    order = np.argsort(-logs.numpy(), axis=1)[:, :9]
    np.testing.assert_allclose(model.valid_share(batch, 9, beam=codes), there[order].mean(axis=1), rtol=1e-6)


# Quick: codes, which has no shares among children to learn from.
@pytest.mark.parametrize("softmax", [pytest.param("children", marks=pytest.mark.slow), "codes"])
def test_it_learns_what_follows_what(tmp_path, softmax):
    model, batch = make_model(softmax=softmax), histories(96)
    model.compile(tf.keras.optimizers.Adam(0.02))
    data = tf.data.Dataset.from_tensor_slices(batch).batch(48)
    before = model.evaluate(data, verbose=0, return_dict=True)
    untrained = float(tf.reduce_mean(model.valid_share(batch, 1)))
    losses = model.fit(data, epochs=40, verbose=0).history["loss"]
    after = model.evaluate(data, verbose=0, return_dict=True)
    assert losses[-1] < losses[0] / 3
    assert after["ndcg@5"] > 0.9 > before["ndcg@5"]
    items = model.retrieve({"item": batch["item"][:, :-1]}, k=5, beam=20)[0].numpy()
    hits = (items == batch["item"][:, -1:].to_tensor().numpy()).any(axis=1)
    assert hits.mean() == pytest.approx(after["hr@5"])
    if softmax == "codes":
        assert float(tf.reduce_mean(model.valid_share(batch, 1))) > 0.95 > untrained
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.retrieve(batch, k=5)[0], model.retrieve(batch, k=5)[0])


# Quick: tests/reinforcement/test_retriever_training.py, test_true_rewards_rise[distinct].
@pytest.mark.slow
def test_it_is_a_policy_that_rewards_reach():
    policy, batch = make_model(dropout=0.2), histories(32)
    data = tf.data.Dataset.from_tensor_slices({**batch, "next": tf.zeros([32], tf.int64)}).batch(16)
    assert isinstance(policy, Policy)
    training = PolicyTraining(policy, HitReward(), objective=GRPO(kl=0.01), rollouts=Rollouts(8))
    training.compile(tf.keras.optimizers.Adam(0.05))
    history = training.fit(data, epochs=8, verbose=0).history["reward"]
    assert history[-1] > 0.5 > history[0]
    reference = training.reference
    assert not {id(weight) for weight in policy.weights} & {id(weight) for weight in reference.weights}


def test_an_exported_model_answers_as_here(tmp_path, model):
    batch = {"item": tf.ragged.constant([[3, 8, 1], [], [9, 4, 5, 6, 7, 20, 21, 22]], tf.int64)}
    exported = export_model(model, tmp_path / "1")
    assert list(exported.signatures) == ["retrieve"]
    sent = {"item": np.asarray(batch["item"].to_tensor(PADDING))}
    (answer,) = ask_all([(tmp_path / "1", "retrieve", sent)])
    items, scores = model.retrieve(batch, 10)
    np.testing.assert_array_equal(answer["items"], items)
    np.testing.assert_allclose(answer["scores"], scores, rtol=5e-5, atol=5e-6)


def fit_ahead(model):
    model.compile("adam", pipeline=Pipeline(depth=1))
    model.fit(tf.data.Dataset.from_tensor_slices(histories(4)).batch(2), verbose=0)


def test_what_makes_no_sense_is_named(model):
    fuxi = FuXi(blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=LONGEST, bias_by_time=False)
    for call, told in (
        (lambda: model.retrieve(histories(2), k=10, beam=9), "beam must be at least 10, the items wanted"),
        (lambda: FlatRetriever(fuxi, make_ids(), dim=8, max_length=4), "FuXiBlock can't read on"),
        (lambda: make_model(dim=0), "dim must be a whole number from 1 on, got 0"),
        (lambda: make_model(softmax="all"), "softmax must be 'children' or 'codes', got 'all'"),
        (lambda: fit_ahead(make_model()), "the model looks up none: leave pipeline out"),
        (lambda: make_model(depth=3), "depth must be at most 2, the codes of an item, got 3"),
    ):
        with pytest.raises(ConfigError, match=told):
            call()
