"""The visibility and times that every block's attention needs, computed once per batch of sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph.conditions import assert_first
from gmeta.ops import AttentionMask, Jagged, jagged


class SequenceView(NamedTuple):
    """Which tokens see which, and the tokens' times.

    Attributes:
      visible: (total, 3) int32, from `gmeta.ops.AttentionMask.visible`.
      row_times: (total,) int64, the time of the item that a token must predict; None without times.
      column_times: (total,) int64, a token's own time.
    """

    visible: tf.Tensor
    row_times: tf.Tensor | None = None
    column_times: tf.Tensor | None = None


def sequence_view(
    mask: AttentionMask, offsets: tf.Tensor, contexts: Any = None, targets: Any = None, times: Any = None
) -> SequenceView:
    """Compute the view of sequences of the form ``[contexts | history | targets]``.

    A history token measures distances in time from the moment of the next history item, because the model
    predicts that item and knows when it comes (Zhai et al., ICML 2024, and the published code). The last
    history token uses its own time. A target also uses its own time, because it is itself the item to
    predict. No token uses the time of another token that is a target, so targets reveal nothing about each
    other.

    Args:
      mask: The rules that say which tokens see which.
      offsets: (batch + 1,) int64.
      contexts: (batch,) integers: the number of contextual tokens at each sequence's start. None: none.
      targets: (batch,) integers: the number of targets at each sequence's end. None: none.
      times: (total,) integers: each token's time, in one unit, such as seconds. None: not known.

    Raises:
      ConfigError: ``times`` isn't a vector.
      InvalidArgumentError: The numbers of times and tokens differ, or a sequence has fewer tokens than its
        contextual tokens and targets together.

    Example:
      >>> offsets = tf.constant([0, 4], tf.int64)
      >>> view = sequence_view(AttentionMask(), offsets, targets=[1], times=[5, 7, 8, 9])
      >>> view.row_times.numpy().tolist()
      [7, 8, 8, 9]
    """
    offsets = _with_parts(offsets, contexts, targets)
    if times is None:
        return SequenceView(mask.visible(offsets, contexts, targets))
    times = tf.cast(times, tf.int64)
    if times.shape.rank not in (None, 1):
        raise ConfigError(f"times must be a vector with a number for each token, got shape {times.shape}")
    times = assert_first(
        times,
        tf.size(times, tf.int64) == offsets[-1],
        ["times: a number for each token expected; tokens", offsets[-1], "times", tf.size(times)],
    )
    visible = mask.visible(offsets, contexts, targets, times)
    tokens = Jagged(times, offsets)
    rows, places, lengths = jagged.row_ids(tokens), jagged.positions(tokens), jagged.lengths(tokens)
    first = 0 if contexts is None else tf.gather(tf.cast(contexts, tf.int64), rows)
    end = tf.gather(lengths if targets is None else lengths - tf.cast(targets, tf.int64), rows)
    following = tf.concat([times[1:], times[-1:]], axis=0)
    return SequenceView(visible, tf.where((places >= first) & (places + 1 < end), following, times), times)


def _with_parts(offsets: tf.Tensor, contexts: Any, targets: Any) -> tf.Tensor:
    """Return the offsets, after checking that each sequence is at least as long as its parts."""
    offsets = tf.cast(offsets, tf.int64)
    if contexts is None and targets is None:
        return offsets
    lengths = offsets[1:] - offsets[:-1]
    counts = [tf.zeros_like(lengths) if c is None else tf.cast(c, tf.int64) for c in (contexts, targets)]
    fits = (counts[0] >= 0) & (counts[1] >= 0) & (counts[0] + counts[1] <= lengths)
    form = "a sequence is [contexts | history | targets]; contexts"
    told = [form, counts[0], "and targets", counts[1], "don't fit into lengths", lengths]
    return assert_first(offsets, fits, told, summarize=20)
