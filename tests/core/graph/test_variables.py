"""Variables that are made while a function is traced."""

import doctest

import tensorflow as tf

from gmeta.core import graph as module
from gmeta.core.graph import lift_variables


def traces_of(scope):
    """How often a function that makes a variable under a scope is traced, and what it counts to."""
    kept, traces = [], []

    @tf.function
    def step():
        traces.append(1)
        if not kept:
            with scope():
                kept.append(tf.Variable(3, name="count"))
        return kept[0].assign_add(1)

    assert [int(step()) for _ in range(3)] == [4, 5, 6]
    return len(traces)


def test_a_function_that_makes_variables_is_traced_once():
    assert traces_of(tf.init_scope) == 2  # what this is there for
    assert traces_of(lift_variables) == 1


def test_it_can_be_made_under_a_condition_and_in_a_loop():
    kept = []

    @tf.function
    def step(x):
        for _ in tf.range(2):
            if x > 0:
                if not kept:
                    with lift_variables():
                        kept.append(tf.Variable(0.0))
                kept[0].assign_add(x)
        return tf.identity(x)

    step(tf.constant(-1.0))
    assert float(kept[0]) == 0
    step(tf.constant(2.0))
    assert float(kept[0]) == 4


def test_a_graph_of_tensorflow_1_gets_its_own():
    with tf.Graph().as_default() as graph, lift_variables():
        assert tf.Variable(1.0).graph is graph


def test_examples():
    assert doctest.testmod(module).failed == 0
