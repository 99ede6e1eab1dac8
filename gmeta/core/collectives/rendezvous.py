"""How the ranks of a job reach its launcher: protected key-value servers, their clients, and notes.

Ranks meet at a key-value server over HTTP, which Horovod 0.28.1 opens on all addresses without protection.
Here the server, Horovod's or gmeta's own, requires the job's secret (`guard`):

* If all ranks are on the launcher's machine (`launch`), the secret is the first part of the path: Gloo's
  client is C++, and accepts a path with a server's address. The server listens only on the loopback address.
* If there are other machines (`horovodrun`), or no Horovod (`Store`), a request carries a signature:
  HMAC-SHA256 of the method, the path, the body and a nonce. Only signed answers are accepted, so the secret
  isn't sent. A rank's own proxy (`through_proxy`) does so for Gloo's client.

Both treat a value as bytes and unpickle nothing.

Without Horovod, ranks find each other by the values of the launcher's `Store`, which exists as long as the
job runs (`gmeta.core.launcher.meeting`). A value is a message of `wire`, so no code from the network runs.
Ranks use the store when they open a lane, and the helper that starts a rank on another machine reports the
rank's end to it. An elastic job has a second store, which outlives its starts (`elastic`). Tensors and
objects are sent by lanes.

A rank also leaves notes for its launcher (`leave_note`): files in a folder that the launcher created. A rank
that has lost its peers leaves a note immediately, even if it takes long to exit and prints its traceback
last.
"""

from __future__ import annotations

import functools
import hmac
import http
import http.client
import os
import secrets
import threading
import time
import urllib.parse
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gmeta.core.collectives.wire import pack, sign, unpack
from gmeta.core.errors import CollectiveError, ConfigError

NOTES = "GMETA_NOTES"
"""Environment variable: the path that this rank's notes begin with, its number in the launcher's folder."""

LOST_PEERS, LEAVES = "lost-peers", "leaves"
"""Notes: other ranks are gone or didn't come; this rank leaves and restarts with another number of ranks."""


def leave_note(what: str) -> None:
    """Leave a note for the launcher, if one listens."""
    if NOTES in os.environ:
        with suppress(OSError):  # the folder disappears with the launcher
            Path(f"{os.environ[NOTES]}.{what}").touch()


def notes_at(path: str) -> frozenset[str]:
    """Return the notes left by a rank whose `NOTES` was ``path``."""
    return frozenset(what for what in (LOST_PEERS, LEAVES) if Path(f"{path}.{what}").exists())


SECRET = "GMETA_SECRET"
"""Environment variable: the secret of a job over several machines."""

_SERVER = "GMETA_RENDEZVOUS"  # the server's address, if the variables below name this rank's proxy
_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_NUMBER, _SIGNATURE = "X-Gmeta-Number", "X-Gmeta-Signature"
_AGE = 300  # maximum difference of two machines' clocks, in seconds
_LARGEST = 1 << 20  # bytes of a value; ranks' addresses are far smaller


def new_secret() -> str:
    """Return a secret that can't be guessed."""
    return secrets.token_hex(32)


def signature(secret: str, *parts: bytes) -> str:
    """Sign a message of parts (`wire.sign`); return the signature in hexadecimal."""
    return sign(secret.encode(), *parts).hex()


def guard(base: type[Any], secret: str, *, signed: bool) -> type[Any]:
    """Make a handler of a key-value server that answers only clients with the secret.

    Args:
      base: Horovod's ``RendezvousHandler``, a class derived from it, or one with its methods to get and put
        a value.
      secret: The job's secret.
      signed: Whether requests are signed; otherwise, their paths begin with the secret.
    """
    used: dict[str, float] = {}
    lock = threading.Lock()

    def is_new(number: str) -> bool:
        when, now = number.partition(".")[0], time.time()
        with lock:
            for old in [each for each, then in used.items() if now - then > 2 * _AGE]:
                del used[old]
            fresh = when.isdecimal() and abs(now - int(when)) < _AGE and number not in used
            if fresh:
                used[number] = now
        return fresh

    class Guarded(base):
        path: str
        number: str | None
        body: bytes

        def parse_request(self) -> bool:
            self.number, self.body = None, b""
            if not super().parse_request():
                return False
            if not self._is_allowed():
                self.close_connection = True
                self.send_status_code(http.HTTPStatus.FORBIDDEN)
                return False
            return True

        def _is_allowed(self) -> bool:
            number, size = self.headers.get(_NUMBER, ""), self.headers.get("Content-Length", "0")
            if not size.isdecimal() or int(size) > _LARGEST:
                return False
            if not signed:
                first, _, rest = self.path.removeprefix("/").partition("/")
                self.path = f"/{rest}"
                allowed = _same(first.partition(":")[0], secret)
                self.body = self.rfile.read(int(size)) if allowed else b""
                return allowed
            self.body = self.rfile.read(int(size))
            expected = signature(secret, *map(str.encode, (self.command, self.path, number)), self.body)
            if not _same(self.headers.get(_SIGNATURE, ""), expected) or not is_new(number):
                return False
            self.number = number
            return True

        def _place(self) -> tuple[str, str] | None:
            _, *place = self.path.split("/")
            if len(place) == 2:
                return place[0], place[1]
            self.send_status_code(http.HTTPStatus.BAD_REQUEST)
            return None

        def do_GET(self) -> None:  # noqa: N802
            place = self._place()
            if place is not None:
                value = self._get_value(*place)
                self._answer(http.HTTPStatus.NOT_FOUND if value is None else http.HTTPStatus.OK, value or b"")

        def do_PUT(self) -> None:  # noqa: N802
            place = self._place()
            if place is not None:
                self._put_value(*place, self.body)
                self._answer(http.HTTPStatus.OK)

        def do_HEAD(self) -> None:  # noqa: N802  # the base class serves files
            self._answer(http.HTTPStatus.NOT_IMPLEMENTED)

        def send_status_code(self, status_code: int) -> None:
            self._answer(status_code)

        def _answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if self.number is not None:
                self.send_header(_SIGNATURE, _of_answer(secret, self.number, status, body))
            self.end_headers()
            self.wfile.write(body)

    return Guarded


def ask(method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request to this job's rendezvous server, signed if the job has a secret.

    Args:
      method: The HTTP method.
      path: The path, such as ``"/rank_and_size/host:0"``.
      body: The value to store there.

    Returns:
      The status and the answer.

    Raises:
      OSError: The server can't be reached.
      ValueError: The answer has no valid signature.
      http.client.HTTPException: The answer isn't HTTP.
    """
    address, _, inner = os.environ[_ADDRESS].partition("/")
    server, secret = f"{address}:{os.environ[_PORT]}", None
    if _SERVER in os.environ:
        server, secret = os.environ[_SERVER], os.environ[SECRET]
    elif inner:  # Gloo's client appends the port to the path
        server, path = address, f"/{inner}:{os.environ[_PORT]}{path}"
    return ask_server(server, secret, method, path, body)


def server_name() -> str:
    """Return a name that identifies this job's rendezvous server; empty without a server."""
    return os.environ.get(_SERVER) or ":".join(filter(None, map(os.environ.get, (_ADDRESS, _PORT))))


@functools.cache  # one proxy
def through_proxy() -> None:
    """Route this process's Gloo client through a proxy that signs its requests, if the job has a secret."""
    secret, address = os.environ.get(SECRET), os.environ.get(_ADDRESS)
    if secret is None or address is None or ("/" in address and _SERVER not in os.environ):
        return
    server = os.environ.setdefault(_SERVER, f"{address}:{os.environ[_PORT]}")
    own = new_secret()  # other users of this machine can reach the proxy too

    class Proxy(BaseHTTPRequestHandler):
        def _forward(self) -> None:
            first, _, rest = self.path.removeprefix("/").partition("/")
            size = self.headers.get("Content-Length", "0")
            status, answer = int(http.HTTPStatus.FORBIDDEN), b""
            if _same(first.partition(":")[0], own) and size.isdecimal() and int(size) <= _LARGEST:
                try:
                    body = self.rfile.read(int(size))
                    status, answer = ask_server(server, secret, self.command, f"/{rest}", body)
                except (OSError, ValueError, http.client.HTTPException):
                    status = int(http.HTTPStatus.BAD_GATEWAY)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_PUT = do_DELETE = _forward  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, name="gmeta-rendezvous", daemon=True).start()
    os.environ[_ADDRESS] = f"127.0.0.1:{proxy.server_port}/{own}"


def ask_server(
    server: str, secret: str | None, method: str, path: str, body: bytes = b"", timeout: float | None = None
) -> tuple[int, bytes]:
    """Send a request to a server, signed if there is a secret; raise the same errors as `ask`.

    Without a ``timeout`` in seconds, wait as long as the server takes.
    """
    number = f"{int(time.time())}.{secrets.token_hex(16)}"
    headers = {"Content-Length": str(len(body))}
    if secret is not None:
        signed = signature(secret, *map(str.encode, (method, path, number)), body)
        headers |= {_NUMBER: number, _SIGNATURE: signed}
    host, _, port = server.rpartition(":")
    # `urllib` would go through a proxy.
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content, given = answer.read(), answer.headers.get(_SIGNATURE, "")
    finally:
        connection.close()
    if secret is not None and not _same(given, _of_answer(secret, number, answer.status, content)):
        raise ValueError("the answer doesn't have this job's signature")
    return answer.status, content


def _of_answer(secret: str, number: str, status: int, body: bytes) -> str:
    return signature(secret, b"answer", number.encode(), str(int(status)).encode(), body)


def _same(one: str, other: str) -> bool:
    """Return whether texts are equal, in a time that doesn't reveal where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())


STORE = "GMETA_STORE"
"""Environment variable: the address and port of the launcher's store."""

ALL = "all"
"""The key that requests all values of a scope; the answer has a part for each key."""

_SHORTEST, _LONGEST = 0.01, 0.5  # seconds between two requests
_SILENCE = 60.0  # seconds without an answer from the store
_FOR_EVER = 10 * 365 * 24 * 3600


class Store:
    """A client of the store of this process's job.

    Args:
      server: Its address and port. None: the environment contains them, and the secret.
      secret: The secret that signs requests and answers.

    Raises:
      ConfigError: The environment doesn't contain them.
    """

    def __init__(self, server: str | None = None, secret: str = "") -> None:
        if server is None:
            if STORE not in os.environ or SECRET not in os.environ:
                raise ConfigError(f"{STORE} and {SECRET} aren't set: start ranks by `gmeta launch`")
            server, secret = os.environ[STORE], os.environ[SECRET]
        self._server, self._secret = server, secret

    def put(self, scope: str, key: str, value: Any) -> None:
        """Store a value that `wire.pack` supports.

        Raises:
          CollectiveError: The store can't be reached, or refuses it.
        """
        self._ask("PUT", scope, key, pack(value))

    def values(self, scope: str) -> dict[str, Any]:
        """Return the values of a scope, by key.

        Raises:
          CollectiveError: The store can't be reached.
        """
        return {key: unpack(value) for key, value in unpack(self._ask("GET", scope, ALL)).items()}

    def gather(self, scope: str, rank: int, size: int, value: Any, seconds: int) -> list[Any]:
        """Give every rank the values of all ranks.

        Args:
          scope: Identifies the exchange; every rank uses it once.
          rank: This rank.
          size: How many ranks there are.
          value: This rank's value.
          seconds: How long to wait for the others; 0: no limit.

        Returns:
          The values by rank.

        Raises:
          CollectiveError: A rank didn't join, or the store can't be reached.
        """
        self.put(scope, str(rank), value)
        deadline, pause = time.monotonic() + (seconds or _FOR_EVER), _SHORTEST
        while True:
            found = self.values(scope)
            missing = [other for other in range(size) if str(other) not in found]
            if not missing:
                return [found[str(other)] for other in range(size)]
            if time.monotonic() > deadline:
                leave_note(LOST_PEERS)
                names = ", ".join(f"rank {other}" for other in missing[:4])
                raise CollectiveError(
                    f"rank {rank} of {size} lost its peers: timed out: {names} did not come to {scope!r} in "
                    f"{seconds} s; see whether every rank has started, and runs the same program"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _ask(self, method: str, scope: str, key: str, body: bytes = b"") -> bytes:
        path = f"/{urllib.parse.quote(scope, safe='')}/{key}"
        try:
            status, answer = ask_server(self._server, self._secret, method, path, body, _SILENCE)
            if status != http.HTTPStatus.OK:
                raise ValueError(f"it answers {status}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            leave_note(LOST_PEERS)
            raise CollectiveError(
                f"the launcher at {self._server} can't be reached: {error}; see whether it still runs, and "
                "whether this machine reaches that address"
            ) from error
        return answer
