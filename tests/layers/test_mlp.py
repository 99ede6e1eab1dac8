import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.layers import MLP


def reference(x, weights, layers):
    for layer in layers:
        x = x @ weights[f"{layer}/kernel"] + weights[f"{layer}/bias"]
        x = x if layer == layers[-1] else np.maximum(x, 0)
    return x


@given(tasks=st.integers(1, 4), samples=st.integers(0, 5), width=st.integers(1, 6), seed=st.integers(0, 9))
def test_every_task_runs_with_its_own_weights(tasks, samples, width, seed):
    rng = np.random.default_rng(seed)
    stack = MLP({"fc": 3, "out": 2}, adapt=["out"], seed=seed)
    x = rng.normal(size=(tasks, samples, width)).astype(np.float32)
    stack(x)
    own = {v.name.split(":")[0].removeprefix("mlp/"): v.numpy() for v in stack.trainable_variables}
    fast = {
        name: rng.normal(size=(tasks, *v.shape)).astype(np.float32)
        for name, v in stack.fast_weights().items()
    }
    result = stack(x, {name: tf.constant(value) for name, value in fast.items()})
    for t in range(tasks):
        weights = {**own, **{name: value[t] for name, value in fast.items()}}
        np.testing.assert_allclose(result[t], reference(x[t], weights, ["fc", "out"]), rtol=1e-4, atol=1e-5)


def test_weights_start_within_one_over_root_fan_in_and_differ():
    stack = MLP({"fc1": 300, "fc2": 300}, seed=3)
    stack(tf.zeros([1, 300]))
    values = {name: v.numpy() for name, v in stack.fast_weights().items()}
    limit = 300**-0.5
    for value in values.values():
        assert np.abs(value).max() <= limit
        np.testing.assert_allclose(value.std(), limit / 3**0.5, rtol=0.15)
    assert not np.array_equal(values["fc1/kernel"], values["fc2/kernel"])


def test_equal_seeds_give_equal_weights_and_others_do_not():
    def kernel(seed):
        stack = MLP({"out": 4}, seed=seed)
        stack(tf.zeros([1, 5]))
        return stack.fast_weights()["out/kernel"].numpy()

    np.testing.assert_array_equal(kernel(1), kernel(1))
    assert not np.array_equal(kernel(1), kernel(2))


def test_a_layer_made_from_its_config_is_the_same():
    stack = MLP({"fc": 3, "out": 1}, adapt=["out"], seed=5)
    again = MLP.from_config(stack.get_config())
    x = tf.ones([2, 4])
    np.testing.assert_array_equal(stack(x), again(x))
    assert list(again.fast_weights()) == list(stack.fast_weights())


def test_adapting_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="fc9"):
        MLP({"fc": 3}, adapt=["fc9"])


def test_a_layer_that_was_saved_as_a_dense_stack_loads():
    saved = tf.keras.saving.serialize_keras_object(MLP({"fc": 3, "out": 1}, adapt=["out"], seed=4))
    saved |= {"class_name": "DenseStack", "registered_name": "gmeta>DenseStack"}
    loaded = tf.keras.saving.deserialize_keras_object(saved)
    assert type(loaded) is MLP
    assert loaded.get_config() == saved["config"]
