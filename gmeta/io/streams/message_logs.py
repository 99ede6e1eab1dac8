"""Message brokers as logs: topics of Kafka, and streams of Redis.

The positions in a log are kept with the model, so nothing is committed to a consumer group: a broker needs no
write access, and any number of jobs read the same topic.
"""

from __future__ import annotations

import json
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gmeta.core.errors import ConfigError, DataError, StoreUnavailableError
from gmeta.core.imports import import_for
from gmeta.io.streams.records import Columns, Format, Ints, Rows, StreamCounts, infer_columns, parse

_AT_ONCE = 4096  # messages
_GONE = "keep messages longer (retention.ms), or start again without the checkpoint's position"
_ANEW = "the topic was made anew: start again without the checkpoint's position"
_FIRST_WAIT = 30.0  # seconds for a broker to answer


def _rows(
    values: Sequence[Any],
    offsets: Sequence[Any],
    times: Ints,
    columns: Columns,
    form: Format | None,
    where: str,
    counts: StreamCounts | None,
    end: Any,
) -> Rows:
    batch, numbers = parse(
        [b"" if value is None else value for value in values],
        columns,
        form or "json",
        lambda i: f"{where}: message {offsets[i]}",
        counts,
    )

    def place(rows: int) -> Any:
        """Return the offset of the first message that isn't read, past bad messages after the last row."""
        return end(len(values)) if rows == len(numbers) else end(int(numbers[rows - 1]) + 1)

    return Rows(batch, times[numbers], place)


@dataclass(frozen=True)
class KafkaLog:
    """A topic of Kafka; each of its partitions is a partition. A place is the next message's offset.

    Attributes:
      servers: The brokers, as in ``bootstrap.servers``.
      topic: The topic.
      settings: Further settings of the consumer, such as those of TLS.
      latest: Whether a new reader begins at the end, not at the beginning.
    """

    servers: str
    topic: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    latest: bool = False
    unit = "us"

    @property
    def name(self) -> str:
        """The log, for messages."""
        return f"kafka://{self.servers}/{self.topic}"

    def consumer(self) -> Any:
        """Return a consumer that never commits."""
        library = import_for("kafka://", "confluent_kafka", "online")
        return library.Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "gmeta",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "queued.max.messages.kbytes": 16384,
                "isolation.level": "read_committed",
                "log_level": 2,  # what goes wrong comes to error_cb
                "error_cb": lambda error: warnings.warn(f"{self.name}: {error.str()}", stacklevel=1),
                **self.settings,
            }
        )

    def partitions(self) -> Sequence[str]:
        """Return the numbers of the topic's partitions.

        Raises:
          StoreUnavailableError: No broker answers.
          DataError: There is no such topic.
        """
        library, consumer = import_for("kafka://", "confluent_kafka", "online"), self.consumer()
        try:
            found = consumer.list_topics(self.topic, timeout=_FIRST_WAIT).topics[self.topic]
        except library.KafkaException as error:
            raise StoreUnavailableError(
                f"{self.name}: no broker answers: {error}; check the address and the network"
            ) from error
        finally:
            consumer.close()
        if found.error is not None:
            raise DataError(
                f"{found.error.str()}", path=self.name, advice="create the topic, or name another one"
            )
        return [str(number) for number in sorted(found.partitions)]

    def from_first(self) -> KafkaLog:
        """Return the log with new readers that begin at the first message."""
        return replace(self, latest=False)

    def infer(self, form: Format | None) -> dict[str, str] | None:
        """Infer the columns from the first messages; None if there are none yet."""
        for partition in self.partitions():
            reader = KafkaReader(self, int(partition), None, {}, form, None, first=True)
            try:
                values = reader.first_values()
            finally:
                reader.close()
            if values:
                return infer_columns(values, form or "json", self.name)
        return None

    def open(
        self, partition: str, place: Any, columns: Columns, form: Format | None, counts: StreamCounts | None
    ) -> KafkaReader:
        """Read a partition from a place on; None is where a new reader begins."""
        return KafkaReader(self, int(partition), place, columns, form, counts)


class KafkaReader:
    """The reader of a partition of a topic; see `KafkaLog.open`."""

    seen: bytes | None = None

    def __init__(
        self,
        log: KafkaLog,
        partition: int,
        place: Any,
        columns: Columns,
        form: Format | None,
        counts: StreamCounts | None,
        *,
        first: bool = False,
    ) -> None:
        library = self._library = import_for("kafka://", "confluent_kafka", "online")
        self._log, self._where = log, f"{log.name}[{partition}]"
        self._columns, self._form, self._counts = columns, form, counts
        self._consumer = log.consumer()
        self.at_end = False
        topic = library.TopicPartition(log.topic, partition)
        try:
            low, high = self._consumer.get_watermark_offsets(topic, timeout=_FIRST_WAIT)
        except library.KafkaException as error:
            self._consumer.close()
            raise StoreUnavailableError(
                f"{self._where}: no broker answers: {error}; check the address and the network"
            ) from error
        if place is None:
            place = low if first or not log.latest else high
        elif not low <= int(place) <= high:
            self._consumer.close()
            raise DataError(
                f"message {place} is to be read next, and the broker has {low} to {high - 1}",
                path=self._where,
                advice=_GONE if int(place) < low else _ANEW,
            )
        self.start = topic.offset = int(place)
        self._consumer.assign([topic])

    def read(self) -> Rows | None:
        """Return the next messages as rows; None if there are none yet.

        Raises:
          DataError: A message is bad, or the broker has deleted the next one.
        """
        messages = self._messages(0.0)
        if not messages:
            return None
        offsets = [message.offset() for message in messages]
        times = np.array([message.timestamp()[1] for message in messages], np.int64) * 1000
        rows = _rows(
            [message.value() for message in messages],
            offsets,
            times,
            self._columns,
            self._form,
            self._where,
            self._counts,
            lambda count: offsets[count - 1] + 1,
        )
        return rows if rows.batch.num_rows else self.read()

    def first_values(self) -> list[bytes]:
        """Return some messages; none if the partition is at its end."""
        messages: list[Any] = []
        while not messages and not self.at_end:
            messages = self._messages(0.1)
        return [message.value() for message in messages if message.value() is not None]

    def _messages(self, wait: float) -> list[Any]:
        errors = self._library.KafkaError
        found = []
        for message in self._consumer.consume(_AT_ONCE, wait):
            error = message.error()
            if error is None:
                found.append(message)
                self.at_end = False
            elif error.code() == errors._PARTITION_EOF:
                self.at_end = True
            elif error.code() in (errors._AUTO_OFFSET_RESET, errors.OFFSET_OUT_OF_RANGE):
                raise DataError(
                    f"the next message is gone: {error.str()}",
                    path=self._where,
                    advice=_GONE,
                )
            elif error.fatal():
                raise StoreUnavailableError(f"{self._where}: {error.str()}")
        return found

    def close(self) -> None:
        """Close the connection."""
        self._consumer.close()


@dataclass(frozen=True)
class RedisLog:
    """Streams of Redis 7, each a partition. A place is the last entry's id, and how many were added up to it.

    An entry is an object in the field ``value``, or else its fields are the columns.

    Attributes:
      server: ``host:port``, with ``user:password@`` before it if need be.
      keys: The streams.
      latest: Whether a new reader begins at the end, not at the beginning.
    """

    server: str
    keys: Sequence[str]
    latest: bool = False
    unit = "us"

    @property
    def name(self) -> str:
        """The log, for messages."""
        return f"redis://{_address(self.server)}/{','.join(self.keys)}"

    def connect(self) -> Any:
        """Return a connection."""
        return import_for("redis://", "redis", "online").Redis.from_url(f"redis://{self.server}")

    def partitions(self) -> Sequence[str]:
        """Return the names of the streams."""
        return self.keys

    def from_first(self) -> RedisLog:
        """Return the log with new readers that begin at the first entry."""
        return replace(self, latest=False)

    def infer(self, form: Format | None) -> dict[str, str] | None:
        """Infer the columns from the first entries; None if there are none yet."""
        for key in self.keys:
            reader = RedisReader(self, key, ["0-0", 0], {}, form, None)
            values = [value for _, value in reader.entries()]
            reader.close()
            if values:
                return infer_columns(values, form or "json", self.name)
        return None

    def open(
        self, partition: str, place: Any, columns: Columns, form: Format | None, counts: StreamCounts | None
    ) -> RedisReader:
        """Read a stream from a place on; None is where a new reader begins."""
        return RedisReader(self, partition, place, columns, form, counts)


class RedisReader:
    """The reader of a stream of Redis; see `RedisLog.open`."""

    seen: bytes | None = None

    def __init__(
        self,
        log: RedisLog,
        key: str,
        place: Any,
        columns: Columns,
        form: Format | None,
        counts: StreamCounts | None,
    ) -> None:
        self._library = import_for("redis://", "redis", "online")
        self._where, self._key = f"redis://{_address(log.server)}/{key}", key
        self._server = log.connect()
        self._columns, self._form, self._counts = columns, form, counts
        self.at_end = False
        self._last, self._read = ("0-0", 0) if place is None else (str(place[0]), int(place[1]))
        if place is None:
            known = self._inspect()
            self._read = known["entries-added"] if log.latest else known["entries-added"] - known["length"]
            self._last = known["last-generated-id"].decode() if log.latest else "0-0"
        self.start = [self._last, self._read]

    def _inspect(self) -> Mapping[str, Any]:
        nothing = {"entries-added": 0, "length": 0, "last-generated-id": b"0-0"}
        with self._reached():
            return self._server.xinfo_stream(self._key) if self._server.exists(self._key) else nothing

    def _check_kept(self) -> None:
        known = self._inspect()
        if (removed := known["entries-added"] - known["length"]) > self._read:
            raise DataError(
                f"{self._read:,} entries were read, up to {self._last}, and {removed:,} were removed",
                path=self._where,
                advice="keep entries longer (XADD with a larger MAXLEN), or start again without the "
                "checkpoint's position",
            )

    def entries(self) -> list[tuple[str, bytes]]:
        """Return the next entries: id and row."""
        with self._reached():
            found = self._server.xread({self._key: self._last}, count=_AT_ONCE)
        of = found[0][1] if isinstance(found, list) and found else next(iter((found or {}).values()), [])
        entries = of[0] if of and isinstance(of[0], list) else of
        return [(name.decode(), _value(fields, self._columns)) for name, fields in entries]

    def read(self) -> Rows | None:
        """Return the next entries as rows; None if there are none yet.

        Raises:
          DataError: An entry is bad, or entries were removed before they were read.
          StoreUnavailableError: Redis doesn't answer.
        """
        entries = self.entries()
        self._check_kept()  # after reading, when only entries that are read may be removed
        self.at_end = not entries
        if not entries:
            return None
        ids, before = [name for name, _ in entries], self._read
        self._last, self._read = ids[-1], before + len(ids)
        times = np.array([int(name.partition("-")[0]) for name in ids], np.int64) * 1000
        rows = _rows(
            [value for _, value in entries],
            ids,
            times,
            self._columns,
            self._form,
            self._where,
            self._counts,
            lambda count: [ids[count - 1], before + count],
        )
        return rows if rows.batch.num_rows else self.read()

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Raise errors of a connection as errors of gmeta."""
        try:
            yield
        except self._library.RedisError as error:
            raise StoreUnavailableError(
                f"{self._where}: {error}; check the address, and that Redis answers there"
            ) from error

    def close(self) -> None:
        """Close the connection."""
        self._server.close()


def _address(server: str) -> str:
    """Return a server's address without user and password."""
    return server.rpartition("@")[2]


def _value(fields: Mapping[bytes, bytes], columns: Columns) -> bytes:
    """Return an entry as a JSON object."""
    if set(fields) == {b"value"}:
        return fields[b"value"]
    found: dict[str, Any] = {}
    for name, value in fields.items():
        text = value.decode()
        kind = columns.get(name.decode())
        try:
            found[name.decode()] = text if kind == "string" else json.loads(text)
        except ValueError:
            found[name.decode()] = text
    return json.dumps(found).encode()


def parse_url(source: str, settings: Mapping[str, Any], latest: bool) -> KafkaLog | RedisLog | None:
    """Return the log that a URL names; None if it names a folder.

    Raises:
      ConfigError: The URL lacks the address, or the topic.
    """
    url = urllib.parse.urlsplit(source)
    if url.scheme not in ("kafka", "redis"):
        return None
    name = url.path.strip("/")
    if not url.netloc or not name:
        raise ConfigError(
            f"stream: {source!r} needs an address and a name, as in kafka://broker:9092/clicks or "
            "redis://127.0.0.1:6379/clicks"
        )
    if url.scheme == "kafka":
        return KafkaLog(url.netloc, name, dict(settings), latest)
    if settings:
        raise ConfigError(f"stream: settings={settings!r} are for Kafka, and the source is {source!r}")
    return RedisLog(url.netloc, name.split(","), latest)
