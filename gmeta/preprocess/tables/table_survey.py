"""Decides the settings that a spec leaves open, from the names and values of all files of a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from gmeta.core.errors import ConfigError
from gmeta.preprocess.plan.column_types import Doubt, Example, Findings, Seen, decide
from gmeta.preprocess.table_spec import ColumnSpec, Role, TableSpec, check_names, is_list
from gmeta.preprocess.tables.table_scan import Scan

MAX_COLUMNS = 1 << 16
REWRITTEN = Example("numbers with a point or an exponent", Seen.POINT)
"""The numbers that a reader of JSON rewrites."""
_NUMBERED = re.compile(r"__index_level_\d+__|Unnamed: \d+")
"""The names that pandas gives to a column without one, most often the number of a row."""

Show = Callable[[str, Role, ColumnSpec, Example], "str | None"]


class Wanted(NamedTuple):
    """A column whose type is open."""

    name: str
    source: str
    role: Role
    column: ColumnSpec


class Names(NamedTuple):
    """The columns of a table.

    Attributes:
      all: Those with a name, in an order that doesn't depend on the files' order.
      nameless: Descriptions of those without a name.
    """

    all: tuple[str, ...]
    nameless: tuple[str, ...]


def merge_names(headers: Iterable[Sequence[str]]) -> Names:
    """Return the columns of several headers: those of the longest one, then all others by name.

    Raises:
      ConfigError: Two names can't be distinguished, or there are too many.
    """
    ordered = sorted({tuple(header) for header in headers}, key=lambda header: (-len(header), header))
    longest = ordered[0] if ordered else ()
    others = {name for header in ordered[1:] for name in header}
    names = [name for name in dict.fromkeys((*longest, *sorted(others))) if name]
    if len(names) > MAX_COLUMNS:
        raise ConfigError(f"there are {len(names):,} columns, and at most {MAX_COLUMNS:,} can be stored")
    check_names(names, "the table has")
    nameless = [
        f"column {place + 1}, which has no name"
        for header in ordered
        for place, name in enumerate(header)
        if not name
    ]
    return Names(tuple(names), tuple(dict.fromkeys(nameless)))


def resolve_spec(scans: Sequence[Scan], spec: TableSpec) -> TableSpec:
    """Decide everything that a spec leaves open, from all values of all files.

    Args:
      scans: The files.
      spec: The description of the columns.

    Returns:
      What `TableSpec.resolve` returns for the types that the values decide.

    Raises:
      ConfigError: The spec doesn't fit, or values don't decide the type of a column.
      DataError: A file can't be read.
    """
    scans = sorted(scans, key=lambda scan: str(scan.file.path))
    headers = [(scan, scan.headers()) for scan in scans]
    names = merge_names(header for _, found in headers for header in found)
    spec = described(spec, [scan.file.columns for scan in scans])
    wanted = open_columns(spec, names, lists=any(scan.file.format == "json" for scan in scans))
    read = {one.source for one in wanted} | {column.source or name for name, column in spec.columns.items()}
    found: dict[str, Findings] = {}
    for scan in scans:
        scan.refuse_unpacked(read)
        # A column that is the time, and a feature too, is surveyed as the time.
        probes = {
            one.source: scan.probe(one.source, one.role, one.column)
            for one in sorted(wanted, key=lambda one: one.role == "time")
            if scan.has(one.source) and not scan.is_empty(one.source)
        }
        if probes:
            for source, own in scan.survey([*probes.values()]).items():
                if scan.file.format == "json" and is_rewritten(probes[source].column, own):
                    raise rewritten(source, scan.find(probes[source], REWRITTEN))
                found[source] = found[source].merge(own) if source in found else own

    if spec.is_open:
        _refuse_absent(
            scans, [one for one in wanted if one.source in found and found[one.source].kinds], spec
        )

    def show(source: str, role: Role, column: ColumnSpec, example: Example) -> str | None:
        shown = (
            scan.find(scan.probe(source, role, column), example)
            for scan in scans
            if scan.has(source) and not scan.is_empty(source)
        )
        return next(filter(None, shown), None)

    known = {name: _stored_type(scans, name) for name in names.all}
    return decide_spec(spec, names, known, wanted, found, show)


def described(spec: TableSpec, given: Iterable[Mapping[str, ColumnSpec]]) -> TableSpec:
    """Return the spec with the files' own descriptions of the columns that it doesn't describe."""
    found = {name: column for columns in given for name, column in columns.items()}
    wanted = {n: c for n, c in found.items() if n not in spec.roles and (spec.is_open or n in spec.columns)}
    wanted = {n: c for n, c in wanted.items() if spec.columns.get(n, ColumnSpec()) == ColumnSpec()}
    return replace(spec, columns={**spec.columns, **wanted}, rest=spec.is_open) if wanted else spec


def open_columns(spec: TableSpec, names: Names, *, lists: bool = False) -> list[Wanted]:
    """Return the columns whose types the values decide.

    Args:
      spec: The description of the columns.
      names: The table's columns.
      lists: Whether only values show which columns hold lists.
    """
    used = {spec.batch, *(column.source for column in spec.columns.values())}
    inferred = [n for n in names.all if n not in used and not _NUMBERED.fullmatch(n)] if spec.is_open else ()
    wanted = []
    for name in dict.fromkeys((*spec.roles, *spec.columns, *inferred)):
        column = spec.columns.get(name, ColumnSpec())
        role = spec.role_of(name)
        if spec.blocks and name == spec.task:
            continue
        is_open = (column.dtype is None or role == "time") and not (column.hash or column.format)
        if is_open or (lists and column.is_list is None):
            wanted.append(Wanted(name, column.source or name, role, column))
    return wanted


def is_rewritten(column: ColumnSpec, found: Findings) -> bool:
    """Return whether a JSON column has numbers that the JSON reader rounds before they are hashed."""
    return column.hash and bool(found.plain & REWRITTEN.kinds)


def rewritten(source: str, shown: str | None) -> ConfigError:
    """Return the error for a column for which `is_rewritten` is true."""
    return ConfigError(
        f"column {source!r} has hash = true, and holds numbers with a point or an exponent such as {shown}, "
        "of which two may have one hash, and one two: write ids as text or digits"
    )


def _refuse_absent(scans: Sequence[Scan], wanted: Sequence[Wanted], spec: TableSpec) -> None:
    """Refuse a table if one of its files lacks a column that the spec doesn't name."""
    for one in wanted:
        lacking = [scan for scan in scans if not scan.has(one.source)]
        if lacking and len(lacking) < len(scans) and one.name not in spec.roles:
            there = next(scan for scan in scans if scan.has(one.source))
            raise ConfigError(
                f"column {one.name!r} is in {there.file.path}, and not in {lacking[0].file.path}: name in "
                "--spec the columns to store, with a default for it, or without it"
            )


def _stored_type(scans: Sequence[Scan], name: str) -> pa.DataType:
    kind = next(scan.type_of(name) for scan in scans if scan.has(name))
    return pa.string() if isinstance(kind, str) else kind


def decide_spec(
    spec: TableSpec,
    names: Names,
    known: Mapping[str, pa.DataType],
    wanted: Sequence[Wanted],
    found: Mapping[str, Findings],
    show: Show,
) -> TableSpec:
    """Decide the settings that a spec leaves open from the survey of the values.

    Args:
      spec: The description of the columns.
      names: The table's columns.
      known: Column -> its type, if no value decides it.
      wanted: What `open_columns` returned.
      found: Column -> the kinds of its values.
      show: Finds a value of some kinds, with its place.

    Raises:
      ConfigError: The spec doesn't fit, or values don't decide the type of a column.
    """
    types, doubts, decided = dict(known), list[str](), list[_Note]()
    there = set(names.all)
    for one in wanted:
        if one.source not in there:
            continue
        own = found.get(one.source, Findings())
        kind = _decide(one, own, types[one.source])
        if isinstance(kind, Doubt):
            doubts.append(_describe(one, kind, show))
            continue
        without_values = kind in (pa.null(), pa.list_(pa.null()))
        if without_values and one.name in spec.columns and is_list(types[one.source]):
            kind = types[one.source]  # all lists are empty, and a Parquet file declares their type
        types[one.source] = kind
        if one.role in ("feature", "task"):
            decided += _notes(one, own, kind, one.name in spec.columns, show)
    if doubts:
        raise ConfigError("; ".join(doubts))
    notes = _together(decided)
    if spec.is_open:
        named = {*spec.roles, *spec.sources.values()}
        numbered = [name for name in names.all if _NUMBERED.fullmatch(name) and name not in named]
        notes += [
            f"column {name!r}, which pandas made of a column without a name: left out" for name in numbered
        ]
        types |= dict.fromkeys(numbered, pa.null())
    resolved = spec.resolve(pa.schema([(name, types[name]) for name in names.all]))
    return replace(resolved, unused=(*names.nameless, *resolved.unused), notes=tuple(notes))


def _decide(one: Wanted, found: Findings, known: pa.DataType) -> pa.DataType | Doubt:
    column = one.column
    if one.role != "time" and (column.dtype is not None or column.hash):  # search only for lists
        if Seen.LIST not in found.kinds:
            return known
        if found.kinds == Seen.LIST:
            return pa.list_(pa.string())
        # With a dtype, values of another form are bad; a hash would take the text of a list.
        return decide(found, one.role) if column.hash else known
    if column.dtype is not None and found.kinds & (Seen.LIST | Seen.OTHER):
        return known  # such records are bad
    kind = decide(found, one.role, column.dtype)
    if isinstance(kind, Doubt):
        return kind
    if pa.types.is_struct(kind) and not pa.types.is_string(known):
        return known
    return kind


def _describe(one: Wanted, doubt: Doubt, show: Show) -> str:
    role = {"time": ", the time,", "label": ", the label,", "task": ", the task,"}.get(one.role, "")
    found = []
    for example in doubt.examples:
        shown = show(one.source, one.role, one.column, example)
        found.append(f"{example.words} such as {shown}" if shown else example.words)
    words = ", ".join(found[:-1]) + " and " * (len(found) > 1) + found[-1]
    return f"column {one.name!r}{role} holds {words}: {doubt.advice}"


class _Note(NamedTuple):
    """A note for the user on a type that the values have decided.

    Attributes:
      column: The column.
      what: The decision, in words that notes on other columns share.
      why: The value that decided it.
    """

    column: str
    what: str
    why: str = ""


def _notes(one: Wanted, found: Findings, kind: pa.DataType, named: bool, show: Show) -> Iterator[_Note]:
    def example(kinds: Seen) -> str:
        return show(one.source, one.role, one.column, Example("", kinds)) or ""

    plain, text = found.plain, Seen.TEXT | Seen.PADDED
    if pa.types.is_null(kind) and not named:
        yield _Note(one.name, "no value: left out")
    elif pa.types.is_string(kind) and plain & (Seen.WHOLE | Seen.BIG) and plain & text:
        yield _Note(one.name, "text", f", because of {example(text)} among whole numbers")
    elif pa.types.is_string(kind) and Seen.BIG in plain:
        yield _Note(one.name, "text", f", because no int64 holds {example(Seen.BIG)}")
    elif pa.types.is_integer(kind) and Seen.ROUND in plain:
        yield _Note(one.name, "whole numbers", f" such as {example(Seen.ROUND)}: stored as int64")


_MOST_NOTES = 3
"""The most notes of a kind that stand alone; more are joined to one."""


def _together(notes: Sequence[_Note]) -> list[str]:
    """Return the notes as sentences; one sentence may be about many columns."""
    verbs = {"no value: left out": ("has", "have"), "text": ("is", "are"), "whole numbers": ("holds", "hold")}
    found = []
    for what in dict.fromkeys(note.what for note in notes):
        own, (one, many) = [note for note in notes if note.what == what], verbs[what]
        if len(own) <= _MOST_NOTES:
            found += [f"column {note.column!r} {one} {what}{note.why}" for note in own]
            continue
        names = ", ".join(repr(note.column) for note in own[:_MOST_NOTES])
        example = f"; for {own[0].column!r}, {own[0].why.lstrip(', ')}" if own[0].why else ""
        found.append(f"columns {names} and {len(own) - _MOST_NOTES} more {many} {what}{example}")
    return found
