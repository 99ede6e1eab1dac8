"""Histories in memory, as rankers keep them without a store: lists in a dictionary, and lists in Redis."""

from __future__ import annotations

import bisect
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gmeta.preprocess.history.shard_reader import history_crc_of_splits

import numpy as np

EVENT = np.dtype([("ts", "<i8"), ("item", "<i8"), ("action", "<i8"), ("price", "<f4")])


class Answer(NamedTuple):
    """A history: its columns and their checksum."""

    columns: dict[str, np.ndarray]
    crc: int


def answer(columns: dict[str, np.ndarray]) -> Answer:
    """Add the checksum to columns."""
    own = list(columns.values())
    return Answer(columns, int(history_crc_of_splits([0, len(own[0])], own)[0]))


class Lists:
    """A list of tuples for each user, ordered by time, under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[int, list[tuple[Any, ...]]] = {}

    def append(self, user: int, event: dict[str, Any]) -> None:
        """Insert an event where its time belongs; usually that is the end."""
        row = (event["ts"], event["item"], event["action"], event["price"])
        with self._lock:
            own = self._users.setdefault(user, [])
            if own and own[-1][0] > row[0]:
                bisect.insort(own, row, key=lambda each: each[0])
            else:
                own.append(row)

    def snapshot(self, user: int, time: int, longest: int) -> Answer:
        """Return the newest events before a time as arrays."""
        with self._lock:
            own = self._users.get(user, [])
            end = bisect.bisect_left(own, time, key=lambda each: each[0])
            rows = own[max(0, end - longest) : end]
        found = np.array(rows, EVENT)
        return answer({name: np.ascontiguousarray(found[name]) for name in ("item", "action", "price")})


class Redis:
    """A list of packed events for each user, in a server of this machine, by a Unix socket."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = f"{self._folder.name}/socket"
        words = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no"]
        self._server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        while not Path(path).exists():
            time.sleep(0.05)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._file = self._socket.makefile("rb", 1 << 20)

    @staticmethod
    def installed() -> bool:
        """Return whether there is a server to start."""
        return shutil.which("redis-server") is not None

    def append(self, user: int, event: dict[str, Any]) -> None:
        """Append an event."""
        row = np.array([(event["ts"], event["item"], event["action"], event["price"])], EVENT)
        self._send([b"RPUSH", b"%d" % user, row.tobytes()])
        self._file.readline()

    def load(self, user: int, rows: np.ndarray) -> None:
        """Append the events of one user."""
        self._send([b"RPUSH", b"%d" % user, *(row.tobytes() for row in rows)])
        self._file.readline()

    def snapshot(self, user: int, time: int, longest: int) -> Answer:
        """Return the newest events before a time as arrays; late events are sorted here."""
        self._send([b"LRANGE", b"%d" % user, b"%d" % -(longest + 64), b"-1"])
        count = int(self._file.readline()[1:])
        parts = []
        for _ in range(count):
            size = int(self._file.readline()[1:])
            parts.append(self._file.read(size + 2)[:-2])
        rows = np.frombuffer(b"".join(parts), EVENT)
        rows = rows[np.argsort(rows["ts"], kind="stable")]
        rows = rows[: np.searchsorted(rows["ts"], time)][-longest:]
        return answer({name: np.ascontiguousarray(rows[name]) for name in ("item", "action", "price")})

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._server.terminate()
        self._server.wait()
        self._folder.cleanup()

    def _send(self, words: Sequence[bytes]) -> None:
        head = b"*%d\r\n" % len(words)
        self._socket.sendall(head + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
