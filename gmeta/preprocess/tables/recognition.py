"""The recognition of a file's format by its content, and the translation of formats that no scan reads.

==============  ==================================================================================
parquet         begins with ``PAR1``
json            an object a line; an array of objects is translated
python          a dict a line, as Python prints it; translated to JSON lines
csv             separated fields, with a line of names or with names given; the delimiter is the one
                that splits the first lines into the same number of fields. MovieLens' ``u.data`` and
                ``ratings.dat`` have names of their own, and RecBole's typed names lose their types
lists           numbers between spaces: a user and its items on each line; translated to pairs
==============  ==================================================================================

Text in another encoding, delimiters of several characters, and quotes escaped by a backslash are translated
too. A translated file has the records of its original, in the same order.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from gmeta.core.errors import ConfigError, DataError, first_line
from gmeta.preprocess.table_spec import CsvForm, FileFormat
from gmeta.preprocess.tables.table_files import TableFile, format_of

_SAMPLE = 1 << 20
_LINES = 100
_DELIMITERS = ("\t", "::", ";", ",", "|")
_BLOCK = 4 << 20
_NO_QUOTE = "\x1f"
"""A character that no text has, as the quote of files without quotes."""

_LIST_LINE = re.compile(r"\s*\d+(?: +\d+)*\s*")
_NUMBER = re.compile(r"\s*-?\d+(?:\.\d+)?\s*")
_TYPED = re.compile(r"(.+):(token|float|token_seq|float_seq)")
_EVENTS = ("user_id", "item_id", "rating", "timestamp")
_GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children", "Comedy", "Crime", "Documentary", "Drama"),
    *(
        "Fantasy",
        "Film-Noir",
        "Horror",
        "Musical",
        "Mystery",
        "Romance",
        "Sci-Fi",
        "Thriller",
        "War",
        "Western",
    ),
)
_NAMES = {
    "u.data": _EVENTS,
    "ratings.dat": _EVENTS,
    "u.user": ("user_id", "age", "gender", "occupation", "zip_code"),
    "u.item": ("item_id", "title", "release_date", "video_release_date", "url", *_GENRES),
    "movies.dat": ("item_id", "title", "genres"),
    "users.dat": ("user_id", "gender", "age", "occupation", "area"),
    "behaviors.tsv": ("impression_id", "user_id", "time", "history", "impressions"),
    "news.tsv": ("item_id", "category", "subcategory", "title", "abstract", "url", "entities", "mentions"),
}
"""Names of files without a line of names, in MovieLens and MIND -> their columns, or the first of them."""


@dataclass(frozen=True)
class Recognised:
    """A file as a scan reads it.

    Attributes:
      file: The file; `TableFile.read` is the translated one, if there is one.
      form: The format of its fields, with a delimiter.
      lists: Columns that hold lists, whose values are separated by spaces.
      notes: What was recognised and may surprise the user, each in a sentence.
    """

    file: TableFile
    form: CsvForm
    lists: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def recognise(
    path: Path, form: CsvForm, wanted: FileFormat | None, scratch: Callable[[], Path]
) -> Recognised:
    """Find out how a file is written, and translate it if no scan reads that.

    Args:
      path: The file.
      form: What is known of its fields.
      wanted: The format, if the user named it.
      scratch: Returns a path for a translated file.

    Raises:
      ConfigError: Its content doesn't show its format, or isn't of the named one.
      DataError: It can't be read.
    """
    head = _head(path)
    if wanted == "parquet" or (wanted is None and head.startswith(b"PAR1")):
        return Recognised(TableFile(path, "parquet"), form)
    if wanted is None and format_of(path) == "parquet":
        return Recognised(TableFile(path, "parquet"), form)  # damaged: its scan says how
    encoding = form.encoding or _encoding(head)
    text = head.decode(encoding, "replace")
    lines = text.splitlines()[: _LINES + 1]
    if len(head) == _SAMPLE and len(lines) <= _LINES:
        lines = lines[:-1] or lines
    lines = [line for line in lines[:_LINES] if line.strip()]
    kind = wanted or _kind(path, form, text, lines)
    if kind in ("json", "jsonl", "python"):
        return _objects(path, form, kind, text, encoding, scratch)
    if kind == "lists":
        return _pairs(path, form, encoding, scratch)
    return _fields(path, replace(form, encoding=encoding), kind, text, lines, scratch)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if file.read(4) == b"PAR1":
                return b"PAR1"
        with pa.input_stream(str(path), compression="detect") as stream:
            return bytes(stream.read(_SAMPLE))
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"can't read it: {first_line(error)}", path=path) from error


def _encoding(head: bytes) -> str:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    return "utf-8"


def _kind(path: Path, form: CsvForm, text: str, lines: list[str]) -> FileFormat:
    """Return the format of a text file, by its content and then by its ending."""
    named = format_of(path)
    start = text.lstrip("\ufeff \t\r\n")
    if named == "json" or (named is None and start[:1] == "{"):
        return "python" if start[:1] == "{" and _is_python(start) else "json"
    if named is None and start[:1] == "[" and start[1:].lstrip()[:1] == "{":
        return "json"
    is_open = form.delimiter is None and form.header and named is None and path.name not in _NAMES
    if is_open and lines and all(_LIST_LINE.fullmatch(line) for line in lines):
        return "lists"
    return "tsv" if ".tsv" in path.suffixes or path.suffix == ".inter" else "csv"


def _is_python(start: str) -> bool:
    """Return whether the first line is a dict of Python and no object of JSON."""
    line = start.splitlines()[0]
    try:
        json.loads(line)
    except RecursionError:  # DuckDB reads it
        return False
    except ValueError:
        try:
            return isinstance(ast.literal_eval(line), dict)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return False
    return False


# Objects: JSON and Python's dicts.


def _objects(
    path: Path, form: CsvForm, kind: FileFormat, text: str, encoding: str, scratch: Callable[[], Path]
) -> Recognised:
    start = text.lstrip("\ufeff \t\r\n")
    file = TableFile(path, "json")
    if kind == "python":
        target = scratch().with_suffix(".jsonl")
        with _reading(path, encoding) as source, target.open("w", encoding="utf-8", newline="") as out:
            out.writelines(f"{_json_of(line)}\n" for line in source)
        return Recognised(replace(file, plain=target), form)
    if start[:1] == "[" and kind == "json":
        return Recognised(replace(file, plain=_from_array(path, encoding, scratch), rows=True), form)
    if encoding not in ("utf-8", "utf8"):
        return Recognised(replace(file, plain=_recoded(path, encoding, scratch)), form)
    return Recognised(file, form)


def _json_of(line: str) -> str:
    """Return a line of Python's literals as JSON; a line that is none of them as it is, which is bad."""
    if not line.strip():
        return ""
    try:
        return json.dumps(ast.literal_eval(line.strip()), default=list)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return line.rstrip("\r\n")


def _from_array(path: Path, encoding: str, scratch: Callable[[], Path]) -> Path:
    """Write the objects of an array as lines; the array is read piece by piece."""
    target, decoder, number = scratch().with_suffix(".jsonl"), json.JSONDecoder(), 0
    with _reading(path, encoding) as source, target.open("w", encoding="utf-8", newline="") as out:
        held, ended, inside = "", False, False
        while True:
            held = held.lstrip(" \t\r\n," if inside else "\ufeff \t\r\n")
            if not inside and held.startswith("["):
                held, inside = held[1:], True
                continue
            if inside and held.startswith("]"):
                break
            try:
                value, end = decoder.raw_decode(held)
            except ValueError as error:
                piece = "" if ended else source.read(_BLOCK)
                if not piece:
                    where = f"the JSON array ends early, or its value {number + 1} is malformed: {error}"
                    raise DataError(where, path=path, advice="fetch it again, or mend it") from error
                held += piece
                continue
            out.write(json.dumps(value) + "\n")
            held, number = held[end:], number + 1
    return target


# Separated fields.


def _fields(
    path: Path, form: CsvForm, kind: FileFormat, text: str, lines: list[str], scratch: Callable[[], Path]
) -> Recognised:
    file, notes, lists = TableFile(path, "csv"), list[str](), tuple[str, ...]()
    encoding = form.encoding or "utf-8"
    delimiter = form.delimiter or _delimiter(path, kind, form, lines)
    form = replace(form, delimiter=delimiter, encoding=None)
    known = _NAMES.get(path.name)
    if known and form.header and lines and _splits(lines[0], delimiter, form.quote) != list(known):
        count = len(_splits(lines[0], delimiter, form.quote))
        if count <= len(known) and (path.name != "behaviors.tsv" or count == len(known)):
            form = replace(form, header=False, names=known[:count])
            if path.suffix == ".tsv" or path.name == "u.data":
                form = replace(form, quote=_NO_QUOTE)
            notes.append(f"{path.name} has no line of names: its columns are {', '.join(form.names)}")
    escape = form.escape or _escape(text, delimiter, form.quote)
    if escape and form.escape is None:
        notes.append(f'{path.name} has quotes escaped by a backslash: \\" is read as one (--escape none: no)')
    if (form.header and format_of(path) is None and lines) and (
        any(_NUMBER.fullmatch(field) for field in _splits(lines[0], delimiter, form.quote))
    ):
        raise ConfigError(
            f"{path}: its first line holds numbers and no names, {lines[0][:60]!r}: name its columns by "
            "--no-header --columns NAME,NAME,...; those of a side table by --join 'FILE: NAME,NAME,...'"
        )
    plain = None
    if encoding.lower().replace("_", "-") not in ("utf-8", "utf8"):
        plain = _recoded(path, encoding, scratch)
    if escape in ("\\",):
        plain = _replaced(plain or path, scratch, rb'\\(["\\])', _unescaped)
    if len(delimiter) > 1:
        plain = _replaced(plain or path, scratch, re.escape(delimiter.encode()) + rb"|\t", _tabbed)
        form = replace(form, delimiter="\t", quote=_NO_QUOTE)
    form = replace(form, escape=None)
    if form.header and lines:
        names = [
            field.strip().lstrip("\ufeff")
            for field in _splits(lines[0], form.delimiter or delimiter, form.quote)
        ]
        typed = [_TYPED.fullmatch(name) for name in names]
        if names and all(typed):
            found = [(match[1], match[2]) for match in typed if match]
            form = replace(form, typed=True)
            lists = tuple(name for name, kind_ in found if kind_.endswith("_seq"))
    return Recognised(replace(file, plain=plain), form, lists, tuple(notes))


def _delimiter(path: Path, kind: FileFormat, form: CsvForm, lines: list[str]) -> str:
    """Return the delimiter of a file: its ending's if that splits its lines, else the one that does."""
    usual = "\t" if kind == "tsv" else ","
    if not lines or (usual in lines[0] and format_of(path) is not None):
        return usual
    counts = {
        delimiter: [len(_splits(line, delimiter, form.quote)) for line in lines] for delimiter in _DELIMITERS
    }
    same = [d for d, found in counts.items() if found[0] > 1 and found.count(found[0]) * 10 >= len(found) * 9]
    if same and (not form.names or any(counts[d][0] == len(form.names) for d in same)):
        fitting = [d for d in same if not form.names or counts[d][0] == len(form.names)]
        return max(fitting, key=lambda d: counts[d][0] if d != usual else counts[d][0] + 0.5)
    if format_of(path) is not None or len(form.names) == 1:
        return usual
    if all(found[0] == 1 for found in counts.values()):
        raise ConfigError(
            f"{path}: neither its ending nor its content shows its format: "
            f"name it by --format or --delimiter; its first line is {lines[0][:60]!r}"
        )
    several = ", ".join(repr(d) for d, found in counts.items() if found[0] > 1)
    raise ConfigError(
        f"{path}: its lines have different numbers of fields by any delimiter ({several}): "
        "name it by --delimiter"
    )


def _splits(line: str, delimiter: str, quote: str) -> list[str]:
    if len(delimiter) > 1:
        return line.split(delimiter)
    try:
        return next(csv.reader(io.StringIO(line), delimiter=delimiter, quotechar=quote), [])
    except csv.Error:
        return line.split(delimiter)


def _escape(text: str, delimiter: str, quote: str) -> str | None:
    """Return a backslash if quotes in quoted fields are escaped by it; at a field's end it may be text."""
    if quote != '"' or '\\"' not in text or len(delimiter) > 1:
        return None
    inner = re.search(rf'{re.escape(delimiter)}"[^"\r\n]*[^\\"]\\"[^"\r\n{re.escape(delimiter)}]', text)
    return "\\" if inner else None


# Translation of bytes.


def _reading(path: Path, encoding: str) -> io.TextIOWrapper:
    stream = pa.input_stream(str(path), compression="detect")
    return io.TextIOWrapper(stream, encoding=encoding, errors="strict", newline="")


def _recoded(path: Path, encoding: str, scratch: Callable[[], Path]) -> Path:
    target = scratch().with_suffix(path.suffix if path.suffix not in (".gz", ".zst") else ".txt")
    try:
        with _reading(path, encoding) as source, target.open("w", encoding="utf-8", newline="") as out:
            while piece := source.read(_BLOCK):
                out.write(piece)
    except UnicodeError as error:
        raise DataError(
            f"isn't text in {encoding}: {error}", path=path, advice="name another --encoding"
        ) from error
    return target


def _replaced(
    path: Path, scratch: Callable[[], Path], form: bytes, by: Callable[[re.Match[bytes]], bytes]
) -> Path:
    """Write a file with all matches of a form of two bytes replaced."""
    target, pattern = scratch().with_suffix(".txt"), re.compile(form)
    with target.open("wb") as out:
        for block in _whole_lines(path):
            out.write(pattern.sub(by, block))
    return target


def _whole_lines(path: Path) -> Iterator[bytes]:
    held = b""
    with pa.input_stream(str(path), compression="detect") as stream:
        while block := bytes(stream.read(_BLOCK)):
            cut = block.rfind(b"\n") + 1
            if cut:
                yield held + block[:cut]
                held = block[cut:]
            else:
                held += block
    if held:
        yield held


def _unescaped(match: re.Match[bytes]) -> bytes:
    return b'""' if match[1] == b'"' else b"\\"


def _tabbed(match: re.Match[bytes]) -> bytes:
    return b" " if match[0] == b"\t" else b"\t"


# A user and its items on each line.


def _pairs(path: Path, form: CsvForm, encoding: str, scratch: Callable[[], Path]) -> Recognised:
    target = scratch().with_suffix(".csv")
    with _reading(path, encoding) as source, target.open("w", encoding="utf-8", newline="") as out:
        out.write("user_id,item_id,position\n")
        position = 0
        for number, line in enumerate(source, start=1):
            user, *items = line.split() or [""]
            if user and not _LIST_LINE.fullmatch(line):
                raise DataError(
                    f"a line of lists is a user and its items, as whole numbers, got {line.strip()[:60]!r}",
                    path=path,
                    line=number,
                    advice="name another --format",
                )
            out.writelines(f"{user},{item},{place}\n" for place, item in enumerate(items, start=position))
            position += len(items)
    form = replace(form, delimiter=",", header=True, names=(), encoding=None, escape=None)
    note = f"{path.name} has a user and its items on each line: columns user_id, item_id and position"
    return Recognised(TableFile(path, "csv", plain=target, rows=True), form, (), (note,))
