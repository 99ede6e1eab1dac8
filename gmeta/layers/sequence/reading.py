"""What is kept of sequences that were read, so that tokens can be appended to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import assert_first
from gmeta.ops import AttentionMask, Jagged, jagged
from gmeta.ops.attention_inputs import time_bucket

_UNSEEN = -1e9  # SiLU and softmax of it are 0


class Kept(NamedTuple):
    """The keys and values of a block: of sequences, and of the tokens that beams appended to them.

    Attributes:
      keys: (batch, heads, longest, d).
      values: (batch, heads, longest, dv).
      own_keys: (batch, beams, heads, t, d); None at first.
      own_values: (batch, beams, heads, t, dv).
    """

    keys: tf.Tensor
    values: tf.Tensor
    own_keys: tf.Tensor | None = None
    own_values: tf.Tensor | None = None

    @classmethod
    def of(cls, keys: tf.Tensor, values: tf.Tensor, offsets: tf.Tensor) -> Kept:
        """Pad the keys and values of sequences, (total, heads, d) each."""
        padded = (jagged.to_padded(Jagged(each, offsets)) for each in (keys, values))
        return cls(*(tf.transpose(each, [0, 2, 1, 3]) for each in padded))

    def append(self, keys: tf.Tensor, values: tf.Tensor) -> Kept:
        """Add a token to each beam, (batch, beams, heads, d) each."""
        own = []
        for former, each in ((self.own_keys, keys), (self.own_values, values)):
            each = each[:, :, :, tf.newaxis]
            own.append(each if former is None else tf.concat([former, each], axis=3))
        return Kept(self.keys, self.values, *own)

    def follow(self, beams: tf.Tensor) -> Kept:
        """Give each beam the tokens of the one that it goes on."""
        if self.own_keys is None:
            return self
        return Kept(*self[:2], *(tf.gather(each, beams, axis=1, batch_dims=1) for each in self[2:]))


class AppendedPlace(NamedTuple):
    """How far the tokens before are from appended ones, the same for all blocks.

    ``n`` is 1 if the appended tokens of a sequence stand at one place, as those of beams do.

    Attributes:
      apart: (batch, n, longest) int64, the places of a sequence's tokens less that of the appended token.
      own_apart: (1, n, t) int64, of the t tokens that were appended, itself included.
      seen: bool (batch, n, longest).
      own_seen: bool (1, n, t).
      time_apart: (batch, n or 1, longest) int64, how long before; None without times.
      own_time_apart: (batch, n or 1, t) int64.
    """

    apart: tf.Tensor
    own_apart: tf.Tensor
    seen: tf.Tensor
    own_seen: tf.Tensor
    time_apart: tf.Tensor | None
    own_time_apart: tf.Tensor | None

    def biases(self, positions: Any = None, buckets: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Compute what is added to scores, so low for tokens that aren't seen that they get no weight.

        Args:
          positions: (2n - 1,), as of `gmeta.ops.RelativeBias`; None: no such term.
          buckets: (129,), as of `gmeta.ops.RelativeBias`; None: no such term.

        Returns:
          (batch, n, longest) and (batch or 1, n, t), float32.
        """
        return (
            _bias(self.apart, self.seen, self.time_apart, positions, buckets),
            _bias(self.own_apart, self.own_seen, self.own_time_apart, positions, buckets),
        )


class Reading(NamedTuple):
    """Sequences that were read, and continuations of them.

    Attributes:
      lengths: (batch,) int64, the sequences' tokens.
      kept: For each block, its keys and values.
      times: (batch, longest) int64, when these tokens were; None: not known.
      own_times: (batch, beams or 1, t) int64, when the appended tokens come.
      appended: t, the tokens that each continuation has.
      contexts: How many contextual tokens each sequence begins with.
    """

    lengths: tf.Tensor
    kept: tuple[Kept, ...]
    times: tf.Tensor | None
    own_times: tf.Tensor | None
    appended: int = 0
    contexts: int = 0

    @classmethod
    def of(
        cls, offsets: tf.Tensor, times: tf.Tensor | None, kept: Sequence[Kept], contexts: int = 0
    ) -> Reading:
        """Make it of a batch of sequences, whose tokens' times are (total,)."""
        padded = None if times is None else jagged.to_padded(Jagged(times, offsets))
        return cls.of_padded(offsets[1:] - offsets[:-1], padded, kept, contexts)

    @classmethod
    def of_padded(
        cls, lengths: tf.Tensor, times: tf.Tensor | None, kept: Sequence[Kept], contexts: int = 0
    ) -> Reading:
        """Make it of lengths (batch,), and of the tokens' times, (batch, longest)."""
        own = None if times is None else tf.zeros([tf.size(lengths), 1, 0], tf.int64)
        return cls(lengths, tuple(kept), times, own, contexts=contexts)

    def follow(self, beams: Any, times: Any, window: int | None, name: str) -> tuple[AppendedPlace, Reading]:
        """Return where a token stands that is appended to each continuation, and what it goes on.

        Args:
          beams: As of `SequenceStack.read_on`.
          times: As of `SequenceStack.read_on`.
          window: How far back a token sees; None: any distance.
          name: The layer's name, for errors.
        """
        self._check_times(times, name)
        kept = self.kept
        if beams is not None:
            kept = tuple(each.follow(beams) for each in kept)
        own_apart = tf.range(-self.appended, 1, dtype=tf.int64)[tf.newaxis, tf.newaxis]
        here = (self.lengths + self.appended)[:, tf.newaxis]
        own_times = time_apart = own_time_apart = None
        if self.times is not None:
            now = tf.cast(times, tf.int64)[..., tf.newaxis]
            now = now[:, tf.newaxis] if now.shape.rank == 2 else now
            own_times = now
            if self.own_times is not None and self.appended:
                if now.shape[1] != 1 or self.own_times.shape[1] != 1:
                    raise ConfigError(f"{name}: continuations can have times of their own for one token only")
                own_times = tf.concat([self.own_times, now], axis=2)
            time_apart, own_time_apart = now - self.times[:, tf.newaxis], now - own_times
        place = self._place(here, own_apart, window, time_apart, own_time_apart)
        return place, self._replace(kept=kept, own_times=own_times, appended=self.appended + 1)

    def extend(
        self, count: Any, row_times: Any, column_times: Any, window: int | None, name: str
    ) -> AppendedPlace:
        """Return where the tokens of a stretch stand that is appended to each sequence.

        Args:
          count: n, the stretch's tokens, ().
          row_times: (batch, n) int64, as in `SequenceView`; None without times.
          column_times: (batch, n) int64.
          window: How far back a token sees; None: any distance.
          name: The layer's name, for errors.
        """
        self._check_times(row_times, name)
        own = tf.range(tf.cast(count, tf.int64))
        own_apart = (own - own[:, tf.newaxis])[tf.newaxis]
        time_apart = own_time_apart = None
        if self.times is not None:
            rows = row_times[:, :, tf.newaxis]
            time_apart, own_time_apart = rows - self.times[:, tf.newaxis], rows - column_times[:, tf.newaxis]
        here = self.lengths[:, tf.newaxis] + own
        return self._place(here, own_apart, window, time_apart, own_time_apart)

    def _check_times(self, times: Any, name: str) -> None:
        if self.times is not None and times is None:
            raise ConfigError(f"{name} read sequences with times: pass times=, when the next tokens come")

    def _place(
        self, here: tf.Tensor, own_apart: tf.Tensor, window: int | None, time_apart: Any, own_time_apart: Any
    ) -> AppendedPlace:
        """Make the place of tokens at the places (batch, n) ``here``."""
        places = tf.range(tf.shape(self.kept[0].keys, tf.int64)[2])
        apart = places - here[:, :, tf.newaxis]
        seen = tf.broadcast_to(places < self.lengths[:, tf.newaxis, tf.newaxis], tf.shape(apart))
        own_seen = own_apart <= 0
        if window is not None:
            seen &= (apart >= -window) | (places < self.contexts)
            own_seen &= own_apart >= -window
        return AppendedPlace(apart, own_apart, seen, own_seen, time_apart, own_time_apart)


def _bias(apart: tf.Tensor, seen: tf.Tensor, time_apart: Any, positions: Any, buckets: Any) -> tf.Tensor:
    added = tf.where(seen, 0.0, _UNSEEN)
    if positions is not None:
        n = (positions.shape[0] + 1) // 2
        added += tf.gather(tf.cast(positions, tf.float32), tf.clip_by_value(apart + n - 1, 0, 2 * n - 2))
    if buckets is not None and time_apart is not None:
        added += tf.gather(tf.cast(buckets, tf.float32), time_bucket(time_apart))
    return added


# The visibility and times that every block's attention needs, computed once per batch of sequences.


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
    given = tf.size(times, tf.int64)
    with tf.device("CPU:0"):  # as all offsets (`gmeta.ops.jagged`)
        told = ["times: a number for each token expected; tokens", offsets[-1], "times", given]
        offsets = assert_first(offsets, given == offsets[-1], told)
    visible = mask.visible(offsets, contexts, targets, times)
    tokens = Jagged(times, offsets)
    rows, places, lengths = jagged.row_ids(tokens), jagged.positions(tokens), jagged.lengths(tokens)
    first = 0 if contexts is None else tf.gather(tf.cast(contexts, tf.int64), rows)
    with tf.device("CPU:0"):
        ends = lengths if targets is None else lengths - tf.cast(targets, tf.int64)
    end = tf.gather(ends, rows)
    following = tf.concat([times[1:], times[-1:]], axis=0)
    return SequenceView(visible, tf.where((places >= first) & (places + 1 < end), following, times), times)


def _with_parts(offsets: tf.Tensor, contexts: Any, targets: Any) -> tf.Tensor:
    """Return the offsets, after checking that each sequence is at least as long as its parts."""
    with tf.device("CPU:0"):
        offsets = tf.cast(offsets, tf.int64)
        if contexts is None and targets is None:
            return offsets
        lengths = offsets[1:] - offsets[:-1]
        counts = [tf.zeros_like(lengths) if c is None else tf.cast(c, tf.int64) for c in (contexts, targets)]
        fits = (counts[0] >= 0) & (counts[1] >= 0) & (counts[0] + counts[1] <= lengths)
        form = "a sequence is [contexts | history | targets]; contexts"
        told = [form, counts[0], "and targets", counts[1], "don't fit into lengths", lengths]
        return assert_first(offsets, fits, told, summarize=20)
