"""Hit rate, recall and NDCG of users with several right items each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number


@tf.keras.saving.register_keras_serializable("gmeta")
class Retrieval(tf.keras.metrics.Metric):
    r"""HR@k, recall@k and NDCG@k of users who have several right items among a whole catalogue.

    .. math::
       \mathrm{HR@}k = \frac{1}{n} \sum_u [h_u > 0], \quad
       \mathrm{recall@}k = \frac{1}{n} \sum_u \frac{h_u}{T_u}, \quad
       \mathrm{NDCG@}k = \frac{1}{n} \sum_u \frac{\sum_{r_{ui} \le k} 1 / \log_2(r_{ui} + 1)}
       {\sum_{r = 1}^{\min(T_u, k)} 1 / \log_2(r + 1)}

    with the ranks :math:`r_{ui}` of the :math:`T_u` right items of user u, of which :math:`h_u` are at most
    k. Users without right items don't count. These are RecBole's definitions. Sums are kept in float64, so
    those over batches and ranks are exact; without any users, results are nan.

    Args:
      ks: The k, each at least 1.
      name: Of the metric.
      dtype: Of the sums.

    Raises:
      ConfigError: No k, a k below 1 or given twice.

    Example:
      >>> metric = Retrieval(ks=[2])
      >>> metric.update_state(tf.ragged.constant([[1, 5, 9], [3]]))
      >>> {name: round(float(value), 3) for name, value in metric.result().items()}
      {'hr@2': 0.5, 'recall@2': 0.167, 'ndcg@2': 0.307}
    """

    def __init__(self, ks: Sequence[int] = (10, 20), name: str = "retrieval", dtype: Any = "float64") -> None:
        numbers = [whole_number("Retrieval: k", k, least=1) for k in ks]
        if not numbers or len(set(numbers)) < len(numbers):
            raise ConfigError(f"Retrieval: ks must be one or more numbers, each once, got {list(ks)}")
        super().__init__(name=name, dtype=dtype)
        self.ks = numbers
        self.sums = {
            part: self.add_weight(name=part, shape=(len(numbers),), initializer="zeros")
            for part in ("hr", "recall", "ndcg")
        }
        self.users = self.add_weight(name="users", initializer="zeros")

    @tf.autograph.experimental.do_not_convert
    def update_state(self, ranks: tf.RaggedTensor) -> None:
        """Add users.

        Args:
          ranks: (users, None) the ranks of each user's right items, integers from 1 on; 0 for what isn't
            finite, which makes all results nan until the next reset.
        """
        users, owner = ranks.nrows(), ranks.value_rowids()
        count = tf.cast(ranks.row_lengths(), tf.float64)
        rank = tf.cast(ranks.values, tf.float64)[:, tf.newaxis]
        rank = tf.where(rank >= 1, rank, float("nan"))
        ks = tf.constant(self.ks, tf.float64)
        hit = tf.cast(rank <= ks, tf.float64) + (rank - rank)  # nan where the rank is
        ln2 = tf.math.log(tf.constant(2.0, tf.float64))
        gains = 1 / (tf.math.log(tf.range(2, max(self.ks) + 2, dtype=tf.float64)) / ln2)
        ideal = tf.concat([[0.0], tf.cumsum(gains)], axis=0)
        best = tf.gather(ideal, tf.cast(tf.minimum(count[:, tf.newaxis], ks), tf.int64))
        hits, gained = (
            tf.math.unsorted_segment_sum(values, owner, users)
            for values in (hit, hit * ln2 / tf.math.log(rank + 1))
        )
        some = count > 0
        found = {
            "hr": tf.minimum(hits, 1),
            "recall": hits / tf.maximum(count, 1)[:, tf.newaxis],
            "ndcg": gained / tf.where(some[:, tf.newaxis], best, 1),
        }
        for part, values in found.items():
            self.sums[part].assign_add(tf.cast(tf.reduce_sum(values, axis=0), self.sums[part].dtype))
        self.users.assign_add(tf.cast(tf.math.count_nonzero(some), self.users.dtype))

    def result(self) -> dict[str, tf.Tensor]:
        """Return ``hr@k``, ``recall@k`` and ``ndcg@k`` for each k: scalars."""
        return {
            f"{part}@{k}": sums[place] / self.users
            for part, sums in self.sums.items()
            for place, k in enumerate(self.ks)
        }

    def reset_state(self) -> None:
        """Forget all users."""
        for variable in self.variables:
            variable.assign(tf.zeros_like(variable))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this metric."""
        return {**super().get_config(), "ks": self.ks}
