"""The collection of hashed texts, and of items' titles, while rows are read (`gmeta.core.data_manifest`).

Every engine collects with a `TextCollector`, from the good records of its part of the input. Parts are joined
as sets, so the files don't depend on the number or the order of parts, or on parts that are read twice.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gmeta.core.data_manifest import TEXT, TEXTS_FOLDER, TITLE, VALUE, TextFile, texts_file
from gmeta.preprocess.plan.normalisation import Normalised, lists_of
from gmeta.preprocess.source import Columns, Ints
from gmeta.preprocess.table_spec import RESERVED, ColumnSpec, TableSpec

_PAIRS = pa.schema([(VALUE, pa.int64()), (TEXT, pa.string())])
_PENDING = 4 << 20  # bytes that are held before repeated texts are dropped
_COLUMN, _KIND = "column", "kind"
_NAMED = re.compile(r"(?:(.+?)[ _-]?)?(?:title|name)", re.IGNORECASE)
_ITEMS = ("item", "item_id", "itemid", "movie", "movie_id", "movieid")


def text_column(source: str) -> str:
    """Return the name under which records hold a column's texts if the column's name holds their hashes."""
    return f"{RESERVED}text_{source}"


class _Pairs:
    """Distinct values and texts, up to a limit.

    Attributes:
      limit: Bytes of all texts, each with 8 bytes of its value.
      is_over: Whether the limit was exceeded; then no pair is held.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.is_over = limit, False
        self._known, self._pending = _PAIRS.empty_table(), list[pa.Table]()
        self._bytes = 0

    def add(self, values: Ints, texts: pa.Array, *, by_text: bool) -> None:
        """Add values (N,) and their texts (N,).

        Args:
          values: The values.
          texts: The texts, without null.
          by_text: Whether equal texts have equal values, which is quicker.
        """
        if self.is_over or not len(values):
            return
        if by_text:
            coded = texts.dictionary_encode()
            codes = coded.indices.to_numpy(zero_copy_only=False)
            first = np.zeros(len(coded.dictionary), np.int64)
            first[codes[::-1]] = np.arange(len(codes))[::-1]
            values, texts = values[first], coded.dictionary
        table = pa.table([pa.array(values, pa.int64()), texts], schema=_PAIRS)
        self._pending.append(table)
        self._bytes += table.nbytes
        if self._bytes > max(_PENDING, self._known.nbytes):
            self._join()

    def _join(self) -> None:
        tables, self._pending, self._bytes = [self._known, *self._pending], [], 0
        self._known = pa.concat_tables(tables).group_by([VALUE, TEXT]).aggregate([])
        size = (pc.sum(pc.binary_length(self._known[TEXT])).as_py() or 0) + 8 * len(self._known)
        if size > self.limit:
            self.drop()

    def drop(self) -> None:
        """Drop all pairs, and hold no more."""
        self.is_over, self._known, self._pending = True, _PAIRS.empty_table(), []

    def table(self) -> pa.Table:
        """Return all distinct pairs, in any order."""
        if not self.is_over:
            self._join()
        return self._known


class TextCollector:
    """Collects what the files of texts will hold.

    Args:
      spec: The columns, as `TableSpec.resolve` decided them. The texts of its hashed columns are collected.
      titles: What `find_titles` returned; titles that the spec sets replace it.

    Example:
      >>> collector = TextCollector(spec, find_titles(spec))  # doctest: +SKIP
      >>> collector.add(batch, normalise(batch, spec))  # doctest: +SKIP
      >>> collector.write(folder)  # doctest: +SKIP
    """

    def __init__(self, spec: TableSpec, titles: Mapping[str, str] = MappingProxyType({})) -> None:
        self._limit = limit = int(spec.texts_limit)
        self._found_titles = spec.titles is None
        self._columns: dict[str, ColumnSpec] = {}
        self.titles: Mapping[str, str] = {}
        if limit:
            self._columns = {name: column for name, column in spec.columns.items() if column.hash}
            self.titles = titles if spec.titles is None else spec.titles
        self._hashed = {name: _Pairs(limit) for name in self._columns}
        self._titled = {name: _Pairs(limit) for name in self.titles}

    @property
    def sources(self) -> dict[str, ColumnSpec]:
        """The table's columns whose texts are still wanted, and how they are read."""
        titles = [source for name, source in self.titles.items() if not self._titled[name].is_over]
        return dict.fromkeys(titles, ColumnSpec(hash=True, is_list=False)) | {
            column.source or name: column
            for name, column in self._columns.items()
            if not self._hashed[name].is_over
        }

    def add(self, batch: pa.RecordBatch, found: Normalised) -> None:
        """Add the texts of some records.

        Args:
          batch: The records; a column may hold hashes if the column that `text_column` names holds the texts.
          found: What `normalise` returned for them.
        """
        if not len(found.rows):
            return
        for name, pairs in self._hashed.items():
            if not pairs.is_over:
                column = self._columns[name]
                given = _given(batch, column.source or name, found.rows)
                values = found.columns[name]
                if isinstance(values, tuple):
                    values, given = values[0], (lists_of(given, column) or (pa.nulls(0), None))[0]
                texts = _as_text(given)
                fill = column.default if column.default is not None else ("" if column.gaps else None)
                if texts.null_count and isinstance(fill, str):
                    texts = pc.fill_null(texts, fill)
                pairs.add(*_without_null(values, texts), by_text=True)
        for name, source in self.titles.items():
            if not self._titled[name].is_over:
                self._add_titles(name, found.columns, _as_text(_given(batch, source, found.rows)))

    def _add_titles(self, name: str, rows: Columns, texts: pa.Array) -> None:
        values = rows[name]
        assert not isinstance(values, tuple)
        texts = pc.utf8_trim_whitespace(texts)
        texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
        self._titled[name].add(*_without_null(values, texts), by_text=False)

    def add_titles(self, name: str, titles: Mapping[int, str]) -> None:
        """Add titles of a column's values."""
        if self._limit:
            pairs = self._titled.setdefault(name, _Pairs(self._limit))
            texts = pa.array(titles.values(), pa.string())
            pairs.add(np.fromiter(titles, np.int64, len(titles)), texts, by_text=False)

    def _pairs(self) -> Iterator[tuple[str, str, _Pairs]]:
        for kind, own in ((TEXT, self._hashed), (TITLE, self._titled)):
            for name, pairs in own.items():
                yield kind, name, pairs

    def save(self, folder: Path) -> None:
        """Write what was collected as a file of ``folder``, for `load`; each call writes another file."""
        parts = []
        for kind, name, pairs in self._pairs():
            table = pairs.table()
            if pairs.is_over:  # a row without a text marks it
                table = pa.table([[None], [None]], schema=_PAIRS)
            own = pa.table({_COLUMN: [name] * len(table), _KIND: [kind] * len(table)})
            parts.append(own.append_column(VALUE, table[VALUE]).append_column(TEXT, table[TEXT]))
        if parts and (whole := pa.concat_tables(parts)).num_rows:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{uuid.uuid4().hex}.parquet"
            unfinished = path.with_suffix(".unfinished")
            pq.write_table(whole, unfinished, compression="zstd")
            unfinished.replace(path)

    def load(self, folder: Path) -> None:
        """Add what `save` of any collectors has written into ``folder``."""
        for path in sorted(folder.glob("*.parquet")):
            table = pq.read_table(path)
            for kind, name, pairs in self._pairs():
                mine = pc.and_(pc.equal(table[_COLUMN], name), pc.equal(table[_KIND], kind))
                own = table.filter(mine).combine_chunks()
                if own[TEXT].null_count:
                    pairs.drop()
                elif len(own):
                    texts = own[TEXT].combine_chunks()
                    pairs.add(own[VALUE].to_numpy(), _array(texts), by_text=False)

    def write(self, folder: Path) -> list[str]:
        """Write the files of texts into the folder of a data set.

        Returns:
          Sentences on columns whose texts are left out, or for which a text had to be chosen.
        """
        notes: list[str] = []
        for name in dict.fromkeys((*self._hashed, *self._titled)):
            own, titles = _PAIRS.empty_table(), _PAIRS.empty_table()
            if name in self._titled:
                titles, several = _first_texts(self._titled[name].table())
                if several and self._found_titles:
                    titles = _PAIRS.empty_table()  # then the column doesn't name the values
                elif several:
                    notes.append(
                        f"{several:,} values of {name} have several titles in {self.titles[name]!r}, of "
                        "which the first in order is kept"
                    )
            if name in self._hashed:
                own, several = _first_texts(self._hashed[name].table())
                if several:
                    notes.append(
                        f"{several:,} hashes in {name} stand for several texts each, of which the first in "
                        "order is kept"
                    )
            if any(group[name].is_over for group in (self._hashed, self._titled) if name in group):
                notes.append(
                    f"{name} has more than {self._limit:,} bytes of texts: they aren't kept (--texts-limit)"
                )
            if len(titles) and self._found_titles and name in self.titles:
                notes.append(f"{self.titles[name]!r} is taken to name {name} in reports")
            whole = own if len(own) else titles.rename_columns([VALUE, TITLE])
            if len(own) and len(titles):
                whole = own.join(titles.rename_columns([VALUE, TITLE]), VALUE, join_type="full outer")
            if len(whole):
                path = folder / texts_file(name)
                path.parent.mkdir(exist_ok=True)
                whole = whole.sort_by(VALUE).combine_chunks().replace_schema_metadata({_COLUMN: name})
                pq.write_table(whole, path, compression="zstd", row_group_size=1 << 16)
        return notes


def text_files(folder: Path) -> dict[str, TextFile]:
    """Return column -> its file of texts in the folder of a data set."""
    found = {}
    for path in sorted((folder / TEXTS_FOLDER).glob("*.parquet")):
        metadata, content = pq.read_metadata(path), path.read_bytes()
        column = metadata.metadata[_COLUMN.encode()].decode()
        digest = hashlib.sha256(content).hexdigest()
        found[column] = TextFile(texts_file(column), metadata.num_rows, len(content), digest)
    return found


def find_titles(spec: TableSpec, sides: Sequence[tuple[str, Collection[str]]] = ()) -> dict[str, str]:
    """Find columns of titles by their names: column of ids -> the table's column of its titles.

    A text column whose name is or ends in ``title`` or ``name`` holds the titles of the key of its side
    table. Without a side table, ``book_title`` holds those of ``book`` or ``book_id``, and ``title`` those of
    an item. Of several columns, ``title`` or ``name`` itself is chosen, otherwise the first.

    Args:
      spec: The columns, as `TableSpec.resolve` decided them.
      sides: Side tables: the column of the key among the rows, and the names of the columns that rows get.
    """
    single = {column.source or name: name for name, column in spec.columns.items() if not column.is_list}
    texts = [source for source, name in single.items() if spec.columns[name].hash]
    texts.sort(key=lambda source: source.lower() not in ("title", "name"))
    by_lower = {source.lower(): source for source in single}
    found: dict[str, str] = {}
    for source in texts:
        named = _NAMED.fullmatch(source)
        if named is None:
            continue
        prefix = (named[1] or "").lower()
        keys = [key for key, names in sides if source in names]
        if not keys and prefix:
            keys = [by_lower[own] for end in ("", "_id", "id", "-id") if (own := prefix + end) in by_lower]
        elif not keys and source.lower() == "title":
            keys = [by_lower[own] for own in _ITEMS if own in by_lower]
        for key in keys[:1]:
            column = single.get(key)
            if column and key != source and spec.columns[column].dtype == "int64":
                found.setdefault(column, source)
    return found


def _given(batch: pa.RecordBatch, source: str, rows: Ints) -> pa.Array:
    """Return a column's texts, or what is hashed as text, in the records ``rows``."""
    name = text_column(source) if text_column(source) in batch.schema.names else source
    if name not in batch.schema.names:
        return pa.nulls(len(rows), pa.string())
    given = batch.column(name)
    if pa.types.is_dictionary(given.type):
        given = given.dictionary_decode()
    return given if len(rows) == batch.num_rows else given.take(pa.array(rows))


def _as_text(given: pa.Array) -> pa.Array:
    return _array(given if given.type == pa.string() else given.cast(pa.string()))


def _array(given: pa.Array | pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(given.chunks) if isinstance(given, pa.ChunkedArray) else given


def _without_null(values: Ints, texts: pa.Array) -> tuple[Ints, pa.Array]:
    if not texts.null_count:
        return values, texts
    there = texts.is_valid()
    return values[there.to_numpy(zero_copy_only=False)], texts.filter(there)


def _first_texts(pairs: pa.Table) -> tuple[pa.Table, int]:
    """Return each value's first text in order, by ascending value, and how many values have several."""
    ordered = pairs.sort_by([(VALUE, "ascending"), (TEXT, "ascending")]).combine_chunks()
    values = ordered[VALUE].to_numpy()
    first = np.append(True, values[1:] != values[:-1])[: len(values)]
    several = len(np.unique(values[~first]))
    return ordered.filter(pa.array(first)), several
