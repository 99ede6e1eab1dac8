"""The exact area under the ROC curve, of all samples together and user by user."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.graph import refuse_numbers, refuse_unless

# The base of metrics that no sums can make: they keep every sample until the result is computed.

_COLUMNS = {"groups": tf.int64, "scores": tf.float32, "positive": tf.float32, "negative": tf.float32}


class SampleMetric(tf.keras.metrics.Metric):
    """Keeps samples as columns: a group, a score, and a weight that is the positive or the negative one.

    Each rank holds the samples that it has seen, in 20 bytes per sample of host memory, which is doubled when
    it is full. `gather_over_ranks` sends 20 bytes per sample to every rank, after which each holds all
    samples: the result is exact, and the same on all ranks.

    The result costs a sort of all samples, 0.3 to 0.7 s for a million of them on a core. Keras asks for it
    after every step of ``fit`` and ``evaluate``: for many samples, update it in a custom loop, and compute
    the result once.

    Args:
      positive: The least label that is positive; None: labels are 0 or 1.
      name: What the logs call it.
      dtype: Of the result.
    """

    def __init__(self, positive: float | None, name: str, dtype: Any) -> None:
        super().__init__(name=name, dtype=dtype)
        self.positive = positive
        with tf.device("CPU:0"):
            self.count = tf.Variable(0, dtype=tf.int64, trainable=False, name="count")
            self.columns = [
                tf.Variable(tf.zeros([0], column), shape=[None], trainable=False, name=name)
                for name, column in _COLUMNS.items()
            ]

    def add_samples(self, labels: Any, predictions: Any, groups: Any, sample_weight: Any) -> None:
        """Append samples; arguments of the same number of elements each, or None for groups and weights."""
        score = tf.reshape(tf.cast(predictions, tf.float32), [-1])
        label = tf.reshape(tf.cast(labels, tf.float64), [-1])
        group = (
            tf.zeros_like(score, tf.int64) if groups is None else tf.reshape(tf.cast(groups, tf.int64), [-1])
        )
        weight = tf.ones_like(score)
        if sample_weight is not None:
            weight = tf.reshape(tf.cast(sample_weight, tf.float32), [-1])
        sizes = [column.shape[0] for column in (label, score, group, weight)]
        if len({size for size in sizes if size is not None}) > 1:
            raise ConfigError(
                f"{self.name}: labels, predictions, groups and weights must have as many elements each, got "
                f"{', '.join(map(str, sizes))}"
            )
        weight = refuse_numbers(weight, weight >= 0, f"{self.name}: weights must be at least 0")
        real = tf.where(weight > 0)[:, 0]
        label, score, group, weight = (tf.gather(x, real) for x in (label, score, group, weight))
        clicked = are_positive(label, self.positive, self.name)
        with tf.device("CPU:0"):
            self._append([group, score, tf.where(clicked, weight, 0), tf.where(clicked, 0.0, weight)])

    def samples(self) -> list[tf.Tensor]:
        """Groups, scores, and the weights as positives and as negatives, each (samples,)."""
        return [column[: self.count] for column in self.columns]

    def gather_over_ranks(self) -> None:
        """Give this metric, on every rank, the samples of all. Called eagerly, by all ranks, once."""
        by_rank = collectives.allgather_objects([column.numpy() for column in self.samples()])
        for variable, parts in zip(self.columns, zip(*by_rank, strict=True), strict=True):
            variable.assign(np.concatenate(parts))
        self.count.assign(tf.size(self.columns[0], tf.int64))

    def reset_state(self) -> None:
        """Forget all samples, and give their memory back."""
        self.count.assign(0)
        for variable in self.columns:
            variable.assign(tf.zeros([0], variable.dtype))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this metric."""
        return {**super().get_config(), "positive": self.positive}

    def _append(self, columns: list[tf.Tensor]) -> None:
        begin = self.count.read_value()
        end = begin + tf.size(columns[0], tf.int64)
        room = tf.size(self.columns[0], tf.int64)

        def grow() -> tf.Tensor:
            more = tf.maximum(end - room, room)
            for variable in self.columns:
                variable.assign(tf.concat([variable, tf.zeros([more], variable.dtype)], axis=0))
            return room + more

        room = tf.cond(end > room, grow, lambda: room)
        with tf.control_dependencies([room]):
            places = tf.range(begin, end)[:, tf.newaxis]
            for variable, column in zip(self.columns, columns, strict=True):
                variable.scatter_nd_update(places, column)
        self.count.assign(end)


def are_positive(labels: tf.Tensor, positive: float | None, name: str) -> tf.Tensor:
    """Return which labels are positive, bool of their shape.

    Args:
      labels: Floats.
      positive: The least positive label; None: labels are 0 or 1.
      name: The metric's name in errors.

    Raises:
      ConfigError: A label is NaN, or without ``positive`` is neither 0 nor 1.
    """
    nan = f"{name}: labels hold NaN, which is of neither class: leave these samples out, or weigh them 0"
    labels = refuse_unless(labels, ~tf.math.is_nan(labels), nan)
    if positive is not None:
        return labels >= positive
    good = tf.equal(labels, 0) | tf.equal(labels, 1)
    advice = "make the metric with positive=, the least label that is positive: 4 for ratings of 1 to 5"
    return tf.equal(refuse_numbers(labels, good, f"{name}: labels must be 0 or 1", advice), 1)


Floats = npt.NDArray[np.float64]


def auc_of_groups(
    groups: npt.NDArray[np.int64],
    scores: npt.NDArray[np.floating[Any]],
    positive: npt.NDArray[np.floating[Any]],
    negative: npt.NDArray[np.floating[Any]],
) -> tuple[Floats, Floats]:
    r"""Each group's AUC, by one sort.

    .. math::
       \mathrm{AUC}_g = \frac{\sum_{i, j \in g} a_i b_j ([s_i > s_j] + [s_i = s_j] / 2)}
       {\sum_{i \in g} a_i \sum_{j \in g} b_j}

    Args:
      groups: (n,) integers.
      scores: (n,) finite floats, of which the order as float32 counts.
      positive: (n,) floats, the weights a of positive samples, 0 for others.
      negative: (n,) floats, the weights b of negative ones.

    Returns:
      (groups,) float64, 0 where a group has samples of one class only; (groups,) float64, the groups' weights
      :math:`\sum a + \sum b`, or 0 for those of one class. Both are in ascending order of groups.

    Example:
      >>> columns = [3, 3, 5], [0.2, 0.1, 0.9], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]
      >>> auc_of_groups(*map(np.array, columns))
      (array([1., 0.]), array([2., 0.]))
    """
    scores = np.asarray(scores, np.float32) + np.float32(0)  # without -0, which has other bits than 0
    bits = scores.view(np.uint32)
    order = _order(np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)))
    if len(groups) and groups.min() != groups.max():
        order = order[np.argsort(groups[order], kind="stable")]
    group, score = groups[order], scores[order]
    other_group = group[1:] != group[:-1]
    # A run is the samples of a group that have the same score.
    runs = _begins(other_group | (score[1:] != score[:-1]), len(group))
    above, below = (_sums(weight[order], runs) for weight in (positive, negative))
    firsts = np.searchsorted(runs, _begins(other_group, len(group)))
    positives, negatives = _sums(above, firsts), _sums(below, firsts)
    lengths = np.diff(firsts, append=len(runs))
    lower = np.cumsum(below) - below - np.repeat(np.cumsum(negatives) - negatives, lengths)
    won = _sums(above * (lower + below / 2), firsts)
    both = (positives > 0) & (negatives > 0)
    return (
        np.divide(won, positives * negatives, out=np.zeros_like(won), where=both),
        np.where(both, positives + negatives, 0.0),
    )


def _order(codes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the stable order of codes below 2**32; sorting values is faster than sorting their places."""
    keys = (codes.astype(np.uint64) << np.uint64(32)) | np.arange(len(codes), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _begins(changes: npt.NDArray[np.bool_], length: int) -> npt.NDArray[np.int64]:
    """Return the first place, and the places after changes; none of nothing."""
    return np.concatenate([np.zeros(min(length, 1), np.int64), np.flatnonzero(changes) + 1])


def _sums(values: npt.NDArray[Any], begins: npt.NDArray[np.int64]) -> Floats:
    """Return the sum of each part that begins at a place and ends at the next one."""
    values = values.astype(np.float64, copy=False)
    return np.add.reduceat(values, begins) if len(begins) else np.zeros(0)


class _GroupedAUC(SampleMetric):
    """The mean of groups' AUC, weighted by their samples."""

    def result(self) -> tf.Tensor:
        """A scalar; nan without samples of both classes, or if a prediction isn't finite."""
        groups, scores, positive, negative = self.samples()
        finite = tf.math.is_finite(scores)
        columns = [groups, tf.where(finite, scores, 0), positive, negative]
        values, weights = tf.numpy_function(auc_of_groups, columns, [tf.float64] * 2, stateful=False)
        mean = tf.reduce_sum(values * weights) / tf.reduce_sum(weights)
        return tf.cast(tf.where(tf.reduce_all(finite), mean, float("nan")), self.dtype)


@tf.keras.saving.register_keras_serializable("gmeta")
class AUC(_GroupedAUC):
    r"""The area under the ROC curve of all samples, exactly.

    .. math::
       \mathrm{AUC} = \frac{\sum_{i: y_i = 1} \sum_{j: y_j = 0} w_i w_j ([s_i > s_j] + [s_i = s_j] / 2)}
       {\sum_{i: y_i = 1} w_i \sum_{j: y_j = 0} w_j}

    It is the chance that a positive sample is scored above a negative one, by the order of the scores as
    float32. `tf.keras.metrics.AUC` puts scores into 200 bins between 0 and 1 instead: it needs probabilities,
    and the order within a bin is lost, which is where most of rare clicks' predictions lie. This one takes
    logits too, and keeps every sample, 20 bytes each (`SampleMetric`). Over several ranks it is
    that of all their samples.

    Args:
      positive: The least label that is positive, such as 4 for ratings of 1 to 5. None: labels are 0 or 1.
      name: What the logs call it.
      dtype: Of the result.

    Example:
      >>> metric = AUC()
      >>> metric.update_state([1.0, 0.0, 1.0, 0.0], [3.0, -1.0, 0.5, 0.5])
      >>> float(metric.result())
      0.875

    References:
      Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic curve"
      (Radiology, 1982).
    """

    def __init__(self, positive: float | None = None, name: str = "auc", dtype: Any = "float64") -> None:
        super().__init__(positive, name, dtype)

    @tf.autograph.experimental.do_not_convert
    def update_state(self, labels: Any, predictions: Any, sample_weight: Any = None) -> None:
        """Add samples.

        Args:
          labels: Numbers of any shape.
          predictions: As many, probabilities or logits.
          sample_weight: As many; 0 marks padding, in which nothing matters.

        Raises:
          ConfigError: There aren't as many of each; a label is NaN, or without ``positive`` neither 0 nor 1;
            or a weight is NaN or below 0.
        """
        self.add_samples(labels, predictions, None, sample_weight)


@tf.keras.saving.register_keras_serializable("gmeta")
class UserGAUC(_GroupedAUC):
    r"""Grouped AUC of samples that come with their users: each user's AUC, weighted by its samples.

    .. math:: \mathrm{GAUC} = \frac{\sum_u n_u \mathrm{AUC}_u}{\sum_u n_u}

    The same as `GAUC`, which sees a task's samples together in a row. Here those of a user may be anywhere:
    in several batches, on several ranks. A user with samples of one class only has no AUC and is left out, of
    both sums; :math:`n_u` is the weight of the user's samples. Every sample is kept, 20 bytes each.

    Args:
      positive: The least label that is positive, such as 4 for ratings of 1 to 5. None: labels are 0 or 1.
      name: What the logs call it.
      dtype: Of the result.

    Example:
      >>> metric = UserGAUC()
      >>> metric.update_state([1.0, 0.0, 1.0], [0.3, 0.2, 0.1], users=[8, 8, 9])
      >>> metric.update_state([0.0], [0.5], users=[9])
      >>> float(metric.result())  # 1 of user 8, 0 of user 9
      0.5

    References:
      Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (KDD 2018), section 6.3, with
      impressions as weights.
    """

    def __init__(
        self, positive: float | None = None, name: str = "user_gauc", dtype: Any = "float64"
    ) -> None:
        super().__init__(positive, name, dtype)

    @tf.autograph.experimental.do_not_convert
    def update_state(self, labels: Any, predictions: Any, users: Any, sample_weight: Any = None) -> None:
        """Add samples.

        Args:
          labels: Numbers of any shape.
          predictions: As many, probabilities or logits.
          users: As many integers.
          sample_weight: As many; 0 marks padding, in which nothing matters.

        Raises:
          ConfigError: There aren't as many of each; a label is NaN, or without ``positive`` neither 0 nor 1;
            or a weight is NaN or below 0.
        """
        self.add_samples(labels, predictions, users, sample_weight)
