"""How precise the rows of a `gmeta.ops.HashTable` are."""

from __future__ import annotations

from dataclasses import dataclass

from gmeta.policies.limits import check_whole


@dataclass(frozen=True)
class TwoPrecisions:
    """Keeps rows that are rarely used in half precision (MTGenRec, appendix C).

    A row has its weights in float16 and its optimizer slots in bfloat16 while its frequency, the number of
    inserting lookups that have read it, is below ``threshold``. The lookup that brings it to ``threshold``
    promotes it to float32, for good. A half record has 8 bytes + 2 for each weight and slot, instead of 4.

    An update of a half row is computed in float32, and rounded to the nearest when it is stored: a weight w
    by at most ``max(2^-11 * |w|, 2^-25)``, a slot by at most 2^-8 of itself. Under `SGD`, which has no slots,
    a weight is after n updates by the same gradients within n + 1 such roundings of the float32 table's. A
    step below half a unit of w's last place is lost, which is why rows that train often should be in float32.
    Weights beyond ±65504 are stored as that. Initial rows are rounded too, and a missing id reads its row as
    it would be stored.

    Checkpoints hold float32, which is exact; restoring puts each row into the precision of its frequency.

    Args:
      threshold: Frequency from which a row is float32, >= 2.

    Example:
      >>> table = HashTable(64, precision=TwoPrecisions(threshold=10))
    """

    threshold: int

    def __post_init__(self) -> None:
        check_whole(self, "threshold", self.threshold, 2, 2**32 - 1)
