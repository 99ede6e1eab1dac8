"""The interface of every feature store, and the requests for rows."""

from __future__ import annotations

import abc
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.core.data.schema import Column
from gmeta.core.errors import ConfigError
from gmeta.io.features.cache import Place, RowCache
from gmeta.io.features.cells import arrow_schema
from gmeta.io.features.fetch_policy import FetchCounts, FetchPolicy
from gmeta.io.features.keys import NEWEST as NEWEST
from gmeta.io.features.keys import Ints, distinct, int64_vector, request_slices, times
from gmeta.io.features.missing import settle_missing
from gmeta.io.features.requests import request


class FeatureSource(abc.ABC):
    """Tables of features by an int64 key, such as an item's id; each value has a version.

    A lookup returns the newest value not after ``as_of``, separately for each column: if a price changes
    daily and a click rate hourly, a row has the price of the day and the rate of the hour. Versions are
    numbers from 0, most often times in the unit of the data set's ``timestamp``.

    `ArrowSource` has tables in memory, `RocksDBSource` in a folder, `HBaseSource` in a cluster. They
    implement how rows are fetched and put. `FetchPolicy` decides, for all of them alike, what is fetched, how
    often, and how missing values are treated. A source serves any number of threads.

    Args:
      name: The name of the source in messages.
      policy: How rows are fetched.
    """

    one_time: ClassVar[bool] = False
    """Whether a request has a single ``as_of`` for all its rows."""

    def __init__(self, name: str, policy: FetchPolicy) -> None:
        self.name, self.policy = name, policy
        self._lock = threading.Lock()
        self._counted: Counter[str] = Counter()
        self._caches: dict[tuple[str, tuple[str, ...]], RowCache] = {}

    @property
    @abc.abstractmethod
    def tables(self) -> Mapping[str, Sequence[Column]]:
        """The columns of each table."""

    @abc.abstractmethod
    def fetch(self, table: str, keys: Ints, columns: Sequence[Column], as_of: Ints | None) -> Any:
        """Fetch the rows of some keys; only `multi_get` calls it.

        Args:
          table: One of `tables`.
          keys: (n,), ``policy.batch_rows`` at most, in ascending order within each ``as_of``.
          columns: Columns of the table.
          as_of: (n,) in ascending order, all alike if `one_time`, or None for the newest values. No pair of
            key and ``as_of`` appears twice.

        Returns:
          A RecordBatch of n rows with these columns, null where there is no value.

        Raises:
          StoreUnavailableError: The connection failed, so another attempt makes sense.
          StoreError: The store refused the request.
        """

    @abc.abstractmethod
    def _put(self, table: str, keys: Ints, rows: Any, columns: Sequence[Column], version: int) -> None:
        """Write rows whose arguments have been checked."""

    def multi_get(
        self,
        table: str,
        keys: npt.ArrayLike,
        columns: Sequence[str],
        as_of: npt.ArrayLike | None = None,
    ) -> Any:
        """Return the features of some keys.

        Equal keys (of an equal ``as_of``) are fetched once, and not at all if the cache has them.

        Args:
          table: The table.
          keys: (n,) int64, in any order; keys may repeat.
          columns: The columns.
          as_of: The newest version allowed: one for all keys, or (n,); None sets no bound. It is rounded
            down to ``policy.resolution``.

        Returns:
          A ``pyarrow.RecordBatch`` of n rows in the order of the keys, with these columns in this order:
          ``int64``, ``float`` or lists of them. Missing values are treated as ``policy.missing`` says.

        Raises:
          ConfigError: There is no such table or column, or an argument is of the wrong form.
          DataError: A value is missing, and ``policy.missing`` is ``"raise"``.
          StoreUnavailableError: The store didn't answer, ``policy.attempts`` times.
          StoreError: The store refused.

        Example:
          >>> source = ArrowSource({"item": pa.table({"key": [7, 9], "price": [10, 20]})})
          >>> source.multi_get("item", [9, 7, 9], ["price"])["price"].to_pylist()
          [20, 10, 20]
        """
        wanted = self.columns(table, columns)
        asked = int64_vector("keys", keys, self.name)
        when = times(as_of, len(asked), self.policy.resolution, self.name)
        unique, unique_when, inverse = distinct(asked, when)
        counted: Counter[str] = Counter(rows=len(asked), distinct=len(unique))
        try:
            rows = self._rows(table, unique, wanted, unique_when, counted)
            what = f"{self.name}: table {table!r}"
            rows = settle_missing(rows, wanted, self.policy, counted, what, unique, unique_when)
        finally:
            with self._lock:
                self._counted.update(counted)
        return rows.take(pa.array(inverse))

    def put(self, table: str, keys: npt.ArrayLike, rows: Any, version: int) -> None:
        """Write values of one version; a value of the same version is replaced.

        The cache isn't updated: rows in it keep their old values.

        Args:
          table: The table.
          keys: (n,) int64, no two alike.
          rows: A RecordBatch, or a mapping of names to sequences, of n rows with some of the table's columns.
            A null leaves the existing value.
          version: From 0 to `NEWEST`.

        Raises:
          ConfigError: There is no such table or column, or an argument is of the wrong form.
          StoreUnavailableError, StoreError: As `multi_get`; the request isn't repeated.
        """
        names = list(rows.schema.names if hasattr(rows, "schema") else rows)
        columns = self.columns(table, names)
        written = int64_vector("keys", keys, self.name)
        if len(np.unique(written)) < len(written):
            raise ConfigError(f"{self.name}: a key stands twice in one put to table {table!r}")
        if not 0 <= version <= NEWEST:
            raise ConfigError(f"{self.name}: version={version} must be from 0 to {NEWEST}")
        schema = arrow_schema(columns)
        arrays = []
        for field in schema:
            array = rows[field.name]
            array = array if isinstance(array, pa.Array) else pa.array(array, field.type)
            arrays.append(array.cast(field.type))
            if len(array) != len(written):
                raise ConfigError(
                    f"{self.name}: column {field.name!r} has {len(array)} values for {len(written)} keys"
                )
        self._put(table, written, pa.RecordBatch.from_arrays(arrays, schema=schema), columns, int(version))

    def columns(self, table: str, names: Sequence[str]) -> list[Column]:
        """Return columns of a table by their names.

        Raises:
          ConfigError: The table or a column doesn't exist; the error names those that do.
        """
        if table not in self.tables:
            raise ConfigError(
                f"{self.name} has no table {table!r}; it has {', '.join(self.tables) or 'none'}"
            )
        there = {column.name: column for column in self.tables[table]}
        for name in names:
            if name not in there:
                raise ConfigError(
                    f"{self.name}: table {table!r} has no column {name!r}; it has {', '.join(there)}"
                )
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"{self.name}: ask for some columns, each once, not {list(names)}")
        return [there[name] for name in names]

    def counts(self) -> FetchCounts:
        """Return the counters since this source was made."""
        with self._lock:
            return FetchCounts(**self._counted)

    def _rows(
        self, table: str, keys: Ints, columns: Sequence[Column], as_of: Ints | None, counted: Counter[str]
    ) -> Any:
        """Return the rows of distinct keys, from the cache or the store."""
        if self.policy.cache_rows == 0 or len(keys) == 0:
            counted["misses"] += len(keys)
            return self._fetch(table, keys, columns, as_of, counted)
        known_as = [-1] * len(keys) if as_of is None else as_of.tolist()
        places: list[Place] = list(zip(keys.tolist(), known_as, strict=True))
        now = time.monotonic()
        with self._lock:
            name = (table, tuple(column.name for column in columns))
            cache = self._caches.setdefault(name, RowCache(self.policy.cache_rows, columns))
            here, cached = cache.get(places, now)
        away = np.flatnonzero(~here)
        counted["hits"] += len(keys) - len(away)
        counted["misses"] += len(away)
        if len(away) == 0:
            return cached
        fetched = self._fetch(table, keys[away], columns, None if as_of is None else as_of[away], counted)
        with self._lock:
            until = now + self.policy.cache_seconds if as_of is None else float("inf")
            cache.put([places[row] for row in away.tolist()], fetched, until)
        if len(away) == len(keys):
            return fetched
        order = np.empty(len(keys), np.int64)
        order[here], order[away] = np.arange(len(cached)), len(cached) + np.arange(len(away))
        return _join([cached, fetched]).take(pa.array(order))

    def _fetch(
        self, table: str, keys: Ints, columns: Sequence[Column], as_of: Ints | None, counted: Counter[str]
    ) -> Any:
        """Fetch the rows of distinct keys from the store, in batches."""
        batches = [pa.RecordBatch.from_pylist([], schema=arrow_schema(columns))]
        for part in request_slices(len(keys), self.policy.batch_rows, as_of if self.one_time else None):
            when = None if as_of is None else as_of[part]
            what = f"{self.name}: table {table!r}, {len(keys[part])} keys from {keys[part][0]}"

            def make(part: slice = part, when: Ints | None = when) -> Any:
                return self.fetch(table, keys[part], columns, when)

            batches.append(request(make, self.policy, counted, what))
        return _join(batches)


def _join(batches: Sequence[Any]) -> Any:
    """Concatenate record batches of one schema."""
    full = [batch for batch in batches if len(batch)] or batches[:1]
    if len(full) == 1:
        return full[0]
    arrays = [pa.concat_arrays(list(columns)) for columns in zip(*(b.columns for b in full), strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=full[0].schema)
