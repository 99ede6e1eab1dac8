"""Mixtures of experts against the equations in NumPy; what is told of their balance; heads of tasks."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.layers import MMoE
from gmeta.layers.mmoe import expert_balance, squared_variation
from gmeta.layers.networks import TaskNetwork
from gmeta.layers.task_heads import TaskHeads, product_logits
from support.layer_parity import check_layer
from support.reference import sequence_layers as reference


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**20),
    samples=st.integers(0, 6),
    tasks=st.integers(1, 3),
    experts=st.integers(1, 5),
    units=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    data=st.data(),
)
def test_outputs_and_gradients_are_those_of_the_equations(seed, samples, tasks, experts, units, data):
    top_k = data.draw(st.integers(1, experts))
    x = np.random.default_rng(seed).normal(size=(samples, 5))
    check_layer(
        lambda dtype: MMoE(
            [f"task{t}" for t in range(tasks)], experts=experts, units=units, top_k=top_k, dtype=dtype
        ),
        lambda layer, given: tf.stack(list(layer(given).values())),
        lambda given, weights: reference.mmoe(given, weights, tasks, top_k),
        x,
        seed,
    )


def test_samples_do_not_depend_on_each_other():
    mixture = MMoE(["a", "b"], experts=4, units=[8], top_k=2)
    x = tf.random.stateless_normal([6, 5], [1, 2])
    together = mixture(x)
    for task, out in mixture(x[2:3]).items():
        np.testing.assert_allclose(out, together[task][2:3], rtol=1e-6, atol=1e-7)
    # Whatever stands before the last dimension.
    shaped = mixture(tf.reshape(x, [2, 3, 5]))
    np.testing.assert_array_equal(shaped["b"], tf.reshape(together["b"], [2, 3, 8]))


@given(seed=st.integers(0, 99), top_k=st.integers(1, 4))
@settings(max_examples=10)
def test_balance_counts_what_gates_choose(seed, top_k):
    mixture = MMoE(["a", "b"], experts=4, units=[2], top_k=top_k, seed=seed)
    x = tf.random.stateless_normal([7, 5], [seed, 0])
    mixture(x)
    gates = mixture.gates(x).numpy()
    np.testing.assert_array_equal((gates > 0).sum(-1), top_k)
    weight = np.array([1, 1, 0, 2, 1, 0, 1], np.float32)
    balance = expert_balance(mixture.gates(x), weight)
    for task in range(2):
        for expert in range(4):
            own = gates[:, task, expert]
            np.testing.assert_allclose(balance.importance[task, expert], own @ weight / 6, rtol=1e-5)
            np.testing.assert_allclose(balance.load[task, expert], (own > 0) @ weight / 6, rtol=1e-5)
    shares = balance.load.numpy()
    np.testing.assert_allclose(
        squared_variation(balance.load), shares.var(-1) / shares.mean(-1) ** 2, rtol=1e-4, atol=1e-6
    )


def test_one_expert_of_several_layers_can_be_mapped_over_tasks_in_a_graph():
    network = tf.keras.Sequential([OneTask(MMoE(["a"], experts=1, units=[16, 8], report=None))])
    x = tf.random.stateless_normal([6, 4, 12], [1, 2])
    expected = network(tf.reshape(x, [-1, 12]))
    tasks = TaskNetwork(network)
    # What adapts makes tasks run side by side: the last weight, of each task its own.
    name, weight = list(tasks.task_weights().items())[-1]
    mapped = tf.function(lambda x: tasks(x, {name: tf.stack([weight] * 6)}), input_signature=[SHAPE])
    np.testing.assert_allclose(mapped(x), tf.reshape(expected, [6, 4, 1]), rtol=1e-5, atol=1e-6)


SHAPE = tf.TensorSpec([None, None, 12])


class OneTask(tf.keras.layers.Layer):
    """The only task of a mixture, through a layer of its own."""

    def __init__(self, mixture):
        super().__init__()
        self.mixture, self.out = mixture, tf.keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.mixture(x)["a"])


def test_balance_is_reported_and_can_be_trained():
    mixture = MMoE(["a"], experts=3, units=[2], top_k=1, balance_loss=0.1, report="experts", name="mix")
    x = tf.random.stateless_normal([64, 5], [3, 4])
    mixture(x)
    balance = expert_balance(mixture.gates(x))
    told = {metric.name: float(metric.result()) for metric in mixture.metrics}
    assert sorted(told) == sorted(
        [f"mix/a/{n}_cv2" for n in ("importance", "load")]
        + [f"mix/a/expert{e}/{n}" for e in range(3) for n in ("importance", "load")]
    )
    np.testing.assert_allclose(told["mix/a/expert2/load"], balance.load[0, 2], rtol=1e-6)
    np.testing.assert_allclose(told["mix/a/load_cv2"], squared_variation(balance.load)[0], rtol=1e-6)
    np.testing.assert_allclose(mixture.losses, [0.1 * told["mix/a/importance_cv2"]], rtol=1e-6)
    # With all gates open, the loss alone evens out what they take.
    mixture = MMoE(["a"], experts=3, units=[2], balance_loss=1.0, report=None)
    mixture(x)
    mixture.gate_kernel.assign(4 * mixture.gate_kernel)
    losses = []
    for _ in range(40):
        with tf.GradientTape() as tape:
            mixture(x + 1)
            loss = tf.add_n(mixture.losses)
        mixture.gate_kernel.assign_sub(0.5 * tape.gradient(loss, mixture.gate_kernel))
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]
    assert mixture.metrics == []


def heads(**settings):
    return TaskHeads(["ctr", "cvr"], units=[3], products={"ctcvr": ["ctr", "cvr"]}, **settings)


@given(a=st.floats(-30, 30), b=st.floats(-30, 30), c=st.floats(-30, 30))
def test_logits_of_products(a, b, c):
    found = product_logits(*(tf.constant(x, tf.float64) for x in (a, b, c)))
    np.testing.assert_allclose(float(found), float(reference.product_logits(a, b, c)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("a", [-300.0, -90.0, 0.0, 90.0, 300.0])
@pytest.mark.parametrize("b", [-300.0, 0.0, 300.0])
def test_products_are_safe_where_probabilities_are_not(a, b):
    pair = [tf.constant(a), tf.constant(b)]
    with tf.GradientTape() as tape:
        tape.watch(pair)
        logit = product_logits(*pair)
    gradients = np.array(tape.gradient(logit, pair))
    # The least of the three terms' exponents bounds it from above, and is at most log 3 away.
    bound = min(a, b, a + b)
    assert bound - np.log(3) - 1e-5 <= float(logit) <= bound + 1e-5
    assert np.isfinite(gradients).all()
    assert (gradients >= 0).all()


def test_heads_multiply_probabilities():
    layer = heads()
    x = {"ctr": tf.random.stateless_normal([9, 4], [1, 1]), "cvr": tf.random.stateless_normal([9, 4], [2, 2])}
    logits = layer(x)
    p = {name: tf.sigmoid(logit).numpy() for name, logit in logits.items()}
    np.testing.assert_allclose(p["ctcvr"], p["ctr"] * p["cvr"], rtol=1e-5)
    np.testing.assert_array_equal(logits["cvr"], layer.towers["cvr"](x["cvr"])[:, 0])
    shared = layer(x["ctr"])
    np.testing.assert_array_equal(shared["ctr"], logits["ctr"])
    assert np.abs(shared["cvr"] - logits["cvr"]).max() > 1e-3


def network(report=None):
    inputs = tf.keras.Input([5])
    mixture = MMoE(["ctr", "cvr"], experts=3, units=[4], top_k=2, report=report, name="mmoe")
    logits = heads(name="heads")(mixture(inputs))
    return tf.keras.Model(inputs, tf.stack([logits["ctr"], logits["ctcvr"]], axis=1))


def test_a_saved_model_is_loaded_whole(tmp_path):
    model = network("tasks")
    x = tf.random.stateless_normal([6, 5], [5, 6])
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))
    assert loaded.get_layer("mmoe").get_config() == model.get_layer("mmoe").get_config()
    assert loaded.get_layer("heads").get_config() == model.get_layer("heads").get_config()


def test_experts_and_heads_run_with_the_weights_of_each_task():
    model = network()
    tasks = TaskNetwork(model)
    x = tf.random.stateless_normal([2, 6, 5], [7, 8])
    tasks(x)
    own = {
        name: tf.stack([variable, variable + 0.5])
        for name, variable in tasks.task_weights().items()
        if name.split("/")[0] in ("mmoe", "heads")
    }
    assert len(own) == len(model.trainable_variables) == 7 + 4
    found = tf.function(tasks)(x, own)
    np.testing.assert_allclose(found[0], model(x[0]), rtol=1e-5, atol=1e-6)
    for variable in model.trainable_variables:
        variable.assign_add(0.5 * tf.ones_like(variable))
    np.testing.assert_allclose(found[1], model(x[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    mixture, layer = MMoE(["ctr", "cvr"], experts=3, units=[4], dtype=policy), heads(dtype=policy)
    x = tf.random.stateless_normal([6, 5], [5, 6])
    mixed = mixture(x)
    assert {out.dtype for out in mixed.values()} == {tf.as_dtype(mixture.compute_dtype)}
    logits = layer(mixed)
    assert {out.dtype for out in logits.values()} == {tf.float32}
    exact = heads()(MMoE(["ctr", "cvr"], experts=3, units=[4])(x))
    np.testing.assert_allclose(logits["ctcvr"], exact["ctcvr"], atol=0.05)
    assert {w.dtype for w in [*mixture.weights, *layer.weights]} == {tf.float32}


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (lambda: MMoE([], experts=2, units=[2]), r"different names, got \[\]"),
        (lambda: MMoE(["a", "a"], experts=2, units=[2]), "different names"),
        (lambda: MMoE(["a"], experts=2, units=[]), "units must be"),
        (lambda: MMoE(["a"], experts=2, units=[2], top_k=3), "top_k=3, experts=2"),
        (lambda: MMoE(["a"], experts=0, units=[2]), "experts=0"),
        (lambda: MMoE(["a"], experts=2, units=[2], report="all"), "'all'"),
        (lambda: TaskHeads(["a"], products={"a": ["a"]}), "different names"),
        (lambda: TaskHeads(["a"], products={"b": ["c"]}), "among a, got c"),
        (lambda: heads()({"ctr": tf.zeros([1, 2])}), "no inputs for cvr; got those for ctr"),
    ],
)
def test_what_makes_no_sense_is_refused(refused, told):
    with pytest.raises(ConfigError, match=told):
        refused()
