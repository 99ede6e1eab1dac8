"""Batches whose times determine the cost of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gmeta.core.errors import ConfigError
from gmeta.io import SequenceCost

import numpy as np
from parts.balance_lengths import Lengths, balanced
from parts.gpu_grm.data import draw

_DRAWN, _OTHERS = 8, 4


def calibration_batches(settings: Mapping[str, Any]) -> list[Lengths]:
    """Draw batches whose tokens and squared lengths vary independently; no rank has them.

    They are eight with a fixed number of sequences, halves of four of these, and four each of sequences below
    and above the mean length, with as many tokens as the first have on average.
    """
    sequences = settings["sequences"]
    drawn = [draw([2, number], sequences, settings) for number in range(_DRAWN)]
    many = draw([3], 4 * _OTHERS * sequences, settings)
    tokens = float(many.mean()) * sequences
    sides = [many[many < many.mean()], many[many >= many.mean()]]
    return [
        *drawn,
        *(one[: sequences // 2] for one in drawn[:_OTHERS]),
        *(batch for side in sides for batch in balanced(side, SequenceCost(), tokens, _OTHERS)),
    ]


def measured_cost(
    batches: list[Lengths], seconds_of: Callable[[Lengths], float]
) -> tuple[SequenceCost | None, dict[str, Any]]:
    """Time batches, and fit the cost of a sequence.

    Returns:
      The cost, or None if the times determine none; and a record of tokens, squared lengths and seconds of
      each batch, and the cost or the reason why there is none.
    """
    seconds = [seconds_of(one) for one in batches]
    noted: dict[str, Any] = {"sums": [sums(one) for one in batches], "seconds": seconds}
    try:
        cost = SequenceCost.of_steps(batches, seconds)
    except ConfigError as error:
        return None, {**noted, "refused": str(error)}
    return cost, {**noted, "linear": cost.linear, "quadratic": cost.quadratic}


def sums(lengths: Lengths) -> list[int]:
    """The tokens of a batch, and the sum of its squared lengths."""
    return [int(lengths.sum()), int(np.square(lengths).sum())]
