"""Messages between a worker and the process that trains: small values and arrays, over TCP.

A message is a pickle whose arrays travel beside it, uncopied. Both sides prove that they know the same key
before anything is unpickled, by the challenge of `multiprocessing.connection`. The kernel notices a machine
that vanished: within 20 s a read fails. A process that was killed closes its connections at once.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from gmeta.core.errors import ConfigError

_GREETING_SECONDS = 10.0
# Linux' names; other systems have keepalive with times of their own.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_NODELAY": 1}


class Channel:
    """One connection, of which the other side knows the key.

    Args:
      link: A connected socket; the channel closes it.
      key: The key.
      server: Whether this side was called.

    Raises:
      OSError: The other side can't be reached, says nothing, or doesn't know the key.
    """

    def __init__(self, link: socket.socket, key: bytes, *, server: bool) -> None:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._link = link
        self._connection = Connection(link.fileno())
        try:
            for step in (deliver_challenge, answer_challenge)[:: 1 if server else -1]:
                if step is answer_challenge and not self._connection.poll(_GREETING_SECONDS):
                    raise ConnectionError("it doesn't answer like a worker of gmeta's")
                step(self._connection, key)
        except AuthenticationError:
            self.close()
            raise ConnectionError("it has another key") from None
        except (EOFError, AssertionError, ValueError, ConnectionResetError, BrokenPipeError) as error:
            self.close()
            raise ConnectionError("it has another key, or is no worker of this gmeta") from error
        except OSError:
            self.close()
            raise

    @classmethod
    def to(cls, address: str, key: bytes, timeout: float = 5.0) -> Channel:
        """Connect to a worker at ``"host:port"``."""
        return cls(socket.create_connection(split_address(address), timeout), key, server=False)

    def send(self, message: Any) -> None:
        """Send a message; waits while the other side doesn't read."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        self._connection.send_bytes(len(buffers).to_bytes(4, "little") + head)
        for buffer in buffers:
            self._connection.send_bytes(buffer.raw())

    def receive(self, timeout: float | None = None) -> Any:
        """Return the next message; its arrays can't be written to.

        Raises:
          TimeoutError: None came for ``timeout`` seconds.
          EOFError, OSError: The other side is gone.
        """
        if not self._connection.poll(timeout):
            raise TimeoutError(f"it sent nothing for {timeout:.0f} s")
        head = self._connection.recv_bytes()
        count = int.from_bytes(head[:4], "little")
        buffers = [self._connection.recv_bytes() for _ in range(count)]
        return pickle.loads(memoryview(head)[4:], buffers=buffers)

    def hang_up(self) -> None:
        """End the connection from any thread: whoever waits for it is told so."""
        with contextlib.suppress(OSError):  # it has ended already
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, from the thread that uses it."""
        self.hang_up()
        self._link.detach()
        if not self._connection.closed:
            self._connection.close()


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``"host:port"``.

    Raises:
      ConfigError: It is no such text.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no worker's address: give HOST:PORT, as `gmeta workers` prints it")
    return host.strip("[]"), int(port)
