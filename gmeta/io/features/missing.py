"""The rule for values that a store doesn't have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.core.data.schema import Column
from gmeta.core.errors import ConfigError, DataError
from gmeta.io.features.cells import arrow_type
from gmeta.io.features.fetch_policy import FetchPolicy

Ints = npt.NDArray[np.int64]
_SHOWN = 5


def settle_missing(
    rows: Any,
    columns: Sequence[Column],
    policy: FetchPolicy,
    counted: Counter[str],
    what: str,
    keys: Ints,
    as_of: Ints | None,
) -> Any:
    """Treat the nulls of some rows as the policy says.

    Args:
      rows: A RecordBatch of n rows, null where there is no value.
      columns: Its columns.
      policy: The rule and the defaults.
      counted: Counters; ``missing_keys`` and ``missing_values`` are increased.
      what: The source and the table, for the error.
      keys: (n,), for the error.
      as_of: (n,) or None, for the error.

    Raises:
      DataError: The rule is to raise, and a value is missing.
    """
    absent = [array.is_null().to_numpy(zero_copy_only=False) for array in rows.columns]
    values = int(sum(nulls.sum() for nulls in absent))
    if values == 0:
        return rows
    counted["missing_values"] += values
    counted["missing_keys"] += int(np.logical_and.reduce(absent).sum())
    if policy.missing == "null":
        return rows
    if policy.missing == "raise":
        raise DataError(
            _describe(columns, absent, keys, as_of),
            path=what,
            advice="put it into the store, or take FetchPolicy(missing='default') or 'null'",
        )
    filled = [
        _fill(array, nulls, column, policy)
        for array, nulls, column in zip(rows.columns, absent, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(filled, schema=rows.schema)


def default_of(column: Column, policy: FetchPolicy) -> Any:
    """Return a column's default, as an Arrow array of one value.

    Raises:
      ConfigError: The default is of another type than the column.
    """
    value = policy.defaults.get(column.name, [] if column.is_list else 0)
    try:
        array = pa.array([value], arrow_type(column))
        if array.null_count == 0:
            return array
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        pass
    kind = f"a list of {column.dtype}" if column.is_list else f"one {column.dtype}"
    raise ConfigError(f"FetchPolicy: the default {value!r} of column {column.name!r} is not {kind}")


def _fill(array: Any, nulls: npt.NDArray[np.bool_], column: Column, policy: FetchPolicy) -> Any:
    if not nulls.any():
        return array
    places = np.where(nulls, len(array), np.arange(len(array)))
    return pa.concat_arrays([array, default_of(column, policy)]).take(pa.array(places))


def _describe(
    columns: Sequence[Column], absent: Sequence[npt.NDArray[np.bool_]], keys: Ints, as_of: Ints | None
) -> str:
    """Describe which keys lack a value in which columns."""
    bad = np.flatnonzero(np.logical_or.reduce(absent))
    named = []
    for row in bad[:_SHOWN].tolist():
        lacking = ", ".join(c.name for c, nulls in zip(columns, absent, strict=True) if nulls[row])
        when = "" if as_of is None else f" as of {as_of[row]}"
        named.append(f"key {keys[row]}{when} ({lacking})")
    more = f", and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return f"{len(bad)} of {len(keys)} keys lack a value: {', '.join(named)}{more}"
