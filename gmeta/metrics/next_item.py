"""Hit rate, NDCG and mean reciprocal rank of the next item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError


@tf.keras.saving.register_keras_serializable("gmeta")
class NextItem(tf.keras.metrics.Metric):
    r"""HR@k, NDCG@k and MRR of predictions that have one right answer each, the item that came next.

    .. math::
       \mathrm{HR@}k = \frac{\sum_i w_i [r_i \leq k]}{\sum_i w_i}, \quad
       \mathrm{NDCG@}k = \frac{\sum_i w_i [r_i \leq k] / \log_2(r_i + 1)}{\sum_i w_i}, \quad
       \mathrm{MRR} = \frac{\sum_i w_i / r_i}{\sum_i w_i}

    with the ranks :math:`r_i` of `catalogue_ranks`, among all items. One pass over the catalogue gives all
    these numbers, so they are one metric, with several results. The ideal order has the one item first, so
    NDCG needs no division; of several graded items a task it is `NDCG`'s to tell.

    Sums are kept in float64 and with the aggregation SUM: 2 k + 2 numbers, whatever the number of
    predictions, which those of several batches and ranks add up to exactly. A rank of 0, of a model that has
    diverged, makes everything nan until the next reset; so does having seen nothing.

    Args:
      ks: The k of HR and NDCG, each at least 1.
      name: Of the metric.
      dtype: Of the sums.

    Raises:
      ConfigError: No k, a k below 1 or given twice.

    Example:
      >>> metric = NextItem(ks=[1, 10])
      >>> metric.update_state([1, 3, 50, 1], sample_weight=[1, 1, 2, 0])
      >>> {name: round(float(value), 3) for name, value in metric.result().items()}
      {'hr@1': 0.25, 'hr@10': 0.5, 'ndcg@1': 0.25, 'ndcg@10': 0.375, 'mrr': 0.343}

    References:
      Zhai et al., "Actions Speak Louder than Words" (ICML 2024), section 4.1.1: HR and NDCG at 10, 50 and
      200, over the full catalogue.
    """

    def __init__(
        self, ks: Sequence[int] = (10, 50, 200), name: str = "next_item", dtype: Any = "float64"
    ) -> None:
        numbers = [whole_number("NextItem: k", k, least=1) for k in ks]
        if not numbers or len(set(numbers)) < len(numbers):
            raise ConfigError(f"NextItem: ks must be one or more numbers, each once, got {list(ks)}")
        super().__init__(name=name, dtype=dtype)
        self.ks = numbers
        self.hits = self.add_weight(name="hits", shape=(len(numbers),), initializer="zeros")
        self.gains = self.add_weight(name="gains", shape=(len(numbers),), initializer="zeros")
        self.reciprocals = self.add_weight(name="reciprocals", initializer="zeros")
        self.weight = self.add_weight(name="weight", initializer="zeros")

    # AutoGraph would rewrite it for nothing, and wrap its errors.
    @tf.autograph.experimental.do_not_convert
    def update_state(self, ranks: Any, sample_weight: Any = None) -> None:
        """Add predictions.

        Args:
          ranks: Integers of any shape, from 1 on, as of `catalogue_ranks`; 0 for what isn't finite.
          sample_weight: Of the same shape; 0 marks padding, whose rank doesn't matter.
        """
        rank = tf.reshape(tf.cast(ranks, tf.float64), [-1])
        weight = (
            tf.ones_like(rank)
            if sample_weight is None
            else tf.reshape(tf.cast(sample_weight, tf.float64), [-1])
        )
        rank = tf.where(weight > 0, rank, 1)
        rank = tf.where(rank >= 1, rank, float("nan"))
        broken = rank - rank  # nan where the rank is, to be seen in comparisons too
        hit = (
            tf.cast(rank[:, tf.newaxis] <= tf.constant(self.ks, tf.float64), tf.float64)
            + broken[:, tf.newaxis]
        )
        gain = hit * (tf.math.log(tf.constant(2.0, tf.float64)) / tf.math.log(rank + 1))[:, tf.newaxis]
        for variable, value in ((self.hits, hit), (self.gains, gain), (self.reciprocals, 1 / rank)):
            total = tf.tensordot(weight, value, axes=1)
            variable.assign_add(tf.cast(total, variable.dtype))
        self.weight.assign_add(tf.cast(tf.reduce_sum(weight), self.weight.dtype))

    def result(self) -> dict[str, tf.Tensor]:
        """``hr@k`` and ``ndcg@k`` for each k, and ``mrr``: scalars."""
        found = {f"hr@{k}": self.hits[i] / self.weight for i, k in enumerate(self.ks)}
        found |= {f"ndcg@{k}": self.gains[i] / self.weight for i, k in enumerate(self.ks)}
        return {**found, "mrr": self.reciprocals / self.weight}

    def reset_state(self) -> None:
        """Forget all predictions."""
        for variable in self.variables:
            variable.assign(tf.zeros_like(variable))

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this metric again."""
        return {**super().get_config(), "ks": self.ks}
