"""Batches of sequences that cost about equally much, in plain Python and NumPy.

A batch of so many sequences is a batch of any number of tokens, and the rank with the most of them is the one
that all others wait for. So batches are made of about equal cost instead, and hold as many sequences as that
takes.
"""

from __future__ import annotations

import heapq
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
    one is taken. A batch is always a prefix of what is left, so where a stream stands is one number.

    Two things are added to what the paper states. A batch has at least one sequence, or a sequence above
    twice the target would wait forever; at the stream's end the waiting sequences are a batch, at any cost.

    Args:
      sequences: (cost, tokens) of each.
      target: What a batch is to cost.
      max_tokens: The most tokens of a batch, for memory's sake; of one sequence alone it may be more, which
        readers refuse.

    Yields:
      How many sequences each batch has.

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
        waiting = sum(cost for cost, _ in queue)  # as of a stream that begins here, to the last bit
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
    """Some sequences, in as many parts as there are ranks; the heap has the most uneven one first."""

    evenness: float  # minus the difference between the dearest part and the cheapest
    number: int  # no two alike, so that nothing after it is compared
    sums: npt.NDArray[np.float64]  # descending
    parts: list[list[int]]  # of each sum


def karmarkar_karp(costs: npt.ArrayLike, ranks: int) -> list[list[int]]:
    """Deal sequences out to ranks so that the ranks' costs are as equal as a quick method can make them.

    The largest differencing method: each sequence begins as a split of its own, in which one rank has it and
    the others nothing. The two most uneven splits are joined, the dearest part of one with the cheapest of
    the other, until one is left. Its parts differ by at most the dearest sequence, most often by far less.

    Unlike `prefix_batches` it moves sequences between ranks, and so keeps the global batch as it is.

    This is the reference of the native ``GmetaKarmarkarKarp``, which `gmeta.io.rank_balance` uses.

    Args:
      costs: (n,) of each sequence, at least 0.
      ranks: How many.

    Returns:
      For each rank the sequences that it gets, in ascending order.

    Raises:
      ConfigError: ``ranks`` is below 1, or a cost below 0 or not finite.

    Example:
      >>> karmarkar_karp([4, 5, 6, 7, 8], ranks=2)
      [[0, 1, 3], [2, 4]]

    References:
      Karmarkar and Karp, "The differencing method of set partitioning", 1982.
    """
    if ranks < 1:
        raise ConfigError(f"karmarkar_karp: at least one rank is needed, got {ranks}")
    known = np.asarray(costs, np.float64)
    if not (np.isfinite(known) & (known >= 0)).all():
        raise ConfigError(f"karmarkar_karp: costs must be numbers from 0 on, the least is {known.min()}")
    splits = []
    for number, cost in enumerate(known.tolist()):
        sums = np.zeros(ranks)
        sums[0] = cost
        parts: list[list[int]] = [[] for _ in range(ranks)]
        parts[0].append(number)
        splits.append(_Split(sums[-1] - sums[0], number, sums, parts))
    if not splits:
        return [[] for _ in range(ranks)]
    heapq.heapify(splits)
    number = len(splits)
    while len(splits) > 1:
        first, second = heapq.heappop(splits), heapq.heappop(splits)
        sums = first.sums + second.sums[::-1]
        order = np.argsort(-sums, kind="stable")
        joined = [a + b for a, b in zip(first.parts, reversed(second.parts), strict=True)]
        sums = sums[order]
        split = _Split(sums[-1] - sums[0], number, sums, [joined[place] for place in order.tolist()])
        heapq.heappush(splits, split)
        number += 1
    return sorted(sorted(part) for part in splits[0].parts)
