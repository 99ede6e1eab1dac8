"""Options of ``gmeta prepare`` that describe a table, and the spec that they make."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from gmeta.core.errors import ConfigError
from gmeta.preprocess.table_shape import BLOCK, Join, LabelRule, pairs, parse_explode, parse_gap
from gmeta.preprocess.table_spec import ColumnSpec, CsvForm, FileFormat, TableSpec

F = TypeVar("F", bound=Callable[..., object])

_RANGE = re.compile(r"(.*?)(\d+)(?:\.\.|-)(.*?)(\d+)")
_OPTIONS = (
    click.option("--task", help="Column of the tasks, such as the user; with or without --spec."),
    click.option("--time", help="Column that orders a task's rows."),
    click.option(
        "--label",
        help="Column to predict; or its values, 'event: buy=1, *=0'; a threshold, 'rating >= 4'; or '*=1', "
        "the same for every row.",
    ),
    click.option(
        "--unique", multiple=True, help="Column whose values may not repeat in a task, such as the item."
    ),
    click.option(
        "--format",
        "format_",
        type=click.Choice(get_args(FileFormat)),
        help="How the files are written.  [default: by their content]",
    ),
    click.option("--delimiter", help="What separates fields, such as ';', '::' or tab."),
    click.option("--no-header", is_flag=True, help="The first line holds values; --columns names them."),
    click.option(
        "--columns",
        help="Columns to store, such as user,item,ts; with --no-header the names of all, C1..C26 for many.",
    ),
    click.option("--encoding", help="Encoding of text, such as latin-1.  [default: UTF-8]"),
    click.option(
        "--escape",
        type=click.Choice(["\\", "none"]),
        help="Whether a backslash stands before quotes in fields.  [default: by the content]",
    ),
    click.option(
        "--null", multiple=True, help="Text that stands for no value, such as \\N; may be repeated."
    ),
    click.option(
        "--time-format",
        multiple=True,
        help="Format of the times, such as '%m/%d/%Y %I:%M:%S %p'; or s, ms, us, ns for numbers since 1970, "
        "also with fractions. COLUMN=FORMAT for another column.",
    ),
    click.option(
        "--default",
        "defaults",
        multiple=True,
        help="Value in place of none: of all features, or NAME=VALUE of one; may be repeated.",
    ),
    click.option(
        "--list",
        "lists",
        multiple=True,
        metavar="NAME=SEPARATOR",
        help="Column of text that holds a list, such as 'genres=|'; may be repeated.",
    ),
    click.option(
        "--explode",
        help="Column of lists whose values become rows; 'shown: item-click' cuts values such as N1-0 in two.",
    ),
    click.option(
        "--join",
        multiple=True,
        help="File of a side table, whose columns rows get by --on; 'FILE: NAME,NAME' if it names none; "
        "may be repeated.",
    ),
    click.option(
        "--on", multiple=True, help="Column that names a row of the --join before; NAME=NAME if they differ."
    ),
    click.option("--where", help="Condition on rows that are kept, in SQL, such as 'price > 0'."),
    click.option("--distinct", help="Columns of which equal values are kept once, the earliest; '*': all."),
    click.option(
        "--core", help="Fewest rows of each value, after all are cut, such as 'user=5, item=5' for a 5-core."
    ),
    click.option(
        "--sessions",
        help="'user: 30m' numbers sessions without such a gap in a column 'session', for --task session.",
    ),
)


def table_options(command: F) -> F:
    """Add the options that describe a table."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def table_spec(settings: dict[str, Any]) -> TableSpec | None:
    """Make a table's spec of its file and the options, which override it and leave ``settings``.

    Returns:
      The spec; None if neither a file nor an option is given.

    Raises:
      ConfigError: Options contradict each other, or the file is wrong.
    """
    path: Path | None = settings.pop("spec_file")
    own = {name: settings.pop(name) for name in ("task", "time", "label", "unique")}
    own["format"] = settings.pop("format_")
    defaults = _defaults(settings.pop("defaults"))
    form, stored = _form(settings)
    rule = LabelRule.parse(own["label"]) if own["label"] else None
    if rule is not None:
        own["label"] = rule.name
    base = None if path is None else TableSpec.load(path)
    time = own["time"] or (None if base is None else base.time)
    shape = _shape(settings, time) | ({} if rule is None else {"label": rule})
    own = {name: value for name, value in own.items() if value}
    options = [*own, *form, *shape, *(["columns"] if stored else []), *(["default"] if defaults else [])]
    if base is None and not options:
        return None
    if base is None and "task" not in own:
        if "label" not in own:
            raise ConfigError(
                f"--{options[0].replace('_', '-')} is of a table: name its --task too, or its --label "
                "for rows without a user"
            )
        own["task"], shape["blocks"] = BLOCK, True
    spec = TableSpec(**own) if base is None else replace(base, **own)
    if form:
        spec = replace(spec, csv=replace(spec.csv, **form))
    if stored:
        spec = replace(spec, columns={name: spec.columns.get(name, ColumnSpec()) for name in stored})
    if defaults:
        spec = replace(spec, defaults={**spec.defaults, **defaults})
    return replace(spec, shape=replace(spec.shape, **shape)) if shape else spec


def _shape(settings: dict[str, Any], time: str | None) -> dict[str, Any]:
    """Return the settings of `TableShape` that the options name."""
    given: dict[str, Any] = {"null": settings.pop("null"), "where": settings.pop("where")}
    files, keys = settings.pop("join"), settings.pop("on")
    if len(files) != len(keys):
        raise ConfigError(f"--join and --on go together: got {len(files)} files and {len(keys)} columns")
    given["joins"] = tuple(
        _join(file, on, key or None)
        for file, (on, _, key) in zip(files, (key.partition("=") for key in keys), strict=True)
    )
    times = {}
    for text in settings.pop("time_format"):
        column, equals, form = text.partition("=")
        if not equals or not column.isidentifier():
            column, form = time, text
        if column is None:
            raise ConfigError(f"--time-format {text}: name the column of times by --time")
        times[column] = form
    given["times"] = times
    lists = [text.partition("=") for text in settings.pop("lists")]
    if wrong := [name for name, _, separator in lists if not separator]:
        raise ConfigError(f"--list {wrong[0]}: write it as NAME=SEPARATOR, such as 'genres=|'")
    given["lists"] = {name: separator for name, _, separator in lists}
    if (text := settings.pop("explode")) is not None:
        given["explode"], given["parts"], given["between"] = parse_explode(text)
    if (text := settings.pop("distinct")) is not None:
        given["distinct"] = tuple(name.strip() for name in text.split(","))
    if (text := settings.pop("sessions")) is not None:
        given["session"], given["gap"] = parse_gap(text)
    if (text := settings.pop("core")) is not None:
        core = pairs(text, "--core")
        if wrong := [least for least in core.values() if not least.isdecimal()]:
            raise ConfigError(f"--core: write COLUMN=NUMBER, COLUMN=NUMBER, got {wrong[0]!r}")
        given["core"] = {name: int(least) for name, least in core.items()}
    return {name: value for name, value in given.items() if value}


def _join(file: str, on: str, key: str | None) -> Join:
    path, colon, names = file.partition(": ")
    return Join(path, on, key, tuple(_names(names)) if colon else ())


def _defaults(given: Sequence[str]) -> dict[str, float | str]:
    """Return column -> default, with ``"*"`` for all features."""
    found: dict[str, float | str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name, value = (name, value) if equals else ("*", text)
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = value
    return found


def _form(settings: dict[str, Any]) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the settings of `CsvForm` that the options name, and the columns to store."""
    given = {name: settings.pop(name) for name in ("delimiter", "encoding", "escape")}
    form = {name: value for name, value in given.items() if value is not None}
    if "delimiter" in form:
        form["delimiter"] = {"tab": "\t", "\\t": "\t", "space": " "}.get(form["delimiter"], form["delimiter"])
    columns, headless = settings.pop("columns"), settings.pop("no_header")
    names = [] if columns is None else _names(columns)
    if headless and not names:
        raise ConfigError("--no-header: name the columns by --columns NAME,NAME,...")
    if headless:
        CsvForm(header=False, names=tuple(names))
        return {**form, "header": False, "names": tuple(names)}, []
    return form, names


def _names(columns: str) -> list[str]:
    """Return the names of a list with commas, of which ``C1..C26`` is a range."""
    names = []
    for name in (part.strip() for part in columns.split(",")):
        found = _RANGE.fullmatch(name)
        if found and found[1] == found[3] and found[1] and int(found[2]) <= int(found[4]):
            width = len(found[2]) if found[2].startswith("0") else 1
            names += [f"{found[1]}{number:0{width}}" for number in range(int(found[2]), int(found[4]) + 1)]
        elif name:
            names.append(name)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--columns names {twice[0]!r} twice")
    return names
