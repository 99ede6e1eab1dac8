"""Rollouts: a function of seed, step and user, and which sampling gives unbiased gradients."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.reinforcement import GRPO, PolicyTraining, Rollouts
from gmeta.reinforcement.rewards import HitReward
from support.softmax_policy import SoftmaxPolicy

USERS = tf.range(12, dtype=tf.int64)
VALUES = tf.constant([0.0, 1.0, 0.3, -0.5, 0.2, 2.0, 0.0, 0.7, -1.0])  # of the 9 items, for every user


def policy_of(seed=0, scale=3.0):
    return SoftmaxPolicy(EmbeddingCollection([FeatureConfig("user", dim=4)]), seed=seed, scale=scale)


def value(batch, items):
    return tf.gather(VALUES, items)


@pytest.mark.parametrize("sampling", ["sample", "without_replacement", "beam"])
def test_a_rollout_is_a_function_of_seed_step_and_user(sampling):
    policy, draws = policy_of(), Rollouts(group=4, sampling=sampling, seed=5)

    def items(users, step=3, rollouts=draws):
        return rollouts.draw(policy, {"user": users}, value, step=step).items.numpy()

    everyone = items(USERS)
    assert np.array_equal(items(USERS), everyone)
    assert np.array_equal(items(USERS[::-1]), everyone[::-1])
    assert np.array_equal(items(USERS[4:5]), everyone[4:5])
    if sampling != "beam":
        assert (items(USERS, step=4) != everyone).any()
        assert (items(USERS, rollouts=Rollouts(group=4, sampling=sampling, seed=6)) != everyone).any()
    if sampling != "sample":
        assert all(len(set(row)) == 4 for row in everyone)


def test_the_likeliest_item_comes_first():
    policy, x = policy_of(), {"user": USERS}
    rollout = Rollouts(group=5).draw(policy, x, value, step=0, reference=policy.copy_dense("reference"))
    assert (np.diff(rollout.log_probs.numpy().sum(axis=-1), axis=1) <= 0).all()
    np.testing.assert_allclose(rollout.log_probs, policy.digit_log_probs(x, rollout.items), rtol=1e-6)
    np.testing.assert_array_equal(rollout.rewards, tf.gather(VALUES, rollout.items))
    np.testing.assert_array_equal(rollout.reference, rollout.log_probs)
    np.testing.assert_allclose(rollout.weights, 0.2)
    assert type(rollout).of_columns(rollout.columns()) == rollout


def test_users_draw_by_their_ids():
    policy = policy_of()
    x = {"user": USERS, "who": tf.strings.as_string(USERS), "same": tf.zeros_like(USERS)}

    def items(user):
        policy.kernel.assign(tf.zeros_like(policy.kernel))
        return Rollouts(group=4).draw(policy, x, value, step=0, user=user).items.numpy()

    assert len(np.unique(items("same"), axis=0)) == 1
    assert len(np.unique(items("user"), axis=0)) > 6
    assert len(np.unique(items("who"), axis=0)) > 6
    with pytest.raises(ConfigError, match="the batch lacks 'visitor', it has user, who, same"):
        items("visitor")


def gradient_of(policy, sampling, baseline, *, users=4_000, group=3):
    """The mean gradient of the bias over users who are all alike, and its standard error."""
    rollouts = Rollouts(group=group, sampling=sampling)
    objective = GRPO(kl=0.0, baseline=baseline, scale="none")
    policy.kernel.assign(tf.zeros_like(policy.kernel))  # so that a user's number matters for the draw alone
    x = {"user": tf.range(users, dtype=tf.int64)}
    rollout = rollouts.draw(policy, x, value, step=0)
    with tf.GradientTape() as tape:
        each = tf.tile(policy.bias[tf.newaxis], [users, 1])
        tape.watch(each)
        logits = tf.nn.log_softmax(each)
        first = tf.gather(
            tf.reduce_logsumexp(tf.reshape(logits, [-1, 3, 3]), -1), rollout.items // 3, batch_dims=1
        )
        whole = tf.gather(logits, rollout.items, batch_dims=1)
        losses = objective(rollout, tf.stack([first, whole - first], axis=-1)).losses
    found = -tape.gradient(losses, each).numpy()
    return found.mean(axis=0), found.std(axis=0) / users**0.5


@pytest.fixture
def policy():
    made = policy_of()
    made.bias.assign([1.5, 0.0, -0.5, 0.3, 0.9, -2.0, 0.2, 0.0, 1.0])
    return made


def exact(policy):
    p = tf.nn.softmax(policy.bias).numpy()
    return p * (VALUES.numpy() - (p * VALUES.numpy()).sum())


@pytest.mark.parametrize(
    ("sampling", "baseline", "factor"),
    [
        ("sample", "others", 1.0),
        # Quick: the others.
        pytest.param("sample", "none", 1.0, marks=pytest.mark.slow),
        pytest.param("sample", "mean", 2 / 3, marks=pytest.mark.slow),  # 1 - 1/G
        ("without_replacement", "none", 1.0),
    ],
)
@pytest.mark.shown_by(case="sample-others-1.0")
def test_the_gradient_is_unbiased(policy, sampling, baseline, factor):
    mean, error = gradient_of(policy, sampling, baseline)
    assert (abs(mean - factor * exact(policy)) < 4.5 * error).all()
    assert (abs(mean) > 10 * error).any()


@pytest.mark.shown_by("test_the_gradient_is_unbiased")
def test_the_weighted_mean_as_the_baseline_costs_a_bias(policy):
    """It is small beside the gradient; with equal weights it would be as large as that."""
    mean, error = gradient_of(policy, "without_replacement", "mean", group=5)
    off = abs(mean - exact(policy))
    assert (off > 4.5 * error).any()
    assert np.linalg.norm(off) < 0.5 * np.linalg.norm(exact(policy))


def test_beams_are_no_estimate(policy):
    """The best item is not among the three likeliest, so its probability never rises."""
    mean, error = gradient_of(policy, "beam", "others", users=10)
    assert not error.round(6).any()
    assert exact(policy)[5] > 0
    assert mean[5] <= 0
    assert np.linalg.norm(mean - exact(policy)) > 0.5 * np.linalg.norm(exact(policy))


def test_sampled_frequencies_are_the_probabilities(policy):
    """χ² of the stub's draws, over 9 items; also of the first of a set without replacement."""
    policy.kernel.assign(tf.zeros_like(policy.kernel))
    p = tf.nn.softmax(policy.bias).numpy()
    x = {"user": tf.range(3_000, dtype=tf.int64)}
    for method, column in (("sample", slice(None)), ("without_replacement", slice(1))):
        drawn = policy.sample(x, 3, seed=1, step=2, method=method)[0].numpy()[:, column]
        counts = np.bincount(drawn.ravel(), minlength=9)
        assert ((counts - p * drawn.size) ** 2 / (p * drawn.size)).sum() < 26.1  # the 0.1% tail of 8 degrees


def test_what_is_refused():
    with pytest.raises(ConfigError, match="group must be a whole number from 2 on, got 1"):
        Rollouts(group=1)
    with pytest.raises(
        ConfigError, match="sampling must be one of sample, without_replacement, beam, got 'top'"
    ):
        Rollouts(sampling="top")
    with pytest.raises(ConfigError, match="Dense lacks sample, digit_log_probs, retrieve, copy_dense"):
        PolicyTraining(tf.keras.layers.Dense(1), HitReward())
