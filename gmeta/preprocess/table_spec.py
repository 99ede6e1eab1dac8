"""The description of a table's columns: which one is the task, which one the time, and how each is stored."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa

from gmeta.core.errors import ConfigError
from gmeta.core.schema import Column, DType, Schema
from gmeta.core.settings import load_toml, parse_size
from gmeta.preprocess.shape_spec import Shape

_EXACT = 2.0**53
_MOST_FLOAT32 = 3.4028234663852886e38
Role = Literal["feature", "task", "time", "label"]
"""The role of a column."""

FormatName = Literal["csv", "tsv", "json", "parquet", "python", "lists"]
"""A format: separated fields, JSON lines or an array, Parquet, lines of Python's dictionaries, or lines of a
user and their items, as in LightGCN."""
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
BLOCK = "block"
"""The column that stands for the task where rows have none."""
BLOCKS = 1024
TEXTS_LIMIT = 64_000_000
"""The default of `TableSpec.texts_limit`."""
RESERVED = "_gmeta_"
"""The prefix of the names of columns that engines add to rows."""


@dataclass(frozen=True)
class ColumnSpec:
    """A column that is stored.

    Attributes:
      source: The column of the table that it is read from. None: the column with the same name.
      dtype: ``"int64"`` or ``"float32"``. None: by the source's type, float32 for floats and the label, int64
        for whole numbers, booleans (0 and 1), dates and times (microseconds since 1970, UTC).
      is_list: Whether a row holds any number of values. None: as in the source; text files hold single values
        unless this says otherwise.
      hash: Store the low 64 bits of the MD5 of the text, as a signed number, for ids that are text. This is
        the default for every text column that has no ``dtype`` and is neither the time nor the label.
        Python's hashlib, DuckDB (``md5_number_lower``) and Spark all compute it, so ids agree wherever they
        are hashed, including when serving; a hash that only one of them knows would tie the data to it. Among
        a million ids, two collide with a probability of 3e-8.
      min: The smallest value that is in range; None: any.
      max: The largest value that is in range; None: any.
      default: The value that is stored in place of null and NaN; None: such a row is bad. A null list becomes
        an empty list. In a hashed column, a text default (also the empty text) is hashed like any other text,
        and a number is stored unchanged.
      separator: The separator of the values of a list in text files (CSV).
      gaps: Whether null and NaN become a separate value: the hash of the empty text in a hashed column,
        `GAP` in one of whole numbers, NaN in one of floats. A ``default`` takes precedence.
      values: Text -> the number that is stored for it, such as ``{"purchase": 1, "*": 0}``; ``"*"`` stands
        for all other values, null included. Without it, other values are bad. The column is a float32.
      positive: A comparison, such as ``">= 4"``: 1 is stored for the numbers that pass it, 0 for others.
      format: The form of times: as for ``strptime``, such as ``"%m/%d/%Y %I:%M:%S %p"``, or a unit of numbers
        since 1970 (`TIME_UNITS`), which may have fractions. Microseconds since 1970, UTC, are stored.
    """

    source: str | None = None
    dtype: DType | None = None
    is_list: bool | None = None
    hash: bool = False
    min: float | None = None
    max: float | None = None
    default: int | float | str | None = None
    separator: str = "|"
    gaps: bool = False
    values: Mapping[str, float] | None = None
    positive: str | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        self._check_rules()
        if self.hash and (self.dtype == "float32" or self.min is not None or self.max is not None):
            raise ConfigError("hash makes an int64 without bounds: leave out dtype, min and max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError(f"min={self.min:g} is more than max={self.max:g}")
        if isinstance(self.default, int) and not isinstance(self.default, bool):
            if abs(self.default) > _EXACT:
                raise ConfigError(f"default={self.default} must lie in [-2^53, 2^53]")
            object.__setattr__(self, "default", float(self.default))  # one number, one manifest
        if isinstance(self.default, float) and not abs(self.default) <= _MOST_FLOAT32:
            raise ConfigError(f"default={self.default:g} must be finite, in float32")
        if isinstance(self.default, float) and (self.hash or self.dtype == "int64"):
            _check_whole(self.default)
        if isinstance(self.default, str) and self.dtype is not None and not self.hash:
            raise ConfigError(f"default={self.default!r} is text: it goes with hash = true")
        if not self.separator:
            raise ConfigError("separator must not be empty")

    def _check_rules(self) -> None:
        """Check `values`, `positive` and `format`, which decide the dtype."""
        given = [name for name in ("values", "positive", "format") if getattr(self, name) is not None]
        if len(given) > 1 or (given and self.hash):
            raise ConfigError(f"{given[0]} goes without {given[1] if len(given) > 1 else 'hash = true'}")
        if self.values is not None and not self.values:
            raise ConfigError('values must map texts to numbers, such as { purchase = 1, "*" = 0 }')
        if self.positive is not None:
            parse_comparison(self.positive)
        if given and self.dtype is None:
            object.__setattr__(self, "dtype", "int64" if self.format is not None else "float32")
        if self.format is not None and self.dtype != "int64":
            raise ConfigError('format makes an int64 of a time: leave out dtype = "float32"')
        if self.format is not None and self.format not in TIME_UNITS and "%" not in self.format:
            units = ", ".join(TIME_UNITS)
            raise ConfigError(
                f"format={self.format!r} has no field such as %Y, and isn't a unit of times since 1970 "
                f"({units})"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the column as JSON values; rules that aren't set are left out."""
        found = asdict(self)
        return {name: value for name, value in found.items() if name not in _RULES or value}


_RULES = ("gaps", "values", "positive", "format")
TIME_UNITS = {"seconds": 1_000_000, "milliseconds": 1000, "microseconds": 1, "nanoseconds": 0.001}
"""The units of times as numbers, each in microseconds."""
GAPS = "own"
"""The default that makes gaps a separate value."""
GAP = -(2**53)
"""The value that is stored for a gap in a column of whole numbers, if gaps are a separate value."""
_COMPARISON = re.compile(r"(>=|<=|==|!=|=|>|<)\s*([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)")


def parse_comparison(text: str) -> tuple[str, float]:
    """Return the operator and the number of a comparison such as ``>= 4``.

    Raises:
      ConfigError: The text isn't a comparison.
    """
    found = _COMPARISON.fullmatch(text.strip())
    try:
        if found is not None:
            return found[1], float(found[2])
    except ValueError:
        pass
    raise ConfigError(f"positive={text!r} must compare with a number, such as '>= 4'")


@dataclass(frozen=True)
class CsvForm:
    """The format of text files with separated fields.

    Attributes:
      delimiter: The separator of fields, such as ``","`` or ``"::"``. None: the one found in the file's first
        lines.
      quote: The character that encloses text with delimiters; doubled, it stands for itself. ``""``: none.
      header: Whether the first line names the columns.
      names: The columns' names, if ``header`` is false.
      escape: The character before a quote that stands for itself; None: a second quote.
      encoding: The files' encoding, by its name in Python.
      null: Texts that stand for null, in addition to the empty one.
    """

    delimiter: str | None = None
    quote: str = '"'
    header: bool = True
    names: tuple[str, ...] = ()
    escape: str | None = None
    encoding: str = "utf-8"
    null: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.delimiter is not None and (
            not 1 <= len(self.delimiter) <= 4 or set(self.delimiter) & set("\r\n")
        ):
            raise ConfigError(f"csv.delimiter must be one to four characters, got {self.delimiter!r}")
        for name, value in (("quote", self.quote or None), ("escape", self.escape)):
            if value is not None and (len(value) != 1 or value in "\r\n"):
                raise ConfigError(f"csv.{name} must be one character, got {value!r}")
        try:
            codecs.lookup(self.encoding)
        except LookupError as error:
            raise ConfigError(f"csv.encoding={self.encoding!r} is unknown: name it as Python does") from error
        if self.header == bool(self.names):
            raise ConfigError("csv.names are needed where csv.header is false, and not otherwise")

    def to_json(self) -> dict[str, Any]:
        """Return the form as JSON values; settings that earlier versions lack are included only if set."""
        own = {**asdict(self), "names": list(self.names), "null": list(self.null)}
        later: dict[str, Any] = {"escape": None, "encoding": "utf-8", "null": []}
        return {name: value for name, value in own.items() if name not in later or value != later[name]}


@dataclass(frozen=True)
class TableSpec:
    """The columns of a prepared data set, and their sources.

    Attributes:
      task: The column of tasks: rows with the same value form a task. Stored as int64. Empty: the rows have
        no tasks, such as clicks of unknown users; a column `BLOCK` then puts each row into one of ``blocks``,
        by a hash of its values.
      time: The column that a task's rows are ordered by; None: by the other columns, in the schema's order.
      label: The column to predict; float32 unless its `ColumnSpec` sets another dtype.
      unique: Columns whose values may not repeat in a task, such as the item; the first row is kept.
      batch: The name of the column that numbers a task's batches; the plan adds it.
      columns: Name -> column. Empty: all columns of numbers and text, and of lists of these. Columns named
        above are always stored.
      rest: Whether all other columns of numbers and text are stored too if ``columns`` isn't empty.
      format: The files' format (`FORMATS`). None: their content and endings decide.
      csv: The format of CSV files.
      defaults: The value stored in place of null and NaN in features that have no ``default``: a
        number in columns of numbers, and a text in hashed columns (without a text, the number); ``"own"``
        sets `ColumnSpec.gaps`.
      shape: How rows are made from the files' rows: side tables, exploded lists, filters.
      blocks: The number of blocks that stand for tasks; 0: the rows have tasks.
      titles: Column of ids -> the table's column that names them, such as ``{"movieId": "title"}``. None:
        names of columns decide (`gmeta.preprocess.plan.texts.find_titles`).
      texts_limit: The most texts that are kept of a column (`gmeta.core.data_manifest.Texts`), such as
        ``"64MB"``: the bytes of all, and 8 for each. A column with more keeps none; 0: no column keeps any.
      unused: The table's columns that aren't stored; `resolve` finds them.
      notes: Decisions made from the values that may surprise the user, one sentence each.

    Example:
      >>> spec = TableSpec("user", time="ts", label="click", columns={"item": ColumnSpec(hash=True)})
      >>> spec.resolve(pq.read_schema("clicks.parquet")).schema
    """

    task: str = ""
    time: str | None = None
    label: str | None = None
    unique: tuple[str, ...] = ()
    batch: str = "batch_id"
    columns: Mapping[str, ColumnSpec] = field(default_factory=dict)
    rest: bool = False
    format: FormatName | None = None
    csv: CsvForm = field(default_factory=CsvForm)
    defaults: tuple[int | float | str, ...] = ()
    shape: Shape = field(default_factory=Shape)
    blocks: int = 0
    titles: Mapping[str, str] | None = None
    texts_limit: int | str = TEXTS_LIMIT
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.task:
            object.__setattr__(self, "task", BLOCK)
            object.__setattr__(self, "blocks", self.blocks or BLOCKS)
        object.__setattr__(self, "texts_limit", parse_size(str(self.texts_limit), "texts_limit"))
        if self.batch in self.columns or self.batch in self.roles:
            raise ConfigError(f"column {self.batch!r} is made by the plan: give batch another name")
        for name in {self.task, self.time, self.label, *self.unique} & set(self.columns):
            if self.columns[name or ""].is_list:
                raise ConfigError(
                    f"column {name!r} must have one value a row to be the task, time, label or key"
                )
        for role, name in (("time", self.time), ("label", self.label)):
            if name is not None and name in self.columns and self.columns[name].hash:
                what = "a whole number or a date" if role == "time" else "a number"
                raise ConfigError(
                    f"column {name!r} is the {role}, and a hash of it has no meaning: leave out hash = true, "
                    f"and write {what} into the file where there is text"
                )
        if self.task in self.columns and self.columns[self.task].dtype == "float32":
            raise ConfigError(
                f"column {self.task!r} is the task and must be an int64; hash = true makes one of text"
            )

    @classmethod
    def load(cls, path: Path) -> TableSpec:
        """Read a TOML file.

        Raises:
          ConfigError: The file can't be read, isn't TOML, or has invalid content.
        """
        return load_toml(cls, path)

    def with_own_gaps(self) -> TableSpec:
        """Return the spec with gaps as separate values if rows have no tasks and it has no defaults."""
        return replace(self, defaults=(GAPS,)) if self.blocks and not self.defaults else self

    @property
    def is_open(self) -> bool:
        """Whether columns are stored that the spec doesn't name."""
        return self.rest or not self.columns

    @property
    def roles(self) -> tuple[str, ...]:
        """The columns that have a role, each once."""
        named = (self.task, self.time, *self.unique, self.label)
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def role_of(self, name: str) -> Role:
        """Return a column's role."""
        roles: dict[str | None, Role] = {self.label: "label", self.time: "time", self.task: "task"}
        return roles.get(name, "feature")

    @property
    def schema(self) -> Schema:
        """The stored columns, the task and the batch first; only for a spec that `resolve` returned."""
        own = [Column(self.task), Column(self.batch)]
        own += [
            Column(name, column.dtype or "int64", bool(column.is_list))
            for name, column in self.columns.items()
            if name != self.task
        ]
        return Schema(tuple(own), task=self.task, batch=self.batch)

    @property
    def order(self) -> tuple[str, ...]:
        """The columns that rows are sorted by: task, time, all others in the schema's order, and the label.

        The label is last, so the choice of a task's last rows, which experiments measure, doesn't depend on
        labels.
        """
        first = (self.task, self.time) if self.time else (self.task,)
        last = (self.label,) if self.label and self.label not in first else ()
        named = {*first, *last, self.batch}
        return (*first, *(column.name for column in self.schema if column.name not in named), *last)

    @property
    def presort(self) -> tuple[str, ...]:
        """The columns that an engine itself must sort by: the first two of `order`, without lists.

        `plan.row_order` then sorts rows that tie in these columns. So all tied rows must be in one place: a
        partition by ranges uses these columns.
        """
        first = self.order[:2]
        return tuple(name for name in first if not self.columns[name].is_list)

    @property
    def sources(self) -> dict[str, str]:
        """Name -> the table's column that it is read from."""
        return {name: column.source or name for name, column in self.columns.items()}

    def resolve(self, table: pa.Schema) -> TableSpec:
        """Decide everything that the spec leaves open, from the types of a table's columns.

        Args:
          table: The columns of the table; columns of text files are text, or of guessed types.

        Returns:
          A spec in which every column has ``dtype`` and ``is_list``, in the order in which they are stored.

        Raises:
          ConfigError: A column doesn't exist, or can't be converted to numbers as specified.
        """
        given = dict(self.columns)
        if self.is_open:
            used = {self.batch, *given, *(column.source for column in given.values())}
            kinds = {f.name: _element(f.type) for f in table if f.name not in used}
            given |= {name: ColumnSpec() for name, kind in kinds.items() if _numbers(kind) or _text(kind)}
            # Columns are in the table's order, whether the spec names them or not.
            order = {name: place for place, name in enumerate(table.names)}
            given = dict(
                sorted(given.items(), key=lambda one: order.get(one[1].source or one[0], len(order)))
            )
        if self.blocks and self.task in table.names:
            raise ConfigError(
                f"the table has a column {self.task!r}, as the column of rows without tasks would be called: "
                "rename it, or name the task"
            )
        names = list(dict.fromkeys((*self.roles, *given)))
        check_names(table.names, "the table has")
        check_names([*names, self.batch], "the spec stores")
        types = {column.name: column.type for column in table}
        columns = {name: self._resolve(name, given.get(name, ColumnSpec()), types) for name in names}
        for name, source in (self.titles or {}).items():
            if name not in columns or columns[name].is_list or source not in types:
                raise ConfigError(
                    f"title {name}={source}: name a stored column of ids, and a column of the table"
                )
        used = {column.source for column in columns.values()}
        return replace(self, columns=columns, unused=tuple(n for n in table.names if n not in used))

    def _resolve(self, name: str, column: ColumnSpec, types: Mapping[str, pa.DataType]) -> ColumnSpec:
        source = column.source or name
        if self.blocks and name == self.task:
            return replace(column, source=source, dtype="int64", is_list=False)
        if source not in types:
            if "*" in (column.values or {}):
                return replace(column, source=source, is_list=False)  # one number for all rows
            hint = "; if the first line is a record, add --no-header --columns and their names"
            hint *= any(re.fullmatch(r"-?[0-9.]+", one) for one in types)
            raise ConfigError(f"no column {source!r} in the table; it has {_show([*types]) or 'none'}{hint}")
        kind = types[source]
        holds_lists = is_list(kind) if column.is_list is None else column.is_list
        if holds_lists and name in self.roles:
            raise ConfigError(
                f"column {name!r} holds lists: it can't be the task, the time, the label or a key"
            )
        kind = _element(kind)
        if pa.types.is_duration(kind):  # times since 1970 with fractions
            unit = ("s", "ms", "us", "ns").index(kind.unit)
            column = replace(column, dtype="int64", format=tuple(TIME_UNITS)[unit])
        dtype, hashes = column.dtype, column.hash
        if dtype is None:
            if hashes or (_text(kind) and name not in (self.time, self.label)):
                dtype, hashes = "int64", True
            elif name in (self.task, self.time):
                dtype = "int64"
            elif name == self.label or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
                dtype = "float32"
            elif pa.types.is_null(kind):
                dtype, hashes = self._without_value(name, column.default)
            elif _numbers(kind):
                dtype = "int64"
            else:
                raise ConfigError(f"column {name!r} is {kind}: neither numbers nor text can be made of it")
        if name not in self.roles:
            column = self._with_default(column, dtype, hashes)
        if hashes and (column.min is not None or column.max is not None):
            raise ConfigError(
                f"column {name!r} is text, which is hashed to ids: leave out min and max, or give a dtype"
            )
        if isinstance(column.default, str) and not hashes:
            raise ConfigError(
                f"column {name!r} holds numbers, and default={column.default!r} is text: give a number, or "
                "set hash = true"
            )
        if isinstance(column.default, float) and dtype == "int64":
            _check_whole(column.default)
        return replace(column, source=source, dtype=dtype, is_list=holds_lists, hash=hashes)

    def _with_default(self, column: ColumnSpec, dtype: DType, hashes: bool) -> ColumnSpec:
        if column.default is not None or column.gaps or column.values or not self.defaults:
            return column
        if GAPS in self.defaults:
            return replace(column, gaps=True)
        texts = [one for one in self.defaults if isinstance(one, str)]
        numbers = [float(one) for one in self.defaults if not isinstance(one, str)]
        fitting = (texts or numbers) if hashes else numbers
        return replace(column, dtype=dtype, hash=hashes, default=fitting[0]) if fitting else column

    def _without_value(self, name: str, default: float | str | None) -> tuple[DType, bool]:
        """Return the type of a column without a value, and whether it is hashed: its default decides."""
        if default is None and name not in self.unique:
            raise ConfigError(f"column {name!r} has no value: leave it out, or give a default for it")
        is_float = isinstance(default, float) and not default.is_integer()
        return "float32" if is_float else "int64", isinstance(default, str)

    def to_json(self) -> dict[str, Any]:
        """Return the spec as the manifest keeps it, as JSON values."""
        return {
            **{"task": self.task, "time": self.time, "label": self.label, "unique": list(self.unique)},
            "columns": {name: column.to_json() for name, column in self.columns.items()},
            **({"shape": self.shape.to_json()} if self.shape != Shape() else {}),
            **({"blocks": self.blocks} if self.blocks else {}),
            **({"titles": dict(self.titles)} if self.titles is not None else {}),
            **({"texts_limit": self.texts_limit} if self.texts_limit != TEXTS_LIMIT else {}),
        }


def _check_whole(default: float) -> None:
    if not default.is_integer() or abs(default) > _EXACT:
        raise ConfigError(f"default={default:g} isn't an int64, or not exact as a floating-point number")


def check_names(names: Sequence[str], what: str) -> None:
    """Refuse names that an engine would confuse with one another, or with its own names."""
    seen: dict[str, str] = {}
    for name in names:
        if name.lower() in seen and seen[name.lower()] == name:
            raise ConfigError(f"{what} two columns {name!r}: rename one")
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise ConfigError(
                f"{what} columns {other!r} and {name!r}, which differ in case alone, and SQL can't "
                "distinguish them: rename one"
            )
        if name.lower().startswith(RESERVED):
            raise ConfigError(
                f"{what} a column {name!r}: names from {RESERVED!r} on are gmeta's own, rename it"
            )


def is_list(kind: pa.DataType) -> bool:
    """Return whether values of a type are lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _element(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if is_list(kind) else kind


def _numbers(kind: pa.DataType) -> bool:
    of = pa.types
    tests = (of.is_integer, of.is_floating, of.is_boolean, of.is_decimal, of.is_timestamp, of.is_date)
    return any(test(kind) for test in tests)


def _text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _show(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
