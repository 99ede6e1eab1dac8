"""Cross-entropy of products of probabilities: numbers, tails, absent labels; and means over samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.losses import MultiTaskBCE
from gmeta.losses.multi_task import mean_loss, product_cross_entropy
from support.reference import losses as reference

FUNNEL = {"ctr": ["click"], "ctcvr": ["click", "buy"]}


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(), (0,), (7,), (2, 3)]),
    heads=st.integers(1, 3),
    scale=st.sampled_from([0.1, 3.0]),
    seed=st.integers(0, 99),
)
def test_it_equals_its_definition(shape, heads, scale, seed):
    rng = np.random.default_rng(seed)
    logits, labels = list(rng.normal(scale=scale, size=(heads, *shape)).clip(-6, 6)), rng.random(shape)
    found = product_cross_entropy(labels, [tf.constant(a) for a in logits])
    expected = reference.product_cross_entropy(labels, logits).astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def gradients(function, labels, logits, dtype):
    inputs = [tf.constant(a, dtype) for a in logits]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        losses = function(tf.constant(labels, dtype), inputs)
    return [t.numpy().astype(np.float64) for t in (losses, *tape.gradient(losses, inputs))]


def naive(labels, logits):
    p = tf.reduce_prod(tf.sigmoid(tf.stack(logits)), axis=0)
    return -labels * tf.math.log(p) - (1 - labels) * tf.math.log(1 - p)


@pytest.mark.parametrize("label", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("spread", [2.0, 6.0])
def test_losses_and_gradients_are_as_near_float64_as_the_definition_in_float32_is(label, spread):
    logits = np.float32(np.random.default_rng(0).uniform(-spread, spread, (2, 2000)))
    labels = np.full(2000, np.float32(label))
    exact = gradients(naive, labels, logits, tf.float64)
    found = gradients(product_cross_entropy, labels, logits, tf.float32)
    for right, value, other in zip(exact, found, gradients(naive, labels, logits, tf.float32), strict=True):
        assert np.abs(value - right).max() <= 2 * np.abs(other - right).max()


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_tails_are_right_where_probabilities_round_to_0_and_1(dtype):
    a = np.array([200.0, 800.0, 30.0, -200.0, -90.0, 800.0])
    b = np.array([300.0, 20.0, 30.0, -300.0, 90.0, 800.0])
    # log(e^-a + e^-b) of two near 1, e^a of one near 0; the derivative is shared as the terms are.
    missed = np.array([200.0, 20.0, 30.0 - math.log(2), 0.0, 0.0, 800.0 - math.log(2)])
    slope_a = np.array([1.0, 0.0, 0.5, 0.0, 0.0, 0.5])
    losses, of_a, _ = gradients(product_cross_entropy, np.zeros(6), [a, b], dtype)
    np.testing.assert_allclose(losses, missed, rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(of_a, slope_a, rtol=1e-6, atol=1e-30)
    losses, of_a, _ = gradients(product_cross_entropy, np.ones(6), [a, b], dtype)
    np.testing.assert_allclose(losses, np.logaddexp(0, -a) + np.logaddexp(0, -b), rtol=1e-6, atol=1e-38)
    np.testing.assert_allclose(of_a, -np.exp(-np.logaddexp(0, a)), rtol=1e-5, atol=1e-38)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_no_step_where_one_way_of_computing_takes_over(dtype):
    eps = np.finfo(dtype.as_numpy_dtype).eps
    for border in (-math.log(eps / 2), -math.log(math.expm1(math.log(2) / 2))):  # of u, by two equal logits
        near = border + np.linspace(-1e-3, 1e-3, 201)
        losses, slope, _ = gradients(product_cross_entropy, np.zeros(201), [near, near], dtype)
        assert np.abs(np.diff(losses, n=2)).max() < 20 * eps * border + 1e-9
        assert np.abs(np.diff(slope)).max() < 1e-5


def test_tasks_are_means_over_known_labels_and_real_samples():
    logits = {"click": np.array([0.3, -1.0, 2.0, 9.0]), "buy": np.array([1.0, 0.5, -2.0, math.nan])}
    labels = {"ctr": np.array([1.0, 0.0, 1.0, 1.0]), "ctcvr": np.array([1.0, math.nan, 0.0, 1.0])}
    known, weights = {"ctcvr": [1, 0, 1, 1]}, np.array([1.0, 1.0, 2.0, 0.0])
    loss = MultiTaskBCE(FUNNEL, weights={"ctcvr": 0.5})
    means = loss.task_means(logits, labels, known=known, weights=weights)
    ctr = reference.product_cross_entropy([1.0, 0.0, 1.0], [logits["click"][:3]])
    both = reference.product_cross_entropy([1.0, 0.0], [a[[0, 2]] for a in logits.values()])
    assert float(means["ctr"]) == pytest.approx(float(ctr @ weights[:3]) / 4)
    assert float(means["ctcvr"]) == pytest.approx(float(both @ [1.0, 2.0]) / 3)
    columns = (
        {head: a[:, np.newaxis] for head, a in logits.items()},
        {t: y[:, None] for t, y in labels.items()},
    )
    total = float(loss(*columns, known=known, weights=weights))
    assert total == pytest.approx(float(means["ctr"] + 0.5 * means["ctcvr"]))


def test_a_task_without_any_label_is_0_and_trains_nothing():
    click, buy = tf.Variable([0.3, 1.0]), tf.Variable([0.3, math.inf])
    with tf.GradientTape() as tape:
        total = MultiTaskBCE(FUNNEL)(
            {"click": click, "buy": buy},
            {"ctr": [1.0, 0.0], "ctcvr": [math.nan, 1.0]},
            known={"ctcvr": [False, False]},
        )
    of_click, of_buy = tape.gradient(total, [click, buy])
    assert np.isfinite(of_click).all()
    assert np.abs(of_click).min() > 0
    np.testing.assert_array_equal(of_buy, [0.0, 0.0])


def test_a_mean_leaves_padding_out_and_is_0_of_nothing():
    losses = tf.Variable([1.0, math.nan, 3.0])
    with tf.GradientTape() as tape:
        mean = mean_loss(losses, [1, 0, 3])
    assert float(mean) == 2.5
    np.testing.assert_array_equal(tape.gradient(mean, losses), [0.25, 0.0, 0.75])
    assert float(mean_loss(losses, [0, 0, 0])) == 0
    assert float(mean_loss(tf.zeros([0]))) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda: MultiTaskBCE({"ctr": []}),
            r"'ctr' must be a list of one or more heads, each once, got \[\]",
        ),
        (lambda: MultiTaskBCE({"ctr": "click"}), "got 'click'"),
        (lambda: MultiTaskBCE({"ctr": ["a", "a"]}), "each once"),
        (lambda: MultiTaskBCE(FUNNEL, weights={"cvr": 1.0}), "of the tasks ctr, ctcvr; got 1.0 for 'cvr'"),
        (lambda: MultiTaskBCE(FUNNEL, weights={"ctr": -1.0}), "at least 0"),
        (
            lambda: MultiTaskBCE(FUNNEL)({"click": [0.0]}, {"ctr": [1.0]}),
            "logits of 'buy', labels of 'ctcvr'",
        ),
        (
            lambda: MultiTaskBCE({"ctr": ["a"]})({"a": [0.0]}, {"ctr": [1.0]}, known={"cvr": [1]}),
            "missing are none",
        ),
        (
            lambda: MultiTaskBCE({"ctr": ["a"]})({"a": [0.0, 0.0]}, {"ctr": [1.0, 5.0]}),
            "labels of 'ctr' must lie between 0 and 1, got 5$",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        wrong()
