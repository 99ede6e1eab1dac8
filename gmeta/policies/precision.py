"""How precise the rows of a `gmeta.ops.HashTable` are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gmeta.core.errors import ConfigError
from gmeta.policies.limits import check_whole


@dataclass(frozen=True)
class TwoPrecisions:
    """Keeps rows that are rarely used in half precision (MTGenRec, appendix C).

    A row has its weights in float16 and its optimizer slots in bfloat16 while its frequency, the number of
    inserting lookups that have read it, is below ``threshold``. The lookup that brings it to ``threshold``
    promotes it to float32. A half record has 8 bytes + 2 for each weight and slot, instead of 4.

    With ``half_life``, rows that are no longer used cool down. The effective frequency of a row that was last
    used n steps ago, by an inserting lookup or an update, is::

      frequency * 2^-k * (1 - r / (2 * half_life))        n = k * half_life + r, 0 <= r < half_life

    so it halves every ``half_life`` steps. Below half of ``threshold``, a row falls back to 16 bits: if its
    frequency is 2^m times the threshold, after m + 1 half-lives without use. This happens at the end of the
    ``apply_gradients`` at which the row's shard is swept: shard i of S (see `Eviction`) where
    ``(step + every * i // S) % every == 0``, ``every = max(1, half_life // 8)``. Its next use brings the row
    back to its frequency, and so to float32. The frequency itself, which `LFU` reads, doesn't decay.

    An update of a half row is computed in float32, and rounded when it is stored:

    * ``"stochastic"``: up or down at random, with probabilities that make the mean the exact number; what
      16 bits hold exactly stays. Updates too small to show by themselves add up, so that a row trains as in
      float32, with noise of at most one unit of the last place an update: of a weight w,
      ``max(2^-10 * |w|, 2^-24)``, and 2^-7 of a slot. The random bits are a function of (table seed, key,
      step, column): runs repeat, on any device, number of threads or ranks.
    * ``"nearest"``: by at most half of that, but always the same way: steps below half a unit of the last
      place are lost. So a slot such as Adam's second moment, which moves by a thousandth in a step, stands
      still.

    Initial rows, imported ones and those that cool down are rounded to nearest. A missing id reads its row as
    it would be stored. Weights beyond ±65504 are stored as that.

    Checkpoints hold float32, which is exact. Restoring puts each row into the precision that it had: it
    follows from the row's frequency and last step, and the table's step.

    Args:
      threshold: Frequency from which a row is float32, >= 2.
      half_life: Steps without use that halve a row's effective frequency, from 1 to 2^31 - 1. None: a row
        that is float32 stays so.
      rounding: ``"stochastic"`` or ``"nearest"``.

    Raises:
      ConfigError: A number out of its range, or another rounding.

    Example:
      >>> table = HashTable(64, precision=TwoPrecisions(threshold=10, half_life=100_000))
    """

    threshold: int
    half_life: int | None = None
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    def __post_init__(self) -> None:
        check_whole(self, "threshold", self.threshold, 2, 2**32 - 1)
        if self.half_life is not None:
            check_whole(self, "half_life", self.half_life, 1, 2**31 - 1)
        if self.rounding not in ("stochastic", "nearest"):
            raise ConfigError(
                f"TwoPrecisions: rounding must be 'stochastic' or 'nearest', got {self.rounding!r}"
            )
