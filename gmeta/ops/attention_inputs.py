"""Attention masks: which tokens of a sequence see which, described once for every form of attention.

A sequence consists of contextual tokens, then its history in order of time, then targets: ``[contexts |
history | targets]``. Any of the three may be absent. Under all the rules below, a token sees the first tokens
of its sequence, one stretch of its history, and itself. A mask is therefore three numbers per token, never a
matrix. From these numbers, kernels find the blocks that they can skip and those that need no masking, so
kernels don't implement the rules.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import assert_first
from gmeta.ops import jagged


@dataclass(frozen=True)
class AttentionMask:
    """Rules of a mask.

    All tokens of a sequence see its contextual tokens, such as a user's age. A token of the history sees the
    tokens before it. A target, such as a shown item, sees the history and no other target. The
    targets of a sequence are therefore scored in one pass, each as if it were alone.

    Attributes:
      causal: Whether a token of the history sees only the history before it; otherwise, it sees all of it.
      window: How far back a token sees in the history (HSTU's maximum attention length); without ``causal``,
        also how far ahead. None: any distance.
      full_tail: With ``window``: this many last tokens of the history, and the targets, see all earlier
        tokens.
      contexts_see: ``"contexts"``: contextual tokens see each other. ``"history"``: they see the whole
        history too, as in Meta's production form. Don't use it for training on the next item, which these
        tokens would reveal.
      by_time: Whether "before" a token means an earlier time in the history, instead of an earlier position:
        the dynamic mask of MTGR (Han et al., arXiv 2505.18654, 2025). Targets that were shown before the end
        of the history then don't see later tokens.

    Example:
      >>> mask = AttentionMask()
      >>> mask.visible(tf.constant([0, 4]), contexts=[1], targets=[1]).numpy().tolist()
      [[1, 1, 1], [1, 1, 1], [1, 1, 2], [1, 1, 3]]
    """

    causal: bool = True
    window: int | None = None
    full_tail: int = 0
    contexts_see: Literal["contexts", "history"] = "contexts"
    by_time: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"attention mask: window must be at least 1, or None, got {self.window}")
        if self.full_tail < 0 or (self.full_tail and self.window is None):
            raise ConfigError(
                f"attention mask: full_tail exempts tokens from a window; it can't be negative, nor above 0 "
                f"without one: got full_tail={self.full_tail}, window={self.window}"
            )
        if self.contexts_see not in ("contexts", "history"):
            raise ConfigError(
                f"attention mask: contexts_see must be 'contexts' or 'history', got {self.contexts_see!r}"
            )
        if self.by_time and not self.causal:
            raise ConfigError("attention mask: by_time defines what is before a token: it needs causal=True")

    def visible(
        self, offsets: Any, contexts: Any = None, targets: Any = None, times: Any = None
    ) -> tf.Tensor:
        """Compute which tokens each token sees, in addition to itself.

        Args:
          offsets: (batch + 1,) where sequences begin and end.
          contexts: (batch,) how many contextual tokens each sequence has; None: no sequence has any.
          targets: (batch,) how many targets each sequence has; None: no sequence has any.
          times: (total,) int64, the time of each token; only with ``by_time``. Times within a history must
            not decrease; those of contextual tokens don't matter.

        Returns:
          (total, 3) int32, positions in the token's own sequence: it sees the tokens in [0, first), and those
          in [second, third).

        Raises:
          ConfigError: ``by_time`` is set, but ``times`` is missing.
          InvalidArgumentError: The times of a history decrease.
        """
        with tf.device("CPU:0"):  # as all offsets (`gmeta.ops.jagged`)
            offsets = tf.cast(offsets, tf.int64)
            lengths, total = offsets[1:] - offsets[:-1], offsets[-1]
            none = tf.zeros_like(lengths)
            contexts = none if contexts is None else tf.cast(contexts, tf.int64)
            ends = lengths - (none if targets is None else tf.cast(targets, tf.int64))
        tokens = jagged.Jagged(tf.range(total, dtype=tf.int64), offsets)
        sequence, place = jagged.row_ids(tokens), jagged.positions(tokens)
        first, end = tf.gather(contexts, sequence), tf.gather(ends, sequence)
        if self.by_time:
            if times is None:
                raise ConfigError("attention mask: by_time needs the times of the tokens")
            before = first + _earlier(tf.cast(times, tf.int64), sequence, (place >= first) & (place < end))
        else:
            before = tf.minimum(place, end)
        begin, until = first, before if self.causal else end
        if self.window is not None:
            begin = tf.where(self._sees_all(place, end), first, tf.maximum(first, before - self.window))
            if not self.causal:
                until = tf.minimum(end, tf.where(self._sees_all(place, end), end, place + 1 + self.window))
        of_context = end if self.contexts_see == "history" else first
        is_context = place < first
        begin, until = tf.where(is_context, first, begin), tf.where(is_context, of_context, until)
        return tf.cast(tf.stack([first, begin, tf.maximum(begin, until)], axis=1), tf.int32)

    def _sees_all(self, place: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
        """Return whether a token is exempt from the window."""
        return (place >= end - self.full_tail) & (self.full_tail > 0)


def _earlier(times: tf.Tensor, sequence: tf.Tensor, of_history: tf.Tensor) -> tf.Tensor:
    """Count, for each token, the tokens of its sequence's history that have an earlier time."""
    # One sorted list for all sequences: a sequence's number, then the time.
    times -= tf.reduce_min(tf.concat([times, [tf.int64.max]], axis=0))
    stride = 1 + tf.reduce_max(tf.concat([times, [0]], axis=0))
    most = tf.reduce_max(tf.concat([sequence, [0]], axis=0)) + 1
    stride = assert_first(
        stride,
        (stride > 0) & (most <= tf.int64.max // tf.maximum(stride, 1)),
        ["attention mask: times of sequences", most, "are too far apart for int64; give them in seconds"],
    )
    keys = sequence * stride + times
    history = tf.boolean_mask(keys, of_history)
    history = assert_first(
        history,
        history[1:] >= history[:-1],
        ["attention mask: the times of a sequence's history must not decrease, got", history],
    )
    return tf.searchsorted(history, keys, out_type=tf.int64) - tf.searchsorted(
        history, sequence * stride, out_type=tf.int64
    )


# The bias that attention adds to a score for two tokens' distance in position and in time (HSTU's rab).
#
# .. math:: \mathrm{rab}_{ij} = p_{j - i + n - 1} + t_{b(\tau_i - \tau_j)}, \quad
#    b(\Delta) = \min(\lfloor \ln(\max(|\Delta|, 1)) / 0.301 \rfloor, 128)
#
# The heads share one table of positions and one of 129 logarithmic buckets of time (Zhai et al., "Actions
# Speak Louder than Words", ICML 2024, section 3.2 and the published code). 0.301 makes each bucket 35% wider
# than the previous one. The last bucket for times in seconds is the 71st, that of 2^31.

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
      column_times: (total,) int64, the time τ_j of an attended token.
    """

    positions: tf.Tensor | None = None
    time_buckets: tf.Tensor | None = None
    row_times: tf.Tensor | None = None
    column_times: tf.Tensor | None = None


@functools.cache
def bucket_starts() -> npt.NDArray[np.int64]:
    """Compute the smallest time difference of each bucket from the first to the 128th, (128,) int64.

    Comparing integers gives equal buckets on all machines; the last digit of a logarithm may differ.

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
