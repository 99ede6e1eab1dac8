"""Outer gradients through the inner loop: against finite differences, in float64, for every way to adapt."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.meta.adaptation import Adaptation, per_task
from gmeta.meta.inner_loop import task_means
from support.cells import slow_but

TASKS, WIDTH, HIDDEN, IDS = 3, 4, 5, 7
OWNERS = np.array([0, 0, 0, 1, 1, 2])
SOURCES = np.array([0, 2, 3, 2, 5, 6])  # row 2 is read by two tasks


def problem(seed=0):
    """Tasks over a small network and embedding rows; padded support sets of 4, 2 and 1 samples."""
    rng = np.random.default_rng(seed)
    return {
        "x": tf.constant(rng.normal(size=(TASKS, 4, WIDTH))),
        "y": tf.constant(rng.normal(size=(TASKS, 4))),
        "mask": tf.constant((np.arange(4) < np.array([[4], [2], [1]])).astype(float)),
        "pair": tf.constant([[0, 1, 2, 0], [3, 4, 3, 3], [5, 5, 5, 5]]),
        "qx": tf.constant(rng.normal(size=(TASKS, 2, WIDTH))),
        "qy": tf.constant(rng.normal(size=(TASKS, 2))),
        "qpair": tf.constant([[1, 2], [3, 4], [5, 5]]),
    }


def start(seed=1):
    rng = np.random.default_rng(seed)
    return {
        "fc": rng.normal(size=(2 * WIDTH, HIDDEN)) / 2,
        "out": rng.normal(size=(HIDDEN, 1)),
        "rows": rng.normal(size=(IDS, WIDTH)),
        "rate_fc": np.full((), 0.1),
        "rate_out": rng.uniform(0.05, 0.15, size=(HIDDEN, 1)),
        "rate_rows": rng.uniform(0.05, 0.15, size=(WIDTH,)),
    }


def outer(given, shared, adapt, rates=False, steps=3, **rule):
    """The query loss after adaptation, as a function of the shared parameters and the rates."""
    weights = per_task({name: shared[name] for name in ("fc", "out")}, TASKS)
    copies = tf.gather(shared["rows"], SOURCES)

    def loss_of(parameters, x, y, pair, mask):
        own = {**weights, "rows": copies, **parameters}
        inputs = tf.concat([x, tf.gather(own["rows"], pair)], axis=-1)
        predicted = (tf.tanh(inputs @ own["fc"]) @ own["out"])[..., 0]
        return task_means((predicted - y) ** 2, mask)

    own = {**weights, "rows": copies}
    rate = {name: shared[f"rate_{name}"] for name in adapt} if rates else 0.1
    adaptation = Adaptation(rate, **rule)
    owners = {"rows": tf.constant(OWNERS)} if "rows" in adapt else {}
    begun = adaptation.begin({name: own[name] for name in adapt}, owners)
    support = [given[name] for name in ("x", "y", "pair", "mask")]
    after = adaptation.run(lambda p: loss_of(p, *support), begun, steps).parameters
    query = [given[name] for name in ("qx", "qy", "qpair")]
    return tf.reduce_mean(loss_of(after, *query, tf.ones([TASKS, 2], tf.float64)))


RATES = ("rate_fc", "rate_out", "rate_rows")
WAYS = {
    "maml": {"adapt": ["fc", "out"]},
    "anil": {"adapt": ["out"]},
    "boil": {"adapt": ["fc"]},
    "rows": {"adapt": ["rows"]},
    "all": {"adapt": ["fc", "out", "rows"]},
    "rates": {"adapt": ["fc", "out", "rows"], "rates": True},
    "momentum": {"adapt": ["fc", "out", "rows"], "optimizer": meta.Momentum(0.8)},
    "nesterov": {"adapt": ["fc", "out", "rows"], "optimizer": meta.Momentum(0.8, nesterov=True)},
    "adam": {"adapt": ["fc", "out", "rows"], "optimizer": meta.Adam(), "rates": True},
    "clip_norm": {"adapt": ["fc", "out", "rows"], "clip_norm": 0.7},
    "clip_value": {"adapt": ["fc", "out", "rows"], "clip_value": 0.2},
}


@pytest.mark.parametrize("way", WAYS)
def test_second_order_gradients_match_finite_differences(way):
    given, values = problem(), start()
    shared = {name: tf.Variable(value) for name, value in values.items()}
    with tf.GradientTape() as tape:
        loss = outer(given, shared, **WAYS[way])
    gradients = tape.gradient(loss, shared, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    step = 1e-6
    for name, value in values.items():
        along = np.random.default_rng(3).normal(size=value.shape)
        ends = [
            float(outer(given, {**values, name: value + sign * step * along}, **WAYS[way]))
            for sign in (1, -1)
        ]
        slope = float(tf.reduce_sum(tf.convert_to_tensor(gradients[name]) * along))
        # Central differences are off by step² times the third derivative, and by rounding over the step.
        np.testing.assert_allclose(
            slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8, err_msg=name
        )


# Quick: the plain one, and those that adapt rows and clip; each way computes gradients above.
@pytest.mark.parametrize("way", slow_but(["maml", "all", "clip_norm"], WAYS))
@pytest.mark.shown_by(case="all")
def test_recomputing_changes_nothing(way):
    given, values = problem(), start()

    @tf.function(autograph=False)
    def gradients(recompute):
        shared = {name: tf.constant(value) for name, value in values.items()}
        with tf.GradientTape() as tape:
            tape.watch(shared)
            adapt = WAYS[way]["adapt"]
            if not recompute:
                loss = outer(given, shared, **WAYS[way])
            else:  # the loss reads nothing else that outer gradients have to reach
                seen = {n: v if n in (*adapt, *RATES) else tf.stop_gradient(v) for n, v in shared.items()}
                loss = outer(given, seen, **WAYS[way], recompute=True)
        found = tape.gradient(loss, shared, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return {name: tf.convert_to_tensor(value) for name, value in found.items()}

    kept, again = gradients(False), gradients(True)
    for name in (*WAYS[way]["adapt"], *RATES):
        np.testing.assert_allclose(again[name], kept[name], rtol=1e-12, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_task_does_not_see_the_others(way):
    given, values = problem(), start()
    moved = {**given, "y": given["y"] + tf.constant([[0.0], [5.0], [0.0]], tf.float64)}
    losses = []
    for case in (given, moved):
        alone = {**case, "qy": tf.where(tf.constant([[True], [False], [True]]), case["qy"], 0)}
        rule = {name: value for name, value in WAYS[way].items() if name != "rates"}
        losses.append(per_task_losses(alone, values, **rule))
    np.testing.assert_array_equal(losses[0][[0, 2]], losses[1][[0, 2]])
    assert losses[0][1] != losses[1][1]


def per_task_losses(given, shared, adapt, **rule):
    found = []
    for task in range(TASKS):
        weight = tf.one_hot(task, TASKS, dtype=tf.float64)[:, None]
        found.append(float(outer_of_task(given, shared, weight, adapt, **rule)))
    return np.array(found)


def outer_of_task(given, shared, weight, adapt, **rule):
    shared = {name: tf.constant(value) for name, value in shared.items()}
    with tf.GradientTape() as tape:
        qy = tf.identity(given["qy"])
        tape.watch(qy)
        loss = outer({**given, "qy": qy}, shared, adapt, **rule)
    # dL/dqy = -2 (predicted - qy) / n: what the task predicts.
    return tf.reduce_sum(tape.gradient(loss, qy) * weight)


def test_clipping_is_by_task():
    gradients = {"w": tf.constant([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]), "rows": tf.constant([[12.0], [0.0]])}
    clipped = meta.adaptation.clip(gradients, {"rows": tf.constant([0, 1])}, 3, norm=1.0)
    np.testing.assert_allclose(clipped["w"][0], np.array([3.0, 4.0]) / 13, rtol=1e-6)
    np.testing.assert_allclose(clipped["rows"][0], [12 / 13], rtol=1e-6)
    np.testing.assert_array_equal(clipped["w"][1:], gradients["w"][1:])  # to the last bit
    by_value = meta.adaptation.clip(gradients, {}, 3, value=2.0)
    np.testing.assert_array_equal(by_value["w"][0], [2.0, 2.0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"algorithm": "mamal"}, "maml, fomaml"),
        ({"algorithm": "fomaml", "order": 2}, "order must be 1 for fomaml"),
        ({"algorithm": "reptile", "steps": 0}, "Reptile"),
        ({"learn_learning_rate": "task"}, "'task'"),
        ({"optimizer": "rmsprop"}, "'rmsprop'"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0, got 0.0"),
        ({"clip_value": float("nan")}, "clip_value must be a finite number, got nan"),
        ({"clip_norm": "1"}, "clip_norm must be a finite number, got '1'"),
        ({"learning_rate": -0.1}, "learning_rate can't be negative, got -0.1"),
        ({"learning_rate": "0.1"}, "learning_rate must be a finite number, got '0.1'"),
        ({"learning_rate": lambda step: 0.1 / step}, "got <function .*; learn_learning_rate='layer'"),
        ({"steps": 1.5}, "steps must be a whole number from 0 on, got 1.5"),
        ({"evaluation_steps": "1"}, "evaluation_steps must be a whole number from 0 on, got '1'"),
        ({"serving_steps": -1}, "serving_steps must be a whole number from 0 on, got -1"),
        ({"adapt": []}, "adapt names nothing; .*steps=0"),
        ({"adapt": ["fc1", 3]}, "adapt must be names of layers"),
        ({"adapt": 3}, "adapt must be names of layers"),
        ({"optimizer": meta.Adam}, "optimizer must be one of sgd, momentum, adam"),
        ({"optimizer": tf.keras.optimizers.Adam()}, "Keras' optimizers are for the outer loop"),
        ({"recompute": "yes"}, "recompute must be True or False"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        meta.InnerLoop(**wrong)


def test_algorithms_settle_what_was_left_open():
    assert meta.InnerLoop().order == 2
    assert meta.InnerLoop("fomaml").order == meta.InnerLoop("reptile").order == 1
    assert meta.InnerLoop("meta-sgd").learn_learning_rate == "parameter"
    assert meta.InnerLoop("reptile").adapts_embeddings
    layers = ("body/fc1", "body/fc2", "out")
    assert meta.InnerLoop("anil").adapted_layers(layers, layers) == ("out",)
    assert meta.InnerLoop("boil").adapted_layers(layers, layers) == layers[:2]
    assert meta.InnerLoop(adapt=["body", "embeddings"]).adapted_layers(layers, ()) == layers[:2]
    with pytest.raises(ConfigError, match=r"fc9, but .* body/fc1, body/fc2, out"):
        meta.InnerLoop(adapt=["fc9"]).adapted_layers(layers, layers)
    twice = meta.InnerLoop(adapt=["out", "out"])
    assert twice == meta.InnerLoop(adapt="out")
    assert twice.adapted_layers(layers, ()) == ("out",)
    with pytest.raises(ConfigError, match="BOIL"):
        meta.InnerLoop("boil").adapted_layers(("out",), ("out",))


def test_steps_differ_in_training_evaluation_and_serving():
    assert [meta.InnerLoop(steps=3).steps_in(use) for use in ("training", "evaluation", "serving")] == [
        3,
        3,
        3,
    ]
    inner = meta.InnerLoop(steps=1, evaluation_steps=5)
    assert [inner.steps_in(use) for use in ("training", "evaluation", "serving")] == [1, 5, 5]
    assert meta.InnerLoop(steps=1, serving_steps=2).steps_in("serving") == 2
