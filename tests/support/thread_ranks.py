"""Ranks that are threads of one process, for code that gets its rank as an argument."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def run_thread_ranks(size: int, work: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """Call ``work(rank, gather)`` for each rank in a separate thread.

    Args:
      size: The number of ranks.
      work: Takes its rank, and a function that sends every rank's object to every rank.

    Returns:
      The result of each rank, or the exception that it raised.
    """
    barrier, said, results = threading.Barrier(size), [None] * size, [None] * size

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            said[rank] = value
            barrier.wait()
            everything = list(said)
            barrier.wait()  # no rank sends more before all have received
            return everything

        try:
            results[rank] = work(rank, gather)
        except BaseException as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("a rank waits for one that doesn't come")
    return results


def thread_alltoall(
    rank: int, gather: Callable[[Any], list[Any]]
) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """`gmeta.core.collectives.alltoall` of ranks that are threads, called eagerly.

    Args:
      rank: The calling rank.
      gather: As passed by `run_thread_ranks`.
    """

    def alltoall(tensor: tf.Tensor, splits: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        if sum(splits.numpy()) != len(tensor):
            raise ValueError(f"{name}: {len(tensor)} rows don't split into {splits.numpy()}")
        everyone = gather((tensor, splits.numpy()))
        ends = [(rows, np.cumsum([0, *sizes])) for rows, sizes in everyone]
        received = [rows[end[rank] : end[rank + 1]] for rows, end in ends]
        return tf.concat(received, axis=0), tf.constant([len(rows) for rows in received])

    return alltoall
