"""Runs a function so that its gradient recomputes the intermediate results instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def recompute(
    function: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Compute ``function(tensors)``, and keep only ``tensors`` for the gradient.

    ``tf.recompute_grad`` isn't used, because it stops all tapes while it runs the function. That includes
    tapes inside the function, such as an inner loop's: its results would be wrong without any error.

    Args:
      function: Float tensors -> float tensors. Gradients reach ``tensors`` and the variables that it reads.
      tensors: The function's arguments.
    """

    @tf.custom_gradient
    def run(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def backward(*upstream: Any, variables: Sequence[tf.Variable] = ()) -> Any:
            upstream = tuple(tf.convert_to_tensor(gradient) for gradient in upstream)
            with tf.GradientTape() as tape:
                again = _not_before(given, upstream[0])
                tape.watch(again)
                results = function(again)
            found = tape.gradient(
                results,
                [*again, *variables],
                output_gradients=list(upstream),
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            found = [tf.convert_to_tensor(gradient) for gradient in found]
            own, of_variables = found[: len(given)], found[len(given) :]
            return (own, of_variables) if variables else own

        return function(given), backward

    return list(run(*tensors))


def _not_before(tensors: Sequence[tf.Tensor], gradient: tf.Tensor) -> list[tf.Tensor]:
    """Return the same tensors, but available only once the gradient is.

    Otherwise TensorFlow would notice that the results were computed before, and keep those.
    """
    first = tf.reduce_max(tf.reshape(gradient, [-1])[:1])
    zero = tf.where(first == first, tf.zeros_like(first), first)
    return [tensor + tf.cast(zero, tensor.dtype) for tensor in tensors]
