"""Semantic ids: a code for each item of a catalogue; similar items share their first digits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.json_values import parse_json
from gmeta.core.shares import splitmix64

if TYPE_CHECKING:
    import pyarrow as pa

# Codebooks of residual quantization: from a vector to one code per level.

Vectors = NDArray[np.float32]
_PIECE = 1 << 25  # distances computed at a time


@dataclass(frozen=True)
class Codebooks:
    """Encodes a vector as codes, coarsest first: each level encodes the residual of the previous levels.

    With r_1 = f(x), level l has the code c_l = argmin_c |r_l - e_l(c)|² and leaves r_{l+1} = r_l - e_l(c_l),
    so f(x) is about e_1(c_1) + … + e_L(c_L). Ties are resolved by the smallest code.

    Args:
      levels: For each level e_l, float32 (codes, dim).
      encoder: The layers of f, each a kernel (in, out) and a bias (out,); all but the last are followed by
        ReLU. Without layers, f(x) = x.

    Raises:
      ConfigError: There is no level, or shapes don't match.

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
        """The width of the vectors that `encode` expects."""
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
    """Apply dense layers to vectors; all layers but the last are followed by ReLU."""
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
      ConfigError: The check fails; the message names the row.
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
    """Return the index of each vector's nearest center, the smallest at ties: int32 (n,)."""
    found = np.empty(len(vectors), np.int32)
    for first, piece in _pieces(vectors, len(centers)):
        found[first : first + len(piece)] = np.argmin(squared_distances(piece, centers), axis=1)
    return found


def squared_distances(vectors: Vectors, centers: Vectors) -> NDArray[np.float32]:
    """Return |v - c|² - |v|² of vectors v and centers c, float32 (n, centers), ordered like distances."""
    return np.einsum("cd,cd->c", centers, centers) - 2 * (vectors @ centers.T)


def _pieces(vectors: Vectors, width: int) -> Iterator[tuple[int, Vectors]]:
    """Cut vectors into pieces that take about as much memory as `_PIECE` numbers of ``width`` each."""
    size = max(1, _PIECE // max(width, 1))
    for first in range(0, len(vectors), size):
        yield first, vectors[first : first + size]


def places_in_groups(groups: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return each element's place within its group, counted from 0; groups are contiguous."""
    places = np.arange(len(groups))
    starts = np.r_[True, groups[1:] != groups[:-1]][: len(groups)]
    return places - np.maximum.accumulate(np.where(starts, places, 0))


IDS, CODEBOOKS = "ids.arrow", "codebooks.arrow"
_NOTE = b"gmeta.semantic_ids"
_FORMAT = 1


@dataclass(frozen=True)
class SemanticIds:
    """The semantic ids of a catalogue: the codes of each item's vector, and one more digit.

    The last digit distinguishes items that share all codes: it numbers them from 0 in the order of a hash of
    their ids. Items that are added later are numbered after the existing ones, so no digit ever changes.

    Args:
      items: The items' ids, int64 (n,), each once.
      digits: int32 (n, levels + 1), distinct rows.
      codebooks: The `Codebooks` that encode vectors.
      method: How they were made, ``"kmeans"`` or ``"rq-vae"``.

    Raises:
      DataError: An item occurs twice, two items have the same digits, or a code isn't in its codebook.

    Example:
      >>> from gmeta.preprocess import semantic_ids
      >>> ids = semantic_ids(np.random.default_rng(0).normal(size=(1000, 8)), levels=2, codes=16)
      >>> ids.digits.shape
      (1000, 3)
    """

    items: NDArray[np.int64]
    digits: NDArray[np.int32]
    codebooks: Codebooks
    method: str

    def __post_init__(self) -> None:
        n, levels = len(self.items), len(self.codebooks.levels)
        if self.items.shape != (n,) or self.digits.shape != (n, levels + 1) or n == 0:
            raise DataError(
                f"semantic ids: items must be (n,) and digits (n, {levels + 1}), n > 0, got "
                f"{self.items.shape} and {self.digits.shape}"
            )
        for number, size in enumerate(self.codebooks.sizes):
            wrong = (self.digits[:, number] < 0) | (self.digits[:, number] >= size)
            if wrong.any():
                at = int(np.argmax(wrong))
                raise DataError(
                    f"semantic ids: item {self.items[at]} has code {self.digits[at, number]} at level "
                    f"{number}, which has codes 0 to {size - 1}: make the ids again"
                )
        for what, rows in (("item", self.items[:, None]), ("digits", self.digits)):
            distinct, count = np.unique(rows, axis=0, return_counts=True)
            if len(distinct) < n:
                twice = ", ".join(map(str, distinct[np.argmax(count > 1)]))
                raise DataError(f"semantic ids: {what} {twice} came more than once: give each item once")

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many values each digit has, including the last."""
        return (*self.codebooks.sizes, int(self.digits[:, -1].max()) + 1)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the items, their digits and the codebooks, in hexadecimal digits."""
        digest = hashlib.sha256(json.dumps([_FORMAT, self.method, *self.sizes]).encode())
        for array in (self.items, self.digits, *self.codebooks.levels, *sum(self.codebooks.encoder, ())):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def add(self, items: NDArray[np.int64], vectors: Vectors) -> SemanticIds:
        """Return these ids and those of new items, encoded by the same codebooks.

        Args:
          items: Their ids, int64 (m,).
          vectors: Their vectors, float (m, dim), made in the same way as the others.

        Raises:
          ConfigError: The vectors have another width or number, or aren't finite; or ids aren't whole
            numbers.
          DataError: An item exists already.
        """
        if len(items) != len(vectors):
            raise ConfigError(
                f"semantic ids: {len(items)} new items have {len(vectors)} vectors: give one each"
            )
        codes = np.concatenate([self.digits[:, :-1], self.codebooks.encode(vectors)])
        every = np.concatenate([self.items, item_numbers(items)])
        last = number_alike(codes, every, self.digits[:, -1])
        return replace(self, items=every, digits=np.column_stack([codes, last]).astype(np.int32))

    def report(self) -> dict[str, Any]:
        """Return how well the codes are used.

        Returns:
          ``items``; ``levels``: for each level, its codes, the fraction of them in use, the entropy of the
          codes in bits, and ``perplexity``, 2 to the entropy; ``alike``: the fraction of items that share all
          codes with another item; ``most_alike``: the maximum number of items that share all codes.
        """
        levels = []
        for number, size in enumerate(self.codebooks.sizes):
            counts = np.bincount(self.digits[:, number], minlength=size)
            shares = counts[counts > 0] / len(self.items)
            entropy = float(-(shares * np.log2(shares)).sum())
            levels.append(
                {
                    "codes": size,
                    "used": float((counts > 0).mean()),
                    "entropy": entropy,
                    "perplexity": 2**entropy,
                }
            )
        _, counts = np.unique(self.digits[:, :-1], axis=0, return_counts=True)
        alike = float(counts[counts > 1].sum() / len(self.items))
        return {"items": len(self.items), "levels": levels, "alike": alike, "most_alike": int(counts.max())}

    def write(self, folder: Path) -> None:
        """Write ``ids.arrow`` and ``codebooks.arrow`` into an existing folder."""
        import pyarrow as pa

        note = {"format": _FORMAT, "method": self.method, "sizes": self.sizes, "digest": self.digest}
        digits = pa.FixedSizeListArray.from_arrays(pa.array(self.digits.ravel()), self.digits.shape[1])
        ids = pa.table({"item": pa.array(self.items), "digits": digits})
        named = [(f"level {number}", level) for number, level in enumerate(self.codebooks.levels)]
        for number, (kernel, bias) in enumerate(self.codebooks.encoder):
            named += [(f"kernel {number}", kernel), (f"bias {number}", bias[None])]
        books = pa.table(
            {
                "name": [name for name, _ in named],
                "rows": [len(array) for _, array in named],
                "values": [np.asarray(array, np.float32).ravel() for _, array in named],
            }
        )
        for name, table in ((IDS, ids), (CODEBOOKS, books)):
            table = table.replace_schema_metadata({_NOTE: json.dumps(note).encode()})
            with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)

    @classmethod
    def read(cls, folder: Path) -> SemanticIds:
        """Read what `write` wrote.

        Raises:
          DataError: A file is missing, damaged or of another kind, or the two don't belong together.
        """
        ids, note = _read_table(folder / IDS)
        books, other = _read_table(folder / CODEBOOKS)
        if note != other:
            raise DataError(f"{folder}: {IDS} and {CODEBOOKS} are of different semantic ids: make them again")
        named = {
            name: np.asarray(values, np.float32).reshape(rows, -1)
            for name, rows, values in zip(
                books["name"].to_pylist(), books["rows"].to_pylist(), books["values"].to_pylist(), strict=True
            )
        }
        layers = sum(name.startswith("kernel ") for name in named)
        found = cls(
            ids["item"].to_numpy().astype(np.int64),
            np.asarray(ids["digits"].combine_chunks().flatten(), np.int32).reshape(len(ids), -1),
            Codebooks(
                tuple(named[f"level {number}"] for number in range(len(named) - 2 * layers)),
                tuple((named[f"kernel {number}"], named[f"bias {number}"][0]) for number in range(layers)),
            ),
            note["method"],
        )
        if found.digest != note["digest"]:
            raise DataError(f"{folder}: the semantic ids changed after they were written: make them again")
        return found


def item_numbers(items: Any) -> NDArray[np.int64]:
    """Return items' ids as int64.

    Raises:
      ConfigError: They aren't whole numbers that fit into int64; a cast would change them.
    """
    ids = np.asarray(items)
    if ids.size and (ids.dtype.kind not in "iu" or (ids > np.iinfo(np.int64).max).any()):
        raise ConfigError(
            f"semantic ids: items must be whole numbers that fit int64, got {ids.dtype}: cast them, or hash "
            "texts by gmeta.ops.hash_text"
        )
    return ids.astype(np.int64)


def number_alike(
    codes: NDArray[np.int32], items: NDArray[np.int64], given: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Number the items that share all codes, from 0, in the order of a hash of their ids.

    Args:
      codes: int32 (n, levels).
      items: int64 (n,).
      given: The existing numbers of the first items, int32 (at most n,).

    Returns:
      int32 (n,), which begins with ``given``.
    """
    _, group = np.unique(codes, axis=0, return_inverse=True)
    later = np.arange(len(items)) >= len(given)
    order = np.lexsort((splitmix64(items.astype(np.uint64)), later, group))
    numbers = np.empty(len(items), np.int32)
    numbers[order] = places_in_groups(group[order])
    numbers[: len(given)] = given
    return numbers


def _read_table(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
        note = parse_json((table.schema.metadata or {})[_NOTE])
    except (OSError, KeyError, ValueError) as error:
        absent = isinstance(error, FileNotFoundError)
        reason = "no such file" if absent else "it is damaged, or something else"
        raise DataError(
            f"{path}: can't read semantic ids: {reason}: name a folder of `gmeta semantic-ids`"
        ) from error
    if note.get("format") != _FORMAT:
        raise DataError(f"{path}: semantic ids of format {note.get('format')}, this version reads {_FORMAT}")
    return table, note
