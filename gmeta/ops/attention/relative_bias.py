r"""What attention adds to a score for how far apart two tokens are, in places and in time (HSTU's rab).

.. math:: \mathrm{rab}_{ij} = p_{j - i + n - 1} + t_{b(\tau_i - \tau_j)}, \quad
   b(\Delta) = \min(\lfloor \ln(\max(|\Delta|, 1)) / 0.301 \rfloor, 128)

One table of places and one of 129 logarithmic buckets of time, shared by the heads (Zhai et al., "Actions
Speak Louder than Words", ICML 2024, section 3.2 and the published code). 0.301 makes each bucket 35% wider
than the one before: the last that a time in seconds reaches is that of 2^31, the 71st.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

BUCKETS = 129
WIDTH = 0.301


class RelativeBias(NamedTuple):
    """The bias of a batch of jagged sequences.

    Attributes:
      positions: (2n - 1,) of the distances j - i from -(n - 1) to n - 1; longer ones take the last. None: no
        such term.
      time_buckets: (129,) of the buckets of time; None: no such term.
      row_times: (total,) int64, the τ of a token that looks: when the next item came, where the model is to
        tell that item. With ``time_buckets`` only.
      column_times: (total,) int64, the τ of a token that is looked at: when it came.
    """

    positions: tf.Tensor | None = None
    time_buckets: tf.Tensor | None = None
    row_times: tf.Tensor | None = None
    column_times: tf.Tensor | None = None


@functools.cache
def bucket_starts() -> npt.NDArray[np.int64]:
    """(128,) int64: the smallest time difference of each bucket from the first to the 128th.

    Buckets so are a matter of integers, and alike on all machines: the logarithm's last digit isn't.

    Example:
      >>> bucket_starts()[:8].tolist()
      [2, 2, 3, 4, 5, 7, 9, 12]
    """
    return np.array([math.ceil(math.exp(bucket * WIDTH)) for bucket in range(1, BUCKETS)], np.int64)


def time_bucket(difference: tf.Tensor) -> tf.Tensor:
    """The bucket of a difference of times.

    Args:
      difference: int64 of any shape.

    Returns:
      int32 of the same shape, from 0 to 128.
    """
    flat = tf.reshape(tf.abs(difference), [-1])
    found = tf.searchsorted(tf.constant(bucket_starts()), flat, side="right")
    return tf.reshape(found, tf.shape(difference))


def bias_inputs(bias: RelativeBias | None) -> dict[str, Any]:
    """The inputs and the attribute by which native ops take a bias: what is absent has no elements."""
    bias = bias or RelativeBias()
    tables = [tf.zeros([0]) if x is None else tf.cast(x, tf.float32) for x in bias[:2]]
    times = [tf.zeros([0], tf.int64) if x is None else x for x in bias[2:]]
    named = dict(zip(RelativeBias._fields, [*tables, *times], strict=True))
    return {**named, "bucket_starts": bucket_starts().tolist()}
