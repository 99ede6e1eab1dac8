import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.meta.adaptation import adapt, per_task
from gmeta.meta.inner_loop import reduce_tasks, task_means


def quadratic(target: np.ndarray) -> meta.adaptation.SupportLoss:
    """Per-task loss 1/2 |w - target|^2, whose gradient step is known in closed form."""
    return lambda p: 0.5 * tf.reduce_sum((p["w"] - target) ** 2, axis=-1)


@given(tasks=st.integers(1, 5), width=st.integers(1, 6), steps=st.integers(0, 6), seed=st.integers(0, 99))
def test_steps_on_a_quadratic_match_the_closed_form(tasks, width, steps, seed):
    rng = np.random.default_rng(seed)
    start, target, rate = rng.normal(size=width), rng.normal(size=(tasks, width)), 0.3
    adapted = adapt(
        quadratic(target), per_task({"w": tf.constant(start)}, tasks), steps=steps, learning_rate=rate
    )
    expected = target + (1 - rate) ** steps * (start - target)
    np.testing.assert_allclose(adapted["w"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2])
def test_outer_gradient_of_a_quadratic(order):
    # One step: w' = w - a (w - s), outer 1/2 |w' - q|^2. Second order carries dw'/dw = 1 - a.
    start, support, query, rate = 2.0, np.array([[1.0]]), 5.0, 0.25
    w = tf.Variable([start], dtype=tf.float64)
    with tf.GradientTape() as tape:
        adapted = adapt(quadratic(support), per_task({"w": w}, 1), steps=1, learning_rate=rate, order=order)
        outer = 0.5 * tf.reduce_sum((adapted["w"] - query) ** 2)
    moved = start - rate * (start - 1.0)
    expected = (moved - query) * ((1 - rate) if order == 2 else 1.0)
    np.testing.assert_allclose(tape.gradient(outer, w), [expected], rtol=1e-12)


def test_orders_agree_where_the_hessian_is_zero():
    slopes = np.array([[1.0, -2.0], [0.5, 3.0]])
    gradients = []
    for order in (1, 2):
        w = tf.Variable([0.3, -0.7], dtype=tf.float64)
        with tf.GradientTape() as tape:
            adapted = adapt(
                lambda p: tf.reduce_sum(p["w"] * slopes, axis=-1),
                per_task({"w": w}, 2),
                steps=3,
                learning_rate=0.1,
                order=order,
            )
            outer = tf.reduce_sum(tf.sin(adapted["w"]))
        gradients.append(tape.gradient(outer, w).numpy())
    np.testing.assert_array_equal(*gradients)


def test_a_parameter_that_the_loss_ignores_is_unchanged():
    parameters = per_task({"w": tf.constant([1.0]), "idle": tf.constant([7.0])}, 3)
    adapted = adapt(quadratic(np.zeros((3, 1), np.float32)), parameters, steps=2, learning_rate=0.5)
    np.testing.assert_array_equal(adapted["idle"], [[7.0]] * 3)


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"order": 3}, {"evaluation_steps": -2}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match="inner loop"):
        meta.InnerLoop(**wrong)


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_reductions_leave_padding_out(sizes, padding, seed):
    width = max(sizes) + padding or 1
    losses = np.random.default_rng(seed).normal(size=(len(sizes), width))
    mask = (np.arange(width) < np.array(sizes)[:, None]).astype(np.float64)
    real = [losses[t, :n] for t, n in enumerate(sizes)]
    padded = np.where(mask > 0, losses, np.nan)  # what stands in the padding must not matter

    means = [part.mean() if len(part) else 0.0 for part in real]
    np.testing.assert_allclose(task_means(tf.constant(padded), tf.constant(mask)), means, atol=1e-12)
    of_samples = np.concatenate(real).mean() if sum(sizes) else 0.0
    np.testing.assert_allclose(
        reduce_tasks(tf.constant(padded), tf.constant(mask), "sample"), of_samples, atol=1e-12
    )
    of_tasks = np.mean([part.mean() for part in real if len(part)]) if sum(sizes) else 0.0
    np.testing.assert_allclose(
        reduce_tasks(tf.constant(padded), tf.constant(mask), "task"), of_tasks, atol=1e-12
    )


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ConfigError, match="'median'"):
        reduce_tasks(tf.zeros([1, 1]), tf.ones([1, 1]), "median")
