r"""A dense layer that tasks adapt, with its change kept as coefficients of the tasks' support samples.

The gradient of a dense layer's kernel on inputs :math:`X_s` is :math:`X_s^\top D`, and of its bias
:math:`1^\top D`, where D is the gradient of its outputs. So wherever steps along such gradients, and sums of
them, lead from W and b,

.. math:: W_t = W + X_s^\top A_t, \quad b_t = b + 1^\top A_t, \quad
   X W_t + b_t = X W + b + (X X_s^\top + 1) A_t

with coefficients A of one row for each support sample: a step is :math:`A \leftarrow A - \alpha D`. This is
the dual form of a linear layer that learns by gradient descent (Aizerman et al., 1964; Irie et al., "The Dual
Form of Neural Networks Revisited", ICML 2022, section 3).

Why it is fast: a task's own kernel, (in, out) for each task, is never made, and no product with it computed.
:math:`X W + b` is one product for all samples of all tasks, without their padding, whatever the number of
steps; what remains of a step is a product with a matrix of samples by samples. Where there are too many
samples for that, :math:`X (X_s^\top A)` is the same product in another order, and costs what a step with
weights of its own does.

It needs inputs that don't adapt, and an optimizer whose directions are sums of gradients: plain descent and
momentum, not Adam.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


class DualDense:
    """A dense layer, adapted by many tasks at once.

    Args:
      samples: (samples, in) inputs of all samples of all tasks.
      kernel: (in, out), where all tasks start.
      bias: (out,).
      support: (tasks, support samples) int64: where a task's support stands among the samples; anywhere, for
        padding, whose coefficients stay 0 as long as no loss depends on its outputs.
      order: 2; or 1, which takes for constants whatever steps have made of the inputs.
      steps: How many steps will be taken.

    Example:
      >>> layer = DualDense(tf.eye(2), tf.ones([2, 1]), tf.zeros([1]), tf.constant([[0], [1]]))
      >>> moved = layer.start() - 0.5
      >>> layer.outputs(tf.constant([[1], [1]]), moved).numpy().ravel().tolist()
      [0.5, 0.0]
    """

    def __init__(
        self,
        samples: tf.Tensor,
        kernel: tf.Tensor,
        bias: tf.Tensor,
        support: tf.Tensor,
        *,
        order: int = 2,
        steps: int = 1,
    ) -> None:
        self._samples, self._kernel, self._bias = samples, kernel, bias
        self._support, self._order, self._steps = support, order, steps
        # Of first order nothing that the support's outputs lead to is differentiated.
        known = [tf.stop_gradient(each) if order == 1 else each for each in (samples, kernel, bias)]
        self._unadapted = tf.matmul(known[0], known[1]) + known[2]
        self._inputs = tf.gather(known[0], support)
        self._units = kernel.shape[-1]
        self._gram: tf.Tensor | None = None

    def start(self) -> tf.Tensor:
        """The coefficients before the first step, (tasks, support samples, out) zeros."""
        shape = tf.concat([tf.shape(self._support), [self._units]], axis=0)
        return tf.ensure_shape(tf.zeros(shape, self._samples.dtype), [*self._support.shape, self._units])

    def support_outputs(self, coefficients: tf.Tensor, step: int) -> tf.Tensor:
        """Outputs for the support, (tasks, support samples, out), after so many steps.

        The gradient of a loss with respect to them is the direction in which the coefficients step.
        """
        outputs = tf.gather(self._unadapted, self._support)
        if step == 0:
            return outputs
        size, width = tf.shape(self._support)[1], self._inputs.shape[-1]
        uses = self._steps - 1
        few = size * (width + uses * self._units) < 2 * uses * width * self._units
        if self._gram is None:
            empty = tf.zeros([0, 0, 0], self._samples.dtype)
            self._gram = _either(few, lambda: _gram(self._inputs, self._inputs), lambda: empty)
        gram = self._gram
        return outputs + _either(
            few, lambda: tf.matmul(gram, coefficients), lambda: self._change(self._inputs, coefficients)
        )

    def outputs(self, index: tf.Tensor, coefficients: tf.Tensor) -> tf.Tensor:
        """Outputs for other samples of the tasks.

        Args:
          index: (tasks, n) int64, where they stand among the samples.
          coefficients: As the steps have left them.

        Returns:
          (tasks, n, out).
        """
        inputs = tf.gather(self._samples, index)
        size, width = tf.shape(self._support)[1], inputs.shape[-1]
        rows = tf.shape(index)[1]
        few = rows * size * (width + self._units) < (rows + size) * width * self._units
        return self._unadapted_at(index, inputs) + _either(
            few,
            lambda: tf.matmul(_gram(inputs, self._inputs), coefficients),
            lambda: self._change(inputs, coefficients),
        )

    def _unadapted_at(self, index: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
        if self._order == 2:
            return tf.gather(self._unadapted, index)
        flat = tf.matmul(tf.reshape(inputs, [-1, inputs.shape[-1]]), self._kernel) + self._bias
        return tf.reshape(flat, tf.concat([tf.shape(index), [self._units]], axis=0))

    def _change(self, inputs: tf.Tensor, coefficients: tf.Tensor) -> tf.Tensor:
        """What the coefficients add to the outputs, by way of the weights' changes."""
        kernel = tf.matmul(self._inputs, coefficients, transpose_a=True)
        return tf.matmul(inputs, kernel) + tf.reduce_sum(coefficients, axis=1, keepdims=True)


def _gram(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Inner products of samples, with the bias for one input more, that is 1."""
    return tf.matmul(left, right, transpose_b=True) + 1


def _either(condition: tf.Tensor, yes: Callable[[], tf.Tensor], no: Callable[[], tf.Tensor]) -> tf.Tensor:
    """`tf.cond`, decided at once where sizes are known."""
    known = tf.get_static_value(condition)
    if known is not None:
        return yes() if known else no()
    return tf.cond(condition, yes, no)
