import pytest
import tensorflow as tf


@pytest.fixture
def float64():
    tf.keras.backend.set_floatx("float64")
    tf.keras.mixed_precision.set_global_policy("float64")  # which counts for layers, once anyone has set one
    yield
    tf.keras.backend.set_floatx("float32")
    tf.keras.mixed_precision.set_global_policy("float32")
