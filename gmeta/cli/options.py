"""Options that several subcommands take, and those that describe a table, with the `TableSpec` they make."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.json_values import FILE_NAME as MANIFEST
from gmeta.core.schema import ON_BAD
from gmeta.preprocess.config import ENGINES
from gmeta.preprocess.shape_spec import Explode, Join, Shape
from gmeta.preprocess.table_spec import (
    FORMATS,
    GAPS,
    TEXTS_LIMIT,
    ColumnSpec,
    CsvForm,
    FormatName,
    TableSpec,
)

F = TypeVar("F", bound=Callable[..., object])

DATA = Path("data")
"""The default folder that `gmeta prepare` makes and `gmeta train` reads."""

RUN = Path("runs/default")
"""The default folder of a run."""

FAMILY = click.Choice(["cold-start", "ranking", "next-item", "retrieval"])
"""The values of ``--for``."""

run_option = click.option(
    "--run",
    "run_path",
    default=RUN,
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of the run.",
)

on_bad_option = click.option(
    "--on-bad",
    type=click.Choice(ON_BAD),
    default="raise",
    show_default=True,
    help="What a bad record or a task too small to split does: end the run, or be counted and left out.",
)

seen_option = click.option(
    "--seen/--no-seen",
    default=None,
    help="For next-item and retrieval, whether items of a history may be shown again.  [default: as the run "
    "was measured]",
)


def find_data(own: Path) -> Path:
    """Find the data set of a run: its own folder, or else the default one of `gmeta prepare`.

    Raises:
      DataError: Neither exists.
    """
    for folder in (own, DATA):
        if (folder / MANIFEST).exists():
            return folder
    raise DataError(
        f"no prepared data set, neither here nor in {DATA}",
        path=own,
        advice="run `gmeta prepare` first, or name one with --data",
    )


def refuse_options(context: click.Context, of_family: Mapping[str, Sequence[str]], family: str) -> None:
    """Refuse options that only runs of other families take.

    Args:
      context: The command's context.
      of_family: Family of runs -> the parameters that only some families take, this one among them.
      family: The family of the run.

    Raises:
      ConfigError: Such an option is given.
    """
    own = of_family.get(family, ())
    for name in dict.fromkeys(name for names in of_family.values() for name in names if name not in own):
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            flag = next(each.opts[-1] for each in context.command.params if each.name == name)
            others = " and ".join(other for other, names in of_family.items() if name in names)
            raise ConfigError(f"{flag} is for runs of {others}, and this is one of {family}: leave it out")


def engine_options(command: F) -> F:
    """Add the options of the engine: --engine, --job, --spark-master and --spark-conf."""
    for option in (
        click.option(
            "--spark-conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark; may be repeated."
        ),
        click.option(
            "--spark-master", help="With --engine spark: such as local[4].  [default: spark-submit's]"
        ),
        click.option(
            "--job",
            type=click.Path(path_type=Path),
            help="With --engine streaming: the folder to make for the jobs, on a file system that all "
            "machines see.",
        ),
        click.option(
            "--engine",
            type=click.Choice(ENGINES),
            default=ENGINES[0],
            show_default=True,
            help="What does the work: this process, Spark, or jobs of Hadoop Streaming; to the same bytes.",
        ),
    ):
        command = option(command)
    return command


_OPTIONS = (
    click.option(
        "--spec", "spec_file", type=click.Path(path_type=Path), help="TOML file that describes columns."
    ),
    click.option("--task", help="Column of the tasks; with or without --spec."),
    click.option("--time", help="Column that orders a task's rows."),
    click.option(
        "--label",
        help="Column to predict, or a rule: 'rating >= 4' is 1 or 0; 'event: buy=1, *=0' has a number for "
        "each value; '*=1' makes every row a positive.",
    ),
    click.option(
        "--unique", multiple=True, help="Column whose values may not repeat in a task, such as the item."
    ),
    click.option(
        "--format",
        "file_format",
        type=click.Choice(FORMATS),
        help="The files' format.  [default: by content]",
    ),
    click.option(
        "--delimiter", help="What separates fields, such as ';', '\\t' or '::'.  [default: by content]"
    ),
    click.option("--header/--no-header", default=None, help="Whether the first line names the columns."),
    click.option(
        "--columns",
        help="With --no-header the names of the columns, else the columns to store: a,b,c or I1..I13.",
    ),
    click.option("--encoding", help="The text's encoding, such as latin-1.  [default: utf-8]"),
    click.option("--quote", help="What encloses a field, or none.  [default: a double quote]"),
    click.option("--escape", help="What stands before a quote in a field.  [default: by content]"),
    click.option("--null", multiple=True, help="A text that stands for a missing value; may be repeated."),
    click.option(
        "--time-format",
        help="Form of the times, such as '%m/%d/%Y %I:%M:%S %p', or seconds, milliseconds, …",
    ),
    click.option(
        "--default",
        "defaults",
        multiple=True,
        metavar="VALUE|COLUMN=VALUE",
        help="What stands for a missing value: a number, a text, or own, for a value of its own; may be "
        "repeated.",
    ),
    click.option(
        "--list",
        "lists",
        multiple=True,
        metavar="COLUMN[=SEPARATOR]",
        help="A column of text with several values, between spaces or the separator; may be repeated.",
    ),
    click.option(
        "--explode", help="'COLUMN: item-click' makes a row of each element, such as N1-0, of a list."
    ),
    click.option("--explode-separator", help="What separates the elements of a text.  [default: spaces]"),
    click.option(
        "--join",
        "joins",
        multiple=True,
        help="Side table, FILE or, without a line of names, FILE:a,b,c; may be repeated, each with its --on.",
    ),
    click.option("--on", multiple=True, help="Key of a --join: a column, or OWN=OTHER for two names."),
    click.option("--where", help="Condition in SQL, such as 'rating >= 3'; other rows are left out."),
    click.option("--distinct", help="Columns of which each combination is kept once: 'user,item'."),
    click.option(
        "--core",
        multiple=True,
        metavar="COLUMN=K",
        help="Leave out values with fewer than K rows; may be repeated.",
    ),
    click.option(
        "--session-gap", help="Cut a task into sessions where a time such as 30m passes; they are the tasks."
    ),
    click.option(
        "--title",
        "titles",
        multiple=True,
        metavar="COLUMN=TITLE",
        help="The column that names a column's ids, such as movieId=title; may be repeated.  [default: by "
        "the columns' names]",
    ),
    click.option(
        "--texts/--no-texts",
        default=None,
        help="Whether to keep the texts behind hashes, and titles, for reports and exports.  [default: "
        "texts]",
    ),
    click.option(
        "--texts-limit",
        metavar="SIZE",
        help="The most texts of a column, such as 200MB; a column with more keeps none.  [default: 64MB]",
    ),
)


def spec_options(command: F) -> F:
    """Add the options that describe a table."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_FORM = ("file_format", "delimiter", "header", "columns", "encoding", "quote", "escape", "null")


def form_options(command: F) -> F:
    """Add the options that describe the form of files alone."""
    for option in reversed(_OPTIONS):
        own = click.command("spec")(option(lambda: None)).params[0]
        if own.name in _FORM:
            command = option(command)
    return command


def form_of(settings: dict[str, Any]) -> tuple[FormatName | None, CsvForm]:
    """Remove the options of `form_options` from ``settings``; return the format and form that they give.

    Raises:
      ConfigError: Options contradict each other.
    """
    given = {name: settings.pop(name) for name in _FORM}
    given = {name: value for name, value in given.items() if value not in (None, (), "")}
    if "columns" in given and given.get("header") is not False:
        raise ConfigError("--columns names the columns of a file without them: add --no-header")
    return given.get("file_format"), _form(CsvForm(), given)


_NAMES = [each.name or "" for each in click.command("spec")(spec_options(lambda: None)).params]
"""What the options are called in the settings of a command."""


def spec_of(settings: dict[str, Any]) -> TableSpec | None:
    """Make a table's spec from its file and the options, which override it and are removed from ``settings``.

    Raises:
      ConfigError: Options contradict each other, or are invalid.
    """
    own = {name: settings.pop(name) for name in _NAMES}
    path = own.pop("spec_file")
    given = {name: value for name, value in own.items() if value not in (None, (), "")}
    if path is None and not given:
        return None
    spec = TableSpec() if path is None else TableSpec.load(path)
    if "task" in given:
        spec = replace(spec, task=given["task"], blocks=0)
    spec = replace(spec, **{name: given[name] for name in ("time", "unique") if name in given})
    if spec.blocks and spec.unique:
        raise ConfigError("--unique is of a task: name its --task too")
    if "file_format" in given:
        spec = replace(spec, format=given["file_format"])
    spec = replace(spec, csv=_form(spec.csv, given))
    columns: dict[str, ColumnSpec] = {}
    if "label" in given:
        label, rule = parse_label(given["label"])
        spec = replace(spec, label=label)
        columns |= {label: rule} if rule != ColumnSpec() else {}
    if "time_format" in given:
        if spec.time is None:
            raise ConfigError("--time-format is of the time: name its column with --time")
        columns[spec.time] = ColumnSpec(format=given["time_format"])
    for text in given.get("lists", ()):
        name, _, separator = text.partition("=")
        columns[name] = ColumnSpec(is_list=True, separator=separator or " ")
    general, own_defaults = parse_defaults(given.get("defaults", ()))
    columns |= {name: replace(columns.get(name, ColumnSpec()), **one) for name, one in own_defaults.items()}
    stored = parse_columns(given["columns"]) if "columns" in given and spec.csv.header else ()
    columns = {**dict.fromkeys(stored, ColumnSpec()), **columns}
    merged = {name: _merge(spec.columns.get(name, ColumnSpec()), column) for name, column in columns.items()}
    rest = spec.is_open and not stored
    shape = _shape(spec.shape, given)
    if given.get("texts") is False and "texts_limit" in given:
        raise ConfigError(
            "--no-texts keeps no text, and --texts-limit is of those that are kept: leave one out"
        )
    if given.get("texts") is False:
        spec = replace(spec, texts_limit=0)
    elif "texts_limit" in given:
        spec = replace(spec, texts_limit=given["texts_limit"])
    elif given.get("texts"):
        spec = replace(spec, texts_limit=spec.texts_limit or TEXTS_LIMIT)
    if "titles" in given:
        spec = replace(spec, titles={**(spec.titles or {}), **_titles(given["titles"])})
    return replace(
        spec,
        columns={**spec.columns, **merged},
        rest=bool(rest and (merged or spec.rest)),
        defaults=general or spec.defaults,
        shape=shape,
    )


def _titles(texts: Sequence[str]) -> dict[str, str]:
    """Parse texts ``COLUMN=TITLE``: column -> the column of its titles."""
    found = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not (name.strip() and equals and source.strip()):
            raise ConfigError(f"--title {text!r}: write it as COLUMN=TITLE, such as movieId=title")
        found[name.strip()] = source.strip()
    return found


def _merge(before: ColumnSpec, own: ColumnSpec) -> ColumnSpec:
    """Return ``before`` with the settings of ``own`` that aren't the defaults."""
    plain = ColumnSpec()
    names = ("source", "dtype", "is_list", "separator", "default", "gaps", "values", "positive", "format")
    return replace(before, **{n: getattr(own, n) for n in names if getattr(own, n) != getattr(plain, n)})


def _form(form: CsvForm, given: Mapping[str, Any]) -> CsvForm:
    changes = {name: given[name] for name in ("delimiter", "encoding", "escape", "null") if name in given}
    if "quote" in given:
        changes["quote"] = given["quote"] if given["quote"] != "none" else ""
    if "delimiter" in changes:
        changes["delimiter"] = changes["delimiter"].replace("\\t", "\t")
    if given.get("header") is False:
        if "columns" not in given and not form.names:
            raise ConfigError("--no-header needs the names of the columns: --columns a,b,c or I1..I13")
        names = parse_columns(given["columns"]) if "columns" in given else form.names
        changes |= {"header": False, "names": names}
    elif given.get("header"):
        changes |= {"header": True, "names": ()}
    return replace(form, **changes)


_RULE = re.compile(r"(.+?)\s*(>=|<=|==|!=|>|<)\s*([^<>=!]+)")
_VALUES = re.compile(r"(?:([^:]+?)\s*:\s*)?([^:=]+=[^=]+)")


def parse_label(text: str) -> tuple[str, ColumnSpec]:
    """Parse the column of a label and its rule.

    Example:
      >>> parse_label("rating >= 4")[1].positive
      '>= 4'
      >>> dict(parse_label("event: buy=1, *=0")[1].values)
      {'buy': 1.0, '*': 0.0}
      >>> parse_label("*=1")[0]
      'label'
    """
    name, separated, rule = text.partition(":")
    if (separated and "=" in rule) or text.replace(" ", "").startswith("*="):
        name, rule = (name.strip(), rule) if separated else ("label", text)
        values: dict[str, float] = {}
        for pair in rule.split(","):
            value, equals, number = pair.rpartition("=")
            try:
                values[value.strip()] = float(number)
            except ValueError:
                equals = ""
            if not equals or not value.strip():
                raise ConfigError(f"--label {text!r}: {pair.strip()!r} isn't VALUE=NUMBER")
        return name, ColumnSpec(values=values)
    if found := _RULE.fullmatch(text.strip()):
        return found[1], ColumnSpec(positive=f"{found[2]} {found[3].strip()}")
    return text, ColumnSpec()


def parse_columns(text: str) -> tuple[str, ...]:
    """Return the names of a list in which ``I1..I3`` stands for ``I1,I2,I3``.

    Example:
      >>> parse_columns("label,I1..I3")
      ('label', 'I1', 'I2', 'I3')
    """
    names: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(.*?)(\d+)\.\.\1(\d+)", part.strip())
        names += (
            [f"{found[1]}{number}" for number in range(int(found[2]), int(found[3]) + 1)]
            if found
            else [part.strip()]
        )
    if twice := sorted(name for name in set(names) if names.count(name) > 1 or not name):
        raise ConfigError(
            f"--columns {text}: column {twice[0]!r} " + ("is there twice" if twice[0] else "has no name")
        )
    return tuple(names)


def parse_defaults(texts: Sequence[str]) -> tuple[tuple[float | str, ...], dict[str, dict[str, Any]]]:
    """Return the values for gaps in all columns, and in single ones: name -> settings of its `ColumnSpec`."""
    general: list[float | str] = []
    own: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        number = _number(value)
        if not equals:
            general.append(number)
        else:
            own[name] = {"gaps": True} if value == GAPS else {"default": number}
    return tuple(general), own


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _join(text: str, key: str) -> Join:
    """Parse a side table: ``FILE``, or ``FILE:a,b,c`` if the file has no line of names."""
    file, colon, names = text.rpartition(":")
    return Join(text, key) if not colon or Path(text).exists() else Join(file, key, parse_columns(names))


def _shape(shape: Shape, given: Mapping[str, Any]) -> Shape:
    joins, on = given.get("joins", ()), given.get("on", ())
    if len(joins) != len(on):
        raise ConfigError(
            f"--join {len(joins)} times and --on {len(on)} times: name the key of each side table"
        )
    changes: dict[str, Any] = {name: given[name] for name in ("where", "session_gap") if name in given}
    if joins:
        changes["joins"] = (*shape.joins, *(_join(file, key) for file, key in zip(joins, on, strict=True)))
    if "distinct" in given:
        changes["distinct"] = parse_columns(given["distinct"])
    if "explode" in given:
        column, colon, into = given["explode"].partition(":")
        if not colon:
            raise ConfigError(f"--explode {given['explode']!r}: write it as 'COLUMN: item-click'")
        changes["explode"] = Explode(column.strip(), into.strip(), given.get("explode_separator"))
    if "core" in given:
        pairs = [one.rpartition("=") for text in given["core"] for one in text.split(",")]
        if wrong := [
            name + equals + least for name, equals, least in pairs if not name or not least.isdigit()
        ]:
            raise ConfigError(f"--core {wrong[0]!r}: write it as COLUMN=K")
        changes["core"] = {name.strip(): int(least) for name, _, least in pairs}
    return replace(shape, **changes)
