"""A Thrift server with HBase's interface and tables in memory, which can be set to fail.

The interface is happybase's own interface file. It behaves like HBase: a read has an exclusive upper bound in
time, answers omit empty rows, a family sets how many versions of a value are kept, and a missing table or
family is an ``IOError`` with a Java stack.
"""

from __future__ import annotations

import importlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

Cells = dict[int, bytes]  # version -> value


class HBaseServer:
    """Serves in threads of this process; ``with`` ends it.

    Args:
      framed: Whether to behave like a server started with ``-framed``.
      compact: Whether to behave like one started with ``-compact``.

    Attributes:
      port: The port on 127.0.0.1.
      requests: (table, rows, time) of each read, in order.
      before: Called at the beginning of each read; may wait, or raise `hang_up`.
    """

    def __init__(self, *, framed: bool = False, compact: bool = False) -> None:
        self._framed, self._compact = framed, compact
        importlib.import_module("happybase")  # loads the interface file
        self._interface: Any = importlib.import_module("Hbase_thrift")
        self._tables: dict[bytes, dict[bytes, dict[bytes, Cells]]] = {}
        self._versions: dict[tuple[bytes, bytes], int] = {}
        self._clients: list[socket.socket] = []
        self._lock = threading.Lock()
        self.requests: list[tuple[str, list[bytes], int | None]] = []
        self.before: Callable[[], None] = lambda: None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """End like a killed server: nothing listens, and open connections break."""
        for open_ in [self._listener, *self._clients]:
            with suppress(OSError):
                open_.shutdown(socket.SHUT_RDWR)
            open_.close()

    def __enter__(self) -> HBaseServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self) -> None:
        transport: Any = importlib.import_module("thriftpy2.transport")
        thrift: Any = importlib.import_module("thriftpy2.thrift")
        protocol: Any = importlib.import_module("thriftpy2.protocol")
        logging.getLogger("thriftpy2").setLevel(logging.CRITICAL)

        def serve(client: socket.socket) -> None:
            streams = transport.TFramedTransport if self._framed else transport.TBufferedTransport
            forms = protocol.TCompactProtocol if self._compact else protocol.TBinaryProtocol
            # Without decode_response=False keys that happen to be UTF-8 arrive as text.
            form = forms(streams(transport.TSocket(sock=client)), decode_response=False)
            if self._compact:
                form.read_message_begin = _named_as_text(form.read_message_begin)
            processor = thrift.TProcessor(self._interface.Hbase, self)
            with suppress(Exception):  # the client has gone, or uses another protocol
                while True:
                    processor.process(form, form)
            client.close()

        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._clients.append(client)
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    # The interface's own names from here on.

    def createTable(self, tableName: bytes, columnFamilies: Sequence[Any]) -> None:  # noqa: N802
        with self._lock:
            self._tables[tableName] = {}
            for family in columnFamilies:
                self._versions[tableName, family.name.rstrip(b":")] = family.maxVersions

    def mutateRowsTs(  # noqa: N802
        self, tableName: bytes, rowBatches: Sequence[Any], timestamp: int, attributes: object
    ) -> None:
        with self._lock:
            for batch in rowBatches:
                row = self._table(tableName).setdefault(batch.row, {})
                for mutation in batch.mutations:
                    kept = self._kept(tableName, mutation.column)
                    cells = row.setdefault(mutation.column, {})
                    cells[timestamp] = mutation.value
                    for old in sorted(cells)[:-kept]:
                        del cells[old]

    def getRowsWithColumns(  # noqa: N802
        self, tableName: bytes, rows: Sequence[bytes], columns: Sequence[bytes], attributes: object
    ) -> list[Any]:
        return self._read(tableName, rows, columns, None)

    def getRowsWithColumnsTs(  # noqa: N802
        self,
        tableName: bytes,
        rows: Sequence[bytes],
        columns: Sequence[bytes],
        timestamp: int,
        attributes: object,
    ) -> list[Any]:
        return self._read(tableName, rows, columns, timestamp)

    def _read(
        self, table: bytes, rows: Sequence[bytes], columns: Sequence[bytes], time: int | None
    ) -> list[Any]:
        self.before()
        with self._lock:
            self.requests.append((table.decode(), list(rows), time))
            there, found = self._table(table), []
            for column in columns:
                self._kept(table, column)
            for row in rows:
                cells = {}
                for column in columns:
                    versions = there.get(row, {}).get(column, {})
                    seen = [version for version in versions if time is None or version < time]
                    if seen:
                        cells[column] = self._interface.TCell(versions[max(seen)], max(seen))
                if cells:
                    found.append(self._interface.TRowResult(row, cells))
            return found

    def _table(self, name: bytes) -> dict[bytes, dict[bytes, Cells]]:
        if name not in self._tables:
            self._refuse(f"TableNotFoundException: {name.decode()}")
        return self._tables[name]

    def _kept(self, table: bytes, column: bytes) -> int:
        family = column.split(b":")[0]
        if (table, family) not in self._versions:
            self._refuse(f"NoSuchColumnFamilyException: Column family {family.decode()} does not exist")
        return self._versions[table, family]

    def _refuse(self, reason: str) -> None:
        stack = "\n\tat org.apache.hadoop.hbase.client.ConnectionImplementation.locate(x.java:1)"
        raise self._interface.IOError(message=f"org.apache.hadoop.hbase.{reason}{stack}")


def _named_as_text(read: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    """The compact protocol also leaves the method's name undecoded, and then doesn't recognise it."""

    def read_message_begin() -> tuple[Any, ...]:
        name, *rest = read()
        return (name.decode(), *rest)

    return read_message_begin


def hang_up() -> None:
    """End the connection of a request without an answer."""
    raise ConnectionResetError
