"""Sends published deltas to servers until they are up to date.

A server is TensorFlow Serving's REST interface, or anything with the same interface. Its signature
``delta_version`` returns its version; ``apply_delta`` receives the deltas after that version one by one, or,
if the server lags far, several combined into one (`gmeta.export.model_deltas.combine`). So this module
stores nothing about servers: a killed delivery, a restarted server and a new replica all resume from the
version that the server has.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.json_values import parse_json
from gmeta.export.model_deltas import MODEL, STREAM, Delta, Layout, combine, deltas_in, models_in

Say = Callable[[str], None]
_LONGEST_PAUSE = 30.0
_AT_ONCE = 64 << 20
"""The maximum bytes of deltas that are combined into one."""


class Server:
    """A server's REST interface.

    Args:
      url: Such as ``"http://host:8501/v1/models/my_model"``.
      timeout: Seconds to wait for an answer.
    """

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        self.url, self._timeout = url.rstrip("/"), timeout

    def version(self) -> int:
        """Return the version that the server has.

        Raises:
          GmetaError: The server doesn't answer, or its answer isn't a version.
        """
        return self._ask("delta_version", {})

    def apply(self, delta: bytes) -> int:
        """Send a delta, and return the version that the server then has.

        Raises:
          GmetaError: As for `version`; or the server refuses the delta.
        """
        return self._ask("apply_delta", {"delta_bytes": {"b64": base64.b64encode(delta).decode()}})

    def _ask(self, signature: str, inputs: dict[str, Any]) -> int:
        body = json.dumps({"signature_name": signature, "inputs": inputs}).encode()
        request = urllib.request.Request(f"{self.url}:predict", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return int(parse_json(answer.read())["outputs"])
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace").strip()
            raise GmetaError(f"{self.url} answers {error.code} to {signature}: {said}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise GmetaError(f"{self.url} can't be reached: {reason}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise GmetaError(f"{self.url} answers {signature} with something other than a version") from error


def catch_up(folder: Path, server: Server, say: Say = print) -> int:
    """Send a server all deltas that it lacks.

    Args:
      folder: The folder of a `gmeta.export.Publisher`.
      server: The server.
      say: Called with a sentence on each delta that was sent.

    Returns:
      The version that the server then has.

    Raises:
      DataError: No delta updates the server's version, so it must first load a newer SavedModel; or a delta
        is damaged.
      GmetaError: As for `Server.apply`.
    """
    layout = Layout.load(folder / STREAM)
    version = server.version()
    while sent := _next(folder, layout, version):
        start = time.perf_counter()
        data = sent.encode(layout)
        version = server.apply(data)
        seconds = time.perf_counter() - start
        say(f"{server.url}: version {version}, {len(data):,} bytes in {seconds:.3f} s")
        if version < sent.version:
            raise GmetaError(f"{server.url} still has version {version} after the delta to {sent.version}")
    return version


def _next(folder: Path, layout: Layout, version: int) -> Delta | None:
    """Return the delta that updates a version, combined with those after it; None if there is none."""
    found: list[Delta] = []
    size = 0
    for path in (path for number, path in deltas_in(folder).items() if number > version):
        expected = found[-1].version if found else version
        try:
            delta = Delta.decode(path.read_bytes(), layout, path)
        except (OSError, ValueError, TypeError) as error:  # for example, the publisher deletes it meanwhile
            raise DataError(f"can't be read: {error}", path=path) from error
        if delta.after != expected:
            break
        size += path.stat().st_size
        if found and size > _AT_ONCE:
            break
        found.append(delta)
    if found:
        return combine(found)
    bases, last = models_in(folder), max([0, *deltas_in(folder), *models_in(folder)])
    if version > last:
        raise DataError(
            f"the server has version {version}, and the last one here is {last}",
            path=folder,
            advice="it serves the model of another folder, or an old one of this folder",
        )
    if version == last:
        return None
    load = f"the server has to load {folder / MODEL / str(bases[-1])}" if bases else "publish again"
    raise DataError(
        f"no delta continues version {version}",
        path=folder,
        advice=f"{load}, as TensorFlow Serving does by itself with --model_base_path={folder / MODEL}",
    )


def deliver(
    folder: Path,
    urls: Sequence[str],
    *,
    follow: bool = False,
    every: float = 1.0,
    say: Say = print,
) -> dict[str, int]:
    """Send servers all deltas that they lack.

    Args:
      folder: The folder of a `gmeta.export.Publisher`.
      urls: The servers' models, such as ``"http://host:8501/v1/models/my_model"``.
      follow: Whether to keep sending new deltas until Ctrl-C. A server that doesn't answer, or lacks a
        SavedModel, is then retried after growing pauses, up to half a minute.
      every: Seconds between two checks of the folder.
      say: Called with sentences on what was sent, and on what failed.

    Returns:
      Server -> its version.

    Raises:
      DataError: As for `catch_up`, without ``follow``; likewise GmetaError, after all servers were tried.
    """
    servers = [Server(url) for url in urls]
    versions: dict[str, int] = {}
    pauses = dict.fromkeys(urls, 0.0)
    due = dict.fromkeys(urls, 0.0)
    while True:
        failed: GmetaError | None = None
        for url, server in zip(urls, servers, strict=True):
            if time.monotonic() < due[url]:
                continue
            try:
                versions[url] = catch_up(folder, server, say)
                pauses[url] = 0.0
            except GmetaError as error:
                failed = error
                pauses[url] = min(max(2 * pauses[url], 1.0), _LONGEST_PAUSE)
                due[url] = time.monotonic() + pauses[url]
                say(str(error))
        if not follow:
            if failed is not None:
                raise failed
            return versions
        time.sleep(every)
