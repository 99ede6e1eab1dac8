"""Mixtures that compute only chosen experts beside mixtures that compute all."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.layers import MMoE
from gmeta.layers.mmoe import group_by_expert, strongest
from gmeta.layers.networks import TaskNetwork
from support.layer_parity import check_layer
from support.reference import sequence_layers as reference

SHAPE = tf.TensorSpec([None, 5])
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def pair(tasks=("a", "b"), **options):
    """The same mixture in both forms."""
    options = {"experts": 6, "units": [4, 3], "top_k": 2, "report": None, **options}
    return [MMoE(tasks, sparse=sparse, **options) for sparse in (True, False)]


def outputs_and_gradients(mixture, x, upstream):
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = tf.stack(list(mixture(x).values()))
        loss = tf.add_n([tf.reduce_sum(out * tf.cast(upstream, out.dtype)), *mixture.losses])
    return [out, *tape.gradient(loss, [x, *mixture.trainable_weights])]


def blind(mixture, expert):
    """Make whatever computes an expert notice."""
    for kernel in mixture.kernels:
        kernel.assign(tf.tensor_scatter_nd_update(kernel, [[expert]], np.nan * kernel[expert : expert + 1]))


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**20),
    samples=st.integers(0, 9),
    tasks=st.integers(1, 3),
    experts=st.integers(1, 7),
    units=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    shift=st.sampled_from([0.0, 3.0]),
    data=st.data(),
)
def test_both_forms_have_the_same_outputs_and_gradients(seed, samples, tasks, experts, units, shift, data):
    options = {
        "experts": experts,
        "units": units,
        "top_k": data.draw(st.integers(1, experts)),
        "balance_loss": data.draw(st.sampled_from([0.0, 0.5])),
        "dtype": "float64",
        "seed": seed,
    }
    random = np.random.default_rng(seed)
    x = tf.constant(random.normal(size=(samples, 5)) + shift)  # shifted: most samples choose alike
    upstream = random.normal(size=(tasks, samples, units[-1]))
    chosen, all_ = (outputs_and_gradients(m, x, upstream) for m in pair(range(tasks), **options))
    for one, two in zip(chosen, all_, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)


@settings(max_examples=4)
@given(seed=st.integers(0, 2**20), samples=st.integers(0, 6), top_k=st.integers(1, 3))
def test_outputs_and_gradients_are_those_of_the_equations(seed, samples, top_k):
    check_layer(
        lambda dtype: MMoE(["a", "b"], experts=3, units=[4, 2], top_k=top_k, sparse=True, dtype=dtype),
        lambda layer, given: tf.stack(list(layer(given).values())),
        lambda given, weights: reference.mmoe(given, weights, 2, top_k),
        np.random.default_rng(seed).normal(size=(samples, 5)),
        seed,
    )


def test_gradients_of_gradients_are_the_same():
    def second(mixture):
        x = tf.random.stateless_normal([7, 5], [1, 2])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.add_n([tf.reduce_sum(out**3) for out in mixture(x).values()])
            norm = tf.reduce_sum(tf.square(inner.gradient(loss, x)))
        return outer.gradient(norm, [x, *mixture.trainable_weights], unconnected_gradients="zero")

    chosen, all_ = map(second, pair())
    for one, two in zip(chosen, all_, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_is_off_by_as_much_in_both_forms(policy):
    x = tf.random.stateless_normal([300, 5], [5, 6])
    upstream = tf.ones([2, 300, 3])
    exact = outputs_and_gradients(pair()[1], x, upstream)
    chosen, all_ = (outputs_and_gradients(mixture, x, upstream) for mixture in pair(dtype=policy))
    assert [each.dtype for each in chosen] == [each.dtype for each in all_]
    assert chosen[0].dtype == tf.as_dtype(policy.removeprefix("mixed_"))
    for one, two, right in zip(chosen, all_, exact, strict=True):
        off = [np.linalg.norm(tf.cast(each, tf.float32) - right) for each in (one, two)]
        assert off[0] <= 1.5 * off[1] + 1e-4 * np.linalg.norm(right)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**20),
    experts=st.integers(1, 9),
    dtype=st.sampled_from([tf.float32, tf.bfloat16]),
    data=st.data(),
)
def test_the_strongest_are_those_of_top_k(seed, experts, dtype, data):
    k = data.draw(st.integers(1, experts))
    drawn = np.random.default_rng(seed).integers(-3, 4, [5, 2, experts])  # many are equal
    logits = tf.cast(np.where(drawn == -3, -np.inf, drawn), dtype)
    _, chosen = tf.math.top_k(tf.cast(logits, tf.float32), k)
    expected = tf.reduce_sum(tf.one_hot(chosen, experts), axis=2)
    finite = np.isfinite(tf.cast(logits, tf.float32))  # any of those that are minus infinity will do
    found = strongest(logits, k).numpy()
    np.testing.assert_array_equal(found & finite, (expected.numpy() > 0) & finite)


def test_samples_are_grouped_and_none_is_left_out():
    mixture = pair()[0]
    x = tf.random.stateless_normal([40, 5], [3, 4])
    mixture(x)
    gates = mixture.gates(x).numpy()
    samples, sizes, weights = (part.numpy() for part in group_by_expert(tf.constant(gates)))
    groups = np.split(samples, np.cumsum(sizes)[:-1])
    for expert, group in enumerate(groups):
        assert group.tolist() == np.flatnonzero((gates[:, :, expert] > 0).any(1)).tolist()
    of_pair = np.repeat(np.arange(6), sizes)
    np.testing.assert_array_equal(weights, gates[samples, :, of_pair])


@pytest.mark.parametrize(("experts", "top_k", "computes_all"), [(8, 1, False), (8, 4, True), (8, None, True)])
def test_experts_that_nobody_chose_are_computed_only_by_the_form_of_all(experts, top_k, computes_all):
    mixture = MMoE(["a", "b"], experts=experts, units=[4], top_k=top_k, report=None)
    x = tf.random.stateless_normal([9, 5], [1, 2])
    mixture(x)
    if top_k is not None:  # all logits of expert 5 below the others
        x = tf.concat([x[:, :4], tf.ones([9, 1])], axis=1)
        kernel = mixture.gate_kernel.numpy()
        kernel[4, [5, experts + 5]] = -100
        mixture.gate_kernel.assign(kernel)
    blind(mixture, 5)
    assert np.isnan(mixture(x)["a"]).any() == computes_all


@pytest.fixture
def gpu(monkeypatch):
    """A process that seems to compute on a GPU, where few numbers spared an expert are enough."""
    monkeypatch.setattr("gmeta.layers.mmoe.on_gpu", lambda: True)
    monkeypatch.setattr("gmeta.layers.mmoe._SAVED_ON_GPU", 42)


def on_gpu_pays_from_8(sparse="auto", **options):
    """A mixture that spares an expert 3/4 of 7 numbers for each sample: 42 of 8 samples."""
    options = {"experts": 8, "units": [4, 3], "top_k": 1, "report": None, **options}
    return MMoE(["a", "b"], sparse=sparse, **options)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("spec", [SHAPE, None], ids=["unknown", "known"])
def test_on_a_gpu_enough_samples_make_it_compute_the_chosen_alone(spec):
    mixture = on_gpu_pays_from_8()
    mixture.build([None, 5])
    kernel = mixture.gate_kernel.numpy()
    kernel[4, [5, 13]] = -100
    mixture.gate_kernel.assign(kernel)
    blind(mixture, 5)
    run = (
        tf.function(lambda x: mixture(x)["a"], input_signature=[spec]) if spec else lambda x: mixture(x)["a"]
    )
    found = {}
    for samples in (1, 7, 8, 30):
        x = tf.concat([tf.random.stateless_normal([samples, 4], [1, 2]), tf.ones([samples, 1])], axis=1)
        found[samples] = not np.isnan(run(x)).any()
    assert found == {1: False, 7: False, 8: True, 30: True}


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_few_experts_are_all_computed():
    mixture = on_gpu_pays_from_8(experts=3)
    mixture.build([None, 5])
    blind(mixture, 2)
    assert np.isnan(mixture(tf.ones([5000, 5]))["a"]).all()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("policy", ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def test_a_graph_that_chooses_its_form_has_the_outputs_and_gradients_of_that_form(policy):
    mixtures = [on_gpu_pays_from_8(sparse, dtype=policy) for sparse in ("auto", True, False)]
    graphs = [
        tf.function(lambda x, upstream, m=m: outputs_and_gradients(m, x, upstream), autograph=False)
        for m in mixtures
    ]
    dtype = tf.as_dtype(policy.removeprefix("mixed_"))
    wide = [tf.TensorSpec([None, 5]), tf.TensorSpec([2, None, 3], dtype)]
    graphs = [graph.get_concrete_function(*wide) for graph in graphs]
    for samples in (0, 7, 8, 33):
        x = tf.random.stateless_normal([samples, 5], [samples, 2])
        auto, chosen, every = (graph(x, tf.ones([2, samples, 3], dtype)) for graph in graphs)
        for one, two in zip(auto, chosen if samples >= 8 else every, strict=True):
            np.testing.assert_allclose(
                *(tf.cast(each, tf.float32) for each in (one, two)), rtol=1e-5, atol=1e-6
            )


def test_on_a_gpu_the_choice_is_the_faster_one_of_those_measured(monkeypatch):
    monkeypatch.setattr("gmeta.layers.mmoe.on_gpu", lambda: True)
    _, *measured = json.loads((RESULTS / "experts-h100.json").read_text())
    faster = {True: [], False: []}  # of training: the chosen experts beside all, where they are chosen
    for row in measured:
        _, case, *numbers = row["name"].split("/")
        experts, top_k, samples, dim = (int(re.sub(r"\D", "", each)) for each in numbers)
        mixture = MMoE(["ctr", "cvr"], experts=experts, units=[dim, dim], top_k=top_k)
        if case == "train":
            faster[samples >= mixture._least_samples()].append(row["ratio"])
    assert min(faster[True]) == pytest.approx(1.08, abs=0.005)  # as the layer's documentation states
    assert max(faster[True]) == pytest.approx(3.0, abs=0.05)
    assert min(faster[False]) == pytest.approx(0.27, abs=0.005)
    assert sorted(faster[False])[-4] < 1 < 1.16 == pytest.approx(max(faster[False]), abs=0.005)


def test_a_sample_that_is_not_a_number_stays_so():
    x = tf.constant(np.where(np.arange(6)[:, np.newaxis] == 2, np.nan, np.ones([6, 5])), tf.float32)
    for mixture in pair():
        assert np.isnan(mixture(x)["b"]).all(1).tolist() == [False, False, True, False, False, False]


def test_a_graph_takes_any_number_of_samples():
    mixture, other = pair()
    graph = tf.function(lambda x: mixture(x), input_signature=[SHAPE])
    for samples in (0, 1, 17):
        x = tf.random.stateless_normal([samples, 5], [samples, 2])
        found = graph(x)
        assert found["a"].shape == [samples, 3]
        np.testing.assert_allclose(found["a"], other(x)["a"], rtol=1e-5, atol=1e-6)
    shaped = mixture(tf.ones([2, 0, 5]))
    assert shaped["b"].shape == [2, 0, 3]


class OneTask(tf.keras.layers.Layer):
    """The first task of a mixture, through a layer of its own."""

    def __init__(self, sparse):
        super().__init__()
        self.mixture = MMoE(["a"], experts=8, units=[4], top_k=1, sparse=sparse, report=None)
        self.out = tf.keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.mixture(x)["a"])


def test_a_graph_that_is_mapped_over_tasks_computes_all():
    x = tf.random.stateless_normal([3, 4, 5], [1, 2])

    def mapped(sparse):
        network = OneTask(sparse)
        expected = network(tf.reshape(x, [-1, 5]))
        tasks = TaskNetwork(network)
        name, weight = list(tasks.task_weights().items())[-1]  # not the mixture's
        return tf.function(lambda x: tasks(x, {name: tf.stack([weight] * 3)})), expected

    graph, expected = mapped("auto")
    np.testing.assert_allclose(graph(x), tf.reshape(expected, [3, 4, 1]), rtol=1e-5, atol=1e-6)
    graph, _ = mapped(True)
    with pytest.raises(ConfigError, match="sparse=True doesn't work in a graph that is mapped"):
        graph(x)


def test_the_form_is_saved(tmp_path):
    inputs = tf.keras.Input([5])
    model = tf.keras.Model(inputs, pair(name="mixture")[0](inputs)["a"])
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    config = loaded.get_layer("mixture").get_config()
    assert config["sparse"] is True
    np.testing.assert_array_equal(loaded(tf.ones([3, 5])), model(tf.ones([3, 5])))
    del config["sparse"]  # as it was saved before there were two forms
    assert MMoE.from_config(config).sparse == "auto"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sparse": "always", "top_k": 1}, "sparse must be True, False or 'auto', got 'always'"),
        ({"sparse": True}, "without top_k all are chosen"),
    ],
)
def test_what_makes_no_sense_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        MMoE(["a"], experts=4, units=[2], **options)
