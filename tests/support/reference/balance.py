"""Batches of sequences of about equal cost, in plain Python and NumPy.

A batch with a fixed number of sequences can have any number of tokens, and all ranks wait for the rank with
the most tokens. So batches have about equal cost instead, with as many sequences as that takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError


def prefix_batches(
    sequences: Iterable[tuple[float, int]], *, target: float, max_tokens: int | None = None
) -> Iterator[int]:
    """Cut a stream of sequences into batches of about equal cost (MTGenRec, algorithm 1).

    Sequences wait in a queue. While they cost less than the target another one is read; then the prefix whose
    cost is closest to the target is a batch, and the rest stays in the queue. Of two equally close the longer
    one is taken. A batch is always a prefix of what is left, so the state of a stream is one number.

    Two things are added to what the paper states. A batch has at least one sequence, or a sequence above
    twice the target would wait forever; at the stream's end the waiting sequences are a batch, at any cost.

    Args:
      sequences: (cost, tokens) of each.
      target: The intended cost of a batch.
      max_tokens: The most tokens of a batch, to bound memory; a single sequence may exceed it, which readers
        reject.

    Yields:
      The number of sequences of each batch.

    Raises:
      ConfigError: ``target`` isn't above 0, or ``max_tokens`` below 1.

    Example:
      >>> list(prefix_batches([(3, 3), (4, 4), (5, 5), (1, 1), (9, 9), (2, 2)], target=8))
      [2, 2, 1, 1]
    """
    if not target > 0 or (max_tokens is not None and max_tokens < 1):
        raise ConfigError(
            f"prefix_batches: target={target} must be above 0, and max_tokens={max_tokens} at least 1"
        )
    stream, queue = iter(sequences), deque[tuple[float, int]]()
    waiting, ended = 0.0, False
    while True:
        while waiting < target and not ended:
            found = next(stream, None)
            if found is None:
                ended = True
            else:
                queue.append(found)
                waiting += found[0]
        if not queue:
            return
        count = _closest(queue, target, max_tokens)
        for _ in range(count):
            queue.popleft()
        waiting = sum(cost for cost, _ in queue)  # as in a stream that begins here, to the last bit
        yield count


def _closest(queue: deque[tuple[float, int]], target: float, max_tokens: int | None) -> int:
    best, cost, tokens = 1, 0.0, 0
    distance = float("inf")
    for count, (own, length) in enumerate(queue, start=1):
        cost, tokens = cost + own, tokens + length
        if count > 1 and (abs(cost - target) > distance or (max_tokens is not None and tokens > max_tokens)):
            break
        best, distance = count, abs(cost - target)
    return best


class _Split(NamedTuple):
    """Some sequences, in one part per rank; the heap has the most uneven one first."""

    evenness: float  # minus the difference between the dearest part and the cheapest
    number: int  # unique, so that nothing after it is compared
    sums: npt.NDArray[np.float64]  # descending
    parts: list[list[int]]  # of each sum
