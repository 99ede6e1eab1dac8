"""Features in key-value stores: in a RocksDB folder, or in HBase over its Thrift server."""

from __future__ import annotations

import importlib
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError, StoreError, StoreUnavailableError
from gmeta.core.imports import import_for
from gmeta.core.schema import Column
from gmeta.io.features.cells import ByteOrder, Cell, FetchPolicy, decode, encode
from gmeta.io.features.feature_source import NEWEST, FeatureSource

Ints = npt.NDArray[np.int64]
_PREFIX, _SIZE = 10, 18  # bytes: of key and column, without and with the version


class RocksDBSource(FeatureSource):
    """Features in a RocksDB folder, on a disk of this machine.

    A table is a column family, and each value a separate entry (`cells` describes its bytes). The entry's key
    is::

        key, 8 bytes | column, 2 bytes | 2**63 - 1 - version, 8 bytes

    All parts are big-endian. The key's sign bit is flipped, and the column is its index in the table. Entries
    are therefore sorted by key, then by column, then from the newest version to the oldest: one seek to the
    prefix, with ``as_of`` in place of the version, finds the requested value. A Bloom filter over prefixes
    speeds up lookups of missing keys. The tables' columns are stored as JSON in the default column family,
    under ``gmeta/<table>``.

    Args:
      path: The folder.
      writable: True: the source can create tables and write rows; only one process at a time may do so.
        False: any number of processes can read, and each sees the state when it opened the folder.
      policy: How rows are fetched. By default, a reader caches 100,000 rows, which is faster than RocksDB's
        own cache, and a writer caches none, because it would read outdated rows; neither has a timeout.

    Raises:
      ConfigError: ``rocksdict`` isn't installed.
      StoreError: The folder can't be opened.

    Example:
      >>> with RocksDBSource("features", writable=True) as source:  # doctest: +SKIP
      ...     source.create_table("item", [Column("price", "float32"), Column("tags", is_list=True)])
      ...     source.put("item", [7], {"price": [9.5], "tags": [[1, 2]]}, version=1_700_000_000)
    """

    def __init__(
        self, path: str | os.PathLike[str], *, writable: bool = False, policy: FetchPolicy | None = None
    ) -> None:
        if policy is None:
            policy = FetchPolicy(timeout=None, cache_rows=0 if writable else 100_000)
        super().__init__(f"RocksDBSource({os.fspath(path)})", policy)
        self._library, self._writable = import_for("RocksDBSource", "rocksdict"), writable
        kinds = self._library.AccessType
        try:
            if writable:
                Path(path).mkdir(parents=True, exist_ok=True)
            there = (Path(path) / "CURRENT").exists()
            families = self._library.Rdict.list_cf(str(path)) if there else ["default"]
            self._store = self._library.Rdict(
                str(path),
                options=self._options(),
                column_families={name: self._options() for name in families if name != "default"},
                access_type=kinds.read_write() if writable else kinds.read_only(),
            )
        except Exception as error:  # the only class that rocksdict raises
            advice = (
                "a folder has one writer; readers open it without writable=True"
                if writable
                else ("give the folder that a RocksDBSource(writable=True) has written")
            )
            raise StoreError(f"{self.name}: can't be opened: {error}; {advice}") from error
        self._columns: dict[str, list[Column]] = {}
        self._families: dict[str, Any] = {}
        for name in families:
            description = self._store.get(_describe(name))
            if description is not None:
                self._columns[name] = [Column(**column) for column in json.loads(description)]
                self._families[name] = self._store.get_column_family(name)

    @property
    def tables(self) -> Mapping[str, Sequence[Column]]:
        """The columns of each table."""
        return self._columns

    def create_table(self, table: str, columns: Sequence[Column]) -> None:
        """Create a table, unless it exists with these columns.

        Raises:
          ConfigError: The table exists with other columns, or the folder isn't open for writing.
        """
        if self._columns.get(table, list(columns)) != list(columns) or not table or table == "default":
            raise ConfigError(f"{self.name}: table {table!r} exists with other columns; choose another name")
        self._check_writable()
        if table not in self._columns:
            described = json.dumps(
                [{"name": c.name, "dtype": c.dtype, "is_list": c.is_list} for c in columns]
            )
            self._families[table] = self._store.create_column_family(table, self._options())
            self._store[_describe(table)] = described.encode()
            self._columns[table] = list(columns)

    def fetch(self, table: str, keys: Ints, columns: Sequence[Column], as_of: Ints | None) -> Any:
        """See `FeatureSource.fetch`."""
        numbers = [self._columns[table].index(column) for column in columns]
        places = self._places(keys, numbers, as_of)
        cells: list[Cell] = []
        try:
            entries = self._families[table].iter()
            for place in places:
                entries.seek(place)
                key = entries.key()
                there = key is not None and key[:_PREFIX] == place[:_PREFIX]
                cells.append(entries.value() if there else None)
        except Exception as error:
            raise StoreError(
                f"{self.name}: table {table!r} can't be read: {error}; see whether the disk is sound, and "
                "write the folder again"
            ) from error
        of_columns = [cells[place :: len(columns)] for place in range(len(columns))]
        return decode(of_columns, columns, keys, f"{self.name}: table {table!r}")

    def close(self) -> None:
        """Close the folder; all written rows are then on the disk."""
        for family in self._families.values():
            family.close()
        self._store.close()

    def __enter__(self) -> RocksDBSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, table: str, keys: Ints, rows: Any, columns: Sequence[Column], version: int) -> None:
        self._check_writable()
        numbers = [self._columns[table].index(column) for column in columns]
        places = self._places(keys, numbers, np.full(len(keys), version, np.int64))
        cells = [encode(array) for array in rows.columns]
        batch = self._library.WriteBatch(raw_mode=True)
        family = self._store.get_column_family_handle(table)
        for i, place in enumerate(places):
            cell = cells[i % len(columns)][i // len(columns)]
            if cell is not None:
                batch.put(place, cell, family)
        self._store.write(batch)

    def _places(self, keys: Ints, numbers: Sequence[int], as_of: Ints | None) -> list[bytes]:
        """Return the entry key to seek for each value of each key, key by key."""
        places = np.empty((len(keys), len(numbers)), [("key", ">u8"), ("column", ">u2"), ("version", ">u8")])
        places["key"] = (keys.astype(np.uint64) ^ np.uint64(1 << 63))[:, None]
        places["column"] = numbers
        when = np.full(len(keys), NEWEST + 1) if as_of is None else as_of
        places["version"] = (np.uint64(NEWEST + 1) - when.astype(np.uint64))[:, None]
        data = places.tobytes()
        return [data[first : first + _SIZE] for first in range(0, len(data), _SIZE)]

    def _options(self) -> Any:
        options = self._library.Options(raw_mode=True)
        options.create_if_missing(self._writable)
        options.set_prefix_extractor(self._library.SliceTransform.create_fixed_prefix(_PREFIX))
        blocks = self._library.BlockBasedOptions()
        blocks.set_bloom_filter(10, False)  # bits per prefix: one in a hundred seeks is in vain
        options.set_block_based_table_factory(blocks)
        return options

    def _check_writable(self) -> None:
        if not self._writable:
            raise ConfigError(f"{self.name} is open for reading; open it with writable=True")


def _describe(table: str) -> bytes:
    return f"gmeta/{table}".encode()


_BYTES_OF_LONG = struct.Struct(">q").pack
_MUTATIONS = 10_000  # the maximum of one write request


class HBaseSource(FeatureSource):
    """Features in HBase tables, read through a Thrift server (``hbase thrift start``, the first interface).

    `row_key` encodes the row's key, a column is ``<family>:<name>``, `cells` describes a value's bytes, and
    versions are HBase's own timestamps. The table must keep as many versions (``VERSIONS``) as ``as_of``
    looks back; `create_table` sets that number.

    HBase accepts one time for all rows of a request, so distinct ``as_of`` are requested one after another.
    Pass one ``as_of`` for all keys, or a `FetchPolicy.resolution` of an hour or a day.

    The first request opens the connection. Each thread uses a separate connection, which is kept for later
    requests.

    Args:
      host: The host of the Thrift server.
      port: The port of the Thrift server.
      tables: Name -> its columns; HBase itself doesn't store types.
      family: The column family.
      byte_order: ``"big"`` for values that Java wrote with ``Bytes.toBytes``.
      row_key: Converts a key to a row's key; by default 8 bytes, big-endian, as ``Bytes.toBytes(long)``.
      table_prefix: A prefix of the tables' names, followed by ``_``.
      transport: ``"framed"`` for a server started with ``-framed``, ``-nonblocking`` or ``-hsha``.
      protocol: ``"compact"`` for a server started with ``-compact``.
      policy: How rows are fetched.

    Raises:
      ConfigError: ``happybase`` isn't installed, or a setting is unknown.

    Example:
      >>> source = HBaseSource(  # doctest: +SKIP
      ...     "thrift.example", tables={"item": [Column("price", "float32")]}, byte_order="big"
      ... )
      >>> source.multi_get("item", [7], ["price"], as_of=1_700_000_000_000)
    """

    def __init__(
        self,
        host: str,
        port: int = 9090,
        *,
        tables: Mapping[str, Sequence[Column]],
        family: str = "f",
        byte_order: ByteOrder = "little",
        row_key: Callable[[int], bytes] = _BYTES_OF_LONG,
        table_prefix: str | None = None,
        transport: str = "buffered",
        protocol: str = "binary",
        policy: FetchPolicy | None = None,
    ) -> None:
        super().__init__(f"HBaseSource({host}:{port})", policy or FetchPolicy())
        for setting, value, known in (
            ("byte_order", byte_order, ("little", "big")),
            ("transport", transport, ("buffered", "framed")),
            ("protocol", protocol, ("binary", "compact")),
        ):
            if value not in known:
                raise ConfigError(f"HBaseSource: {setting} must be {' or '.join(known)}, got {value!r}")
        self._library = import_for("HBaseSource", "happybase")
        self._tables = {name: list(columns) for name, columns in tables.items()}
        self._family, self._order, self._row_key = family.encode(), byte_order, row_key
        self._settings = {
            "host": host,
            "port": port,
            # Limits each wait on the socket, so that an abandoned thread ends; `requests` limits the time of
            # a whole request.
            "timeout": None if self.policy.timeout is None else max(1, int(self.policy.timeout * 2000)),
            "table_prefix": table_prefix,
            "transport": transport,
            "protocol": protocol,
        }
        self._idle: deque[Any] = deque()

    one_time = True

    @property
    def tables(self) -> Mapping[str, Sequence[Column]]:
        """The columns of each table."""
        return self._tables

    def create_table(self, table: str, *, versions: int) -> None:
        """Create a table in HBase whose values keep ``versions`` versions.

        Raises:
          StoreUnavailableError, StoreError: As `multi_get`; also if the table already exists.
        """
        with self._connection(table) as connection:
            connection.create_table(table, {self._family.decode(): {"max_versions": versions}})

    def fetch(self, table: str, keys: Ints, columns: Sequence[Column], as_of: Ints | None) -> Any:
        """See `FeatureSource.fetch`."""
        names = [self._name(column) for column in columns]
        rows = [self._row_key(key) for key in keys.tolist()]
        # The server returns values older than the given time, excluding the time itself.
        until = None if as_of is None or as_of[0] >= NEWEST else int(as_of[0]) + 1
        with self._connection(table) as connection:
            answer = dict(connection.table(table).rows(rows, columns=names, timestamp=until))
        nothing: dict[bytes, bytes] = {}
        cells = [[answer.get(row, nothing).get(name) for row in rows] for name in names]
        return decode(cells, columns, keys, f"{self.name}: table {table!r}", self._order)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            with suppress(IndexError, OSError):
                self._idle.popleft().close()

    def _put(self, table: str, keys: Ints, rows: Any, columns: Sequence[Column], version: int) -> None:
        names = [self._name(column) for column in columns]
        cells = [encode(array, self._order) for array in rows.columns]
        with (
            self._connection(table) as connection,
            connection.table(table).batch(timestamp=version, batch_size=_MUTATIONS) as batch,
        ):
            for key, *values in zip(keys.tolist(), *cells, strict=True):
                there = {name: cell for name, cell in zip(names, values, strict=True) if cell is not None}
                if there:
                    batch.put(self._row_key(key), there)

    def _name(self, column: Column) -> bytes:
        return self._family + b":" + column.name.encode()

    @contextmanager
    def _connection(self, table: str) -> Iterator[Any]:
        """Yield a connection that no other thread uses in the meantime; a failed one isn't reused."""
        thrift = importlib.import_module("thriftpy2.thrift")
        transport = importlib.import_module("thriftpy2.transport")
        connection = None
        try:
            try:
                connection = self._idle.popleft()
            except IndexError:
                connection = self._library.Connection(**self._settings)
            yield connection
        except (OSError, transport.TTransportException) as error:
            _drop(connection)
            self.close()  # idle connections are to the same server, which may have restarted
            hung_up = getattr(error, "type", None) == transport.TTransportException.END_OF_FILE
            hint = (
                " (as a server does that was started with another transport= or protocol=)" if hung_up else ""
            )
            raise StoreUnavailableError(f"{_said(error)}{hint}") from error
        except thrift.TException as error:
            _drop(connection)
            raise StoreError(
                f"{self.name}: table {table!r}: {_said(error)}; see whether the table and its family "
                f"{self._family.decode()!r} are there, and how the server was started (transport=, protocol=)"
            ) from error
        except BaseException:
            _drop(connection)
            raise
        self._idle.append(connection)


def _said(error: BaseException) -> str:
    """Return the first line of an error's message; a Java server sends its whole stack trace."""
    said = getattr(error, "message", None) or str(error)
    text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    return f"{type(error).__name__}: {text.strip().splitlines()[0] if text.strip() else 'no reason given'}"


def _drop(connection: Any) -> None:
    if connection is not None:
        with suppress(OSError):
            connection.close()
