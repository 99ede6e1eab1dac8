"""A layer against its equations in NumPy: outputs, and gradients of weights and inputs.

The rule: the error of a layer in float32 may be twice that of the plain form in float32, both
measured against float64, or a few roundings where that is less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.ops.table.portable_tables import portable_ops

Array = npt.NDArray[Any]
ROUNDINGS = 16 * float(np.finfo(np.float32).eps)


def own_name(variable: tf.Variable, layer: tf.keras.layers.Layer) -> str:
    """The name of a layer's weight without the layer's name."""
    return str(variable.name.split(":")[0].removeprefix(f"{layer.name}/"))


def check_layer(
    make: Callable[[str], tf.keras.layers.Layer],
    call: Callable[[tf.keras.layers.Layer, tf.Tensor], tf.Tensor],
    reference: Callable[[Array, Mapping[str, Array]], Array],
    x: Array,
    seed: int,
    spread: float = 0.3,
) -> None:
    """Compare a layer with its reference, in float64 and in float32.

    Args:
      make: dtype -> the layer.
      call: The layer and x -> outputs.
      reference: x and weights by name -> outputs, in the precision of x.
      x: The inputs, float64.
      seed: The seed of the weights, of the outputs' upstream gradients, and of the directions of difference
        quotients.
      spread: How far random weights are from the initial ones.

    Raises:
      AssertionError: Outputs or gradients differ from the reference's.
    """
    random = np.random.default_rng(seed)
    exact, single = make("float64"), make("float32")
    for layer in (exact, single):
        call(layer, tf.constant(x, layer.compute_dtype))  # makes the weights
    for variable, other in zip(exact.weights, single.weights, strict=True):
        # Values that float32 represents, so that both layers have the same weights.
        value = (variable.numpy() + spread * random.normal(size=variable.shape)).astype(np.float32)
        variable.assign(value.astype(np.float64))
        other.assign(value)
    x = x.astype(np.float32).astype(np.float64)
    weights = {own_name(v, exact): v.numpy() for v in exact.weights}
    expected = reference(x, weights)
    upstream = random.normal(size=expected.shape).astype(np.float32).astype(np.float64)
    truth = _run(exact, call, x, upstream)
    np.testing.assert_allclose(truth["out"], expected, rtol=1e-9, atol=1e-11)
    _check_gradients(reference, x, weights, upstream, truth, random)
    ours = _run(single, call, x, upstream)
    with portable_ops():
        plain = _run(single, call, x, upstream)
    halved = reference(x.astype(np.float32), {n: w.astype(np.float32) for n, w in weights.items()})
    plain["out"] = halved.astype(np.float64)
    for name, want in truth.items():
        if want.size:
            allowed = max(2 * np.abs(plain[name] - want).max(), ROUNDINGS * np.abs(want).max())
            found = np.abs(ours[name] - want).max()
            assert found <= allowed, f"{name}: off by {found}, and the plain form by half of {allowed}"


def _run(
    layer: tf.keras.layers.Layer, call: Callable[..., tf.Tensor], x: Array, upstream: Array
) -> dict[str, Array]:
    """Outputs, and the gradient of each trained weight and of x, by name."""
    given = tf.constant(x, layer.compute_dtype)
    with tf.GradientTape() as tape:
        tape.watch(given)
        out = call(layer, given)
    sources = [given, *layer.trainable_weights]
    zero = tf.UnconnectedGradients.ZERO
    gradients = tape.gradient(out, sources, tf.constant(upstream, out.dtype), unconnected_gradients=zero)
    names = ["x", *(own_name(v, layer) for v in layer.trainable_weights)]
    found = {name: tf.convert_to_tensor(g).numpy() for name, g in zip(names, gradients, strict=True)}
    return {"out": out.numpy(), **found}


def _check_gradients(
    reference: Callable[[Array, Mapping[str, Array]], Array],
    x: Array,
    weights: Mapping[str, Array],
    upstream: Array,
    gradients: Mapping[str, Array],
    random: np.random.Generator,
) -> None:
    """Compare with difference quotients of the reference, each weight along a random direction."""
    arguments = {"x": x, **weights}
    step = 1e-6
    for name, gradient in gradients.items():
        if name == "out":
            continue
        direction = random.normal(size=gradient.shape)
        moved = []
        for sign in (1, -1):
            each = {**arguments, name: arguments[name] + sign * step * direction}
            moved.append(reference(each["x"], {n: w for n, w in each.items() if n != "x"}))
        quotient = np.sum((moved[0] - moved[1]) * upstream) / (2 * step)
        size = np.abs(gradient * direction).sum()
        np.testing.assert_allclose(
            np.sum(gradient * direction), quotient, rtol=1e-6, atol=1e-6 + 1e-7 * size, err_msg=name
        )
