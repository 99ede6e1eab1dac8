"""Rewards: by hand, against the simulator and a model; and what can't be a reward."""

import math

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import name_refusals
from gmeta.layers import FeatureConfig
from gmeta.models import GRM
from gmeta.preprocess.synthetic.exposures import ExposureConfig
from gmeta.preprocess.synthetic.user_law import SimulatorConfig
from gmeta.preprocess.synthetic.user_simulator import UserSimulator
from gmeta.reinforcement.rewards import HitReward, ModelReward, RankAwareReward, SimulatorReward, rewards_of

ITEMS = tf.constant([[4, 9, 7], [6, 9, 4], [1, 2, 3]], tf.int64)
BATCH = {"next": tf.constant([9, 4, 8], tf.int64), "user": tf.constant([70, 80, 90], tf.int64)}


@pytest.fixture(scope="module")
def simulator():
    return UserSimulator(SimulatorConfig(ExposureConfig(items=50, categories=5)))


@pytest.fixture(scope="module")
def model():
    features = [FeatureConfig(name, dim=4) for name in ("city", "item", "category", "action")]
    return GRM.of(
        features,
        contexts=["city"],
        history=["item", "action"],
        targets=["item", "category"],
        time="time",
        dim=8,
        max_length=20,
    )


@pytest.fixture(scope="module")
def batch():
    history = {"item": [[1, 2], [3], [4, 5, 6]], "action": [[1, 1], [2], [1, 3, 1]]}
    return {
        **{name: tf.ragged.constant(rows, tf.int64) for name, rows in history.items()},
        "time": tf.ragged.constant([[10, 20], [5], [1, 2, 3]], tf.int64),
        "city": tf.constant([1, 2, 3], tf.int64),
        "asked": tf.constant([400, 500, 600], tf.int64),
    }


def test_hits():
    assert HitReward()(BATCH, ITEMS).numpy().tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_wrong_items_cost_the_more_the_higher_they_are():
    """Discounts 1, 1/log2(3), 1/2; a group without the next item gets nothing."""
    discounts = np.array([1, 1 / math.log2(3), 0.5])
    low, middle, high = -0.5 * discounts[::-1] / discounts.sum()
    found = RankAwareReward(penalty=0.5)(BATCH, ITEMS)
    np.testing.assert_allclose(found, [[high, 1, low], [high, middle, 1], [0, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize("reward", [HitReward(), RankAwareReward()])
def test_without_the_next_items(reward):
    with pytest.raises(ConfigError, match=rf"reward {reward.name}: the batch lacks 'next', it has user"):
        reward({"user": [1, 2, 3]}, ITEMS)
    with pytest.raises(ConfigError, match=r"one item per user, \(users,\), got shape \(3, 1\)"):
        reward({"next": BATCH["next"][:, None]}, ITEMS)


class TestSimulator:
    def test_true_probabilities(self, simulator):
        states = simulator.histories([90, 5, 70, 80], events=10, pages=1).states
        found = SimulatorReward(simulator, states)(BATCH, ITEMS)
        np.testing.assert_allclose(found, simulator.click_probability(states.of([70, 80, 90]), ITEMS), 1e-6)

    def test_clicks_are_those_of_a_showing(self, simulator):
        states = simulator.histories(np.arange(300), events=10, pages=1).states
        items = np.arange(300)[:, None] % 40 + np.arange(8)
        found = SimulatorReward(simulator, states, clicks=True)({"user": states.users}, tf.constant(items))
        assert np.array_equal(found.numpy(), simulator.step(states, items).clicks)

    @pytest.mark.parametrize("traced", [False, True])
    def test_what_is_refused(self, simulator, traced):
        reward = SimulatorReward(simulator, simulator.begin([70, 80]))
        called = tf.function(reward) if traced else reward
        with (
            pytest.raises(ConfigError, match=r"^reward simulator: user 90 has no state; there are 2"),
            name_refusals(),
        ):
            called(BATCH, ITEMS)
        two = {"user": BATCH["user"][:2]}
        with pytest.raises(ConfigError, match="items must be places from 0 to 49"), name_refusals():
            called(two, 10 * ITEMS[:2])
        with pytest.raises(ConfigError, match="there are no states"):
            SimulatorReward(simulator, simulator.begin([]))


class TestModel:
    def exposures(self, model, batch, items, categories, times):
        def ragged(rows):
            return tf.RaggedTensor.from_tensor(tf.cast(rows, tf.int64))

        found = model.predict(
            {
                "task": tf.range(3),
                "contexts": {"city": batch["city"]},
                "history": {name: batch[name] for name in ("item", "action", "time")},
                "targets": {
                    "item": ragged(items),
                    "category": ragged(tf.gather(categories, items)),
                    "time": ragged(tf.repeat(tf.constant(times)[:, None], 3, axis=1)),
                },
            },
            verbose=0,
        )
        return {name: tf.sigmoid(logits.to_tensor()).numpy() for name, logits in found.items()}

    @pytest.mark.parametrize(("time", "times"), [(None, [21, 6, 4]), ("asked", [400, 500, 600])])
    @pytest.mark.parametrize("head", ["ctr", "ctcvr"])
    @pytest.mark.shown_by(case="ctcvr-asked-times1")
    def test_it_scores_items_as_exposures(self, model, batch, time, times, head):
        categories = np.arange(10) % 3
        reward = ModelReward(model, head, attributes={"category": categories}, time=time)
        expected = self.exposures(model, batch, ITEMS, categories, times)[head]
        np.testing.assert_allclose(tf.function(reward)(batch, ITEMS), expected, rtol=1e-5)

    def test_what_is_refused(self, model, batch):
        with pytest.raises(ConfigError, match="has the heads ctr, cvr, ctcvr, got 'like'"):
            ModelReward(model, "like", attributes={"category": [0]})
        with pytest.raises(ConfigError, match="needs category of an exposure"):
            ModelReward(model)
        with pytest.raises(ConfigError, match="has no use for price"):
            ModelReward(model, attributes={"category": [0], "price": [1]})
        reward = ModelReward(model, attributes={"category": np.zeros(10, np.int64)})
        with pytest.raises(ConfigError, match="reward grm/ctr: the batch lacks 'action'"):
            reward({name: column for name, column in batch.items() if name != "action"}, ITEMS)


class TestChecks:
    @pytest.mark.parametrize("traced", [False, True])
    @pytest.mark.parametrize(("user", "who"), [("user", "user 80"), (None, "user 1 of the batch")])
    def test_of_no_number(self, traced, user, who):
        def bad(batch, items):
            return tf.where(batch["next"][:, None] == 4, float("nan"), tf.ones_like(items, tf.float32))

        def rewards(batch, items):
            return rewards_of(bad, batch, items, user=user)

        called = tf.function(rewards) if traced else rewards
        told = f"^reward bad: the rewards of {who} are not finite: nan, nan, nan; let it give .* a number$"
        with pytest.raises(ConfigError, match=told), name_refusals():
            called(BATCH, ITEMS)

    @pytest.mark.parametrize("traced", [False, True])
    def test_of_another_shape(self, traced):
        def short(batch, items):
            return tf.zeros([3, 2])

        called = tf.function(rewards_of, reduce_retracing=False) if traced else rewards_of
        with pytest.raises(ConfigError, match=r"reward short: rewards must be \(3, 3\).*got \(3, 2\)"):
            called(short, BATCH, ITEMS)

        def unknown(batch, items):
            return tf.numpy_function(lambda: np.zeros([3, 2], np.float32), [], tf.float32)

        def rewards():
            return rewards_of(unknown, BATCH, ITEMS)

        told = r"reward unknown: rewards must be .*(3, 2|\[3 2\])"
        with pytest.raises(ConfigError, match=told), name_refusals():
            (tf.function(rewards) if traced else rewards)()

    def test_of_no_users(self):
        empty = {name: column[:0] for name, column in BATCH.items()}
        assert rewards_of(HitReward(), empty, ITEMS[:0], user="user").shape == (0, 3)

    def test_no_gradient_goes_through_a_reward(self):
        scores = tf.Variable(tf.ones([3, 3]))
        with tf.GradientTape() as tape:
            found = tf.reduce_sum(rewards_of(lambda batch, items: scores * 2, BATCH, ITEMS))
        assert tape.gradient(found, scores) is None
