r"""Makes the clocks of ranks agree: how far each is ahead of that of rank 0, and how sure that is.

Clocks of two machines differ by milliseconds, and drift. A sum over ranks is had by nobody before all have
given to it. So if rank r enters one at :math:`e_r` and leaves it at :math:`l_r`, each by its own clock, then
r's clock is ahead of that of rank 0 by

.. math:: e_r - l_0 \le o_r \le l_r - e_0 .

Several sums narrow this down; the middle of what remains is within half of its width of the truth. If 0
remains possible, clocks are taken to agree, as those of ranks on one machine do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from gmeta.core import collectives

_ROUNDS = 8

Round = list[float]
"""When a rank entered a sum and when it left, by its clock."""


class Offsets(NamedTuple):
    """How far clocks are ahead.

    Attributes:
      ahead: For each rank the seconds by which its clock is ahead of that of rank 0.
      error: How far from the truth any of them may be, in seconds.
    """

    ahead: tuple[float, ...]
    error: float


def take_rounds(now: Callable[[], tf.Tensor]) -> list[Round]:
    """Enter and leave some sums over ranks; all ranks call it together."""
    if collectives.world().size == 1:
        return []
    rounds = []
    for _ in range(_ROUNDS):
        entered = float(now())
        collectives.allreduce_sum([tf.constant(1)], name="step_times/clock")
        rounds.append([entered, float(now())])
    return rounds


def offsets_of(rounds: Sequence[Sequence[Round]]) -> Offsets:
    """Compute how far the ranks' clocks are ahead from what each found in `take_rounds`.

    Example:
      >>> offsets_of([[[0.0, 0.2]], [[5.0, 5.2]]])
      Offsets(ahead=(0.0, 5.0), error=0.2)
    """
    ahead, error = [], 0.0
    for of_rank in rounds:
        pairs = list(zip(of_rank, rounds[0], strict=True))
        least = max((entered - left for (entered, _), (_, left) in pairs), default=0.0)
        most = min((left - entered for (_, left), (entered, _) in pairs), default=0.0)
        possible = least <= 0 <= most
        ahead.append(0.0 if possible else round((least + most) / 2, 9))
        if of_rank is not rounds[0]:
            error = max(error, round((most - least) / 2, 9))
    return Offsets(tuple(ahead), error)
