"""Tasks as rectangles: pairs of a query row and a support row, and their products, of many tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from gmeta.experiment.baselines.task_rows import Floats, Ints, Rows, Tasks


@dataclass(frozen=True)
class Block:
    """Tasks of similar size, padded to rectangles.

    Attributes:
      support: (tasks, s) indices of support rows; 0 in padding.
      given: (tasks, s) whether a support row is real.
      query: (tasks, q) indices of query rows; 0 in padding.
      asked: (tasks, q) whether a query row is real.
    """

    support: Ints
    given: NDArray[np.bool_]
    query: Ints
    asked: NDArray[np.bool_]


def cut_blocks(tasks: Tasks, most: int = 400_000, *, squares: bool = False) -> Iterator[Block]:
    """Cut tasks with support rows into blocks of at most ``most`` pairs of rows; a larger task stands alone.

    A task without support rows, or without query rows, is in no block: it has no pairs.

    Args:
      tasks: The tasks.
      most: Pairs of a query row and a support row, with those of padding.
      squares: Whether pairs of two support rows are bounded as well.
    """
    given, asked = tasks.support.sizes, tasks.query.sizes
    order = np.lexsort((asked, given))
    order = order[(given[order] > 0) & (asked[order] > 0)]
    start = 0
    while start < len(order):
        end, rows, queries = start, 0, 0
        while end < len(order):
            rows, queries = max(rows, given[order[end]]), max(queries, asked[order[end]])
            if end > start and (end - start + 1) * rows * max(queries, rows * squares) > most:
                break
            end += 1
        chosen = order[start:end]
        yield Block(*_pad(tasks.support, chosen), *_pad(tasks.query, chosen))
        start = end


def _pad(rows: Rows, chosen: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    sizes = rows.sizes[chosen]
    place = np.arange(sizes.max())
    real = place < sizes[:, None]
    return np.where(real, rows.row_splits[:-1][chosen, None] + place, 0), real


def multiply(vectors: csr_matrix, query: Rows, support: Rows, block: Block) -> Floats:
    """Multiply the vector of each query row with those of its task's support rows.

    One sparse product serves the whole block: each task has columns of its own, so that rows of two tasks
    have none in common.

    Args:
      vectors: (items, width).
      query: The rows that ``block.query`` numbers.
      support: The rows that ``block.support`` numbers.
      block: Some of the tasks.

    Returns:
      (tasks, q, s); 0 in padding.

    Example:
      >>> rows = Rows(np.array([0, 1, 1]), np.zeros(3), np.array([0, 3]))
      >>> (block,) = cut_blocks(Tasks(rows, rows))
      >>> multiply(csr_matrix([[1.0, 0.0], [2.0, 3.0]]), rows, rows, block)
      array([[[ 1.,  2.,  2.],
              [ 2., 13., 13.],
              [ 2., 13., 13.]]])
    """
    asked, given = np.nonzero(block.asked), np.nonzero(block.given)
    items = np.concatenate([query.items[block.query[asked]], support.items[block.support[given]]])
    own = vectors[items]
    task = np.repeat(np.concatenate([asked[0], given[0]]), np.diff(own.indptr))
    used, column = np.unique(own.indices + task * vectors.shape[1], return_inverse=True)
    apart = csr_matrix((own.data, column, own.indptr), shape=(len(items), len(used)))
    first = len(asked[0])
    product = (apart[:first] @ apart[first:].T).tocoo()
    found = np.zeros((*block.asked.shape, block.given.shape[1]))
    found[asked[0][product.row], asked[1][product.row], given[1][product.col]] = product.data
    return found
