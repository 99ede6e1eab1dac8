"""Features in HBase, over its Thrift server."""

from __future__ import annotations

import importlib
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError, StoreError, StoreUnavailableError
from gmeta.core.schema import Column
from gmeta.io.features.cells import ByteOrder, FetchPolicy, decode, encode
from gmeta.io.features.feature_source import NEWEST, FeatureSource
from gmeta.io.features.rocksdb import import_for

Ints = npt.NDArray[np.int64]
_BYTES_OF_LONG = struct.Struct(">q").pack
_MUTATIONS = 10_000  # the most of one write request


class HBaseSource(FeatureSource):
    """Features in HBase tables, read through a Thrift server (``hbase thrift start``, the first interface).

    `row_key` makes the row's key, a column is ``<family>:<name>``, `cells` describes a value's bytes, and
    versions are HBase's own timestamps. The table must keep as many versions (``VERSIONS``) as ``as_of``
    looks back; `create_table` sets that number.

    HBase takes one time for all rows of a request, so each distinct ``as_of`` takes a request of its own, one
    after the other. Give one ``as_of`` for all keys, or a `FetchPolicy.resolution` of an hour or a day.

    Nothing is opened before the first request. Each thread uses a connection of its own; connections are
    kept.

    Args:
      host: The host of the Thrift server.
      port: The port of the Thrift server.
      tables: Name -> its columns; HBase itself knows no types.
      family: The column family.
      byte_order: ``"big"`` for values that Java wrote with ``Bytes.toBytes``.
      row_key: Makes a row's key from a key; by default 8 bytes, big-endian, as ``Bytes.toBytes(long)``.
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
        """Make a table in HBase whose values keep ``versions`` versions.

        Raises:
          StoreUnavailableError, StoreError: As `multi_get`; also if the table already exists.
        """
        with self._connection(table) as connection:
            connection.create_table(table, {self._family.decode(): {"max_versions": versions}})

    def fetch(self, table: str, keys: Ints, columns: Sequence[Column], as_of: Ints | None) -> Any:
        """See `FeatureSource.fetch`."""
        names = [self._name(column) for column in columns]
        rows = [self._row_key(key) for key in keys.tolist()]
        # The server returns values older than the time, and not those of the time itself.
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
        """Lend a connection that no other thread uses meanwhile; a failed one isn't used again."""
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
            self.close()  # the idle ones are to the same server, which may have been restarted
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
