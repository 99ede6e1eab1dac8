"""Options of ``gmeta prepare`` that describe a table, and the spec that they make."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from gmeta.core.errors import ConfigError
from gmeta.preprocess.table_spec import ColumnSpec, CsvForm, FileFormat, TableSpec

F = TypeVar("F", bound=Callable[..., object])

_RANGE = re.compile(r"(.*?)(\d+)(?:\.\.|-)(.*?)(\d+)")
_OPTIONS = (
    click.option("--task", help="Column of the tasks, such as the user; with or without --spec."),
    click.option("--time", help="Column that orders a task's rows."),
    click.option("--label", help="Column to predict."),
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
    form, stored = _form(settings)
    own = {name: value for name, value in own.items() if value}
    if path is not None:
        spec = replace(TableSpec.load(path), **own)
    elif not own and not form and not stored:
        return None
    elif "task" not in own:
        option = next(iter([*own, *form, *(["columns"] if stored else [])]))
        raise ConfigError(f"--{option} is of a table: name its --task too")
    else:
        spec = TableSpec(**own)
    if form:
        spec = replace(spec, csv=replace(spec.csv, **form))
    if stored:
        spec = replace(spec, columns={name: spec.columns.get(name, ColumnSpec()) for name in stored})
    return spec


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
