"""Products of the rows of one task, where an item's vector is sparse and wider than a task is long."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix

from gmeta.experiment.baselines.task_blocks import Block
from gmeta.experiment.baselines.task_rows import Floats, Rows


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
