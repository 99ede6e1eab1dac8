"""A loss of several labels of one shown item, some of which presuppose others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, finite_number
from gmeta.core.graph import refuse_numbers

# The mean of samples' losses, over one rank's samples or those of all.


def mean_loss(
    losses: tf.Tensor, weights: Any = None, *, over_ranks: bool = False, name: str = "loss/weights"
) -> tf.Tensor:
    r"""Compute the weighted mean of losses over samples.

    .. math:: \bar{l} = \frac{\sum_i w_i l_i}{W}, \quad W = \sum_i w_i

    Over several ranks W is the weight of all ranks' samples, and each rank gets its share of the mean: the
    shares sum to the mean, and so do the ranks' gradients. Ranks may have different numbers of samples, or
    none. It takes one small all-reduce; no gradient flows through it.

    Args:
      losses: (n,) floats. Losses of weight 0 are ignored, even nan.
      weights: (n,) numbers, not negative; 0 marks padding. None: 1 for each.
      over_ranks: Whether W is that of all ranks. All ranks must call it then.
      name: Of the all-reduce, where several means of a step are over ranks.

    Returns:
      () of the losses' type; 0 if nothing has weight.

    Example:
      >>> float(mean_loss(tf.constant([1.0, 4.0, 9.0]), [1.0, 3.0, 0.0]))
      3.25
    """
    (mean,) = mean_losses([losses], [weights], over_ranks=over_ranks, name=name)
    return mean


def mean_losses(
    losses: Sequence[tf.Tensor], weights: Sequence[Any], *, over_ranks: bool, name: str
) -> list[tf.Tensor]:
    """Compute several means like `mean_loss`, with one all-reduce."""
    given = [tf.convert_to_tensor(of_samples) for of_samples in losses]
    weighed = [
        tf.ones_like(of_samples) if weight is None else tf.cast(weight, of_samples.dtype)
        for of_samples, weight in zip(given, weights, strict=True)
    ]
    totals = [tf.reduce_sum(tf.cast(weight, tf.float64)) for weight in weighed]  # counts of any size, exactly
    if over_ranks:
        totals = collectives.allreduce_sum(totals, name=name)
    return [
        tf.math.divide_no_nan(
            tf.reduce_sum(tf.math.multiply_no_nan(of_samples, weight)),
            tf.cast(tf.stop_gradient(total), of_samples.dtype),
        )
        for of_samples, weight, total in zip(given, weighed, totals, strict=True)
    ]


class MultiTaskBCE:
    r"""Binary cross-entropy of tasks whose probabilities are products of heads': clicks, and what follows.

    .. math::
       L = \sum_t w_t \, \frac{\sum_i k_{ti} l_{ti}}{\sum_i k_{ti}}, \quad
       l_t = -y_t \log p_t - (1 - y_t) \log(1 - p_t), \quad p_t = \prod_{h \in t} \sigma(a_h)

    A purchase presupposes a click. So the model has a head for the click and one for the purchase after a
    click, and both are trained on all exposures: by the click (CTR), and by click and purchase (CTCVR), whose
    probability is the product. This avoids the selection bias of a head that is trained on clicked items
    alone. A third head can model the cart in between in the same way.

    It is computed from the logits (`product_cross_entropy`), so that neither a probability near 0 nor one
    near 1 costs precision.

    Args:
      tasks: Name of a task -> the heads whose product it is, such as
        ``{"ctr": ["click"], "ctcvr": ["click", "buy"]}``.
      weights: Name of a task -> :math:`w_t`, at least 0; 1 for tasks that aren't in it.

    Raises:
      ConfigError: A task without heads, a head twice in a task, a weight of no task or below 0.

    Example:
      >>> loss = MultiTaskBCE({"ctr": ["click"], "ctcvr": ["click", "buy"]}, weights={"ctcvr": 2.0})
      >>> logits = {"click": tf.constant([0.0, 0.0]), "buy": tf.constant([0.0, 0.0])}
      >>> labels = {"ctr": [1.0, 0.0], "ctcvr": [1.0, 0.0]}
      >>> known = {"ctcvr": [True, False]}  # log 2 of both clicks, twice log 4 of the one known purchase
      >>> round(float(loss(logits, labels, known=known)), 4) == round(5 * math.log(2), 4)
      True

    References:
      Ma et al., "Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click Conversion
      Rate" (SIGIR 2018), section 2.3.
    """

    def __init__(
        self, tasks: Mapping[str, Sequence[str]], weights: Mapping[str, float] | None = None
    ) -> None:
        self.tasks = {task: tuple(heads) for task, heads in tasks.items()}
        given = dict(weights or {})
        for task, heads in self.tasks.items():
            if isinstance(tasks[task], str) or not heads or len(set(heads)) < len(heads):
                raise ConfigError(
                    f"MultiTaskBCE: the task {task!r} must be a list of one or more heads, each once, got "
                    f"{tasks[task]!r}"
                )
        for task, weight in given.items():
            if task not in self.tasks or finite_number(f"MultiTaskBCE: the weight of {task!r}", weight) < 0:
                raise ConfigError(
                    f"MultiTaskBCE: weights are at least 0, of the tasks {', '.join(self.tasks)}; got "
                    f"{weight!r} for {task!r}"
                )
        self.weights = {task: float(given.get(task, 1.0)) for task in self.tasks}

    def __call__(self, logits: Mapping[str, Any], labels: Mapping[str, Any], **more: Any) -> tf.Tensor:
        """Compute the weighted sum of the tasks' means, a scalar; arguments as of `task_means`."""
        means = self.task_means(logits, labels, **more)
        return tf.add_n([self.weights[task] * mean for task, mean in means.items()])

    def task_means(
        self,
        logits: Mapping[str, Any],
        labels: Mapping[str, Any],
        *,
        known: Mapping[str, Any] | None = None,
        weights: Any = None,
        over_ranks: bool = False,
    ) -> dict[str, tf.Tensor]:
        """Compute each task's mean over the samples whose label is known, for training and for the logs.

        Args:
          logits: Head -> (n,) or (n, 1) floats.
          labels: Task -> (n,) or (n, 1), from 0 to 1.
          known: Task -> booleans or 0 and 1 of the labels' shape: whether the label is known. All labels of
            a task that isn't in it are known. The value of an unknown label is ignored, even nan.
          weights: (n,) or (n, 1), of the samples; 0 marks padding.
          over_ranks: Whether means are over the samples of all ranks, as in `mean_loss`; one all-reduce.

        Returns:
          Task -> (), 0 if the task has no label.

        Raises:
          ConfigError: A head's logits or a task's labels are missing, or ``known`` names no task; or a known
            label is below 0 or above 1 (see `gmeta.core.graph.refuse_unless`).
        """
        absent = [f"logits of {h!r}" for heads in self.tasks.values() for h in heads if h not in logits]
        absent += [f"labels of {task!r}" for task in self.tasks if task not in labels]
        if absent or not set(known or {}) <= set(self.tasks):
            raise ConfigError(
                f"MultiTaskBCE: the tasks are {self.tasks}; missing are {', '.join(absent) or 'none'}; got "
                f"logits {sorted(logits)}, labels {sorted(labels)}, known {sorted(known or {})}"
            )
        every = tf.ones([], tf.bool) if weights is None else _flat(weights) > 0
        losses, weighed = [], []
        for task, heads in self.tasks.items():
            with tf.device("CPU:0"):  # where labels are: a GPU would wait for the answer
                label = _flat(labels[task])
                there = every & tf.cast(_flat((known or {}).get(task, tf.ones_like(label))), tf.bool)
                label = tf.where(there, label, 0)
                good = ~((label < 0) | (label > 1))  # NaN makes the loss NaN, which all ranks notice together
                told = f"MultiTaskBCE: labels of {task!r} must lie between 0 and 1"
                label = refuse_numbers(label, good, told)
            outputs = [tf.where(there, _flat(logits[head]), 0) for head in heads]
            losses.append(product_cross_entropy(label, outputs))
            weight = tf.cast(there, losses[-1].dtype)
            weighed.append(weight if weights is None else weight * tf.cast(_flat(weights), weight.dtype))
        means = mean_losses(losses, weighed, over_ranks=over_ranks, name="loss/tasks")
        return dict(zip(self.tasks, means, strict=True))


def product_cross_entropy(labels: Any, logits: Sequence[Any]) -> tf.Tensor:
    r"""Binary cross-entropy of a probability that is a product of sigmoids.

    .. math::
       l = y u - (1 - y) \log(1 - e^{-u}), \quad u = -\log p = \sum_h \log(1 + e^{-a_h})

    u has its full precision however near p is to 0 or 1. The second logarithm is taken as
    :math:`\log(-\mathrm{expm1}(-u))` up to u = log 2 and as :math:`\mathrm{log1p}(-e^{-u})` above (Mächler,
    "Accurately computing log(1 - exp(-|a|))", 2012); below the type's precision :math:`1 - e^{-u}` is u, and
    its logarithm that of :math:`\sum_h e^{-a_h}`, which underflows for no logit. So losses and gradients are
    finite for all finite logits.

    Args:
      labels: From 0 to 1, of any shape.
      logits: One or more tensors of that shape; what is narrower than float32 is computed in float32.

    Returns:
      Losses of that shape, float32 or float64.

    Example:
      >>> float(product_cross_entropy([0.0], [[200.0], [300.0]])[0])  # log σ(200) + log σ(300) is -1.4e-87
      200.0
    """
    heads = [tf.convert_to_tensor(logit) for logit in logits]
    dtype = tf.float64 if tf.float64 in {head.dtype for head in heads} else tf.float32
    heads = [tf.cast(head, dtype) for head in heads]
    label = tf.cast(labels, dtype)
    if len(heads) == 1:
        return tf.nn.sigmoid_cross_entropy_with_logits(label, heads[0])
    surprise = tf.add_n([tf.math.softplus(-head) for head in heads])
    tiny, large = surprise <= dtype.as_numpy_dtype(2.0 ** _ROUNDING[dtype]), surprise > math.log(2)
    # A branch that isn't taken gets an input that its gradient is finite at.
    small = -tf.math.log(-tf.math.expm1(-tf.where(tiny | large, tf.constant(0.5, dtype), surprise)))
    usual = -tf.math.log1p(-tf.exp(-tf.where(large, surprise, tf.constant(1.0, dtype))))
    of_tails = -tf.reduce_logsumexp(tf.stack([-head for head in heads]), axis=0)
    other = tf.where(tiny, of_tails, tf.where(large, usual, small))
    return label * surprise + (1 - label) * other


_ROUNDING = {tf.float32: -23, tf.float64: -52}  # the exponent of the distance from 1 to the next number


def _flat(values: Any) -> tf.Tensor:
    return tf.reshape(values, [-1])
