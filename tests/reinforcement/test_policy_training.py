"""Training of a policy by rewards: what it learns, what it shares, and that it resumes as uninterrupted."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.reinforcement import DPO, ECPO, GRPO, PolicyTraining, Rollouts
from gmeta.reinforcement.rewards import HitReward
from support.cells import slow_but
from support.softmax_policy import SoftmaxPolicy
from support.tables import sorted_records

USERS, ITEMS = 24, 9


def policy_of(scale=0.5):
    table = TableConfig("user", 32, initializer=Normal(0.0, 1.0))
    return SoftmaxPolicy(EmbeddingCollection([FeatureConfig("user", table)]), scale=scale)


def data(batch=8):
    users = np.arange(USERS)
    columns = {"user": users, "next": users * 5 % ITEMS}
    return tf.data.Dataset.from_tensor_slices(columns).batch(batch)


def near(batch, items):
    """The nearer an item's number is to the user's next one, the better; 1 at best."""
    return 1 - tf.abs(tf.cast(items - batch["next"][:, tf.newaxis], tf.float32)) / (ITEMS - 1)


def training_of(policy=None, reward=None, rate=0.03, eager=False, **settings):
    """A policy's training; eager where so few steps take less time than to trace one."""
    settings = {"rollouts": Rollouts(group=4), "user": "user", "k": 1, **settings}
    training = PolicyTraining(policy or policy_of(), reward or near, **settings)
    training.compile(tf.keras.optimizers.Adam(rate), run_eagerly=eager)
    return training


# Quick: sample, and the others in test_only_allowed_items_come_out and test_rollouts.py.
@pytest.mark.parametrize("sampling", slow_but(["sample"], ["sample", "without_replacement", "beam"]))
def test_the_policy_learns_what_is_rewarded(sampling):
    training = training_of(rollouts=Rollouts(group=4, sampling=sampling), objective=GRPO(kl=0.0))
    before = training.evaluate(data(), verbose=0, return_dict=True)["reward@1"]
    history = training.fit(data(), epochs=30, verbose=0).history
    after = training.evaluate(data(), verbose=0, return_dict=True)["reward@1"]
    assert before < 0.75
    assert after > 0.85
    assert history["reward"][-1] > history["reward"][0]
    assert history["kl"][0] < history["kl"][-1]


# Quick: DPO, whose pairs are its own; ECPO resumes below, and test_losses.py has them all.
@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(ECPO(kl=0.0), marks=pytest.mark.slow),
        pytest.param(GRPO(kl=0.0, per="digit"), marks=pytest.mark.slow),
        DPO(beta=0.5),
    ],
)
def test_with_each_objective(objective):
    training = training_of(objective=objective, updates=2)
    history = training.fit(data(), epochs=30, verbose=0).history
    assert set(history) == {"loss", "reward", *objective.reports}
    assert training.evaluate(data(), verbose=0, return_dict=True)["reward@1"] > 0.8


def test_a_divergence_that_weighs_more_stays_smaller():
    moved = []
    for kl in (0.0, 100.0):
        training = training_of(objective=GRPO(kl=kl))
        training.fit(data(), epochs=15, verbose=0)
        x = next(iter(data(USERS)))
        p, q = training.policy(x), training.reference(x)
        moved.append(float(tf.reduce_mean(tf.reduce_sum(tf.exp(p) * (p - q), axis=-1))))
    assert moved[0] > moved[1]
    assert moved[1] < 0.05


def test_tables_are_shared_and_frozen():
    policy = policy_of()
    policy(next(iter(data())), training=False)
    training = training_of(policy, eager=True, updates=2)
    table, kernel = policy.collection.tables[0], policy.kernel.numpy()
    records = sorted_records(table)
    training.fit(data(), epochs=2, verbose=0)
    assert training.reference.collection is policy.collection
    assert policy.collection.trainable  # whoever trains the policy in another way trains its tables too
    assert np.array_equal(training.reference.kernel, kernel)
    assert not np.array_equal(policy.kernel, kernel)
    for name, column in sorted_records(table).items():
        assert np.array_equal(column, records[name]), name
    assert {id(v) for v in training.trainable_variables} == {id(policy.kernel), id(policy.bias)}


def test_a_model_as_the_reward_is_not_trained():
    class Scores(tf.keras.Model):
        def __init__(self):
            super().__init__(name="scores")
            self.values = self.add_weight(name="values", shape=(ITEMS,), initializer="ones")

        def call(self, batch, items):
            return tf.gather(self.values, items) * near(batch, items)

    reward = Scores()
    training = training_of(reward=reward, eager=True)
    training.fit(data(), epochs=1, verbose=0)
    assert all(weight is not reward.values for weight in training.weights)
    assert np.array_equal(reward.values, np.ones(ITEMS))


def test_a_tied_group_has_no_gradient():
    def same(batch, items):
        return tf.ones_like(items, tf.float32) * tf.cast(batch["user"], tf.float32)[:, tf.newaxis]

    training = training_of(reward=same, eager=True, objective=GRPO(kl=0.0))
    before = training.policy.kernel.numpy()
    history = training.fit(data(), epochs=1, verbose=0).history
    assert history["tied"] == [1.0]
    assert np.array_equal(training.policy.kernel, before)


def test_the_first_update_is_on_policy():
    settings = {"objective": GRPO(kl=0.0), "eager": True}
    one = training_of(updates=1, **settings).fit(data(), epochs=1, verbose=0).history
    assert one["ratio_max"][0] == pytest.approx(1.0, abs=1e-5)
    assert one["clipped"] == [0.0]
    four = training_of(updates=4, rate=0.3, **settings).fit(data(), epochs=1, verbose=0).history
    assert four["ratio_max"][0] > 1.05
    assert four["clipped"][0] > 0


def test_updates_share_a_rollout():
    """Two updates of a batch are those of two steps on the rollout that was drawn for it."""
    training = training_of(updates=2)
    x = next(iter(data()))
    rollout = training.roll_out(x)
    training.train_on_batch(x)
    assert int(training.step_number) == 2
    assert np.array_equal(training.rollouts.draw(training.reference, x, near, step=0).items, rollout.items)
    again = training.rollouts.draw(training.policy, x, near, step=1)
    assert np.array_equal(training.roll_out(x).items, again.items)


def test_a_loss_on_logged_items_beside():
    def nothing(batch, items):
        return tf.zeros_like(items, tf.float32)

    training = training_of(reward=nothing, objective=ECPO(kl=0.0), sft=1.0)
    history = training.fit(data(), epochs=30, verbose=0).history
    assert history["loss"] == pytest.approx(history["sft_loss"])
    assert history["sft_loss"][-1] < 0.5 < history["sft_loss"][0]
    hits = training.policy.retrieve(next(iter(data(USERS))), 1)[0][:, 0].numpy()
    assert (hits == np.arange(USERS) * 5 % ITEMS).mean() > 0.8
    with pytest.raises(ConfigError, match=r"sft=1\.0 learns 'next', which the batch lacks; it has user"):
        training_of(reward=nothing, sft=1.0).fit(data().map(lambda x: {"user": x["user"]}), verbose=0)


@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.slow), 3])  # quick: 3
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, updates):
    def fresh():
        return training_of(objective=ECPO(kl=0.1), eager=True, updates=updates, sft=0.2)

    whole = fresh()
    whole.fit(data(), epochs=2, verbose=0)
    first = fresh()
    first.fit(data(), epochs=1, verbose=0)
    tf.train.Checkpoint(model=first, optimizer=first.optimizer).write(str(tmp_path / "state"))
    second = fresh()
    second.policy.kernel.assign(tf.zeros_like(second.policy.kernel))
    second.reference.kernel.assign(tf.zeros_like(second.reference.kernel))
    second.optimizer.build(second.trainable_variables)
    tf.train.Checkpoint(model=second, optimizer=second.optimizer).read(
        str(tmp_path / "state")
    ).assert_consumed()
    second.fit(data(), epochs=2, initial_epoch=1, verbose=0)
    for one, other in zip(second.weights, whole.weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert not np.array_equal(first.policy.kernel, whole.policy.kernel)


@pytest.mark.parametrize(
    "sampling",  # quick: the other two
    slow_but(["without_replacement", "beam"], ["sample", "without_replacement", "beam"]),
)
@pytest.mark.shown_by(case="beam")
def test_only_allowed_items_come_out(sampling):
    allow = np.arange(ITEMS) % 2 == 0
    rollouts = Rollouts(group=4, sampling=sampling)
    training = training_of(objective=ECPO(kl=0.1), rollouts=rollouts, allow=allow, sft=0.5, updates=2, k=5)
    x = next(iter(data(USERS)))
    rollout = training.roll_out(x)
    assert allow[rollout.items.numpy()].all()
    history = training.fit(data(), epochs=20, verbose=0).history
    assert all(np.isfinite(values).all() for values in history.values())
    assert history["sft_loss"][-1] < history["sft_loss"][0]
    items = training.policy.retrieve(x, 5, allow=allow)[0].numpy()
    assert (np.sort(items) == np.flatnonzero(allow)).all()
    expected = near(x, tf.constant(items)).numpy().mean()
    found = training.evaluate(data(), verbose=0, return_dict=True)["reward@5"]
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_next_item_that_is_not_allowed_is_not_learned():
    def nothing(batch, items):
        return tf.zeros_like(items, tf.float32)

    allow = np.arange(ITEMS) < 4
    users = np.flatnonzero(~allow[np.arange(USERS) * 5 % ITEMS])
    columns = {"user": users, "next": users * 5 % ITEMS}
    training = training_of(reward=nothing, objective=ECPO(kl=0.0), eager=True, sft=1.0, allow=allow)
    before = training.policy.kernel.numpy()
    history = training.fit(tf.data.Dataset.from_tensor_slices(columns).batch(4), verbose=0).history
    assert history["sft_loss"] == [0.0]
    assert np.array_equal(training.policy.kernel, before)


def test_updates_are_traced_once():
    traced = []

    def ops_of(updates):
        training = training_of(updates=updates)
        x = next(iter(data()))
        graph = tf.function(training.train_step).get_concrete_function(x).graph
        traced.append(len(graph.as_graph_def().node) + len(graph.as_graph_def().library.function))

    for updates in (2, 8):
        ops_of(updates)
    assert traced[0] == traced[1]


def test_a_bad_reward_ends_training_in_one_line():
    def bad(batch, items):
        return tf.where(batch["user"][:, tf.newaxis] == 13, float("nan"), tf.ones_like(items, tf.float32))

    training = training_of(reward=bad)
    before = training.policy.kernel.numpy()
    with pytest.raises(ConfigError, match=r"^reward bad: the rewards of user 13 are not finite: [^\n]*$"):
        training.fit(data(USERS), verbose=0)
    assert np.array_equal(training.policy.kernel, before)


def test_what_is_refused():
    with pytest.raises(ConfigError, match="accumulate_steps=2 would make one step of the 3 updates"):
        training_of(updates=3).compile("adam", accumulate_steps=2)
    with pytest.raises(ConfigError, match="reward must be a callable"):
        PolicyTraining(policy_of(), 3)
    with pytest.raises(ConfigError, match="sft must be 0 or more"):
        PolicyTraining(policy_of(), HitReward(), sft=-1)
    with pytest.raises(ConfigError, match=r"allow must be bool \(V,\), .*, got int64 \(9,\)"):
        training_of(allow=np.arange(ITEMS))
    with pytest.raises(ConfigError, match="allow permits 3 items, but 4 are to be drawn"):
        training_of(allow=np.arange(ITEMS) < 3, rollouts=Rollouts(4, "without_replacement"))
    with pytest.raises(ConfigError, match="GRPO: baseline must be one of mean, others, none, got 'median'"):
        GRPO(baseline="median")
    with pytest.raises(ConfigError, match="ECPO: scale must be one of std, none, got 'range'"):
        ECPO(scale="range")
    with pytest.raises(ConfigError, match="a reward is code"):
        PolicyTraining(policy_of(), HitReward()).get_config()
