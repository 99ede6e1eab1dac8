"""The dual form of an adapted dense layer, against the same steps taken with weights of each task's own."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.meta import SGD, Momentum
from gmeta.meta.adaptation import Adaptation, per_task
from gmeta.meta.ridge import DualDense

RATE = 0.3


def support_losses(z, labels, mask):
    """A loss that isn't quadratic in the outputs, so that second order has something to pass through."""
    return tf.reduce_sum(tf.reduce_sum(tf.math.softplus(z * labels) + z**2, -1) * mask, -1)


def by_weights(x, kernel, bias, labels, support, mask, query, steps, order, optimizer):
    rule = Adaptation(RATE, order, optimizer)
    start = per_task({"kernel": kernel, "bias": bias}, len(support))

    def outputs(index, p):
        return tf.gather(x, index) @ p["kernel"] + p["bias"][:, None]

    adapted = rule.run(
        lambda p: support_losses(outputs(support, p), tf.gather(labels, support), mask),
        rule.begin(start),
        steps,
    )
    return outputs(query, adapted.parameters)


def by_samples(x, kernel, bias, labels, support, mask, query, steps, order, optimizer):
    layer = DualDense(x, kernel, bias, support, order=order, steps=steps)
    rule = Adaptation(
        RATE, order, optimizer, read=lambda p, step: {"layer": layer.support_outputs(p["layer"], step)}
    )
    adapted = rule.run(
        lambda read: support_losses(read["layer"], tf.gather(labels, support), mask),
        rule.begin({"layer": layer.start()}),
        steps,
    )
    return layer.outputs(query, adapted.parameters["layer"])


def value_and_gradients(form, x, kernel, bias, *rest):
    with tf.GradientTape() as tape:
        tape.watch((x, kernel, bias))
        loss = tf.reduce_mean(tf.sin(form(x, kernel, bias, *rest)))
    return [loss, *map(tf.convert_to_tensor, tape.gradient(loss, (x, kernel, bias)))]


def drawn(seed, sizes, width, units, queries):
    random = np.random.default_rng(seed)
    samples, longest = 30, max(sizes)
    mask = np.array([[float(k < size) for k in range(longest)] for size in sizes])
    return (
        tf.constant(random.normal(size=(samples, width)) / width**0.5),
        tf.constant(random.normal(size=(width, units))),
        tf.constant(random.normal(size=units)),
        tf.constant(random.normal(size=(samples, units))),
        tf.constant(random.integers(0, samples, (len(sizes), longest))),
        tf.constant(mask),
        tf.constant(random.integers(0, samples, (len(sizes), queries))),
    )


OPTIMIZERS = [SGD(), Momentum(0.8), Momentum(0.5, nesterov=True)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    # From one support sample with many inputs, where the matrix of samples is small, to the reverse.
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    width=st.integers(1, 20),
    units=st.integers(1, 4),
    queries=st.integers(1, 8),
    steps=st.integers(0, 3),
    order=st.sampled_from([1, 2]),
    optimizer=st.sampled_from(OPTIMIZERS),
)
def test_the_same_outputs_and_outer_gradients(seed, sizes, width, units, queries, steps, order, optimizer):
    given_ = (*drawn(seed, sizes, width, units, queries), steps, order, optimizer)
    for ours, expected in zip(
        value_and_gradients(by_samples, *given_), value_and_gradients(by_weights, *given_), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-11)


# Quick: few samples; both outside of a graph above.
@pytest.mark.parametrize(
    "width", [pytest.param(2, marks=pytest.mark.slow), 40], ids=["many samples", "few samples"]
)
def test_in_a_graph_of_open_sizes(width):
    x, kernel, bias, labels, support, mask, query = drawn(5, [12, 3], width, 3, 6)
    open_ = [tf.TensorSpec([None, width], tf.float64), tf.TensorSpec(kernel.shape, tf.float64)]
    open_ += [tf.TensorSpec(bias.shape, tf.float64), tf.TensorSpec([None, 3], tf.float64)]
    open_ += [tf.TensorSpec([None, None], each.dtype) for each in (support, mask, query)]
    traced = tf.function(
        lambda *args: value_and_gradients(by_samples, *args, 3, 2, SGD()), input_signature=open_
    )
    found = traced(x, kernel, bias, labels, support, mask, query)
    expected = value_and_gradients(by_weights, x, kernel, bias, labels, support, mask, query, 3, 2, SGD())
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)
