"""MMoE: experts that tasks share, and gates with which each task chooses among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.networks import is_mapped
from gmeta.ops import jagged
from gmeta.ops.device import on_gpu

# Computes for each sample only the experts that its gates have chosen.


class ExpertGroups(NamedTuple):
    """The pairs of an expert and a sample that has chosen it, expert after expert.

    Attributes:
      samples: (pairs,) int64, the samples of expert 0 in their order, then those of expert 1, ….
      sizes: (experts,) int64, how many samples each expert has.
      gates: (pairs, tasks), the expert's weight for each of the sample's tasks.
    """

    samples: tf.Tensor
    sizes: tf.Tensor
    gates: tf.Tensor


def strongest(logits: tf.Tensor, k: int) -> tf.Tensor:
    """Find the k largest of each row; of equal ones the first, as `tf.math.top_k` does.

    There are k passes of elementwise ops: on a GPU `tf.math.top_k` takes a block of threads for each row, and
    a mixture has many short rows.

    Args:
      logits: (..., experts).
      k: At most as many as there are experts.

    Returns:
      (..., experts) bool. A row that has a NaN has none.

    Example:
      >>> strongest(tf.constant([[1.0, 3.0, 3.0, 2.0]]), 1).numpy().tolist()
      [[False, True, False, False]]
    """
    experts = logits.shape[-1]
    numbers = tf.range(experts, dtype=tf.float32)
    left, chosen = logits, tf.zeros_like(logits, tf.bool)
    for _ in range(k):
        best = tf.equal(left, tf.reduce_max(left, axis=-1, keepdims=True))
        first = tf.reduce_min(tf.where(best, numbers, float(experts)), axis=-1, keepdims=True)
        one = tf.equal(numbers, first)
        chosen, left = chosen | one, tf.where(one, tf.constant(-math.inf, left.dtype), left)
    return chosen


def group_by_expert(gates: tf.Tensor) -> ExpertGroups:
    """Group the samples by the experts that any of their tasks has chosen.

    No sample is left out, however many have chosen one expert. With k experts a task there are at most
    ``min(experts, tasks * k)`` pairs for each sample.

    Args:
      gates: (samples, tasks, experts), 0 where a task hasn't chosen the expert.

    Example:
      >>> groups = group_by_expert(tf.constant([[[0.0, 1.0]], [[0.5, 0.5]], [[0.0, 1.0]]]))
      >>> groups.samples.numpy().tolist(), groups.sizes.numpy().tolist()
      ([1, 0, 1, 2], [1, 3])
      >>> groups.gates.numpy().tolist()
      [[0.5], [1.0], [0.5], [1.0]]
    """
    of_expert = tf.transpose(gates, [2, 0, 1])
    chosen = tf.reduce_any(tf.not_equal(of_expert, 0), axis=2)  # a gate that is NaN isn't lost
    pairs = tf.where(chosen)  # in the order of experts
    sizes = tf.reduce_sum(tf.cast(chosen, tf.int64), axis=1)
    return ExpertGroups(pairs[:, 1], sizes, tf.gather_nd(of_expert, pairs))


def mix_chosen(x: tf.Tensor, gates: tf.Tensor, kernels: Sequence[Any], biases: Sequence[Any]) -> tf.Tensor:
    r"""Mix the outputs of the chosen experts for each task, and compute no others.

    .. math::
       y_{tn} = \sum_{e:\, (e, n) \in P} g_{nte}\, f_e(x_n)

    P are the pairs of `group_by_expert`. The samples of each pair are copied once, an expert's layers are
    products of exactly its own samples, and an output serves all tasks that have chosen the expert. So the
    result is that of all experts, up to the rounding of sums, in values and in gradients of any order.

    Args:
      x: (samples, dim).
      gates: (samples, tasks, experts), 0 where a task hasn't chosen the expert.
      kernels: For each layer (experts, in, out).
      biases: For each layer (experts, out).

    Returns:
      (tasks, samples, last of out).

    Example:
      >>> gates = tf.constant([[[0.0, 1.0]], [[0.5, 0.5]]])
      >>> kernel, bias = tf.constant([[[1.0]], [[10.0]]]), tf.zeros([2, 1])
      >>> mix_chosen(tf.constant([[1.0], [2.0]]), gates, [kernel], [bias]).numpy().tolist()
      [[[10.0], [11.0]]]
    """
    samples, sizes, weights = group_by_expert(gates)
    tasks, experts = gates.shape[1:]
    outputs = tf.split(jagged.take(x, samples), sizes, num=experts)
    for kernel, bias in zip(kernels, biases, strict=True):
        of_expert = zip(outputs, tf.unstack(kernel), tf.unstack(bias), strict=True)
        outputs = [
            tf.nn.relu(tf.matmul(rows, its_kernel) + its_bias) for rows, its_kernel, its_bias in of_expert
        ]
    mixed = weights[:, :, tf.newaxis] * tf.concat(outputs, axis=0)[:, tf.newaxis]
    # Sums of half precision in float32, as a matrix product has them.
    wide = tf.cast(mixed, tf.float32) if mixed.dtype.size < 4 else mixed
    sums = tf.math.unsorted_segment_sum(wide, samples, tf.shape(x, tf.int64)[0])
    return tf.transpose(tf.cast(tf.ensure_shape(sums, [None, tasks, mixed.shape[2]]), x.dtype), [1, 0, 2])


# Measures how evenly a mixture's tasks use its experts.


class ExpertBalance(NamedTuple):
    r"""A batch's use of the experts.

    Attributes:
      importance: (tasks, experts), each expert's share in a task's gates; a task's shares sum to 1.
      load: (tasks, experts), the share of the task's samples that go to the expert; with k experts per
        sample, a task's shares sum to k.
    """

    importance: tf.Tensor
    load: tf.Tensor


def expert_balance(gates: tf.Tensor, sample_weight: tf.Tensor | None = None) -> ExpertBalance:
    """Compute importance and load of each expert.

    See Shazeer et al., "Outrageously Large Neural Networks", 2017, 4.

    Args:
      gates: (samples, tasks, experts), at least 0, as `MMoE.gates` returns them.
      sample_weight: (samples,); 0 for samples that don't count, such as padding. None: all count alike.

    Returns:
      The shares; all 0 if no sample counts.

    Example:
      >>> balance = expert_balance(tf.constant([[[0.5, 0.5, 0.0]], [[1.0, 0.0, 0.0]]]))
      >>> balance.importance.numpy().tolist(), balance.load.numpy().tolist()
      ([[0.75, 0.25, 0.0]], [[1.0, 0.5, 0.0]])
    """
    gates = tf.cast(gates, tf.float32) if gates.dtype.size < 4 else gates
    weight = tf.ones_like(gates[:, 0, 0]) if sample_weight is None else tf.cast(sample_weight, gates.dtype)
    sums = [tf.einsum("nte,n->te", x, weight) for x in (gates, tf.cast(gates > 0, gates.dtype))]
    total = tf.reduce_sum(weight)
    return ExpertBalance(*(tf.math.divide_no_nan(x, total) for x in sums))


def squared_variation(shares: tf.Tensor) -> tf.Tensor:
    r"""Compute the squared coefficient of variation over experts, :math:`\mathrm{var}(s) / \bar{s}^2`.

    It is 0 if all experts are used alike, and experts - 1 if one expert does everything.

    Args:
      shares: (..., experts).

    Returns:
      (...).

    Example:
      >>> squared_variation(tf.constant([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])).numpy().tolist()
      [0.0, 3.0]
    """
    return tf.math.divide_no_nan(
        tf.math.reduce_variance(shares, axis=-1), tf.square(tf.reduce_mean(shares, axis=-1))
    )


_PAYS = 2
"""The ratio of experts to those that a sample may need from which grouping pays: `tools/bench/experts.py`."""
_SAVED_ON_GPU = 6_000_000
"""The numbers that an expert must be spared on average for grouping to pay on a GPU."""


@tf.keras.saving.register_keras_serializable("gmeta")
class MMoE(tf.keras.layers.Layer):
    r"""Multi-gate mixture of experts, with the k strongest gates of each task.

    .. math::
       y_t = \sum_{e \in K_t(x)} g_{te}\, f_e(x), \quad
       g_t = \mathrm{softmax}(\{(x W_t)_e : e \in K_t(x)\}), \quad K_t(x) = \mathrm{top}_k(x W_t)

    f is a multilayer perceptron with ReLU after each layer (Ma et al., "Modeling Task Relationships in
    Multi-task Learning with Multi-gate Mixture-of-Experts", KDD 2018, section 4.2; the k strongest as in
    Shazeer et al., 2017, section 2.1). All weights start at :math:`U(-1/\sqrt{in}, 1/\sqrt{in})`.

    Two forms compute the same outputs and gradients, up to the rounding of sums. The form of all experts is
    one batched matrix product per expert layer. The form of the chosen ones (``sparse=True``) groups samples
    by expert: an expert computes only its own samples, once for all tasks that chose it. Groups are as large
    as the gates make them, and no sample is dropped. An expert's samples aren't bounded: there are at most
    ``min(experts, tasks * k)`` rows for each sample, and with a bound outputs would depend on the batch.

    ``sparse="auto"`` computes the chosen ones if there are at least twice as many experts as a sample can
    need, ``experts >= 2 * tasks * k``. On CPUs that is the whole rule. On two cores, with two tasks,
    training on 2,048 samples or more is then 1.3 to 2.0 times as fast at twice, 2.4 to 3.8 at four times, 4.9
    to 6.2 at eight times, 9.3 to 12 at sixteen times as many (`tools/bench/experts.py`). Gains are smaller
    with fewer samples: 1.0 to 1.2 of 64 to 512 samples at twice as many. With 4 experts and k = 2, where a
    sample can need all, it is 0.9 to 1.1, so all are computed. A `GRM` gains little: its experts see only
    exposures, hundreds a step, and its recipe has 4 experts without k.

    On a GPU an expert that is computed separately takes a fixed time, however few its samples are: 0.2 ms of
    training on an H100. So the saving must be large enough too: on average over experts, 6 million numbers
    that an expert's layers needn't compute for N samples,

    .. math:: N \left(1 - \frac{tasks \cdot k}{experts}\right) \sum units \ge 6 \cdot 10^6

    Where that holds, on an H100 in TensorFloat-32, training is 1.08 to 3.0 times as fast as with all experts
    (8,192 samples of width 512, 32,768 of 256), and inference 1.03 to 2.8 times; with 8 experts, k = 1 and
    8,192 samples inference alone is slower, 0.81 times as fast. Where it doesn't hold, choosing would be 0.27
    to 0.90 times as fast; at three sizes training would be 1.06 to 1.16 times as fast, and inference 0.71 to
    0.75 times. A graph of an unknown number of samples decides in each call.

    ``"auto"`` also computes all experts in a graph that is mapped over tasks, which doesn't support groups of
    different sizes. XLA can't compile groups: there, use ``sparse=False``.

    Metrics report how the gates choose. ``{name}/{task}/importance_cv2`` and ``.../load_cv2`` are the
    squared coefficients of variation over experts: 0 if all experts are used alike, experts - 1 if one does
    everything. ``report="experts"`` adds ``{name}/{task}/expert{e}/importance`` and ``.../load``
    (`expert_balance`).

    Args:
      tasks: The tasks' names.
      experts: Number of experts.
      units: Number of units of each of an expert's layers, in order from the input.
      top_k: k. None: all experts.
      sparse: Whether to compute for each sample only the experts that its tasks have chosen. ``"auto"``:
        where that is faster by the rule above.
      balance_loss: Factor of the balance loss, which is the squared variation of importance, summed over
        tasks (Shazeer et al., equation 7). 0: no balance loss is added.
      report: ``"tasks"``, ``"experts"``, or None for no metrics. A graph that is mapped over tasks, as
        inside a `TaskNetwork`, can't keep metrics.
      seed: Seed of the initial values.

    Shapes:
      (..., dim) -> {task: (..., last of units)}.

    Raises:
      ConfigError: There are no tasks, or two of one name; there are no units; k isn't in [1, experts]; or
        ``sparse=True`` without k, or in a call that is mapped over tasks.

    Example:
      >>> mixture = MMoE(["ctr", "cvr"], experts=4, units=[8], top_k=2)
      >>> {task: out.shape for task, out in mixture(tf.random.normal([5, 16])).items()}
      {'ctr': TensorShape([5, 8]), 'cvr': TensorShape([5, 8])}
      >>> mixture.gates(tf.random.normal([5, 16])).shape
      TensorShape([5, 2, 4])
    """

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        experts: int,
        units: Sequence[int],
        top_k: int | None = None,
        sparse: bool | Literal["auto"] = "auto",
        balance_loss: float = 0.0,
        report: Literal["tasks", "experts"] | None = "tasks",
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not tasks or isinstance(tasks, str) or len(set(tasks)) < len(tasks):
            raise ConfigError(f"{self.name}: tasks must be a list of different names, got {tasks!r}")
        if not units or min(units) < 1:
            raise ConfigError(f"{self.name}: units must be a list of positive numbers, got {units!r}")
        if not 1 <= (experts if top_k is None else top_k) <= experts:
            raise ConfigError(
                f"{self.name}: top_k must be between 1 and the number of experts, got top_k={top_k}, "
                f"experts={experts}"
            )
        if not isinstance(sparse, bool) and sparse != "auto":
            raise ConfigError(f"{self.name}: sparse must be True, False or 'auto', got {sparse!r}")
        if sparse is True and top_k is None:
            raise ConfigError(
                f"{self.name}: sparse=True computes only chosen experts, and without top_k all are chosen: "
                "set top_k, or leave sparse='auto'"
            )
        if report not in ("tasks", "experts", None):
            raise ConfigError(f"{self.name}: report must be 'tasks', 'experts' or None, got {report!r}")
        self.tasks, self.experts, self.units = tuple(tasks), experts, tuple(units)
        self.top_k, self.sparse, self.balance_loss = top_k, sparse, balance_loss
        self.report, self.seed = report, seed

    def build(self, input_shape: Any) -> None:
        """Create the weights for inputs of the given width."""
        width = int(tf.TensorShape(input_shape)[-1])
        self.gate_kernel = self._weight("gates/kernel", [width, len(self.tasks) * self.experts], width, 0)
        self.kernels, self.biases = [], []
        for layer, units in enumerate(self.units):
            shape = [self.experts, width, units]
            self.kernels.append(self._weight(f"experts{layer}/kernel", shape, width, 2 * layer + 1))
            self.biases.append(
                self._weight(f"experts{layer}/bias", [self.experts, units], width, 2 * layer + 2)
            )
            width = units
        super().build(input_shape)

    def _weight(self, name: str, shape: list[int], fan_in: int, index: int) -> tf.Variable:
        limit = 1 / math.sqrt(fan_in)
        # Each weight has its own seed, because initialisers with equal seeds draw equal numbers.
        initializer = tf.keras.initializers.RandomUniform(-limit, limit, seed=1000 * self.seed + index)
        return self.add_weight(name=name, shape=shape, initializer=initializer)

    def gates(self, x: tf.Tensor) -> tf.Tensor:
        """Compute the weight of each expert for each task.

        Args:
          x: (samples, dim).

        Returns:
          (samples, tasks, experts): k of a task's weights are above 0, and its weights sum to 1.
        """
        logits = tf.matmul(x, tf.cast(self.gate_kernel, x.dtype))
        logits = tf.reshape(logits, [-1, len(self.tasks), self.experts])
        if self.top_k in (None, self.experts):
            return tf.nn.softmax(logits)
        without = tf.constant(-math.inf, logits.dtype)
        return tf.nn.softmax(tf.where(strongest(logits, self.top_k), logits, without))

    def call(self, x: tf.Tensor, sample_weight: tf.Tensor | None = None) -> dict[str, tf.Tensor]:
        """Mix the experts' outputs for each task.

        Args:
          x: (..., dim).
          sample_weight: (...), for the reported metrics and the balance loss; 0 marks padding.
        """
        flat = tf.reshape(x, [-1, x.shape[-1]])
        gates = self.gates(flat)
        self._tell(gates, None if sample_weight is None else tf.reshape(sample_weight, [-1]))
        mixed = self._mix(flat, gates)
        shape = tf.concat([tf.shape(x)[:-1], [self.units[-1]]], axis=0)
        static = [*x.shape[:-1], self.units[-1]]
        return {
            task: tf.ensure_shape(tf.reshape(mixed[number], shape), static)
            for number, task in enumerate(self.tasks)
        }

    def _mix(self, x: tf.Tensor, gates: tf.Tensor) -> tf.Tensor:
        """Mix the experts' outputs in the form that this call is to have."""
        chosen, every = (partial(mix, x, gates, self.kernels, self.biases) for mix in (mix_chosen, _mix_all))
        least, samples = self._least_samples(), x.shape[0]
        if least in (0, math.inf):  # whatever their number
            return every() if least else chosen()
        if samples is None:
            return tf.cond(tf.shape(x)[0] >= least, chosen, every)
        return chosen() if samples >= least else every()

    def _least_samples(self) -> float:
        """Return how many samples a call must have to compute only the chosen experts; infinite: none do."""
        if self.sparse is True and is_mapped():
            raise ConfigError(
                f"{self.name}: sparse=True doesn't work in a graph that is mapped over tasks, whose "
                "groups have different sizes: leave sparse='auto'"
            )
        if self.sparse != "auto":
            return 0 if self.sparse else math.inf
        most = min(self.experts, len(self.tasks) * (self.top_k or self.experts))
        if self.experts < _PAYS * most or is_mapped():
            return math.inf
        if not on_gpu():
            return 0
        return math.ceil(_SAVED_ON_GPU / (1 - most / self.experts) / sum(self.units))

    def _tell(self, gates: tf.Tensor, sample_weight: tf.Tensor | None) -> None:
        """Update the metrics and add the balance loss."""
        if not (self.report or self.balance_loss):
            return
        balance = expert_balance(gates, sample_weight)
        varied = {name: squared_variation(shares) for name, shares in balance._asdict().items()}
        if self.balance_loss:
            self.add_loss(self.balance_loss * tf.reduce_sum(varied["importance"]))
        for number, task in enumerate(self.tasks if self.report else ()):
            for name, shares in balance._asdict().items():
                self.add_metric(varied[name][number], name=f"{self.name}/{task}/{name}_cv2")
                for expert in range(self.experts if self.report == "experts" else 0):
                    self.add_metric(shares[number, expert], name=f"{self.name}/{task}/expert{expert}/{name}")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        names = ("tasks", "experts", "units", "top_k", "sparse", "balance_loss", "report", "seed")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def _mix_all(x: tf.Tensor, gates: tf.Tensor, kernels: Sequence[Any], biases: Sequence[Any]) -> tf.Tensor:
    """Compute `mix_chosen` from the outputs of all experts, a batched matrix product per layer."""
    hidden = x
    for layer, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
        # Not tf.matmul: mapped over tasks it would broadcast, and with one expert oneDNN's broadcast writes
        # outside of its memory.
        hidden = tf.einsum("enh,ehk->enk" if layer else "nd,edh->enh", hidden, kernel)
        hidden = tf.nn.relu(hidden + _per_sample(bias, hidden))
    # Sums and not products of small matrices, which a GPU would compute one sample after another; in float32,
    # as a matrix product has them.
    wide = tf.cast(hidden, tf.float32) if hidden.dtype.size < 4 else hidden
    weights = tf.expand_dims(tf.cast(tf.transpose(gates, [1, 2, 0]), wide.dtype), -1)
    sums = [tf.reduce_sum(of_task * wide, axis=0) for of_task in tf.unstack(weights)]
    return tf.cast(tf.stack(sums), hidden.dtype)


def _per_sample(bias: tf.Tensor, hidden: tf.Tensor) -> tf.Tensor:
    """Return experts' biases (experts, units) in a form that adds to (experts, samples, units)."""
    each = tf.expand_dims(bias, 1)
    if hidden.dtype.size >= 4 or not on_gpu() or is_mapped():
        return each
    # A product, whose gradient is one too: TensorFlow sums columns of half precision slowly.
    return tf.matmul(tf.ones([*bias.shape[:1], tf.shape(hidden)[1], 1], each.dtype), each)
