"""Losses of policies, against numbers computed by hand and against what makes the methods different."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.reinforcement.losses import dpo, ecpo, group_advantages, grpo, k3_divergence


def log(*rows):
    """Logs of probabilities, (users, group, digits)."""
    return tf.constant(np.log(np.array(rows, np.float32)))


def gradient(loss, at):
    at = tf.convert_to_tensor(at, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(at)
        found = tf.reduce_sum(loss(at))
    return tape.gradient(found, at).numpy()


class TestAdvantages:
    def test_by_hand(self):
        """Rewards 0, 0, 3: mean 1, deviation √2."""
        found = group_advantages([[0.0, 0.0, 3.0]])
        np.testing.assert_allclose(found.values, [[-1 / math.sqrt(2)] * 2 + [math.sqrt(2)]], rtol=1e-6)
        assert int(found.tied) == 0
        assert group_advantages([[0.0, 0.0, 3.0]], scale="none").values.numpy().tolist() == [[-1, -1, 2]]
        others = group_advantages([[0.0, 0.0, 3.0]], baseline="others", scale="none")
        np.testing.assert_allclose(others.values, [[-1.5, -1.5, 3]], rtol=1e-6)  # 3 - 0, and 0 - 3/2
        weighed = group_advantages([[0.0, 4.0]], scale="none", weights=[[0.75, 0.25]])
        assert weighed.values.numpy().tolist() == [[-1, 3]]
        none = group_advantages([[0.0, 0.0, 3.0]], baseline="none", scale="none")
        assert none.values.numpy().tolist() == [[0, 0, 3]]

    @pytest.mark.parametrize("baseline", ["mean", "others", "none"])
    @pytest.mark.parametrize("scale", ["std", "none"])
    def test_a_group_without_spread_is_zero_and_counted(self, baseline, scale):
        rewards = tf.constant([[0.1] * 7, [1e6 + 0.1] * 7, [0.0] * 6 + [1.0], [-3.0] * 7])
        found = group_advantages(rewards, baseline=baseline, scale=scale)
        assert not found.values.numpy()[[0, 1, 3]].any()
        assert found.values.numpy()[2].any()
        assert int(found.tied) == 3

    def test_of_nothing(self):
        found = group_advantages(tf.zeros([0, 4]))
        assert found.values.shape == (0, 4)
        assert int(found.tied) == 0

    def test_what_is_refused(self):
        with pytest.raises(ConfigError, match="baseline must be one of mean, others, none"):
            group_advantages([[1.0, 2.0]], baseline="median")
        with pytest.raises(ConfigError, match="group >= 2, got \\(1, 1\\)"):
            group_advantages([[1.0]])


class TestDivergence:
    def test_its_mean_is_the_divergence(self):
        p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
        k3 = k3_divergence(tf.constant(np.log(p)), tf.constant(np.log(q))).numpy()
        assert (p * k3).sum() == pytest.approx((p * np.log(p / q)).sum(), rel=1e-9)
        assert (k3 >= 0).all()


class TestGrpo:
    def test_by_hand(self):
        """Two items of two digits: ratios (0.5·0.8)/(0.5·0.5) = 1.6 and (0.2·0.5)/(0.5·0.5) = 0.4."""
        pi, old = log([[0.5, 0.8], [0.2, 0.5]]), log([[0.5, 0.5], [0.5, 0.5]])
        found = grpo(pi, old, [[2.0, -1.0]], clip=0.2)
        np.testing.assert_allclose(found.ratio, [[1.6, 0.4]], rtol=1e-6)
        np.testing.assert_allclose(found.losses, [[-2 * 1.2, 0.8]], rtol=1e-6)
        assert found.clipped.numpy().tolist() == [[1.0, 1.0]]
        by_digit = grpo(pi, old, [[2.0, -1.0]], clip=0.2, per="digit")
        # Digits: 1 and 1.6 -> 2 and 2.4; 0.4 and 1 -> -0.8 and -1.
        np.testing.assert_allclose(by_digit.losses, [[-2.2, 0.9]], rtol=1e-6)
        np.testing.assert_allclose(by_digit.clipped, [[0.5, 0.5]])

    def test_more_room_above(self):
        found = grpo(log([[0.5], [0.5]]), log([[0.25], [0.25]]), [[1.0, -1.0]], clip=0.2, clip_high=0.5)
        np.testing.assert_allclose(found.losses, [[-1.5, 2.0]], rtol=1e-6)

    @pytest.mark.parametrize("per", ["item", "digit"])
    def test_with_a_reference(self, per):
        """Digits that halve and double: k3 of 0.5/0.25 and of 0.2/0.4."""
        pi, ref = log([[0.5, 0.2]]), log([[0.25, 0.4]])
        digits = [0.5 + math.log(2) - 1, 2 - math.log(2) - 1]
        expected = 0.0 if per == "item" else sum(digits)  # 0.5·0.2 = 0.25·0.4
        found = grpo(pi, pi, [[0.0]], ref, kl=0.1, per=per)
        np.testing.assert_allclose(found.divergence, [[expected]], atol=1e-6)
        np.testing.assert_allclose(found.losses, [[0.1 * expected / (1 if per == "item" else 2)]], atol=1e-7)

    def test_on_policy_its_gradient_is_that_of_reinforce(self):
        pi, advantages = log([[0.5, 0.2], [0.1, 0.3]]), tf.constant([[1.5, -2.0]])
        found = gradient(lambda p: grpo(p, pi, advantages).losses, pi)
        np.testing.assert_allclose(found, [[[-1.5, -1.5], [2.0, 2.0]]], rtol=1e-6)

    def test_no_gradient_where_tied(self):
        pi, old = log([[0.5, 0.2], [0.1, 0.3]]), log([[0.1, 0.1], [0.4, 0.4]])
        advantages = group_advantages([[3.0, 3.0]]).values
        for loss in (grpo, ecpo):
            assert not gradient(lambda p, loss=loss: loss(p, old, advantages).losses, pi).any()

    @settings(max_examples=40, deadline=None)
    @given(
        st.integers(1, 4),
        st.integers(1, 5),
        st.integers(1, 4),
        st.sampled_from(["item", "digit"]),
        st.integers(0, 99),
    )
    def test_as_numpy_would(self, users, group, digits, per, seed):
        rng = np.random.default_rng(seed)
        pi, old, ref = np.log(rng.uniform(0.05, 1, (3, users, group, digits)))
        a, clip, high, beta = rng.normal(size=(users, group)), 0.1, 0.3, 0.05
        found = grpo(pi, old, a, ref, clip=clip, clip_high=high, kl=beta, per=per)

        def total(x):
            return x.sum(-1, keepdims=True) if per == "item" else x

        r, d = np.exp(total(pi) - total(old)), total(ref) - total(pi)
        gain = np.minimum(r * a[..., None], r.clip(1 - clip, 1 + high) * a[..., None])
        losses = (-gain + beta * (np.exp(d) - d - 1)).mean(-1)
        np.testing.assert_allclose(found.losses, losses, rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(found.ratio, np.exp((pi - old).sum(-1)), rtol=2e-4)

    def test_what_is_refused(self):
        pi = log([[0.5, 0.5]])
        with pytest.raises(ConfigError, match=r"clip must be from 0 on and below 1, got 1\.5"):
            grpo(pi, pi, [[1.0]], clip=1.5)
        with pytest.raises(ConfigError, match=r"kl=0\.1 needs the reference"):
            grpo(pi, pi, [[1.0]], kl=0.1)
        with pytest.raises(
            ConfigError, match=r"old must be .* all alike, got log_probs \(1, 1, 2\), old \(1, 2\)"
        ):
            grpo(pi, pi[0], [[1.0]])
        with pytest.raises(ConfigError, match="per must be 'item' or 'digit', got 'token'"):
            grpo(pi, pi, [[1.0]], per="token")


class TestEcpo:
    def test_the_ratio_is_bounded_where_the_advantage_is_negative(self):
        pi, old = log([[0.9], [0.9]]), log([[0.01], [0.01]])
        np.testing.assert_allclose(grpo(pi, old, [[-1.0, 1.0]]).losses, [[90.0, -1.2]], rtol=1e-5)
        found = ecpo(pi, old, [[-1.0, 1.0]], delta=0.1)
        np.testing.assert_allclose(found.losses, [[1.3, -1.2]], rtol=1e-5)
        np.testing.assert_allclose(found.ratio, [[90.0, 90.0]], rtol=1e-5)  # reported as it is

    @pytest.mark.parametrize("per", ["item", "digit"])
    def test_gradients_are_bounded(self, per):
        rng = np.random.default_rng(0)
        pi, old = np.log(rng.uniform(1e-4, 1, (2, 50, 8, 3)))
        advantages = rng.normal(size=(50, 8)).astype(np.float32)
        found = gradient(lambda p: ecpo(p, old, advantages, per=per).losses, pi)
        assert (abs(found) <= 1.3001 * abs(advantages)[..., None]).all()
        unbounded = gradient(lambda p: grpo(p, old, advantages, per=per).losses, pi)
        assert abs(unbounded).max() > 30

    def test_elsewhere_it_is_grpo(self):
        """Also the gradient of a gain that is clipped: it is 0 with the bound and without."""
        rng = np.random.default_rng(1)
        old = np.log(rng.uniform(0.2, 1, (20, 8, 3)))
        near = old + rng.uniform(-0.05, 0.05, old.shape)
        advantages = rng.normal(size=(20, 8))
        for advantage, pi in ((advantages, near), (abs(advantages), np.log(rng.uniform(1e-4, 1, old.shape)))):
            one, other = (
                gradient(lambda p, loss=loss, a=advantage: loss(p, old, a).losses, pi)
                for loss in (grpo, ecpo)
            )
            np.testing.assert_array_equal(one, other)

    def test_what_is_refused(self):
        with pytest.raises(ConfigError, match="delta must be above 0, got 0"):
            ecpo(log([[0.5]]), log([[0.5]]), [[1.0]], delta=0)


class TestDpo:
    def test_of_two(self):
        """β [log 2 - log 0.5] = 0.5 · 2 log 2 = log 2: -log σ(log 2) = log 1.5."""
        pi, ref = log([[0.5, 0.4], [0.1, 0.5]]), log([[0.5, 0.2], [0.2, 0.5]])
        found = dpo(pi, ref, [[1.0, 0.0]], beta=0.5)
        np.testing.assert_allclose(found.losses, [math.log(1.5)], rtol=1e-5)
        assert (found.pairs.numpy().tolist(), found.right.numpy().tolist()) == ([1], [1.0])
        np.testing.assert_allclose(dpo(pi, ref, [[0.0, 1.0]], beta=0.5).losses, [math.log(3)], rtol=1e-5)

    def test_of_all_pairs(self):
        rng = np.random.default_rng(0)
        pi, ref = np.log(rng.uniform(0.1, 1, (2, 1, 4, 2))).astype(np.float32)
        rewards = np.array([[2.0, 0.0, 2.0, 1.0]])
        moved = (pi - ref).sum(-1)[0]
        better = [(0, 1), (0, 3), (2, 1), (2, 3), (3, 1)]
        expected = np.mean([np.log1p(np.exp(-0.1 * (moved[i] - moved[j]))) for i, j in better])
        found = dpo(pi, ref, rewards)
        np.testing.assert_allclose(found.losses, [expected], rtol=1e-5)
        assert int(found.pairs[0]) == 5

    def test_a_tied_group_makes_no_pair(self):
        pi = log([[0.5], [0.2]])
        found = dpo(pi, log([[0.1], [0.3]]), [[1.0, 1.0]])
        assert (float(found.losses[0]), int(found.pairs[0])) == (0.0, 0)
        assert not gradient(lambda p: dpo(p, pi, [[1.0, 1.0]]).losses, pi).any()

    def test_what_is_refused(self):
        with pytest.raises(ConfigError, match="beta must be above 0, got -1"):
            dpo(log([[0.5]]), log([[0.5]]), [[1.0]], beta=-1)
