"""Rows of embedding tables in Redis, Redis Cluster or RocksDB, for models with external tables.

A value is the row of an id::

    8 bytes   little-endian: the lowest byte is the dtype, 1 float32, 2 bfloat16, 3 int8; the others are the
              version that wrote the row
    4 width   the row in this format (`gmeta.core.row_formats`), little-endian; for float32, its numbers

Redis has a key for each row, in one of 128 buckets, and a key with the position of each bucket::

    <prefix>:{<bucket>}:<table>:<id>     bucket = (id * 0x9E3779B97F4A7C15 mod 2^64) >> 57, all in decimal
    <prefix>:{<bucket>}                  the position

Redis Cluster hashes only what is between the braces. A bucket is therefore in one slot: one MGET reads its
rows, and one script changes rows and position together. Each bucket moves from version to version by itself.
If a failover loses the last rows of a bucket, it loses their position too, and they are sent again.

RocksDB has the key ``<table> 0x00 <id, 8 bytes, big-endian>``, and the position under ``position``, which is
written in one batch with the rows.

A position is a stream and a number, such as ``-71203 12``: version 12 of the deltas with this fingerprint. A
change has the state of rows, not a difference. It is therefore right at every position from the one that it
follows to the one that it makes, and changes nothing at any other: none is applied twice, or skipped.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError, StoreError, StoreUnavailableError, first_line
from gmeta.core.imports import import_for
from gmeta.core.row_formats import RowDtype
from gmeta.export.model_deltas import Ints, TableChange

HEAD = 8
"""The number of bytes before a row."""
DTYPES: Mapping[RowDtype, int] = {"float32": 1, "bfloat16": 2, "int8": 3}
"""The dtype of rows -> the byte that stands for it."""
BUCKETS = 128
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SWEPT_AT_ONCE = 1000


class Position(NamedTuple):
    """Where a store is, or a bucket of it.

    Attributes:
      stream: What its rows come from; empty if there are none.
      at: The version in it.
    """

    stream: str
    at: int

    @classmethod
    def of(cls, held: bytes | None, url: str) -> Position:
        """Read a position as it is stored; None: there is none."""
        if not held:
            return cls("", 0)
        if not re.fullmatch(rb"\S+ \d+", held):
            raise StoreError(f"{url}: {held[:40]!r} isn't a position of gmeta: name another prefix or folder")
        stream, at = held.decode().split()
        return cls(stream, int(at))

    @property
    def stored(self) -> bytes:
        """The position as it is stored."""
        return f"{self.stream} {self.at}".encode()


@dataclass(frozen=True)
class Change:
    """A change of a store, for positions of a stream from ``after`` to before ``until``.

    Attributes:
      stream: The stream.
      after: The first position.
      until: One past the last.
      to: The position after the change.
      version: The version to note in its rows.
      dtype: The dtype of its rows.
      tables: Table -> its changed rows, by the names of stores.
    """

    stream: str
    after: int
    until: int
    to: Position
    version: int
    dtype: RowDtype
    tables: Mapping[str, TableChange]

    def fits(self, held: Position) -> bool:
        """Return whether the change is right for a position."""
        return held.stream == self.stream and self.after <= held.at < self.until


def encode_rows(rows: npt.NDArray[Any], dtype: RowDtype, version: int) -> list[bytes]:
    """Return the values of (n, width) rows of a format."""
    values = np.empty(len(rows), [("head", "<u8"), ("row", "<i4", (rows.shape[1],))])
    values["head"] = version << 8 | DTYPES[dtype]
    values["row"] = np.ascontiguousarray(rows).view(np.int32)
    size, data = values.dtype.itemsize, values.tobytes()
    return [data[place : place + size] for place in range(0, len(data), size)]


def without_password(url: str) -> str:
    """Return an address as messages show it."""
    return re.sub(r"(//[^/@]*:)[^/@]*@", r"\1***@", url)


class RowStore(ABC):
    """A store of rows.

    Args:
      url: Its address.

    Attributes:
      url: The address without a password.
    """

    def __init__(self, url: str) -> None:
        self.url = without_password(url)

    @abstractmethod
    def positions(self) -> set[Position]:
        """Return the positions of its buckets.

        Raises:
          StoreUnavailableError: The store doesn't answer.
          StoreError: The store refuses, or it has something else.
        """

    @abstractmethod
    def change(self, change: Change) -> None:
        """Change the rows and the position of each bucket that the change fits; others stay.

        Raises:
          StoreUnavailableError, StoreError: As for `positions`. Some buckets may have changed.
        """

    @abstractmethod
    def sweep(self, version: int) -> None:
        """Delete all rows that a version before this one wrote.

        Raises:
          StoreUnavailableError, StoreError: As for `positions`.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


# All of these run in Redis at once: no other client sees a part of it.
_CHANGE = """
local held = redis.call('GET', KEYS[1])
local stream, at = '', 0
if held then
  stream, at = string.match(held, '^(%S+) (%d+)$')
  at = tonumber(at)
end
if stream ~= ARGV[1] or at < tonumber(ARGV[2]) or at >= tonumber(ARGV[3]) then return 0 end
local gone = tonumber(ARGV[5])
for i = 2, gone + 1 do redis.call('DEL', KEYS[i]) end
for i = gone + 2, #KEYS do redis.call('SET', KEYS[i], ARGV[i - gone + 4]) end
redis.call('SET', KEYS[1], ARGV[4])
return 1
"""
_SWEEP = """
for i = 1, #KEYS do
  local head = redis.call('GETRANGE', KEYS[i], 0, 7)
  local version = 0
  for byte = 8, 2, -1 do version = version * 256 + (string.byte(head, byte) or 0) end
  if version < tonumber(ARGV[1]) then redis.call('DEL', KEYS[i]) end
end
"""


class RedisConnection:
    """A connection to Redis, or to Redis Cluster, that opens at its first use.

    Args:
      url: As for `RedisRows`.

    Attributes:
      url: The address without a password.
      prefix: What keys begin with.

    Raises:
      ConfigError: ``redis`` isn't installed, or the address isn't one.
    """

    def __init__(self, url: str) -> None:
        self.url = without_password(url)
        self._library = import_for("a store redis://", "redis")
        parts = urlsplit(url)
        account, _, hosts = parts.netloc.rpartition("@")
        self._hosts = [host for host in hosts.split(",") if host]
        self._account = f"{parts.scheme}://{account}{'@' if account else ''}"
        self.prefix = parts.path.strip("/")
        if not self._hosts or not re.fullmatch(r"[\w.:/-]+", self.prefix) or parts.query:
            raise ConfigError(
                f"{url} must be redis://host:port/prefix, a prefix of letters, digits, _ . : / -"
            )

    @cached_property
    def client(self) -> Any:
        """The connection; the nodes of a cluster are found from any one that answers."""
        library, failed = self._library, None
        limits = {"socket_connect_timeout": 10, "socket_timeout": 60}
        for host in self._hosts:
            try:
                client = library.Redis.from_url(self._account + host, **limits)
                if client.info("cluster").get("cluster_enabled"):
                    client.close()
                    client = library.RedisCluster.from_url(self._account + host, **limits)
                elif len(self._hosts) > 1:
                    raise StoreError(f"{self.url}: {host} isn't a node of a cluster: name one server")
                self._check_eviction(client)
                return client
            except self._unavailable as error:
                failed = error
        raise failed or AssertionError

    def _check_eviction(self, client: Any) -> None:
        found = client.info("memory")
        for node in [found] if "maxmemory" in found else found.values():
            if node.get("maxmemory") and str(node.get("maxmemory_policy")).startswith("allkeys"):
                raise StoreError(
                    f"{self.url} evicts keys (maxmemory-policy {node['maxmemory_policy']}), and an evicted "
                    "one reads as that of an id or a user never seen: set maxmemory-policy noeviction"
                )

    @property
    def _unavailable(self) -> tuple[type[Exception], ...]:
        found = self._library.exceptions
        return (
            found.ConnectionError,
            found.TimeoutError,
            found.ClusterError,
            found.RedisClusterException,
            OSError,
        )

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Turn Redis' errors in a ``with`` block into those of gmeta; one that can't be reached is closed."""
        try:
            yield
        except self._unavailable as error:
            self.close()
            raise StoreUnavailableError(
                f"{self.url} can't be reached: {first_line(error)}; start Redis, or check the address"
            ) from error
        except self._library.exceptions.RedisError as error:
            raise StoreError(f"{self.url} refuses: {first_line(error)}") from error

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        client = self.__dict__.pop("client", None)
        if client is not None:
            client.close()


class RedisRows(RowStore):
    """Rows in Redis, or in Redis Cluster.

    Args:
      url: ``redis://[user:password@]host[:port][,host[:port]...]/prefix``, or ``rediss://`` for TLS. Several
        hosts are nodes of one cluster, any of which may be down.

    Raises:
      ConfigError: ``redis`` isn't installed, or the address isn't one.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._redis = RedisConnection(url)

    def positions(self) -> set[Position]:
        """See `RowStore.positions`."""
        keys = [self._key(bucket) for bucket in range(BUCKETS)]
        with self._redis.explain():
            many = getattr(self._redis.client, "mget_nonatomic", self._redis.client.mget)
            return {Position.of(held, self.url) for held in many(keys)}

    def _key(self, bucket: int) -> bytes:
        return f"{self._redis.prefix}:{{{bucket}}}".encode()

    def change(self, change: Change) -> None:
        """See `RowStore.change`."""
        gone: list[list[bytes]] = [[] for _ in range(BUCKETS)]
        keys: list[list[bytes]] = [[] for _ in range(BUCKETS)]
        rows: list[list[bytes]] = [[] for _ in range(BUCKETS)]
        for table, of in change.tables.items():
            for bucket, key in self._keys(table, of.removed):
                gone[bucket].append(key)
            for (bucket, key), row in zip(
                self._keys(table, of.ids), encode_rows(of.rows, change.dtype, change.version), strict=True
            ):
                keys[bucket].append(key)
                rows[bucket].append(row)
        settings = [change.stream, change.after, change.until, change.to.stored]
        with self._redis.explain():
            for bucket in range(BUCKETS):
                names = [self._key(bucket), *gone[bucket], *keys[bucket]]
                words = [*settings, len(gone[bucket]), *rows[bucket]]
                self._redis.client.eval(_CHANGE, len(names), *names, *words)

    def _keys(self, table: str, ids: Ints) -> Iterator[tuple[int, bytes]]:
        for bucket, number in zip(_buckets(ids), ids.tolist(), strict=True):
            yield bucket, f"{self._redis.prefix}:{{{bucket}}}:{table}:{number}".encode()

    def sweep(self, version: int) -> None:
        """See `RowStore.sweep`."""
        with self._redis.explain():
            found = self._redis.client.scan_iter(match=f"{self._redis.prefix}:{{*}}:*", count=_SWEPT_AT_ONCE)
            while some := sorted(itertools.islice(found, _SWEPT_AT_ONCE), key=_bucket_of):
                for _, keys in itertools.groupby(some, _bucket_of):
                    of = [*keys]
                    self._redis.client.eval(_SWEEP, len(of), *of, version)

    def close(self) -> None:
        """See `RowStore.close`."""
        self._redis.close()


def _buckets(ids: Ints) -> list[int]:
    numbers: list[int] = ((ids.astype(np.uint64) * _GOLDEN) >> np.uint64(64 - 7)).tolist()
    return numbers


def _bucket_of(key: bytes) -> bytes:
    return key[key.index(b"{") : key.index(b"}")]


_POSITION = b"position"


class RocksDBRows(RowStore):
    """Rows in a RocksDB folder of this machine. One process writes it; readers open it as secondary.

    Args:
      url: ``rocksdb:///path``.

    Raises:
      ConfigError: ``rocksdict`` isn't installed, or there is no path.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._library = import_for("a store rocksdb://", "rocksdict")
        self._path = url.removeprefix("rocksdb://")
        if not self._path:
            raise ConfigError(f"{url} must be rocksdb:///path")

    @cached_property
    def _store(self) -> Any:
        options = self._library.Options(raw_mode=True)
        options.create_if_missing(True)
        blocks = self._library.BlockBasedOptions()
        blocks.set_bloom_filter(10, False)  # bits a key: one in a hundred reads of a missing row is in vain
        options.set_block_based_table_factory(blocks)
        return self._library.Rdict(self._path, options)

    @contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # the only class that rocksdict raises
            self.close()
            raise StoreUnavailableError(
                f"{self.url}: {first_line(error)}; one process may write a folder, on a disk that has room"
            ) from error

    def positions(self) -> set[Position]:
        """See `RowStore.positions`."""
        with self._explain():
            held = Position.of(self._store.get(_POSITION), self.url)
            entries = self._store.iter()
            entries.seek_to_first()
            if not held.stream and entries.valid():
                raise StoreError(f"{self.url} has something other than rows of gmeta: name another folder")
            return {held}

    def change(self, change: Change) -> None:
        """See `RowStore.change`."""
        with self._explain():
            if not change.fits(*self.positions()):
                return
            batch = self._library.WriteBatch(raw_mode=True)
            for table, of in change.tables.items():
                for key in _rocksdb_keys(table, of.removed):
                    batch.delete(key)
                values = encode_rows(of.rows, change.dtype, change.version)
                for key, value in zip(_rocksdb_keys(table, of.ids), values, strict=True):
                    batch.put(key, value)
            batch.put(_POSITION, change.to.stored)
            self._write(batch)

    def _write(self, batch: Any) -> None:
        to_disk = self._library.WriteOptions()
        to_disk.sync = True
        self._store.write(batch, to_disk)

    def sweep(self, version: int) -> None:
        """See `RowStore.sweep`."""
        with self._explain():
            entries = self._store.iter()
            entries.seek_to_first()
            batch = self._library.WriteBatch(raw_mode=True)
            while entries.valid():
                key, head = entries.key(), entries.value()[:HEAD]
                if key != _POSITION and int.from_bytes(head, "little") >> 8 < version:
                    batch.delete(key)
                if batch.len() >= _SWEPT_AT_ONCE:
                    self._write(batch)
                    batch = self._library.WriteBatch(raw_mode=True)
                entries.next()
            self._write(batch)

    def close(self) -> None:
        """See `RowStore.close`."""
        store = self.__dict__.pop("_store", None)
        if store is not None:
            store.close()


def _rocksdb_keys(table: str, ids: Ints) -> list[bytes]:
    start, places = table.encode() + b"\0", ids.astype(">i8").tobytes()
    return [start + places[place : place + 8] for place in range(0, len(places), 8)]


def row_store(url: str) -> RowStore | None:
    """Return the store at an address; None if the address isn't that of a store."""
    kinds: Sequence[tuple[tuple[str, ...], type[RedisRows] | type[RocksDBRows]]] = (
        (("redis", "rediss"), RedisRows),
        (("rocksdb",), RocksDBRows),
    )
    scheme = url.partition("://")[0]
    return next((kind(url) for schemes, kind in kinds if scheme in schemes), None)
