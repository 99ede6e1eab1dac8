"""The interface of every feature store, and the requests for rows."""

from __future__ import annotations

import abc
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.core.errors import ConfigError, StoreUnavailableError
from gmeta.core.schema import Column
from gmeta.io.features.cells import NEWEST as NEWEST
from gmeta.io.features.cells import (
    FetchCounts,
    FetchPolicy,
    Ints,
    arrow_schema,
    distinct,
    int64_vector,
    list_array,
    request_slices,
    settle_missing,
    times,
)

# A cache of recently fetched rows, which drops the least recently used rows to make room.
#
# Each row has a slot. An ordered dict maps (key, as_of) to the slot, and values are stored in one array per
# column, so that rows are copied by indexing, not one by one.

CellKey = tuple[int, int]
_FIRST = 1024  # initial number of slots


class RowCache:
    """Rows of some columns by (key, as_of); not safe for several threads at once.

    Args:
      capacity: The maximum number of rows.
      columns: The columns of a row.
    """

    def __init__(self, capacity: int, columns: Sequence[Column]) -> None:
        self._capacity, self._columns = capacity, columns
        self._slots: OrderedDict[CellKey, int] = OrderedDict()
        self._values = [np.zeros(0, object if column.is_list else column.dtype) for column in columns]
        self._there = [np.zeros(0, bool) for _ in columns]
        self._until = np.zeros(0)

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, places: Sequence[CellKey], now: float) -> tuple[npt.NDArray[np.bool_], Any]:
        """Return which of the requested rows are cached, and these rows.

        Args:
          places: (key, as_of) of each row, no two alike.
          now: The current time; rows whose ``until`` is earlier are dropped.

        Returns:
          (n,) bool, and a RecordBatch with one row for each True.
        """
        slots = np.fromiter((self._slots.get(place, -1) for place in places), np.int64, len(places))
        if len(self):
            slots[(slots >= 0) & (self._until[slots] < now)] = -1  # `put` writes into the same slot
        here = slots >= 0
        for place, hit in zip(places, here.tolist(), strict=True):
            if hit:
                self._slots.move_to_end(place)
        return here, self._rows(slots[here])

    def put(self, places: Sequence[CellKey], rows: Any, until: float) -> None:
        """Cache the rows of a RecordBatch, which count as the newest ones until the time ``until``."""
        first = max(0, len(places) - self._capacity)  # if not all fit, the last ones are kept
        slots = np.fromiter(map(self._slot, places[first:]), np.int64, len(places) - first)
        if len(slots) == 0:
            return
        self._grow(int(slots.max()) + 1)
        self._until[slots] = until
        for column, values, there, array in zip(
            self._columns, self._values, self._there, rows.columns, strict=True
        ):
            array = array.slice(first)
            there[slots] = array.is_valid().to_numpy(zero_copy_only=False)
            if column.is_list:
                starts = array.offsets.to_numpy().tolist()
                numbers = array.values.to_numpy(zero_copy_only=False)
                for row, slot in enumerate(slots.tolist()):  # copied, so that the batch isn't kept in memory
                    values[slot] = numbers[starts[row] : starts[row + 1]].copy()
            else:
                values[slots] = array.fill_null(0).to_numpy(zero_copy_only=False)

    def _slot(self, place: CellKey) -> int:
        """Return the slot to write a row into; if all are taken, that of the least recently used row."""
        slot = self._slots.pop(place, None)
        if slot is None:
            full = len(self._slots) == self._capacity
            slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
        self._slots[place] = slot
        return slot

    def _grow(self, least: int) -> None:
        size = len(self._until)
        if least <= size:
            return
        more = min(self._capacity, max(least, 2 * size, _FIRST)) - size

        def grow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([array, np.zeros(more, array.dtype)])

        self._values, self._there = list(map(grow, self._values)), list(map(grow, self._there))
        self._until = grow(self._until)

    def _rows(self, slots: Ints) -> Any:
        arrays = []
        for column, values, there in zip(self._columns, self._values, self._there, strict=True):
            found, valid = values[slots], there[slots]
            if column.is_list:
                lengths = np.fromiter(map(len, found), np.int64, len(found))
                numbers = np.concatenate([np.zeros(0, column.dtype), *found])
                arrays.append(list_array(numbers, lengths, valid))
            else:
                arrays.append(pa.array(found, mask=~valid))
        return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(self._columns))


# One request to a store, with a time limit, and repeated when the connection fails.

T = TypeVar("T")


class _LateError(Exception):
    pass


def request(make: Callable[[], T], policy: FetchPolicy, counted: Counter[str], what: str) -> T:
    """Make a request, with as many attempts as the policy allows, and return its result.

    Args:
      make: Makes the request; raises `StoreUnavailableError` if another attempt may succeed.
      policy: The time limit and the number of attempts.
      counted: The counters, whose ``requests``, ``retries`` and ``timeouts`` are increased.
      what: The source, table and keys, for the error.

    Raises:
      StoreUnavailableError: The last attempt failed too. Other errors are raised immediately.
    """
    began = time.monotonic()
    for attempt in range(1, policy.attempts + 1):
        counted["requests"] += 1
        counted["retries"] += attempt > 1
        try:
            return make() if policy.timeout is None else _within(policy.timeout, make)
        except _LateError:
            counted["timeouts"] += 1
            cause = StoreUnavailableError(f"no answer within {policy.timeout:g} s")
        except StoreUnavailableError as error:
            cause = error
        if attempt < policy.attempts:
            time.sleep(policy.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
    raise StoreUnavailableError(
        f"{what}: {cause}; tried {policy.attempts} times in {time.monotonic() - began:.1f} s: see whether "
        "the store is running and reached from here, or allow more with FetchPolicy(timeout=, attempts=)"
    ) from cause


def _within(seconds: float, make: Callable[[], T]) -> T:
    """Run ``make()`` in a separate thread, and abandon the thread when the time limit expires.

    A thread can't be stopped from outside. A source that waits for a network ends its own requests by a time
    limit on its sockets; the limit here applies to every store.
    """
    outcome: list[tuple[bool, Any, float]] = []
    began = time.monotonic()

    def run() -> None:
        try:
            outcome.append((True, make(), 0.0))
        except BaseException as error:
            outcome.append((False, error, time.monotonic() - began))

    thread = threading.Thread(target=run, name="gmeta-fetch", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise _LateError
    done, value, took = outcome[0]
    if not done:
        # On a busy machine, the socket's limit may also have expired before this thread resumes.
        raise value if took < seconds else _LateError from value
    return value


class FeatureSource(abc.ABC):
    """Tables of features by an int64 key, such as an item's id; each value has a version.

    A lookup returns the newest value not after ``as_of``, separately for each column: if a price changes
    daily and a click rate hourly, a row has the price of the day and the rate of the hour. Versions are
    numbers from 0, usually times in the unit of the data set's ``timestamp``.

    `ArrowSource` stores tables in memory, `RocksDBSource` in a folder, `HBaseSource` in a cluster. They
    implement how rows are fetched and written. For all stores, `FetchPolicy` sets what is fetched, how often,
    and how missing values are treated. A source supports any number of threads.

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
          keys: (n,), at most ``policy.batch_rows``, in ascending order within each ``as_of``.
          columns: Columns of the table.
          as_of: (n,) in ascending order, all equal if `one_time`, or None for the newest values. Pairs of key
            and ``as_of`` are distinct.

        Returns:
          A RecordBatch of n rows with these columns; missing values are null.

        Raises:
          StoreUnavailableError: The connection failed, so another attempt may succeed.
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

        Equal keys (with equal ``as_of``) are fetched once, or not at all if the cache contains them.

        Args:
          table: The table.
          keys: (n,) int64, in any order; keys may repeat.
          columns: The columns.
          as_of: The newest version allowed: one for all keys, or (n,); None sets no bound. It is rounded
            down to ``policy.resolution``.

        Returns:
          A ``pyarrow.RecordBatch`` of n rows in the order of the keys, with these columns in this order:
          ``int64``, ``float`` or lists of them. ``policy.missing`` decides on missing values.

        Raises:
          ConfigError: There is no such table or column, or an argument is of the wrong form.
          DataError: A value is missing, and ``policy.missing`` is ``"raise"``.
          StoreUnavailableError: The store didn't answer any of ``policy.attempts`` requests.
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
            raise ConfigError(f"{self.name}: request some columns, each once, not {list(names)}")
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
        places: list[CellKey] = list(zip(keys.tolist(), known_as, strict=True))
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
