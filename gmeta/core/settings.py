"""Reads settings from TOML files into dataclasses, with errors that name the key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import cattrs
from cattrs import cols
from cattrs.gen import make_dict_structure_fn

from gmeta.core.errors import ConfigError
from gmeta.core.json_values import parse_toml

T = TypeVar("T")

_converter = cattrs.Converter(forbid_extra_keys=True)


def _strict(value: Any, wanted: type) -> Any:
    """Refuse a setting of the wrong type; cattrs would turn both "3" and 3.7 into 3."""
    accepted = (int, float) if wanted is float else wanted
    if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
        raise TypeError(f"expected {wanted.__name__}, got {value!r}")
    return wanted(value)


for _type in (int, float, str, bool):
    _converter.register_structure_hook(_type, _strict)


def _make_list(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Cattrs would convert a string to a list of characters, and a mapping to a list of keys."""
    is_tuple = get_origin(kind) is tuple
    factory = cols.homogenous_tuple_structure_factory if is_tuple else cols.list_structure_factory
    make = factory(kind, converter)

    def structure(value: Any, kind: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise TypeError(f"expected a list, got {value!r}")
        return make(value, kind)

    return structure


_converter.register_structure_hook_factory(cols.is_sequence, _make_list)


def _has_former_names(kind: Any) -> bool:
    return is_dataclass(kind) and hasattr(kind, "FORMER_NAMES")


def _make_with_former_names(cls: Any) -> Any:
    """Return a function that reads settings and accepts former names of their keys."""
    make = make_dict_structure_fn(cls, _converter, _cattrs_forbid_extra_keys=True)
    return lambda value, kind: make({cls.FORMER_NAMES.get(name, name): value[name] for name in value}, kind)


_converter.register_structure_hook_factory(_has_former_names, _make_with_former_names)


def _is_choice(kind: Any) -> bool:
    """Return whether a type is a union of several types other than None, among which cattrs can't choose."""
    return get_origin(kind) in (Union, UnionType) and len(set(get_args(kind)) - {type(None)}) > 1


def _choose(value: Any, union: Any) -> Any:
    """Choose a union's type by the value, and convert the value to it.

    A string becomes a string or one of a ``Literal``'s words, a list a tuple, and a mapping a mapping or the
    first dataclass that has all its keys and whose ``Literal`` fields accept its words. If there is none, the
    errors are those of the first dataclass with these words.
    """
    kinds = [kind for kind in get_args(union) if kind is not type(None)]
    if value is None and type(None) in get_args(union):
        return None
    if isinstance(value, Mapping):
        tables: list[Any] = [
            k for k in kinds if is_dataclass(k) and all(_has_word(value, *each) for each in _words(k))
        ]
        fitting = [
            k
            for k in kinds
            if get_origin(k) is Mapping or (k in tables and value.keys() <= {f.name for f in fields(k)})
        ]
        fitting = fitting or tables
        known = [(each.name, word) for k in kinds for each, words in _words(k) for word in words]
        for name in dict.fromkeys(name for name, _ in known if not fitting and name in value):
            words = [word for other, word in known if other == name]
            if value[name] not in words:
                raise TypeError(f"{name} must be one of {', '.join(words)}, got {value[name]!r}")
        keys = f"the keys {', '.join(value)}"
    elif isinstance(value, list | tuple):
        fitting, keys = [k for k in kinds if get_origin(k) is tuple], "a list"
    else:
        fitting = [k for k in kinds if k is type(value)] or [k for k in kinds if get_origin(k) is Literal]
        keys = repr(value)
    if not fitting:
        raise TypeError(f"nothing here takes {keys}")
    return _converter.structure(value, fitting[0])


def _words(kind: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the ``Literal`` fields of a dataclass, with their words."""
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    return [
        (each, get_args(hints[each.name]))
        for each in (fields(kind) if hints else ())
        if get_origin(hints[each.name]) is Literal
    ]


def _has_word(value: Mapping[str, Any], field: Any, words: tuple[Any, ...]) -> bool:
    """Return whether a mapping has one of a field's words, or omits a field with a default."""
    if field.name in value:
        return value[field.name] in words
    return not (field.default is MISSING and field.default_factory is MISSING)


_converter.register_structure_hook_func(_is_choice, _choose)


def from_mapping(
    cls: type[T], value: Mapping[str, Any], where: str = "config", converter: cattrs.Converter = _converter
) -> T:
    """Create a dataclass from nested mappings.

    Args:
      cls: The dataclass; its defaults apply to keys that ``value`` omits.
      value: Key -> value.
      where: What errors call the settings, such as the file's name.
      converter: A result of `copy_converter`, with hooks for additional types.

    Raises:
      ConfigError: An unknown key, a value of the wrong type, or a value that the dataclass refuses; the
        message names every error and its place.
    """
    try:
        return converter.structure(value, cls)
    except cattrs.BaseValidationError as error:
        faults = "; ".join(cattrs.transform_error(error, path=where, format_exception=_describe))
        raise ConfigError(faults) from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _describe(error: BaseException, wanted: type | None) -> str:
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return f"unknown keys: {', '.join(sorted(error.extra_fields))}"
    return str(error) or type(error).__name__


def to_mapping(value: Any, converter: cattrs.Converter = _converter) -> dict[str, Any]:
    """Convert a dataclass to nested mappings of JSON values; the inverse of `from_mapping`."""
    return converter.unstructure(value)


def copy_converter() -> cattrs.Converter:
    """Copy the converter that `from_mapping` uses; a format adds hooks for its own types to the copy."""
    return _converter.copy()


def load_toml(cls: type[T], path: Path) -> T:
    """Read a TOML file into a dataclass.

    Raises:
      ConfigError: The file can't be read, isn't TOML, or doesn't fit the dataclass (see `from_mapping`).
    """
    return from_mapping(cls, read_toml(path), where=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as nested mappings.

    Raises:
      ConfigError: The file can't be read or isn't TOML.
    """
    try:
        return parse_toml(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def override(settings: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return settings with some of their values replaced.

    Args:
      settings: Key -> value.
      assignments: Lines of TOML such as ``seeds=[0]`` or ``methods.maml.epochs=3``; if two set the same key,
        the later one applies.

    Raises:
      ConfigError: A line isn't TOML, or sets nothing.

    Example:
      >>> override({"seeds": [0, 1], "query": 10}, ["seeds=[3]"])
      {'seeds': [3], 'query': 10}
    """
    found = dict(settings)
    for line in assignments:
        try:
            given = parse_toml(line)
        except ValueError as error:
            raise ConfigError(
                f"{line!r} isn't KEY=VALUE in TOML, where a text has quotes: {error}"
            ) from error
        if not given:
            raise ConfigError(f"{line!r} sets nothing: give KEY=VALUE")
        found = _merge(found, given)
    return found


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both tables; values of ``new`` take precedence."""
    both = {
        key: _merge(old[key], value)
        for key, value in new.items()
        if isinstance(value, Mapping) and isinstance(old.get(key), Mapping)
    }
    return {**old, **new, **both}


# The inverse: settings as a TOML file with only the values that differ from the defaults.


def without_defaults(value: Any) -> dict[str, Any]:
    """Convert a dataclass to nested mappings of the settings that differ from its class' defaults.

    Example:
      >>> @dataclass
      ... class Training:
      ...     epochs: int = 10
      ...     rate: float = 0.1
      >>> without_defaults(Training(epochs=3))
      {'epochs': 3}
    """
    found = {}
    for each in fields(value):
        now = getattr(value, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if now is not None and (now != default or type(now) is not type(default)):
            found[each.name] = without_defaults(now) if is_dataclass(now) else to_mapping(now)
    whole = {key: each for key, each in to_mapping(value).items() if each is not None}
    # Without all its keys, a value of a union may be mistaken for another type.
    return found if from_mapping(type(value), found) == value else whole


def to_toml(settings: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Return settings as TOML.

    Args:
      settings: Nested mappings of JSON values; None values are omitted.
      comments: Name of a table, such as ``"methods.maml"`` -> a comment line above it.

    Example:
      >>> print(to_toml({"seeds": [0], "methods": {"maml": {"epochs": 3, "inner": {"steps": 2}}}}), end="")
      seeds = [0]
      <BLANKLINE>
      [methods.maml]
      epochs = 3
      inner = { steps = 2 }
    """
    blocks: list[str] = []

    def write(table: Mapping[str, Any], path: tuple[str, ...]) -> None:
        given = {key: each for key, each in table.items() if each is not None}
        nested = {key: each for key, each in given.items() if isinstance(each, Mapping) and len(path) < 2}
        lines = [f"{_key(key)} = {_toml(each)}" for key, each in given.items() if key not in nested]
        if path and (lines or not nested):
            lines.insert(0, f"[{'.'.join(map(_key, path))}]")
            lines[:0] = [f"# {line}" for line in (comments or {}).get(".".join(path), "").splitlines()]
        blocks.extend(["\n".join(lines)] if lines else [])
        for key, each in nested.items():
            write(each, (*path, key))

    write(settings, ())
    return "\n\n".join(blocks) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, Mapping):
        inner = [f"{_key(key)} = {_toml(each)}" for key, each in value.items() if each is not None]
        return f"{{ {', '.join(inner)} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):  # JSON's escapes equal TOML's, except for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


# Sizes.

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def parse_size(text: str, what: str, least: int = 0) -> int:
    """Parse a size such as ``"2GB"``, ``"512 MiB"`` or ``"1000000000"``, and return it in bytes.

    Args:
      text: The size.
      what: Its name in errors.
      least: The smallest size allowed, in bytes.

    Raises:
      ConfigError: The text isn't a size, or the size is smaller, or 4 EiB or more.

    Example:
      >>> parse_size("64MB", "the limit")
      64000000
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"{what} must be a size such as 2GB or 512MiB, got {text!r}")
    size = float(match[1]) * {**_UNITS, **_BINARY}[(match[2] or "").capitalize()]
    if not least <= size < 1 << 62:
        raise ConfigError(f"{what} must be at least {least >> 20}MiB and below 4EiB, got {text!r}")
    return int(size)


_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, what: str) -> float:
    """Parse a time such as ``"90s"``, ``"2m"``, ``"1.5h"`` or ``"1d"``, and return it in seconds.

    Raises:
      ConfigError: The text isn't a number of at least 0, followed by ``s``, ``m``, ``h``, ``d`` or nothing.

    Example:
      >>> parse_duration("2m", "the budget")
      120.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text) if isinstance(text, str) else None
    if found is None:
        raise ConfigError(f'{what} must be a time such as "90s", "2m" or "1h", or "0", got {text!r}')
    return float(found[1]) * _SECONDS[found[2]]
