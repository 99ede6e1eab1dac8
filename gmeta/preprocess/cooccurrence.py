"""Computes vectors of items from their neighbours in users' histories and from their attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.semantic_ids import Vectors


def cooccurrence_vectors(
    histories: Sequence[Sequence[int] | NDArray[np.int64]],
    items: int,
    dim: int = 64,
    *,
    window: int = 5,
    attributes: Mapping[int, Sequence[int]] | None = None,
    seed: int = 0,
) -> Vectors:
    """Embed items by a truncated SVD of their neighbours in histories and of their attributes.

    Two matrices are put beside each other, each scaled to a Frobenius norm of 1: the positive pointwise
    mutual information max(0, log(p(i, j) / (p(i) p(j)))) of items at most ``window`` places apart, and
    attributes by inverse frequency, log(items / items with it). With the SVD U S Vᵀ, the vectors are U √S,
    each divided by its length.

    Args:
      histories: Items of each user in the order of time, numbers from 0. Leave out the items to predict.
      items: How many items there are.
      dim: Width of the vectors, 1 <= dim < items.
      window: Places, >= 1.
      attributes: The attributes of items, as any numbers: categories, brands.
      seed: Of the SVD's random start.

    Returns:
      float32 (items, dim). An item without neighbours and attributes has zeros.

    Raises:
      ConfigError: A number is out of its limits, or histories or attributes name an item that isn't there.

    Example:
      >>> cooccurrence_vectors([[0, 1, 2], [1, 0, 3], [2, 3]], items=4, dim=2).shape
      (4, 2)

    Reference: Levy and Goldberg, Neural word embedding as implicit matrix factorization, NeurIPS 2014.
    """
    from scipy.sparse import hstack
    from sklearn.decomposition import TruncatedSVD

    whole_number("cooccurrence_vectors: window", window, 1)
    whole_number("cooccurrence_vectors: dim", dim, 1)
    if dim >= items:
        raise ConfigError(f"cooccurrence_vectors: dim must be below the number of items, {items}, got {dim}")
    parts = [_mutual_information(histories, items, window)]
    if attributes:
        parts.append(_weighted_attributes(attributes, items))
    whole = hstack([part / max(np.sqrt(part.power(2).sum()), 1e-30) for part in parts]).tocsr()
    svd = TruncatedSVD(min(dim, whole.shape[1] - 1), random_state=seed)
    vectors = svd.fit_transform(whole) / np.sqrt(np.maximum(svd.singular_values_, 1e-30))
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 1e-12, lengths, np.inf)).astype(np.float32)


def _mutual_information(
    histories: Sequence[Sequence[int] | NDArray[np.int64]], items: int, window: int
) -> Any:
    from scipy.sparse import coo_matrix

    lengths = np.fromiter((len(history) for history in histories), np.int64, len(histories))
    flat = np.concatenate([np.asarray(history, np.int64) for history in histories] or [np.empty(0, np.int64)])
    _check_items(flat, items, "a history")
    user = np.repeat(np.arange(len(lengths)), lengths)
    counts = coo_matrix((items, items))
    for apart in range(1, window + 1):
        beside = user[apart:] == user[:-apart]
        left, right = flat[:-apart][beside], flat[apart:][beside]
        counts = counts + coo_matrix((np.ones(len(left)), (left, right)), (items, items))
    counts = (counts + counts.T).tocoo()
    of_item = np.asarray(counts.sum(axis=1)).ravel()
    expected = of_item[counts.row] * of_item[counts.col] / max(of_item.sum(), 1)
    values = np.maximum(0, np.log(counts.data / expected))
    return coo_matrix((values, (counts.row, counts.col)), (items, items)).tocsr()


def _weighted_attributes(attributes: Mapping[int, Sequence[int]], items: int) -> Any:
    from scipy.sparse import coo_matrix

    item = np.repeat(list(attributes), [len(each) for each in attributes.values()]).astype(np.int64)
    _check_items(item, items, "an attribute's item")
    names, column = np.unique(np.concatenate(list(map(np.asarray, attributes.values()))), return_inverse=True)
    whole = coo_matrix((np.ones(len(item)), (item, column)), (items, len(names))).tocsr()
    whole.data[:] = 1  # an attribute that is named twice counts once
    return whole.multiply(np.log(items / np.asarray(whole.sum(axis=0)))).tocsr()


def _check_items(found: NDArray[np.int64], items: int, where: str) -> None:
    wrong = (found < 0) | (found >= items)
    if wrong.any():
        raise ConfigError(
            f"cooccurrence_vectors: {where} is {found[np.argmax(wrong)]}, but items are 0 to {items - 1}: "
            "number them from 0"
        )
