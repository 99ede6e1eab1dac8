"""Counters of online training for Prometheus: events, lag, deltas, age of served rows, progressive metrics.

`OnlineMonitor` holds them, and serves them over HTTP in Prometheus' text format. A board for Grafana that
shows all of them is in ``docs/grafana-online.json``.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, start_http_server

from gmeta.core.errors import ConfigError
from gmeta.export import Publisher
from gmeta.export.publisher import Published
from gmeta.metrics.guard import Decision
from gmeta.metrics.progressive import METRICS, Window

_PROGRESSIVE = (*METRICS, "rows", "late", "corrections", "not_finite")
_MICROSECONDS = 1e6


def parse_address(text: str | int, what: str = "--metrics-port") -> tuple[str, int]:
    """Parse ``PORT`` or ``HOST:PORT``; a port alone is served to this machine only, at 127.0.0.1.

    Args:
      text: Such as ``"9464"``, ``"0.0.0.0:9464"`` for all of the machine's addresses, or ``"[::]:9464"``.
        With port 0 the system chooses a free one.
      what: Its name in errors.

    Raises:
      ConfigError: It has another form, or the port isn't within 0 to 65535.

    Example:
      >>> parse_address("9464"), parse_address("0.0.0.0:9464")
      (('127.0.0.1', 9464), ('0.0.0.0', 9464))
    """
    found = re.fullmatch(r"(?:(\[[0-9a-fA-F:.]+\]|[\w.-]+):)?([0-9]{1,5})", str(text))
    if found is None or int(found[2]) > 65535:
        raise ConfigError(
            f"{what} must be a port from 0 to 65535, such as 9464, or an address and a port, such as "
            f"0.0.0.0:9464, which other machines can reach; got {str(text)!r}"
        )
    return (found[1] or "127.0.0.1").strip("[]"), int(found[2])


class OnlineMonitor:
    """Counters of one training on a stream.

    ====================================  ================================================================
    gmeta_events_total                    samples trained
    gmeta_skipped_total                   rows that can't be parsed, and files that came too late
    gmeta_lag_seconds                     when samples were trained last: the time since the newest event
    gmeta_rows_touched_total              rows published in deltas: each that changed since the delta before
    gmeta_rows_removed_total              removed ids published in deltas
    gmeta_deltas_total                    deltas published
    gmeta_delta_bytes_total               their size
    gmeta_models_total                    SavedModels published
    gmeta_publish_seconds                 how long publications took: a count and a sum
    gmeta_published_version               the last version
    gmeta_oldest_served_row_seconds       the time since the last publication: no change that is older waits
    gmeta_progressive{metric,window}      `gmeta.metrics.progressive.Window`: of the ``last`` one, and of
                                          ``all`` together
    gmeta_decisions_total{action}         decisions of rules: ``stop`` and ``fall back``
    ====================================  ================================================================

    The age of the oldest served row is that of a server that has applied the latest delta. It grows while
    nothing is published, also if files can't be written. How far a server is behind shows in its version,
    which `gmeta deliver` asks for.

    Several monitors in a process don't share counters. On several ranks, one on rank 0 suffices.

    Attributes:
      registry: The `prometheus_client.CollectorRegistry`; add your own counters to it.

    Example:
      ::

        monitor = OnlineMonitor()
        monitor.follow(publisher)
        monitor.serve("0.0.0.0:9464")
        progressive = ProgressiveEvaluation(model, "10m", times="time", on_window=monitor.note_window)
        for batch in stream:
            model.train_on_batch(...)
            monitor.note_events(len(batch), latest=batch["time"].max())
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._events = Counter("gmeta_events", "Samples trained.", registry=registry)
        self._skipped = Counter("gmeta_skipped", "Bad rows and late files skipped.", registry=registry)
        self._lag = Gauge(
            "gmeta_lag_seconds", "Time since the newest event, when it was trained.", registry=registry
        )
        self._touched = Counter("gmeta_rows_touched", "Rows published in deltas.", registry=registry)
        self._removed = Counter("gmeta_rows_removed", "Removed ids published in deltas.", registry=registry)
        self._deltas = Counter("gmeta_deltas", "Deltas published.", registry=registry)
        self._bytes = Counter("gmeta_delta_bytes", "Size of the deltas published.", registry=registry)
        self._models = Counter("gmeta_models", "SavedModels published.", registry=registry)
        self._seconds = Summary("gmeta_publish_seconds", "Duration of publications.", registry=registry)
        self._version = Gauge("gmeta_published_version", "Last version published.", registry=registry)
        self._oldest = Gauge(
            "gmeta_oldest_served_row_seconds", "Time since the last publication.", registry=registry
        )
        self._progressive = Gauge(
            "gmeta_progressive",
            "Metrics of predictions before training on their labels.",
            ["metric", "window"],
            registry=registry,
        )
        self._decisions = Counter("gmeta_decisions", "Decisions of rules.", ["action"], registry=registry)
        for action in ("stop", "fall back"):
            self._decisions.labels(action)
        for gauge in (self._lag, self._version, self._oldest):
            gauge.set(math.nan)  # not known yet
        self._server: Any = None

    def serve(self, address: str | int) -> int:
        """Begin to serve the counters over HTTP, in a thread, and return the port.

        Args:
          address: As for `parse_address`.

        Raises:
          ConfigError: The address is invalid, isn't this machine's, or is in use.
        """
        host, port = parse_address(address)
        try:
            self._server, _ = start_http_server(port, host, self.registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--metrics-port {address}: can't listen on {host}, port {port}: {error}: give another port, "
                "or an address of this machine"
            ) from error
        return int(self._server.server_port)

    def close(self) -> None:
        """End the server, if there is one."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def note_events(self, count: int, latest: int | None = None) -> None:
        """Count samples that were trained.

        Args:
          count: Their number.
          latest: The latest of their event times, microseconds since 1970. None: the lag stays.
        """
        self._events.inc(count)
        if latest is not None:
            self._lag.set(max(time.time() - int(latest) / _MICROSECONDS, 0.0))

    def note_skipped(self, count: int) -> None:
        """Count rows and files that were skipped."""
        self._skipped.inc(count)

    def note_window(self, window: Window, overall: Window | None = None) -> None:
        """Show the metrics of a window that has ended.

        Args:
          window: The window.
          overall: `ProgressiveMetrics.overall`.
        """
        for name, each in (("last", window), ("all", overall)):
            if each is not None:
                for metric in _PROGRESSIVE:
                    self._progressive.labels(metric, name).set(getattr(each, metric))

    def note_decision(self, decision: Decision) -> None:
        """Count a decision of a guard."""
        self._decisions.labels(decision.action).inc()

    def follow(self, publisher: Publisher) -> None:
        """Count what a publisher publishes from now on."""
        publisher.listeners.append(self._note_published)
        self._oldest.set_function(lambda: time.time() - publisher.covered if publisher.covered else math.nan)

    def _note_published(self, published: Published | None) -> None:
        if published is None:
            return
        self._seconds.observe(published.seconds)
        self._version.set(published.version)
        if not published.bytes:  # a SavedModel
            self._models.inc()
            return
        self._deltas.inc()
        self._bytes.inc(published.bytes)
        self._touched.inc(published.rows)
        self._removed.inc(published.removed)
