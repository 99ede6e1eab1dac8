r"""The bias that attention adds to a score for two tokens' distance in position and in time (HSTU's rab).

.. math:: \mathrm{rab}_{ij} = p_{j - i + n - 1} + t_{b(\tau_i - \tau_j)}, \quad
   b(\Delta) = \min(\lfloor \ln(\max(|\Delta|, 1)) / 0.301 \rfloor, 128)

The heads share one table of positions and one of 129 logarithmic buckets of time (Zhai et al., "Actions Speak
Louder than Words", ICML 2024, section 3.2 and the published code). 0.301 makes each bucket 35% wider than the
one before. The last bucket that a time in seconds reaches is the 71st, that of 2^31.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

BUCKETS = 129
WIDTH = 0.301


class RelativeBias(NamedTuple):
    """Bias of a batch of jagged sequences.

    Attributes:
      positions: (2n - 1,) biases for the distances j - i from -(n - 1) to n - 1; longer distances use the
        last one. None: no such term.
      time_buckets: (129,) biases for the buckets of time; None: no such term.
      row_times: (total,) int64, the time τ_i of an attending token. In a model that predicts the next item,
        it is the time of that item. With ``time_buckets`` only.
      column_times: (total,) int64, the time τ_j of an attended token: when it came.
    """

    positions: tf.Tensor | None = None
    time_buckets: tf.Tensor | None = None
    row_times: tf.Tensor | None = None
    column_times: tf.Tensor | None = None


@functools.cache
def bucket_starts() -> npt.NDArray[np.int64]:
    """Compute the smallest time difference of each bucket from the first to the 128th, (128,) int64.

    Comparing integers gives the same buckets on all machines; the last digit of a logarithm may differ.

    Example:
      >>> bucket_starts()[:8].tolist()
      [2, 2, 3, 4, 5, 7, 9, 12]
    """
    return np.array([math.ceil(math.exp(bucket * WIDTH)) for bucket in range(1, BUCKETS)], np.int64)


def time_bucket(difference: tf.Tensor) -> tf.Tensor:
    """Find the bucket of a time difference.

    Args:
      difference: int64 of any shape.

    Returns:
      int32 of the same shape, from 0 to 128.
    """
    flat = tf.reshape(tf.abs(difference), [-1])
    found = tf.searchsorted(tf.constant(bucket_starts()), flat, side="right")
    return tf.reshape(found, tf.shape(difference))
