"""MetaModel over networks of Keras' own: functional, subclassed, with inputs by name, several outputs."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.layers.networks import TaskNetwork
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from support.drawn_batches import drawn_alone as alone
from support.drawn_batches import make_batch

K = tf.keras


def collection():
    start = Normal(0.0, 1.0)
    return EmbeddingCollection(
        [
            FeatureConfig("user", TableConfig("user", 4, initializer=start)),
            FeatureConfig("item", TableConfig("item", 4, initializer=start)),
        ]
    )


def functional():
    parts = {
        "user": K.Input([4], name="user"),
        "item": K.Input([4], name="item"),
        "price": K.Input([1], name="price"),
    }
    x = K.layers.Concatenate()(list(parts.values()))
    x = K.layers.LayerNormalization(name="norm")(K.layers.Dense(8, "tanh", name="fc")(x))
    return K.Model(parts, K.layers.Dense(1, name="out")(x))


class Subclassed(K.Model):
    """A weight of its own, a list of layers, attention over a sample's two vectors."""

    def __init__(self):
        super().__init__(name="subclassed")
        self.attention = K.layers.MultiHeadAttention(2, 3, name="attention")
        self.tower = [K.layers.Dense(6, "tanh", name="fc1"), K.layers.Dense(1, name="fc2")]

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=[8], initializer="ones")
        super().build(shape)

    def call(self, x):
        x = tf.reshape(x * self.scale, [-1, 2, 4])
        x = tf.reshape(self.attention(x, x), [-1, 8])
        for layer in self.tower:
            x = layer(x)
        return x[:, 0]  # (samples,) is an output too


class ByName(K.Model):
    """A subclassed network that takes a dict."""

    takes_by_name = ("user", "price")

    def __init__(self):
        super().__init__(name="by_name")
        self.fc = K.layers.Dense(6, "tanh", name="fc")
        self.out = K.layers.Dense(1, name="out")

    def call(self, x):
        return self.out(self.fc(tf.concat([x["user"], tf.reshape(x["price"], [-1, 1])], axis=-1)))


NETWORKS = {
    "by name": ByName,
    "functional": functional,
    "subclassed": Subclassed,
    "sequential": lambda: K.Sequential([K.layers.Dense(5, "tanh", name="fc"), K.layers.Dense(1, name="out")]),
    "layer": lambda: K.layers.Dense(1, name="linear"),
}


def with_price(batch):
    price = np.random.default_rng(5).normal(size=len(batch["label"]))
    return {**batch, "features": {**batch["features"], "price": tf.constant(price, tf.float32)}}


def compiled(network, **inner):
    model = MetaModel(collection(), network, inner=InnerLoop(**{"steps": 2, "learning_rate": 0.05, **inner}))
    model.compile(K.optimizers.SGD(0.1), "mse", ["mae"])
    return model


def plain(network, batch, vectors, index, weights):
    """One task's outputs, computed with its weights assigned to the network."""
    named = {name: tf.gather(values, index) for name, values in vectors.items()}
    named["price"] = tf.gather(batch["features"]["price"], index)[:, None]
    variables = TaskNetwork(network).task_weights()
    before = {name: variable.numpy() for name, variable in variables.items()}
    for name, value in weights.items():
        variables[name].assign(value)
    side_by_side = tf.concat([named["user"], named["item"]], axis=-1)
    by_name = isinstance(network, ByName) or isinstance(getattr(network, "input", None), dict)
    outputs = network(named if by_name else side_by_side)
    for name, value in before.items():
        variables[name].assign(value)
    return np.ravel(outputs)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.shown_by(case="functional")
def test_a_network_runs_with_each_tasks_own_weights(name):
    network = NETWORKS[name]()
    model, batch = compiled(network), with_price(make_batch([3, 1, 4], pad=1))
    lookup = model.collection.lookup(batch["features"], insert=False)
    view = model.learner.view(batch, lookup)

    @tf.function(autograph=False)
    def run():
        weights = model.learner.adapt(view, steps=2).parameters
        return weights, model.learner.task_outputs(view, "query", weights)

    weights, outputs = run()
    vectors = model.collection.embed(lookup)
    assert all(
        not np.allclose(value[0], value[1]) for value in weights.values() if value.shape.num_elements() > 30
    )
    for task in range(3):
        own = {each: value[task] for each, value in weights.items()}
        expected = plain(network, batch, vectors, batch["query"]["index"][task], own)
        np.testing.assert_allclose(np.ravel(outputs[task]), expected, rtol=1e-5, atol=1e-6)


# The others differ from this one in what the tests above compare.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "layer" else pytest.mark.slow) for name in NETWORKS],
)
def test_it_learns_under_fit(name):
    model, batch = (
        compiled(NETWORKS[name](), learn_learning_rate="layer"),
        with_price(make_batch([4, 3, 5, 2])),
    )
    model.compile(K.optimizers.Adam(2e-2), "mse")
    history = model.fit(tf.data.Dataset.from_tensors(batch).repeat(60), epochs=1, verbose=0).history
    before = float(compiled(NETWORKS[name]()).evaluate(tf.data.Dataset.from_tensors(batch), verbose=0)[0])
    assert history["loss"][-1] < before
    assert model.evaluate(tf.data.Dataset.from_tensors(batch), verbose=0) < 0.7 * before


def test_a_keras_stack_and_a_dense_stack_are_the_same():
    stack = MLP({"fc": 8, "out": 1})
    dense = [K.layers.Dense(8, "relu", name="fc"), K.layers.Dense(1, name="out")]
    keras = K.Sequential(dense)
    keras.build([None, 8])
    for name, variable in TaskNetwork(keras).task_weights().items():
        stack(tf.zeros([1, 8]))
        variable.assign(stack.task_weights()[name])
    batch = make_batch([3, 1, 4], pad=2)
    ours, theirs = (compiled(network).compute_gradients(batch) for network in (stack, keras))
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-6)
    for one, other in zip((*ours.dense, *ours.rows), (*theirs.dense, *theirs.rows), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_several_outputs_and_labels():
    network = K.Sequential([K.layers.Dense(6, "tanh", name="fc"), K.layers.Dense(2, "sigmoid", name="out")])
    model, batch = compiled(network), make_batch([3, 2])
    labels = (np.random.default_rng(1).random((len(batch["label"]), 2)) > 0.5).astype(np.float32)
    batch = {**batch, "label": tf.constant(labels)}
    model.compile("adam", "binary_crossentropy", [K.metrics.BinaryAccuracy()])
    assert model(batch).shape == (2, 2, 2)
    outer = model.compute_gradients(batch)
    predicted = model(batch)
    true = tf.gather(labels, batch["query"]["index"])
    expected = tf.reduce_mean(K.losses.binary_crossentropy(true, predicted))
    np.testing.assert_allclose(outer.loss, expected, rtol=1e-5)


def test_networks_that_tasks_cant_share_are_refused():
    normalized = K.Sequential([K.layers.Dense(4), K.layers.BatchNormalization(name="bn"), K.layers.Dense(1)])
    with pytest.raises(ConfigError, match="bn keeps statistics of batches"):
        MetaModel(collection(), normalized)
    inputs = [K.Input([4], name="a"), K.Input([4], name="b")]
    with pytest.raises(ConfigError, match="inputs in a list"):
        MetaModel(collection(), K.Model(inputs, K.layers.Dot(1)(inputs)))
    wide = {"user": K.Input([9], name="user"), "item": K.Input([4], name="item")}
    with pytest.raises(ConfigError, match="takes user 9 wide, of which the collection makes 4"):
        MetaModel(collection(), K.Model(wide, K.layers.Dense(1)(K.layers.Concatenate()(list(wide.values())))))
    with pytest.raises(
        ConfigError, match="names fc9, but the network's layers with weights are fc, norm, out"
    ):
        MetaModel(collection(), functional(), inner=InnerLoop(adapt=["fc9"]))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.shown_by(case="functional")
def test_a_tasks_result_does_not_depend_on_its_neighbours(name):
    model, batch = compiled(NETWORKS[name](), steps=3), with_price(make_batch([3, 1, 5], pad=4))
    together = model(batch)
    for task in range(3):
        np.testing.assert_allclose(model(alone(batch, task))[0], together[task], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_rank_without_tasks_runs_a_network_of_which_some_weights_adapt(monkeypatch, eagerly):
    """As a rank whose data has ended does; on one rank there are always tasks."""
    monkeypatch.setattr(collectives.place, "_world", collectives.World(0, 2, 0))
    network = TaskNetwork(K.Sequential([K.layers.Dense(3, name="fc"), K.layers.Dense(2, name="out")]))
    network(tf.zeros([1, 1, 4]))
    own = {name: v for name, v in network.task_weights().items() if name.startswith("out/")}

    @tf.function(input_signature=[tf.TensorSpec([None, None, 4])])
    def run(x):
        tasks = tf.shape(x)[0]
        weights = {name: tf.repeat(v[tf.newaxis], tasks, axis=0) for name, v in own.items()}
        with tf.GradientTape() as tape:
            out = network(x, weights)
        return out, tape.gradient(out, network.network.trainable_variables)

    tf.config.run_functions_eagerly(eagerly)
    try:
        for tasks in (0, 2):
            out, gradients = run(tf.ones([tasks, 5, 4]))
            assert out.shape == (tasks, 5, 2)
            np.testing.assert_allclose(out, network(tf.ones([tasks, 5, 4])), rtol=1e-6)
            assert all(np.any(gradient) == bool(tasks) for gradient in gradients[:2])
    finally:
        tf.config.run_functions_eagerly(False)


def test_a_column_that_the_batch_lacks_is_named():
    model, batch = compiled(functional()), make_batch([2])
    for use in (model.train_step, lambda batch: model.predict_after(batch, [0, 1])):
        with pytest.raises(ConfigError, match=r"the network takes price by name, .*; it has user, item"):
            use(batch)
