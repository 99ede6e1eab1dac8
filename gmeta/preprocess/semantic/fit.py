"""Makes semantic ids out of vectors."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gmeta.core.arguments import whole_number
from gmeta.core.data.codebooks import Codebooks, Vectors, check_vectors
from gmeta.core.data.semantic_ids import SemanticIds, item_numbers, number_alike
from gmeta.core.errors import ConfigError
from gmeta.preprocess.semantic.residual_kmeans import fit_residual_kmeans
from gmeta.preprocess.semantic.rq_vae import RqVae, fit_rq_vae

Method = Literal["kmeans"] | RqVae


def semantic_ids(
    vectors: Vectors,
    levels: int = 3,
    codes: int = 256,
    *,
    items: NDArray[np.int64] | None = None,
    method: Method = "kmeans",
    balanced: bool = False,
    seed: int = 0,
) -> SemanticIds:
    """Give each item ``levels`` digits by residual quantization of the items' vectors, and one digit more.

    Level 1 clusters the vectors, or what the encoder of an `RqVae` makes of them; level l + 1 what is left
    after the nearest center of level l has been subtracted (`Codebooks`). So similar items share their first
    digits. The last digit tells apart items that share all codes.

    Args:
      vectors: float (n, dim), one row an item: embeddings of texts or pictures, rows of a trained model
        (`gmeta tables export`), `cooccurrence_vectors`. k-means weighs all columns alike: scale them first if
        they shouldn't count as their values do.
      levels: Digits, without the last one; >= 1.
      codes: Values of a digit, >= 2. A level at which fewer distinct vectors are left has fewer.
      items: The items' ids, int64 (n,), each once; None: 0 to n - 1.
      method: ``"kmeans"``, or the `RqVae` to train, for which TensorFlow is loaded.
      balanced: With k-means, whether all codes of a level get as many items, up to one.
      seed: Of the first centers, and of the RQ-VAE's training.

    Returns:
      `SemanticIds`. Their ``write`` and ``read`` keep them in files.

    Raises:
      ConfigError: An argument is out of its limits or for the other method, the vectors aren't finite numbers
        (n, dim), or items have another number.
      DataError: An item occurs twice.

    Example:
      >>> ids = semantic_ids(np.eye(6), levels=2, codes=3, items=np.arange(10, 16))
      >>> ids.items[0], len(ids.digits[0])
      (10, 3)

    Reference: Rajput et al., Recommender systems with generative retrieval, NeurIPS 2023, section 3.1; Luo et
    al., QARM, 2024, section 3.2, for k-means.
    """
    whole_number("semantic_ids: levels", levels, 1)
    whole_number("semantic_ids: codes", codes, 2)
    vectors = np.asarray(vectors)
    check_vectors(vectors)
    numbers = np.arange(len(vectors), dtype=np.int64) if items is None else item_numbers(items)
    if numbers.shape != (len(vectors),):
        raise ConfigError(
            f"semantic_ids: items must be ({len(vectors)},), one id a vector, got shape {numbers.shape}"
        )
    vectors = vectors.astype(np.float32)
    if isinstance(method, RqVae):
        if balanced:
            raise ConfigError(
                "semantic_ids: balanced=True is for k-means, and an RqVae is given: leave one out"
            )
        books = fit_rq_vae(vectors, levels, codes, method, seed)
        digits = books.encode(vectors)
    elif method == "kmeans":
        centers, digits = fit_residual_kmeans(vectors, levels, codes, balanced=balanced, seed=seed)
        books = Codebooks(centers)
    else:
        raise ConfigError(f"semantic_ids: method must be 'kmeans' or an RqVae, got {method!r}")
    last = number_alike(digits, numbers, np.empty(0, np.int32))
    made = "rq-vae" if isinstance(method, RqVae) else method
    return SemanticIds(numbers, np.column_stack([digits, last]).astype(np.int32), books, made)
