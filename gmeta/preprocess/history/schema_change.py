"""Another form for the events of a store: columns that come or go, other groups, shards and stripes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gmeta.core.errors import ConfigError
from gmeta.preprocess.history.files.stripe import as_words
from gmeta.preprocess.history.spec import EVENTS, HistorySpec
from gmeta.preprocess.plan.column_values import hash_text
from gmeta.preprocess.table_spec import ColumnSpec


def change_spec(old: HistorySpec, new: HistorySpec) -> HistorySpec:
    """Return a spec with every column and group named, to which the events of a store can be rewritten.

    Args:
      old: The store's spec.
      new: What is wanted. A column that the store has keeps its type. A column that it hasn't needs a type,
        or ``hash``, and a default, which is the value of the events that are there.

    Raises:
      ConfigError: The user or the time is another column, a column changes its type, or a new column has no
        type or no default.
    """
    for role in ("user", "time"):
        if getattr(old, role) != getattr(new, role):
            raise ConfigError(
                f"{role} is {getattr(old, role)!r} in the store and {getattr(new, role)!r} in the spec: the "
                f"{role} can't change; make a store of its own"
            )
    both = (old.user, old.time)
    own = [name for name in new.columns if name not in both]
    every = own or [name for name in old.columns if name not in both]
    groups = dict(new.groups) or {EVENTS: tuple(every)}
    names = [name for each in groups.values() for name in each]
    if absent := sorted(set(own) - set(names)):
        raise ConfigError(f"groups: no group has column {', '.join(absent)}")
    columns = {name: _column(name, old, new.columns.get(name)) for name in (*both, *names)}
    return replace(new, columns=columns, groups=groups)


def default_word(column: ColumnSpec) -> int:
    """Return the default of a column as a stripe holds it."""
    if isinstance(column.default, str):
        return hash_text(column.default)
    value = np.array([column.default], np.float32 if column.dtype == "float32" else np.int64)
    return int(as_words(value)[0])


def _column(name: str, old: HistorySpec, new: ColumnSpec | None) -> ColumnSpec:
    known = old.columns.get(name)
    if known is None:
        if new is None or new.default is None:
            raise ConfigError(
                f"column {name!r} isn't in the store: its events need a value, so give it a default"
            )
        dtype = "int64" if new.hash or isinstance(new.default, str) else new.dtype
        if dtype is None or new.is_list:
            raise ConfigError(f"column {name!r} isn't in the store: give it the dtype int64 or float32")
        return replace(new, dtype=dtype, hash=new.hash or isinstance(new.default, str), is_list=False)
    if new is None:
        return known
    if new.dtype not in (None, known.dtype) or (new.hash and not known.hash) or new.is_list:
        raise ConfigError(
            f"column {name!r} is of {known.dtype}{', a hash' if known.hash else ''} in the store, and a "
            "column can't change its type: give the new one another name"
        )
    return replace(new, dtype=known.dtype, hash=known.hash, is_list=known.is_list)
