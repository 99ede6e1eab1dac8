"""Semantic ids: a code for each item of a catalogue, whose first digits similar items share."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.codebooks import Codebooks, Vectors, places_in_groups
from gmeta.core.data.splitmix import splitmix64
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.json_values import parse_json

if TYPE_CHECKING:
    import pyarrow as pa

IDS, CODEBOOKS = "ids.arrow", "codebooks.arrow"
_NOTE = b"gmeta.semantic_ids"
_FORMAT = 1


@dataclass(frozen=True)
class SemanticIds:
    """The semantic ids of a catalogue: the codes of each item's vector, and one digit more.

    The last digit tells apart items that share all codes: it numbers them from 0 in the order of a hash of
    their ids. An item that is added later comes after those that are there, so no digit ever changes.

    Args:
      items: The items' ids, int64 (n,), each once.
      digits: int32 (n, levels + 1), distinct rows.
      codebooks: The `Codebooks` by which vectors become codes.
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
        """How many values each digit has, the last too."""
        return (*self.codebooks.sizes, int(self.digits[:, -1].max()) + 1)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the items, their digits and the codebooks, in hexadecimal digits."""
        digest = hashlib.sha256(json.dumps([_FORMAT, self.method, *self.sizes]).encode())
        for array in (self.items, self.digits, *self.codebooks.levels, *sum(self.codebooks.encoder, ())):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def add(self, items: NDArray[np.int64], vectors: Vectors) -> SemanticIds:
        """Return these ids and those of new items, coded by the same codebooks.

        Args:
          items: Their ids, int64 (m,).
          vectors: Their vectors, float (m, dim), made as those of the others were.

        Raises:
          ConfigError: The vectors have another width or number, or aren't finite; or ids aren't whole
            numbers.
          DataError: An item is there already.
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
          ``items``; ``levels``: for each level its codes, the share of them in use, the entropy of the codes
          in bits, and ``perplexity``, 2 to the entropy; ``alike``: the share of items that share all
          codes with another one; ``most_alike``: the most items that do.
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
        """Write ``ids.arrow`` and ``codebooks.arrow`` into a folder, which is there."""
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
          DataError: A file is absent, damaged or of something else, or the two don't belong together.
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
            raise DataError(f"{folder}: the semantic ids aren't what was written there: make them again")
        return found


def item_numbers(items: Any) -> NDArray[np.int64]:
    """Return items' ids as int64.

    Raises:
      ConfigError: They aren't whole numbers that fit int64, which a cast would change.
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
      given: The numbers that the first items have already, int32 (at most n,).

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
