"""Messages between a worker and the process that trains: small values and arrays, over TCP.

Both sides prove that they know the same key, and sign each message
(`gmeta.core.collectives.driver.greeting`). A message is one of `gmeta.core.collectives.driver.wire`, so
reading it runs no code. The kernel notices a machine that vanished: within 20 s a read fails. A process that
was killed closes its connections at once.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import Any

from gmeta.core.collectives.driver.greeting import SignedLink
from gmeta.core.collectives.driver.wire import pack_parts, unpack
from gmeta.core.errors import CollectiveError, ConfigError

_PURPOSE = b"gmeta workers"
_GREETING_SECONDS = 10.0
# Linux' names; other systems have keepalive with times of their own.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_NODELAY": 1}


class Channel:
    """One connection, of which the other side knows the key.

    Args:
      link: A connected socket; the channel closes it.
      key: The key.
      server: Whether this side was called.
      identity: Who this side is, 16 bytes, if it was called.
      expected: Who may be called, if this side calls; empty: any worker that knows the key.

    Raises:
      OSError: The other side can't be reached, says nothing, doesn't know the key, or is another worker.
    """

    def __init__(
        self,
        link: socket.socket,
        key: bytes,
        *,
        server: bool,
        identity: bytes = b"",
        expected: Collection[bytes] = (),
    ) -> None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._link = SignedLink(
            link,
            key,
            _PURPOSE,
            called=server,
            name=identity,
            expected=expected,
            seconds=_GREETING_SECONDS,
        )

    @classmethod
    def to(cls, address: str, key: bytes, expected: Collection[bytes] = (), timeout: float = 5.0) -> Channel:
        """Connect to a worker at ``"host:port"``."""
        link = socket.create_connection(split_address(address), timeout)
        return cls(link, key, server=False, expected=expected)

    def send(self, message: Any) -> None:
        """Send a message, of the kinds that `wire.pack` takes; waits while the other side doesn't read."""
        self._link.send(pack_parts(message))

    def receive(self, timeout: float | None = None) -> Any:
        """Return the next message.

        Raises:
          TimeoutError: Nothing came for ``timeout`` seconds.
          EOFError, OSError: The other side is gone, or what came isn't its next message.
        """
        try:
            return unpack(self._link.receive(timeout))
        except TimeoutError as error:
            raise TimeoutError(f"it sent nothing for {timeout:.0f} s") from error
        except CollectiveError as error:
            raise ConnectionError(str(error)) from error

    def hang_up(self) -> None:
        """End the connection, from any thread: the threads that wait for it get an error."""
        self._link.hang_up()

    def close(self) -> None:
        """Close it, from the thread that uses it."""
        self._link.close()


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``"host:port"``.

    Raises:
      ConfigError: It is no such text.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no worker's address: give HOST:PORT, as `gmeta workers` prints it")
    return host.strip("[]"), int(port)
