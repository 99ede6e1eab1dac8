"""Floating-point operations that training a GRM on a batch needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gpu_hstu
import numpy as np
from parts.balance_lengths import Lengths
from parts.gpu_grm.data import CONTEXTS, EVENT, SHOWN
from parts.gpu_grm.model import EXPERTS, TASKS, WIDTHS


def pairs(tokens: Lengths, exposures: int) -> int:
    """Count the pairs of tokens that see each other in users' sequences of these numbers of tokens.

    Contextual tokens see each other, an event sees them and earlier events, an exposure sees all of these and
    no other exposure; each sees itself.
    """
    first = len(CONTEXTS)
    history = np.asarray(tokens) - first - exposures
    before = first + history
    events = history * first + history * (history + 1) // 2
    return int((first * first + events + exposures * (before + 1)).sum())


def operations(settings: Mapping[str, Any], tokens: Lengths) -> float:
    """Count the operations of a training step; products count three times those of the forward pass.

    HSTU is counted as in `tools/bench/gpu_hstu.py`. Besides: the products that make tokens of embeddings, and
    gates, experts and towers for each exposure. Two tasks that choose two experts each need four.

    Args:
      settings: ``dim``, ``blocks``, and ``exposures`` of a user.
      tokens: The number of tokens of each user's sequence.
    """
    dim, exposures, users = settings["dim"], settings["exposures"], len(tokens)
    total, shown = int(tokens.sum()), exposures * len(tokens)
    events = total - shown - len(CONTEXTS) * users
    hstu = gpu_hstu.operations(dim, settings["blocks"], total, pairs(tokens, exposures))
    inputs = sum(
        count * sum(WIDTHS[name] for name in names)
        for count, names in ((users, CONTEXTS), (events, EVENT), (shown, SHOWN))
    )
    gates = len(TASKS) * EXPERTS * dim
    towers = len(TASKS) * (dim * (dim // 2) + dim // 2)
    return hstu + 3 * 2.0 * (dim * inputs + shown * (gates + EXPERTS * dim * dim + towers))
