"""Sends published deltas to servers, and to stores of rows, until they are up to date.

A server is TensorFlow Serving, or anything with its REST or gRPC interface (`gmeta.export.servers`). Its
signature ``delta_version`` returns its version; ``apply_delta`` receives the deltas after that version one by
one, or, if the server lags far, several combined into one (`gmeta.export.published_folder`). So this
module stores nothing about servers: a killed delivery, a restarted server and a new replica all resume from
the version that the server has.

A store of rows (`gmeta.export.row_stores`) is one more replica. It gets the external tables of each delta;
servers get the rest. If no delta continues its position, it is loaded: it gets all rows of the newest
version, part by part, and then loses those that only earlier versions wrote. Meanwhile its position is one in
a stream of these parts, so that a killed load resumes, and two deliveries don't disturb each other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, closing
from queue import SimpleQueue

from gmeta.core.errors import ConfigError, DataError, GmetaError, StoreError
from gmeta.export.model_deltas import Delta, Layout, TableChange
from gmeta.export.published_folder import MODEL, PublishedFolder
from gmeta.export.row_stores import Change, Position, RowStore, row_store
from gmeta.export.servers import Server, server_at

Say = Callable[[str], None]
Folder = str | os.PathLike[str] | PublishedFolder
_LONGEST_PAUSE = 30.0
_LAST_WAIT = 1.0
"""The maximum seconds for which a delivery that ends early waits for its threads."""
_AT_ONCE = 64 << 20
"""The maximum bytes of deltas that are combined into one."""
_PREPARE = threading.Lock()
"""Held while a delta is read, combined and encoded: this takes memory several times its size."""


def catch_up(folder: Folder, server: Server, say: Say = print) -> int:
    """Send a server all deltas that it lacks.

    Args:
      folder: The folder of a `gmeta.export.Publisher`, or its address, such as ``"s3://bucket/prefix"``.
      server: The server.
      say: Called with a sentence on each delta that was sent.

    Returns:
      The version that the server then has.

    Raises:
      DataError: No delta updates the server's version, so it must first load a newer SavedModel; or a delta
        is damaged.
      GmetaError: As for `Server.apply`.
    """
    published = _open(folder)
    layout = published.layout()
    version = server.version()
    while prepared := _prepare(published, layout, version):
        expected, data = prepared
        start = time.perf_counter()
        version = server.apply(data)
        seconds = time.perf_counter() - start
        say(f"{server.url}: version {version}, {len(data):,} bytes in {seconds:.3f} s")
        if version < expected:
            raise GmetaError(f"{server.url} still has version {version} after the delta to {expected}")
    return version


def _prepare(folder: PublishedFolder, layout: Layout, version: int) -> tuple[int, bytes] | None:
    """Return what to send to a server of a version, and the version that it then has."""
    with _PREPARE:
        delta = _next(folder, layout, version)
        if delta is None:
            return None
        return delta.version, _without(delta, folder.external(delta.version)).encode(layout)


def _without(delta: Delta, external: Mapping[str, str]) -> Delta:
    """Return a delta without the rows of external tables."""
    left = {
        name: TableChange(change.ids[:0], change.rows[:0], change.removed[:0]) if name in external else change
        for name, change in delta.tables.items()
    }
    return Delta(delta.after, delta.version, left, delta.dense)


def catch_up_rows(folder: Folder, store: RowStore, say: Say = print) -> int:
    """Send a store all external rows that it lacks.

    Args:
      folder: The folder of a `gmeta.export.Publisher` with external tables.
      store: The store.
      say: Called with a sentence on each change that was sent.

    Returns:
      The version that the store then has.

    Raises:
      DataError: The folder has no rows of external tables, or a file is damaged.
      StoreUnavailableError: The store doesn't answer.
      StoreError: It refuses, or it has the rows of another stream.
    """
    published = _open(folder)
    layout = published.layout()
    own = str(layout.fingerprint)
    held = store.positions()
    while True:
        if strange := [each.stream for each in held if each.stream.partition("/")[0] not in ("", own)]:
            raise StoreError(
                f"{store.url} has the rows of another model or training (stream {strange[0]}): deliver to "
                "another prefix or folder, or empty this one"
            )
        start = time.perf_counter()
        at = min(each.at for each in held)
        load = {each.stream for each in held} != {own}
        try:
            sent = None if load else _next(published, layout, at)
        except _NoDeltaError:
            if at >= max(published.contents().rows, default=0):
                raise
            sent, load = None, True
        if load:
            done = _load(published, layout, store, held)
        elif sent is None:
            return at
        else:
            tables = _external(sent, published.external(sent.version))
            to = Position(own, sent.version)
            store.change(Change(own, sent.after, sent.version, to, sent.version, layout.rows, tables))
            done = f"version {sent.version}"
        before, held = held, store.positions()
        if held == before:
            raise StoreError(f"{store.url} still has version {at} after {done}")
        say(f"{store.url}: {done}, in {time.perf_counter() - start:.3f} s")


def _load(folder: PublishedFolder, layout: Layout, store: RowStore, held: Set[Position]) -> str:
    """Take the next step to load all rows of the newest version into a store, and describe it."""
    versions = folder.contents().rows
    if not versions:
        raise DataError(
            "has no rows for a store",
            path=str(folder),
            advice="publish with Publisher(..., export={'external': [tables]})",
        )
    version, own = max(versions), str(layout.fingerprint)
    loads = [int(each.stream.partition("/")[2] or 0) for each in held]
    if max(loads) > version:
        raise DataError(
            f"{store.url} is being loaded with version {max(loads)}, and the newest here is {version}",
            path=str(folder),
            advice="deliver from the folder that the publisher writes",
        )
    load = f"{own}/{version}"
    parts = versions[version]
    loaded = [each for each in held if each.stream == own and each.at >= version]
    if behind := [each for each in held if each.stream != load and each not in loaded]:
        for each in behind:
            store.change(
                Change(each.stream, each.at, each.at + 1, Position(load, 0), version, layout.rows, {})
            )
        return f"the load of version {version} begins"
    at = min(each.at for each in held if each.stream == load)
    if at < len(parts):
        tables = _external(_read(folder, parts[at], layout), folder.external(version))
        store.change(Change(load, at, at + 1, Position(load, at + 1), version, layout.rows, tables))
        return f"part {at + 1} of {len(parts)} of version {version}"
    store.sweep(version)
    store.change(Change(load, at, at + 1, Position(own, version), version, layout.rows, {}))
    return f"version {version}"


def _external(delta: Delta, external: Mapping[str, str]) -> dict[str, TableChange]:
    return {name: delta.tables[table] for table, name in external.items()}


class _NoDeltaError(DataError):
    """No delta continues a version."""


def _open(folder: Folder) -> PublishedFolder:
    return folder if isinstance(folder, PublishedFolder) else PublishedFolder(folder)


def _read(folder: PublishedFolder, name: str, layout: Layout) -> Delta:
    try:
        return folder.read(name, layout)
    except FileNotFoundError as error:  # the publisher deletes it meanwhile
        raise DataError(f"can't be read: {error.strerror}", path=folder.path(name)) from error


def _next(folder: PublishedFolder, layout: Layout, version: int) -> Delta | None:
    """Return the delta that updates a version, combined with those after it; None if there is none."""
    contents = folder.contents()
    if version > contents.version:
        raise DataError(
            f"the server has version {version}, and the last one here is {contents.version}",
            path=str(folder),
            advice="it serves the model of another folder, or an old one of this folder",
        )
    if version == contents.version:
        return None
    if (delta := folder.changes(layout, version, _AT_ONCE)) is not None:
        return delta
    base = folder.path(f"{MODEL}/{contents.models[-1]}") if contents.models else None
    load = f"the server has to load {os.fspath(base)}" if base else "publish again"
    models = os.fspath(folder.path(MODEL))
    raise _NoDeltaError(
        f"no delta continues version {version}",
        path=str(folder),
        advice=f"{load}, as TensorFlow Serving does by itself with --model_base_path={models}",
    )


def deliver(
    folder: Folder,
    urls: Sequence[str],
    *,
    follow: bool = False,
    every: float = 1.0,
    say: Say = print,
) -> dict[str, int]:
    """Send servers and stores all deltas that they lack.

    Each gets them in a thread of its own, so one that hangs doesn't delay the others. When this function ends
    early, by Ctrl-C or an error of ``say``, it doesn't wait for answers: a killed delivery loses nothing.

    Args:
      folder: The folder of a `gmeta.export.Publisher`, or its address, such as ``"s3://bucket/prefix"``.
      urls: The servers' models, such as ``"http://host:8501/v1/models/my_model"`` or
        ``"grpc://host:8500/my_model"`` (`gmeta.export.servers.server_at`), and stores of external rows:
        ``"redis://host:6379/prefix"``, of a cluster ``"redis://host:6379,host:6379/prefix"``, or
        ``"rocksdb:///folder"``.
      follow: Whether to keep sending new deltas until Ctrl-C. A server that doesn't answer, or lacks a
        SavedModel, is then retried after growing pauses, up to half a minute.
      every: Seconds between two checks of the folder.
      say: Called with sentences on what was sent, and on what failed; by one thread at a time.

    Returns:
      Server or store -> its version. A store's address is without its password.

    Raises:
      ConfigError: An address is neither a server's nor a store's, or its package isn't installed.
      GmetaError: As for `catch_up` and `catch_up_rows`, after all were tried, the error of the first that
        failed; with ``follow``, never.
    """
    published = _open(folder)
    with ExitStack() as stack:
        targets: dict[str, Server | RowStore] = {}
        for url in urls:
            store = row_store(url)
            if store is not None:
                targets[store.url] = stack.enter_context(closing(store))
            elif url.startswith(("http://", "https://", "grpc://", "grpcs://")):
                targets[url] = server_at(url)
            else:
                raise ConfigError(
                    f"{url} must begin with http:// or grpc:// (a server), redis:// or rocksdb:// (a store "
                    "of rows)"
                )
        stack.pop_all()  # from here on, each thread closes its store
    return _Delivery(published, follow, every, say).run(targets)


class _Delivery:
    """The threads that send deltas, one for each server or store."""

    def __init__(self, folder: PublishedFolder, follow: bool, every: float, say: Say) -> None:
        self._folder, self._follow, self._every, self._say = folder, follow, every, say
        self._stopped, self._saying = threading.Event(), threading.Lock()
        self._ended: SimpleQueue[tuple[str, int | BaseException]] = SimpleQueue()

    def run(self, targets: Mapping[str, Server | RowStore]) -> dict[str, int]:
        """Start the threads, and return the versions when all have ended."""
        threads = [
            # Daemons, because a process ends without waiting for them.
            threading.Thread(target=self._send, args=each, name=f"gmeta to {each[0]}", daemon=True)
            for each in targets.items()
        ]
        found: dict[str, int | BaseException] = {}
        try:
            for thread in threads:
                thread.start()
            while len(found) < len(targets):
                url, result = self._ended.get()
                if isinstance(result, BaseException) and not isinstance(result, GmetaError):
                    raise result
                found[url] = result
        finally:
            self._stopped.set()
            until = time.monotonic() + _LAST_WAIT
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(until - time.monotonic(), 0.0))
        versions: dict[str, int] = {}
        for url in targets:
            result = found[url]
            if isinstance(result, BaseException):
                raise result
            versions[url] = result
        return versions

    def _send(self, url: str, target: Server | RowStore) -> None:
        """Keep a server or store up to date: what a thread runs."""
        try:
            with ExitStack() as stack:
                if not isinstance(target, Server):
                    stack.enter_context(closing(target))
                result: int | BaseException = self._keep_up(target)
        except BaseException as error:  # `run` raises it
            result = error
        self._ended.put((url, result))

    def _keep_up(self, target: Server | RowStore) -> int | GmetaError:
        pause = 0.0
        while True:
            result: int | GmetaError
            try:
                if isinstance(target, Server):
                    result = catch_up(self._folder, target, self._say_whole)
                else:
                    result = catch_up_rows(self._folder, target, self._say_whole)
                pause = 0.0
            except GmetaError as error:
                result, pause = error, min(max(2 * pause, 1.0), _LONGEST_PAUSE)
                self._say_whole(str(error))
            if not self._follow or self._stopped.wait(max(self._every, pause)):
                return result

    def _say_whole(self, line: str) -> None:
        with self._saying:
            if self._stopped.is_set():
                raise SystemExit  # ends the thread before the next delta
            self._say(line)
