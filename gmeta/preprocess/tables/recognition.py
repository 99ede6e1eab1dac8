"""Recognises a table file's format and, for separated fields, its form, from its content.

A given format or delimiter takes precedence, then the first bytes, then the file's ending. Formats that
DuckDB doesn't read record by record are rewritten as JSON lines or CSV in a temporary file.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

import pyarrow as pa

from gmeta.core.errors import ConfigError, DataError, first_line
from gmeta.preprocess.table_spec import FORMATS, ColumnSpec, CsvForm, FormatName, TableSpec
from gmeta.preprocess.tables.duckdb_text import PlainPath, explain_errors, sql_text

Format = Literal["parquet", "csv", "json"]
"""A format that a scan reads."""

SUFFIXES: dict[str, FormatName] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
COMPRESSED = (".gz", ".zst")
_HEAD = 1 << 20  # bytes from which the form is decided
_LINES = 64  # lines from which the form is decided
_DELIMITERS = ("\t", "::", ",", ";", "|")
_TYPED = re.compile(r"(.+):(token|float|token_seq|float_seq)")
"""A name in the first line of RecBole's atomic files."""


class Layout(NamedTuple):
    """A file of MovieLens without a line of names, known by its name."""

    delimiter: str
    names: tuple[str, ...]


_RATING = ("user", "item", "rating", "timestamp")
_USER = ("user", "gender", "age", "occupation", "zip")
_GENRES = (
    "unknown Action Adventure Animation Children Comedy Crime Documentary Drama Fantasy Film-Noir Horror "
    "Musical Mystery Romance Sci-Fi Thriller War Western"
)
LAYOUTS = {
    "u.data": Layout("\t", _RATING),
    "u.user": Layout("|", ("user", "age", "gender", "occupation", "zip")),
    "u.item": Layout("|", ("item", "title", "release", "video", "url", *_GENRES.split())),
    "ratings.dat": Layout("::", _RATING),
    "users.dat": Layout("::", _USER),
    "movies.dat": Layout("::", ("item", "title", "genres")),
}
ROLES = (
    *(
        (names, dict(zip(("task", "label", "time"), (names[0], *names[2:]), strict=True)))
        for names in (
            _RATING,
            ("userId", "movieId", *_RATING[2:]),
            ("user_id", "item_id", *_RATING[2:]),
            ("user_id", "movie_id", *_RATING[2:]),
        )
    ),
    (("user_id", "item_id", "timestamp"), {"task": "user_id", "time": "timestamp"}),
    (("user_id", "item_id", "rating"), {"task": "user_id", "label": "rating"}),
    (("user", "item", "position"), {"task": "user", "time": "position"}),
)
"""Columns of well-known files, and their roles."""


@dataclass(frozen=True)
class TableFile:
    """A file of a table.

    Attributes:
      path: The file.
      format: The format in which it is read.
      form: The form of separated fields, with its delimiter.
      names: The columns of separated fields; ``""`` for one without a name.
      columns: The file's own description of its columns.
      copy: The rewritten file, which is read in its place.
      by_line: Whether a record is a line of the file.
    """

    path: Path
    format: Format
    form: CsvForm = field(default_factory=CsvForm)
    names: tuple[str, ...] = ()
    columns: Mapping[str, ColumnSpec] = field(default_factory=dict)
    copy: Copy | None = None
    by_line: bool = True

    @property
    def is_text(self) -> bool:
        """Whether a record has a line by which messages name it."""
        return self.format != "parquet" and self.by_line

    @property
    def read(self) -> Path:
        """The file that is read."""
        return self.path if self.copy is None else self.copy.path


class Copy:
    """A temporary file, deleted with this object."""

    def __init__(self, name: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gmeta-")
        self.path = Path(self._folder.name) / name


def format_of(path: PurePath) -> FormatName | None:
    """Return the format that a file's ending names, or None."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        suffix = path.with_suffix("").suffix.lower()
        suffix = "" if suffix in (".parquet", ".pq") else suffix  # Parquet is compressed inside
    return SUFFIXES.get(suffix)


def recognise(path: Path, spec: TableSpec) -> TableFile:
    """Recognise a file's format, and rewrite the file if no scan reads that format.

    Args:
      path: The file, not empty.
      spec: The format and the form, as far as they are given.

    Raises:
      ConfigError: The content shows no format, or more than one, or has another encoding.
      DataError: The file can't be read.
    """
    with open_bytes(path) as stream:
        try:
            raw = stream.read(_HEAD)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"can't read it: {first_line(error)}", path=path) from error
    text = _decode(raw, path, spec.csv)
    kind = spec.format or _kind(raw, text, path, spec.csv)
    if kind == "parquet":
        return TableFile(path, "parquet")
    if kind == "python":
        return _rewrite_lines(path, spec.csv, _of_python)
    if kind == "lists":
        return _rewrite_lists(path, spec.csv)
    if kind == "json":
        if text.lstrip()[:1] == "[" or _spans_lines(text):
            return _rewrite_json(path, spec.csv)
        return _in_utf8(TableFile(path, "json", spec.csv), spec.csv)
    return _separated(path, text, kind, spec)


def _decode(raw: bytes, path: Path, form: CsvForm) -> str:
    if raw[:4] in (b"PAR1", b"ARRO"):
        return ""
    text = raw.decode(form.encoding, errors="replace").removeprefix("\ufeff")
    lines = text.splitlines()[:_LINES]
    if "\0" not in text and sum("\ufffd" in line for line in lines) * 2 > len(lines) > 1:
        raise ConfigError(
            f"{path}: it isn't {form.encoding}: name its encoding with --encoding, such as latin-1"
        )
    if len(raw) == _HEAD and "\n" in text:
        text = text[: text.rindex("\n") + 1]  # the last line may be cut
    return text


def _kind(raw: bytes, text: str, path: Path, form: CsvForm) -> FormatName:
    ending = format_of(path)
    if raw.startswith(b"PAR1"):
        return "parquet"
    if ending == "parquet":
        return ending  # damaged; its reader explains how
    start = text.lstrip()
    first = start.partition("\n")[0]
    if re.match(r"\{\s*u?'", start) and ending in (None, "json") and _is_dict(first):
        return "python"
    if re.match(r"\[\s*(\{\s*[\"}]|\])|\{\s*[\"}]", start) and (ending in (None, "json") or _is_json(start)):
        return "json"
    if ending is not None:
        return ending
    if "\0" in text[:4096]:
        raise ConfigError(f"{path}: neither text nor Parquet; gmeta reads {', '.join(FORMATS)}")
    if form.delimiter is None and path.name not in LAYOUTS and _is_lists(text):
        return "lists"
    return "csv"


def _is_json(text: str) -> bool:
    """Return whether text begins with an object of JSON, or with an array of them."""
    try:
        return isinstance(json.JSONDecoder().raw_decode(text.lstrip("[ \t\r\n"))[0], dict)
    except RecursionError:  # DuckDB reads it
        return True
    except ValueError:
        return False


def _is_dict(line: str) -> bool:
    try:
        return isinstance(ast.literal_eval(line.strip()), dict)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def _spans_lines(text: str) -> bool:
    """Return whether the first object of JSON ends on a later line than its first."""
    start = text.lstrip()
    if "\n" not in start.rstrip():
        return False
    try:
        return "\n" in start[: json.JSONDecoder().raw_decode(start)[1]]
    except (ValueError, RecursionError):
        return False


def _is_lists(text: str) -> bool:
    """Return whether lines are whole numbers separated by single spaces, more on some than on others."""
    lines = [line for line in text.splitlines()[:_LINES] if line.strip()]
    return (
        all(re.fullmatch(r"\d+(?: \d+)* ?", line) for line in lines)
        and len({line.strip().count(" ") for line in lines}) > 1
    )


# Separated fields.


def _separated(path: Path, text: str, kind: FormatName, spec: TableSpec) -> TableFile:
    form = spec.csv
    layout = LAYOUTS.get(path.name)
    delimiter = form.delimiter or (
        "\t" if kind == "tsv" or (".tsv" in path.suffixes and not spec.format) else ""
    )
    if layout and form == CsvForm(encoding=form.encoding, null=form.null):
        first = text.partition("\n")[0].split(layout.delimiter)
        if len(first) == len(layout.names):
            encoding = form.encoding if form.encoding != "utf-8" or _is_utf8(path) else "latin-1"
            lists = {"genres": ColumnSpec(is_list=True)} if "genres" in layout.names else {}
            form = CsvForm(layout.delimiter, "", False, layout.names, encoding=encoding, null=form.null)
            return _in_utf8(TableFile(path, "csv", form, layout.names, lists), form)
    if not delimiter:
        delimiter = _delimiter_of(path, text, form)
    quote = form.quote if len(delimiter) == 1 else ""
    form = replace(
        form, delimiter=delimiter, quote=quote, escape=form.escape or _escape_of(text, delimiter, quote)
    )
    names: tuple[str, ...] = form.names
    columns: dict[str, ColumnSpec] = {}
    if form.header:
        names = tuple(names_of(io.StringIO(text, newline=""), path, form, delimiter))
        typed = [_TYPED.fullmatch(name) for name in names]
        if all(typed):
            for found in filter(None, typed):
                if found[2].endswith("_seq"):  # words of a title may look like numbers
                    hashed = found[2] == "token_seq"
                    columns[found[1]] = ColumnSpec(is_list=True, separator=" ", hash=hashed)
            names = tuple(found[1] for found in typed if found)
        elif names == ("movieId", "title", "genres"):
            columns["genres"] = ColumnSpec(is_list=True)
    if len(text) >= _HEAD and "\n" not in text:
        raise DataError(f"the first line has more than {_HEAD:,} characters", path=path, line=1)
    return _in_utf8(TableFile(path, "csv", form, names, columns), form)


def _delimiter_of(path: Path, text: str, form: CsvForm) -> str:
    """Find the delimiter: the one that occurs equally often in each of the first lines."""
    lines = text.splitlines()[:_LINES]
    first = next((line for line in lines if line.strip()), "")
    is_csv = format_of(path) == "csv"
    if is_csv and len(_fields(first, ",", form)) > 1:
        return ","
    found = []
    for delimiter in (*_DELIMITERS, " "):
        counts = {len(_fields(line, delimiter, form)) for line in lines if line.strip()}
        if counts and len(counts) == 1 and counts != {1}:
            found.append(delimiter)
    if len(found) > 1 and " " in found:
        found.remove(" ")
    if not found:  # lines with too many or too few fields are reported later
        found = [d for d in _DELIMITERS if all(len(_fields(line, d, form)) > 1 for line in lines if line)][:1]
    if len(found) == 1:
        return found[0]
    if not found and (format_of(path) is not None or (len(lines) > 1 and " " not in first)):
        return ","  # a single column
    words = " and ".join(repr(one) for one in found)
    raise ConfigError(
        f"{path}: its first lines have the same number of {words}: say which separates fields, such as "
        f"--delimiter {sql_text(found[0])}"
        if found
        else f"{path}: its content shows no format: name it with --format {'|'.join(FORMATS)}, or --delimiter"
    )


def _fields(line: str, delimiter: str, form: CsvForm) -> list[str]:
    if len(delimiter) > 1 or not form.quote:
        return line.split(delimiter)
    escape = form.escape or ("\\" if "\\" + form.quote in line else None)
    try:
        return next(csv.reader([line], delimiter=delimiter, quotechar=form.quote, escapechar=escape), [])
    except csv.Error:
        return []


def _escape_of(text: str, delimiter: str, quote: str) -> str | None:
    r"""Return a backslash if ``\"`` occurs within quoted fields; otherwise None."""
    if not quote:
        return None
    inside = re.escape("\\" + quote) + f"[^{re.escape(delimiter)}\r\n]"
    return "\\" if re.search(f"{re.escape(delimiter + quote)}[^\r\n]*?{inside}", text) else None


def names_of(head: io.StringIO, path: PurePath | str, form: CsvForm, delimiter: str) -> list[str]:
    """Return the columns that the first record of a file of separated fields names; it may span lines.

    Raises:
      DataError: It names no column, or one twice.
    """
    if len(delimiter) > 1 or not form.quote:
        fields = head.readline().rstrip("\r\n").split(delimiter)
    else:
        try:
            reader = csv.reader(head, delimiter=delimiter, quotechar=form.quote, escapechar=form.escape)
            fields = next(reader, [])
        except csv.Error as error:
            raise DataError(f"can't read it: {error}", path=path, line=1) from error
    names = [name.strip() for name in fields]
    if not any(names):
        raise DataError("the first line names no columns", path=path, line=1)
    if twice := sorted(name for name in set(names) if names.count(name) > 1 and name):
        raise DataError(
            f"the first line names {twice[0]!r} twice",
            path=path,
            line=1,
            advice="rename one, or name the columns of a file without names by --no-header --columns",
        )
    return names


# Rewriting of formats that no scan reads, line for line if possible.


def open_bytes(path: Path) -> pa.NativeFile:
    """Open a file, and decompress it if its first bytes show compression.

    Raises:
      DataError: It can't be opened.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        kind = "gzip" if magic[:2] == b"\x1f\x8b" else "zstd" if magic == b"\x28\xb5\x2f\xfd" else None
        return pa.input_stream(str(path), compression=kind)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"can't read it: {first_line(error)}", path=path) from error


def open_text(path: Path, encoding: str = "utf-8-sig") -> io.TextIOWrapper:
    """Open a text file, compressed or not, and keep its line ends."""
    return io.TextIOWrapper(open_bytes(path), encoding=encoding, errors="replace", newline="")


def _is_utf8(path: Path) -> bool:
    try:
        with io.TextIOWrapper(open_bytes(path), encoding="utf-8") as text:
            while text.read(_HEAD):
                pass
        return True
    except UnicodeDecodeError:
        return False


def _in_utf8(file: TableFile, form: CsvForm) -> TableFile:
    """Return a file whose text is UTF-8, and whose compression matches its ending."""
    with file.path.open("rb") as stream:
        magic = stream.read(4)
    packed = magic[:2] == b"\x1f\x8b" or magic == b"\x28\xb5\x2f\xfd"
    named = file.path.suffix.lower() in COMPRESSED
    if form.encoding.lower().replace("_", "-") in ("utf-8", "utf8", "utf-8-sig") and packed == named:
        return file
    copy = Copy("file.txt")
    try:
        source = io.TextIOWrapper(open_bytes(file.path), encoding=form.encoding, newline="")
        with source, copy.path.open("w", encoding="utf-8", newline="") as out:
            while block := source.read(_HEAD):
                out.write(block)
    except UnicodeError as error:
        raise DataError(
            f"isn't {form.encoding}: {first_line(error)}",
            path=file.path,
            advice="name its encoding with --encoding, such as latin-1",
        ) from error
    return replace(file, copy=copy)


def _rewrite_lines(path: Path, form: CsvForm, rewrite: Callable[[str], str]) -> TableFile:
    copy = Copy("file.jsonl")
    with open_text(path, form.encoding) as source, copy.path.open("w", encoding="utf-8") as out:
        for line in source:
            out.write(rewrite(line) + "\n")
    return TableFile(path, "json", form, copy=copy)


def _of_python(line: str) -> str:
    """Return a dictionary in Python's notation as JSON; any other line unchanged."""
    try:
        return json.dumps(ast.literal_eval(line.strip()), ensure_ascii=False) if line.strip() else ""
    except (ValueError, SyntaxError, TypeError, RecursionError):
        return line.strip()


def _rewrite_json(path: Path, form: CsvForm) -> TableFile:
    """Rewrite an array of JSON, or objects over several lines, with one record per line."""
    import duckdb

    plain = _in_utf8(TableFile(path, "json"), form)
    known = PlainPath(plain.read)
    copy = Copy("file.jsonl")
    size = max(16 << 20, plain.read.stat().st_size * 20)
    query = (
        f"SELECT json(json)::VARCHAR AS line FROM read_json_objects({sql_text(str(known))}, format='auto', "
        f"maximum_object_size={min(size, (1 << 32) - 1)})"
    )
    with (
        explain_errors(path, known),
        duckdb.connect(":memory:") as connection,
        copy.path.open("w", encoding="utf-8") as out,
    ):
        for batch in connection.sql(query).to_arrow_reader(4096):
            out.writelines(f"{line}\n" for line in batch.column(0).to_pylist())
    return TableFile(path, "json", form, copy=copy, by_line=False)


def _rewrite_lists(path: Path, form: CsvForm) -> TableFile:
    """Rewrite lines of a user and items, with the place of each item in its line."""
    copy = Copy("file.csv")
    with open_text(path, form.encoding) as source, copy.path.open("w") as out:
        for number, line in enumerate(source, start=1):
            user, *items = line.split() or [""]
            if not all(one.isdigit() for one in (user, *items)) and line.strip():
                raise DataError(
                    f"a user and items, as whole numbers, expected, got {line.strip()[:60]!r}",
                    path=path,
                    line=number,
                    advice="name the file's format with --format",
                )
            out.writelines(f"{user},{item},{place}\n" for place, item in enumerate(items))
    names = ("user", "item", "position")
    return TableFile(path, "csv", CsvForm(",", header=False, names=names), names, copy=copy, by_line=False)


def roles_of(names: Iterator[str]) -> dict[str, str] | None:
    """Return the roles of the columns of a well-known file, or None."""
    there = set(names)
    return next((dict(roles) for columns, roles in ROLES if there >= set(columns)), None)
