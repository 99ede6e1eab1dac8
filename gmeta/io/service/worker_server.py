"""A worker: reads pieces of epochs on request, a thread for each piece.

The training process sends its function from a piece to a dataset, and names a piece. The worker builds the
dataset and sends its elements, as far as the connection takes them; a slow reader thus stops it. It keeps
nothing: if its connection breaks, another worker continues from the first element that didn't arrive.

The function is a pickle, the only one that travels, and reading it runs code. It is read from a connection
whose other side has proved to know the key, and signs what it sends. Elements travel as plain arrays.
"""

from __future__ import annotations

import hashlib
import ipaddress
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.collectives.wire import Callers
from gmeta.core.native import load_op_library
from gmeta.core.settings import from_mapping
from gmeta.core.version import __version__
from gmeta.io.readers.read_options import OneEpoch
from gmeta.io.service.channel import Channel, announce

_ASKING_SECONDS = 60.0
_MOST_CALLERS = 64  # that haven't proved yet to know the key


class WorkerServer:
    """A worker that listens.

    Args:
      host: The address to listen at; ``"0.0.0.0"`` or ``"::"`` for all of this machine's.
      port: The port; 0 for any that is free.
      key: What those who ask must know (`gmeta.io.service.channel.key_of`).
      folder: Where the worker announces itself while it listens, if it does.

    Attributes:
      address: ``"host:port"``, for those who ask.
      pieces: How many pieces were read, or begun.
      elements: How many elements were sent.

    Raises:
      OSError: The port is taken, or the host isn't this machine's.
    """

    def __init__(self, host: str, port: int, key: bytes, folder: Path | None = None) -> None:
        load_op_library("io")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._listener.settimeout(0.2)
        bound, port = self._listener.getsockname()[:2]
        where = ipaddress.ip_address(bound)
        name = socket.gethostname() if where.is_unspecified else f"[{host}]" if ":" in host else host
        self.address = f"{name}:{port}"
        self.pieces = self.elements = 0
        self._closed = False
        self._key, self._identity = key, secrets.token_bytes(16)
        self._functions: dict[str, Any] = {}
        self._callers = Callers(_MOST_CALLERS)
        self._channels: set[Channel] = set()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._leaves = threading.Event()
        self._announcement = (
            None
            if folder is None
            else announce(folder, self.address, self._identity, loopback=where.is_loopback)
        )

    def serve(self, idle: float | None = None) -> None:
        """Serve until a training process dismisses this worker, or none has read for ``idle`` seconds."""
        used = time.monotonic()
        while True:
            if self._channels:
                used = time.monotonic()
            elif self._leaves.is_set() or (idle is not None and time.monotonic() - used > idle):
                return
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed:
                    return
                raise
            self._callers.admit(link)
            thread = threading.Thread(target=self._answer, args=(link,), daemon=True)
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def close(self) -> None:
        """Stop listening, and end running transfers; waits 5 s at most for datasets that are slow to end."""
        self._withdraw()
        self._closed = True
        self._listener.close()
        with self._lock:
            channels, threads = list(self._channels), list(self._threads)
        for channel in channels:
            channel.hang_up()
        until = time.monotonic() + 5
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _withdraw(self) -> None:
        if self._announcement is not None:
            self._announcement.unlink(missing_ok=True)

    def _answer(self, link: socket.socket) -> None:
        try:
            try:
                channel = Channel(link, self._key, server=True, identity=self._identity)
            finally:
                self._callers.leave(link)
            with self._lock:
                self._channels.add(channel)
            try:
                self._hear(channel)
            finally:
                with self._lock:
                    self._channels.discard(channel)
                channel.close()
        except (OSError, EOFError):
            pass  # the caller is gone, or has no key; elements that didn't arrive are requested again
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _hear(self, channel: Channel) -> None:
        """Serve requests, one after another."""
        asked = channel.receive(_ASKING_SECONDS)
        while True:
            version, what, *given = asked
            if version != __version__:
                channel.send(("error", f"the worker {self.address} runs gmeta {__version__}, not {version}"))
            elif what == "read":
                start = from_mapping(OneEpoch, given[1])
                for message in self._messages(self._function(channel, given[0]), start):
                    channel.send(message)
            elif what == "leave":
                self._withdraw()
                self._leaves.set()
            else:
                channel.send(("hello",))
            asked = channel.receive()

    def _function(self, channel: Channel, digest: str) -> Any:
        """Return the function with this digest, or the error that it raised; request it the first time."""
        if digest not in self._functions:
            channel.send(("function",))
            sent = channel.receive(_ASKING_SECONDS)
            try:
                if digest_of(sent) != digest:
                    raise ValueError("another function came than the one that was named")
                self._functions[digest] = pickle.loads(sent)
            except Exception as error:  # such as a module that isn't here
                return error
        return self._functions[digest]

    def _messages(self, function: Any, start: Any) -> Iterator[tuple[Any, ...]]:
        with self._lock:
            self.pieces += 1
        began = time.monotonic()
        try:
            if isinstance(function, Exception):
                raise function
            for element in function(start):
                parts = [encode(tensor) for tensor in tf.nest.flatten(element, expand_composites=True)]
                yield "element", time.monotonic() - began, parts
                began = time.monotonic()
                with self._lock:
                    self.elements += 1
        except Exception as error:  # any error of a user's function goes to the training process
            yield "error", f"{type(error).__name__}: {getattr(error, 'message', error)}"
        else:
            yield ("end",)


def encode(tensor: tf.Tensor) -> Any:
    """Return a tensor as a message has it: an array of numbers, or for other types (type, TensorProto)."""
    if np.dtype(tensor.dtype.as_numpy_dtype).kind in "biufc":
        return np.asarray(tensor.numpy())
    return tensor.dtype.name, tf.io.serialize_tensor(tensor).numpy()


def decode(part: Any) -> Any:
    """Return the array of a tensor that `encode` has encoded."""
    return part if isinstance(part, np.ndarray) else tf.io.parse_tensor(part[1], part[0]).numpy()


def digest_of(function: bytes) -> str:
    """Return the name by which a worker knows a function that it was sent."""
    return hashlib.sha256(function).hexdigest()
