"""The manifest of a prepared data set, and the texts that it names.

The manifest is written last, so its presence implies complete data.

`gmeta prepare` stores a text as its hash, a number, and items often have titles. `Texts` has the meaning of
each number of a column. The folder ``texts/`` of a data set has a Parquet file for each such column:
``value`` int64, ascending, each once; ``text``, what was hashed; and ``title``. A file may have only one of
the last two. The manifest names the files, with their digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import DataError
from gmeta.core.files import ReadablePath
from gmeta.core.group_index import LAYOUTS, Layout
from gmeta.core.json_values import (
    FILE_NAME,
    MOST,
    SealedManifest,
    folder_name,
    inner_path,
    items,
    load_manifest_file,
    mapping,
    text,
    whole,
)
from gmeta.core.schema import Roles, Schema

FORMAT, VERSION = "gmeta-records", 2


@dataclass(frozen=True)
class Shard:
    """One TFRecord file.

    Attributes:
      name: Its name inside the data set's folder; its index is beside it (`gmeta.core.group_index`).
      groups: Groups (task batches) in it.
      rows: Rows in all its groups.
      bytes: Its size.
      index: The checksum of its index, `GroupIndex.checksum`. It covers the checksum of every group, so
        readers notice an index, or a shard with its index, from another data set.
    """

    name: str
    groups: int
    rows: int
    bytes: int
    index: int

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Shard:
        """Read a shard from what `dataclasses.asdict` returns.

        Raises:
          ValueError: A value isn't what gmeta writes. KeyError and TypeError are possible too.
        """
        shard = cls(**mapping(value, "a shard"))
        folder_name(shard.name, "a shard's name")
        for name in ("groups", "rows", "bytes", "index"):
            whole(getattr(shard, name), f"shard {shard.name!r}: {name}", most=2**64 - 1)
        return shard


@dataclass(frozen=True)
class Split:
    """A named part of the data set, such as ``warm`` or ``cold``."""

    shards: tuple[Shard, ...]

    @property
    def groups(self) -> int:
        """Groups (task batches) in all shards."""
        return sum(shard.groups for shard in self.shards)

    @property
    def rows(self) -> int:
        """Rows in all shards."""
        return sum(shard.rows for shard in self.shards)


@dataclass(frozen=True)
class TextFile:
    """The file of a column's texts (`Texts`).

    Attributes:
      name: The path of the file inside the data set's folder.
      texts: Number of values with texts.
      bytes: Its size.
      sha256: Its digest.
    """

    name: str
    texts: int
    bytes: int
    sha256: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TextFile:
        """Read a file from what `dataclasses.asdict` returns; raise ValueError, KeyError or TypeError."""
        file = cls(**mapping(value, "a file of texts"))
        inner_path(file.name, "a file of texts")
        text(file.sha256, "sha256")
        for name in ("texts", "bytes"):
            whole(getattr(file, name), f"{file.name!r}: {name}", 1)
        return file


@dataclass(frozen=True)
class Manifest(SealedManifest):
    """The contents of a prepared data set, and how it was made.

    Attributes:
      schema: The columns of every row.
      splits: Split name -> shards.
      config: The settings of the preparation, as JSON values.
      dropped: Reason -> number of dropped input records.
      layout: How rows are encoded: ``"columnar"``, one record per group, or ``"example"``, one
        ``tf.train.Example`` per row.
      seed: The seed of the order of the groups.
      versions: Name -> version of a part that determines the written bytes: ``plan`` and ``layout``.
      texts: Column -> the file of its texts.
    """

    schema: Schema
    splits: Mapping[str, Split]
    config: Mapping[str, Any] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    layout: Layout = "columnar"
    seed: int = 0
    versions: Mapping[str, int] = field(default_factory=dict)
    texts: Mapping[str, TextFile] = field(default_factory=dict)

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "versions": dict(self.versions),
            "layout": self.layout,
            "seed": self.seed,
            "schema": self.schema.to_json(),
            "config": dict(self.config),
            "dropped": dict(self.dropped),
            "splits": {
                name: {
                    "groups": split.groups,
                    "rows": split.rows,
                    "shards": [asdict(shard) for shard in split.shards],
                }
                for name, split in self.splits.items()
            },
            **({"texts": {name: asdict(one) for name, one in self.texts.items()}} if self.texts else {}),
        }

    @property
    def roles(self) -> Roles:
        """Roles of the columns: the task, the time, the label, and those with hashed text."""
        return Roles.of(self.schema, self.config)

    @classmethod
    def load(cls, folder: ReadablePath, *, check_shards: bool = True) -> Manifest:
        """Read a manifest, and check that its shards exist and have the stated sizes.

        Args:
          folder: The folder of ``manifest.json``, a `pathlib.Path` or an object with its reading methods.
          check_shards: Whether to check the shards; a reader that may skip bad records checks them itself.

        Raises:
          DataError: The manifest is missing, is of another format, or was edited; or a shard is missing or of
            another size.
        """
        path = folder / FILE_NAME
        advice = "run `gmeta prepare` (again) to make this folder"
        value = load_manifest_file(
            path, FORMAT, VERSION, advice=advice, older="prepare the data again with this gmeta"
        )

        def counts(what: str) -> dict[str, int]:
            return {name: whole(count, name) for name, count in mapping(value[what], what).items()}

        try:
            splits = {
                name: Split(tuple(Shard.from_json(shard) for shard in items(split["shards"], "shards")))
                for name, split in mapping(value["splits"], "splits").items()
            }
            schema = Schema.from_json(value["schema"])
            if value["layout"] not in LAYOUTS:
                raise ValueError(f"layout {value['layout']!r} isn't one of {', '.join(LAYOUTS)}")
            manifest = cls(
                schema,
                splits,
                mapping(value["config"], "config"),
                counts("dropped"),
                value["layout"],
                whole(value["seed"], "seed", -MOST),
                counts("versions"),
                {
                    name: TextFile.from_json(one)
                    for name, one in mapping(value.get("texts", {}), "texts").items()
                },
            )
            digest = manifest.digest
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            said = " ".join(str(error).split())  # a name in it may contain line breaks
            raise DataError(f"incomplete: {said}", path=path, advice=advice) from error
        if digest != value.get("digest"):
            raise DataError("its digest doesn't match its content: it was edited", path=path, advice=advice)
        for split in splits.values():
            for shard in split.shards if check_shards else ():
                _check_size("shard", folder / shard.name, shard.bytes, advice)
        for file in manifest.texts.values() if check_shards else ():
            _check_size("file of texts", folder / file.name, file.bytes, advice)
        return manifest


def _check_size(what: str, path: ReadablePath, expected: int, advice: str) -> None:
    if not path.exists():
        raise DataError(f"the manifest names this {what}, but it is missing", path=path, advice=advice)
    size = path.stat().st_size
    if size != expected:
        raise DataError(f"{size} bytes, the manifest says {expected}", path=path, advice=advice)


TEXTS_FOLDER = "texts"
"""The folder of the files of texts, in that of the data set."""
Kind = Literal["text", "title"]
VALUE = "value"
TEXT: Kind = "text"
TITLE: Kind = "title"
"""The columns of a file of texts."""


def texts_file(column: str) -> str:
    """Return the path of the file of a column's texts in the data set.

    Example:
      >>> texts_file("movie/id")
      'texts/movie%2Fid.parquet'
    """
    name = quote(column, safe=" ")
    if len(name) > 200:
        name = f"{name[:100]}-{hashlib.sha256(column.encode()).hexdigest()[:16]}"
    return f"{TEXTS_FOLDER}/{name}.parquet"


class Texts:
    """The meaning of the numbers in a data set's columns: the text that was hashed, and a title.

    A column's file is read and compared with its digest on first use.

    Args:
      data: The folder of the data set.
      files: Column -> its file, as in the manifest.

    Example:
      >>> texts = Texts.of(Path("data/clicks"))  # doctest: +SKIP
      >>> texts.find("item", [8250560606382298838, 7], "text")  # doctest: +SKIP
      ['abc', None]
      >>> texts.name("item", [8250560606382298838, 7])  # doctest: +SKIP
      ['The first three letters', '7']
    """

    def __init__(self, data: ReadablePath, files: Mapping[str, TextFile]) -> None:
        self._data, self.files = data, files
        self._tables: dict[str, Any] = {}

    @classmethod
    def of(cls, data: ReadablePath) -> Texts:
        """Open the texts of a data set; they are empty if it was prepared without texts.

        Raises:
          DataError: The manifest is missing or was edited.
        """
        return cls(data, Manifest.load(data, check_shards=False).texts)

    def kinds(self, column: str) -> list[Kind]:
        """Return what is stored for a column: its texts, titles, both or nothing.

        Raises:
          DataError: The column's file is damaged.
        """
        return (
            []
            if column not in self.files
            else [n for n in (TEXT, TITLE) if n in self.table(column).schema.names]
        )

    def table(self, column: str) -> Any:
        """Return a column's file as a ``pyarrow.Table``.

        Raises:
          KeyError: Nothing is stored for the column.
          DataError: The file is damaged.
        """
        if column not in self._tables:
            self._tables[column] = self._read(self.files[column])
        return self._tables[column]

    def _read(self, file: TextFile) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        path, advice = self._data / file.name, "prepare the data again with --overwrite"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"can't read texts: {error.strerror}", path=path, advice=advice) from error
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise DataError("damaged: its digest isn't that of the manifest", path=path, advice=advice)
        return parquet.read_table(pa.BufferReader(content)).combine_chunks()

    def find(self, column: str, values: Sequence[int] | NDArray[np.int64], kind: Kind) -> list[str | None]:
        """Return the text or the title of each value (N,); None for missing ones.

        Raises:
          DataError: The column's file is damaged.
        """
        asked = np.asarray(values, np.int64)
        if kind not in self.kinds(column) or not len(asked):
            return [None] * len(asked)
        table = self.table(column)
        known = table[VALUE].to_numpy()
        place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        found = table[kind].take(place).to_pylist()
        return [text if own else None for text, own in zip(found, known[place] == asked, strict=True)]

    def name(self, column: str, values: Sequence[int] | NDArray[np.int64]) -> list[str]:
        """Return a readable name for each value (N,): its title, or else its text, or else its digits.

        Raises:
          DataError: The column's file is damaged.
        """
        titles, texts = (self.find(column, values, kind) for kind in (TITLE, TEXT))
        return [
            text if title is None and text is not None else str(int(value)) if title is None else title
            for value, title, text in zip(values, titles, texts, strict=True)
        ]


def hash_text(text: str) -> int:
    """Hash a text: return the last 8 bytes of the MD5 of its UTF-8, little endian, as a signed number.

    DuckDB's ``md5_number_lower(text)`` gives the same bits.

    Example:
      >>> hash_text("abc")
      8250560606382298838
    """
    return int.from_bytes(
        hashlib.md5(text.encode(), usedforsecurity=False).digest()[8:], "little", signed=True
    )
