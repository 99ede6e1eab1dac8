"""Which tokens of a sequence see which: one description for every form of attention.

A sequence is contextual tokens, then its history in the order of time, then targets, any of which may be
absent: ``[contexts | history | targets]``. Whatever the rules below, what a token sees is its sequence's
first tokens, one stretch of its history, and itself. So a mask is three numbers a token, never a matrix:
kernels find from them which blocks they can skip and which they needn't mask, and no kernel knows a rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph.conditions import assert_first
from gmeta.ops import jagged


@dataclass(frozen=True)
class AttentionMask:
    """The rules of a mask.

    A contextual token, such as a user's age, is seen by all tokens of its sequence. A token of the history
    sees what came before it. A target, such as an item that was shown, sees the history and no other target:
    so the targets of a sequence are scored in one pass, each as if it were alone.

    Attributes:
      causal: Whether the history sees only what is before it; otherwise all of it.
      window: How far back, and without ``causal`` ahead, a token sees in the history (HSTU's maximum
        attention length). None: any distance.
      full_tail: With ``window``: this many last tokens of the history, and the targets, see all that is
        before them.
      contexts_see: ``"contexts"``: contextual tokens see each other. ``"history"``: the whole history too, as
        in Meta's production form; not for training on the next item, which they would tell.
      by_time: What is before a token are the tokens of the history with an earlier time, in place of an
        earlier position: the dynamic mask of MTGR (Han et al., arXiv 2505.18654, 2025). Targets that were
        shown before the history ended then don't see what came after them.

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
            raise ConfigError("attention mask: by_time says what is before a token: it needs causal=True")

    def visible(
        self, offsets: Any, contexts: Any = None, targets: Any = None, times: Any = None
    ) -> tf.Tensor:
        """What each token sees, besides itself.

        Args:
          offsets: (batch + 1,) where sequences begin and end.
          contexts: (batch,) how many contextual tokens each has; None: none.
          targets: (batch,) how many targets.
          times: (total,) int64, when a token was; contextual tokens' don't matter. Of the history they must
            not decrease. With ``by_time`` only.

        Returns:
          (total, 3) int32, positions in the token's own sequence: it sees the tokens in [0, first), and those
          in [second, third).

        Raises:
          ConfigError: ``by_time`` without ``times``.
          InvalidArgumentError: Times of a history that decrease.
        """
        offsets = tf.cast(offsets, tf.int64)
        lengths = offsets[1:] - offsets[:-1]
        none = tf.zeros_like(lengths)
        contexts = none if contexts is None else tf.cast(contexts, tf.int64)
        ends = lengths - (none if targets is None else tf.cast(targets, tf.int64))
        tokens = jagged.Jagged(tf.range(offsets[-1]), offsets)
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
        """Whether a token is exempt from the window."""
        return (place >= end - self.full_tail) & (self.full_tail > 0)


def _earlier(times: tf.Tensor, sequence: tf.Tensor, of_history: tf.Tensor) -> tf.Tensor:
    """For each token, how many of its sequence's history have an earlier time."""
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
