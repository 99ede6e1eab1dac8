"""Codebooks of residual quantization: from a vector to one code a level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError

Vectors = NDArray[np.float32]
_PIECE = 1 << 25  # distances computed at a time


@dataclass(frozen=True)
class Codebooks:
    """Writes a vector as codes, the first the coarsest: each level codes what the levels before leave.

    With r_1 = f(x), level l has the code c_l = argmin_c |r_l - e_l(c)|² and leaves r_{l+1} = r_l - e_l(c_l),
    so f(x) is about e_1(c_1) + … + e_L(c_L). The smallest of equally near codes is taken.

    Args:
      levels: For each level e_l, float32 (codes, dim).
      encoder: The layers of f, each a kernel (in, out) and a bias (out,); all but the last are followed by
        ReLU. Without layers, f(x) = x.

    Raises:
      ConfigError: There is no level, or shapes don't fit each other.

    Example:
      >>> books = Codebooks((np.float32([[0, 0], [4, 0]]), np.float32([[0, 1], [0, -1]])))
      >>> books.encode(np.float32([[4.2, -0.9], [0.1, 2.0]]))
      array([[1, 1],
             [0, 0]], dtype=int32)

    Reference: Lee et al., Autoregressive image generation using residual quantization, CVPR 2022, section
    3.1.1; Rajput et al., Recommender systems with generative retrieval, NeurIPS 2023, section 3.1.
    """

    levels: tuple[Vectors, ...]
    encoder: tuple[tuple[Vectors, Vectors], ...] = ()

    def __post_init__(self) -> None:
        if not self.levels:
            raise ConfigError("codebooks: at least one level is needed, got none")
        shapes = [level.shape for level in self.levels]
        if any(len(shape) != 2 or shape[0] < 1 or shape[1] != shapes[0][1] for shape in shapes):
            raise ConfigError(f"codebooks: levels must be (codes, dim) with one dim, got shapes {shapes}")
        width = None
        for kernel, bias in self.encoder:
            fits = kernel.ndim == 2 and bias.shape == kernel.shape[1:] and width in (None, kernel.shape[0])
            if not fits:
                raise ConfigError(
                    f"codebooks: a layer of the encoder has shapes {kernel.shape} and {bias.shape}, after "
                    f"one of width {width}"
                )
            width = kernel.shape[1]
        if width not in (None, shapes[0][1]):
            raise ConfigError(f"codebooks: the encoder's width is {width}, that of the codes {shapes[0][1]}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The codes of each level."""
        return tuple(len(level) for level in self.levels)

    @property
    def dim(self) -> int:
        """The width of the vectors that `encode` takes."""
        return int(self.encoder[0][0].shape[0] if self.encoder else self.levels[0].shape[1])

    def encode(self, vectors: Vectors) -> NDArray[np.int32]:
        """Return the codes of vectors.

        Args:
          vectors: float (n, dim).

        Returns:
          int32 (n, levels).

        Raises:
          ConfigError: The vectors have another width, or hold NaN or infinity.
        """
        check_vectors(vectors, self.dim)
        left = self.latent(vectors)
        codes = np.empty((len(left), len(self.levels)), np.int32)
        for number, level in enumerate(self.levels):
            codes[:, number] = nearest(left, level)
            left = left - level[codes[:, number]]
        return codes

    def latent(self, vectors: Vectors) -> Vectors:
        """Return f of vectors, float32 (n, width of the codes)."""
        return apply_layers(self.encoder, np.asarray(vectors, np.float32))

    def decode(self, codes: NDArray[np.int32]) -> Vectors:
        """Return the sums of the codes' vectors, float32 (n, width of the codes)."""
        return np.sum([level[codes[:, number]] for number, level in enumerate(self.levels)], axis=0)


def apply_layers(layers: Sequence[tuple[Vectors, Vectors]], vectors: Vectors) -> Vectors:
    """Return what dense layers make of vectors; all layers but the last are followed by ReLU."""
    for number, (kernel, bias) in enumerate(layers):
        vectors = vectors @ kernel + bias
        if number + 1 < len(layers):
            vectors = np.maximum(vectors, 0)
    return vectors


def check_vectors(vectors: Vectors, dim: int | None = None) -> None:
    """Check that vectors are finite numbers (n, dim), n > 0.

    Args:
      vectors: The vectors.
      dim: Their width; None: any.

    Raises:
      ConfigError: They aren't; the message says which row.
    """
    if vectors.ndim != 2 or 0 in vectors.shape or vectors.dtype.kind not in "fiu":
        raise ConfigError(
            f"vectors must be numbers (items, dim), got {vectors.dtype} of shape {vectors.shape}: give an "
            "array with a row for each item"
        )
    if dim is not None and vectors.shape[1] != dim:
        raise ConfigError(
            f"vectors must be {dim} wide, as those that the codebooks were made of, got {vectors.shape[1]}"
        )
    for first, piece in _pieces(vectors, vectors.shape[1]):
        finite = np.isfinite(piece).all(axis=1)
        if not finite.all():
            raise ConfigError(
                f"row {first + int(np.argmin(finite))} of the vectors holds NaN or infinity: leave the item "
                "out, or give it zeros"
            )


def nearest(vectors: Vectors, centers: Vectors) -> NDArray[np.int32]:
    """Return the number of each vector's nearest center, the smallest of equally near ones: int32 (n,)."""
    found = np.empty(len(vectors), np.int32)
    for first, piece in _pieces(vectors, len(centers)):
        found[first : first + len(piece)] = np.argmin(squared_distances(piece, centers), axis=1)
    return found


def squared_distances(vectors: Vectors, centers: Vectors) -> NDArray[np.float32]:
    """Return |v - c|² - |v|² of vectors v and centers c, float32 (n, centers): ordered as distances are."""
    return np.einsum("cd,cd->c", centers, centers) - 2 * (vectors @ centers.T)


def _pieces(vectors: Vectors, width: int) -> Iterator[tuple[int, Vectors]]:
    """Cut vectors into pieces that take about as much memory as `_PIECE` numbers of ``width`` each."""
    size = max(1, _PIECE // max(width, 1))
    for first in range(0, len(vectors), size):
        yield first, vectors[first : first + size]


def places_in_groups(groups: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return each element's place within its group, from 0; the elements of a group stand together."""
    places = np.arange(len(groups))
    starts = np.r_[True, groups[1:] != groups[:-1]][: len(groups)]
    return places - np.maximum.accumulate(np.where(starts, places, 0))
