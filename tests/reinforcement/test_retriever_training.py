"""A generative retriever as the policy: what it shares with its reference, and that rewards reach it."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import GenerativeRetriever
from gmeta.optimizers import Adam
from gmeta.preprocess import semantic_ids
from gmeta.preprocess.synthetic.exposures import ExposureConfig
from gmeta.preprocess.synthetic.user_law import SimulatorConfig
from gmeta.preprocess.synthetic.user_simulator import UserSimulator
from gmeta.reinforcement import ECPO, GRPO, PolicyTraining, Rollouts
from gmeta.reinforcement.rewards import HitReward, SimulatorReward
from gmeta.reinforcement.rollouts import Policy
from support.tables import sorted_records

ITEMS, EVENTS, USERS = 60, 8, 64


def retriever(seed=0):
    vectors = np.random.default_rng(0).normal(size=(ITEMS, 4))
    ids = semantic_ids(vectors, levels=2, codes=6)
    table = TableConfig("item", 8, initializer=Normal(0.0, 0.3))
    collection = EmbeddingCollection([FeatureConfig("item", table)], optimizer=Adam(None))
    hstu = HSTU(
        blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=EVENTS, bias_by_time=False, seed=seed
    )
    return GenerativeRetriever(
        collection,
        hstu,
        ids,
        max_length=EVENTS,
        width=8,
        negatives=8,
        dropout=0.2,
        beam=20,
        seed=seed,
        ks=(5,),
    )


@pytest.fixture(scope="module")
def simulator():
    return UserSimulator(SimulatorConfig(ExposureConfig(items=ITEMS, categories=4)))


@pytest.fixture(scope="module")
def past(simulator):
    return simulator.histories(np.arange(USERS), events=EVENTS, pages=1)


@pytest.fixture(scope="module")
def data(past):
    columns = {
        "item": tf.RaggedTensor.from_tensor(past.items),
        "user": past.states.users,
        "next": past.shown[:, 0, 0],
    }
    return tf.data.Dataset.from_tensor_slices(columns).batch(USERS // 2)


@pytest.fixture(scope="module")
def imitator(data):
    made = retriever()
    # So few steps take less time than to trace one.
    made.compile(tf.keras.optimizers.Adam(0.01), run_eagerly=True)
    made.fit(data.map(lambda x: {"item": x["item"]}), epochs=3, verbose=0)
    return made


@pytest.fixture
def policy(imitator):
    return imitator.copy_dense("policy")


def test_a_copy_shares_tables_and_nothing_else(policy, data):
    assert isinstance(policy, Policy)
    copy = policy.copy_dense("copy")
    assert copy.collection is policy.collection
    x = next(iter(data))
    items = policy.sample(x, 6, seed=1, step=2)[0]
    np.testing.assert_array_equal(copy.sample(x, 6, seed=1, step=2)[0], items)
    before = copy.digit_log_probs(x, items).numpy()
    np.testing.assert_array_equal(before, policy.digit_log_probs(x, items))
    shared = {id(weight) for weight in policy.weights} & {id(weight) for weight in copy.weights}
    assert shared == set()
    for weight in policy.trainable_variables:
        weight.assign(weight + 1.0)
    np.testing.assert_array_equal(copy.digit_log_probs(x, items), before)


@pytest.mark.parametrize(
    # Quick: distinct, and drawn test_policy_training.py, test_the_policy_learns_what_is_rewarded[sample].
    "rollouts",
    [
        pytest.param(Rollouts(8), marks=pytest.mark.slow),
        Rollouts(8, "without_replacement", weights="equal"),
    ],
    ids=["drawn", "distinct"],
)
@pytest.mark.shown_by("reinforcement/test_policy_training.py::test_the_policy_learns_what_is_rewarded")
def test_true_rewards_rise(policy, data, simulator, past, rollouts):
    reward = SimulatorReward(simulator, past.states)
    training = PolicyTraining(policy, reward, objective=GRPO(kl=0.01), rollouts=rollouts, user="user", k=5)
    training.compile(tf.keras.optimizers.Adam(0.01))
    table = sorted_records(policy.collection.tables[0])
    before = training.evaluate(data, verbose=0, return_dict=True)["reward@5"]
    history = training.fit(data, epochs=12, verbose=0).history
    after = training.evaluate(data, verbose=0, return_dict=True)["reward@5"]
    oracle = simulator.oracle(past.states, 5).probabilities.mean()
    assert before + 0.15 * (oracle - before) < after < oracle
    assert history["reward"][-1] > history["reward"][0]
    assert history["kl"][-1] > 0
    for name, column in sorted_records(policy.collection.tables[0]).items():
        assert np.array_equal(column, table[name]), name


@pytest.mark.shown_by("reinforcement/test_policy_training.py::test_only_allowed_items_come_out")
def test_probabilities_are_among_what_is_allowed(policy, data, simulator, past):
    allow = np.random.default_rng(3).random(ITEMS) < 0.3
    x = next(iter(data))
    every = tf.tile(tf.range(ITEMS, dtype=tf.int64)[tf.newaxis], [USERS // 2, 1])
    with tf.GradientTape() as tape:
        logs = tf.reduce_sum(policy.digit_log_probs(x, every, allow=allow), axis=-1)
        total = tf.reduce_sum(tf.boolean_mask(logs, allow, axis=1))
    gradients = [tf.convert_to_tensor(each) for each in tape.gradient(total, policy.scorer.biases)]
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert np.isneginf(logs.numpy()[:, ~allow]).all()
    np.testing.assert_allclose(np.exp(logs).sum(axis=1), 1, rtol=1e-5)
    _, scores = policy.retrieve(x, 5, beam=ITEMS, allow=allow)
    np.testing.assert_allclose(scores, np.sort(logs, axis=1)[:, :-6:-1], rtol=1e-4)

    reward = SimulatorReward(simulator, past.states)
    training = PolicyTraining(
        policy, reward, rollouts=Rollouts(8, "without_replacement"), user="user", k=5, sft=0.1, allow=allow
    )
    training.compile(tf.keras.optimizers.Adam(0.01))
    before = training.evaluate(data, verbose=0, return_dict=True)["reward@5"]
    history = training.fit(data, epochs=4, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert training.evaluate(data, verbose=0, return_dict=True)["reward@5"] > before
    assert allow[policy.retrieve(x, 5, allow=allow)[0].numpy()].all()
    wrong = PolicyTraining(policy, reward, user="user", k=5, allow=np.ones(ITEMS + 1, bool))
    wrong.compile("sgd")
    with pytest.raises(ConfigError, match=r"a mask of items must be bool \(60,\)"):
        wrong.evaluate(data, verbose=0)


# Quick: test_policy_training.py, test_a_resumed_run_is_the_uninterrupted_one[3].
@pytest.mark.slow
def test_it_resumes_as_uninterrupted(data, tmp_path):
    def fresh():
        policy = retriever()
        training = PolicyTraining(
            policy, HitReward(), objective=ECPO(kl=0.1), rollouts=Rollouts(4), updates=2, sft=0.5, user="user"
        )
        training.compile(tf.keras.optimizers.Adam(0.01))
        return training

    whole, first, second = fresh(), fresh(), fresh()
    whole.fit(data, epochs=3, verbose=0)
    first.fit(data, epochs=1, verbose=0)
    first.save_weights(tmp_path / "state")
    second.load_weights(tmp_path / "state")
    second.fit(data, epochs=3, initial_epoch=1, verbose=0)
    for one, other in zip(second.weights, whole.weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    x = next(iter(data))
    np.testing.assert_array_equal(second.policy.retrieve(x, 5)[0], whole.policy.retrieve(x, 5)[0])
    assert any(
        not np.array_equal(one, other) for one, other in zip(first.weights, whole.weights, strict=True)
    )
