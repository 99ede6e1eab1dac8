"""The counters for Prometheus: their names and values over HTTP, and the board that shows them."""

from __future__ import annotations

import json
import math
import re
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from gmeta.core.errors import ConfigError
from gmeta.experiment.online.monitor import OnlineMonitor, parse_address
from gmeta.export.publisher import Published
from gmeta.metrics.guard import Guard
from gmeta.metrics.progressive import ProgressiveMetrics

BOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana-online.json"


@pytest.fixture
def monitor():
    monitor = OnlineMonitor()
    yield monitor
    monitor.close()


def scraped(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_it_serves_what_it_counted(monitor, tmp_path):
    publisher = SimpleNamespace(listeners=[], covered=0.0)
    monitor.follow(publisher)
    port = monitor.serve(0)
    assert math.isnan(scraped(port)["gmeta_oldest_served_row_seconds"])
    monitor.note_events(300, latest=int((time.time() - 50) * 1e6))
    monitor.note_events(20)
    publisher.covered = time.time() - 40
    for published in (
        Published(1, tmp_path, 900, 0, 0, 2.5),
        Published(2, tmp_path / "2.delta", 30, 4, 5000, 0.5),
        Published(3, tmp_path / "3.delta", 10, 0, 1000, 0.25),
        None,
    ):
        publisher.listeners[0](published)
    metrics = ProgressiveMetrics(2)
    first, second = metrics.update([0, 1, 1, 0], [0.1, 0.9, 0.2, 0.6])
    monitor.note_window(second, metrics.overall())
    monitor.note_decision(Guard(["auc < 2"]).decide([first]))
    found = scraped(port)
    assert 50 <= found["gmeta_lag_seconds"] < 500
    assert 40 <= found["gmeta_oldest_served_row_seconds"] < 500
    expected = {
        "gmeta_events_total": 320,
        "gmeta_rows_touched_total": 40,
        "gmeta_rows_removed_total": 4,
        "gmeta_deltas_total": 2,
        "gmeta_delta_bytes_total": 6000,
        "gmeta_models_total": 1,
        "gmeta_publish_seconds_sum": 3.25,
        "gmeta_publish_seconds_count": 3,
        "gmeta_published_version": 3,
        'gmeta_progressive{metric="auc",window="last"}': 0,
        'gmeta_progressive{metric="auc",window="all"}': 0.5,
        'gmeta_progressive{metric="rows",window="all"}': 4,
        'gmeta_decisions_total{action="stop"}': 1,
        'gmeta_decisions_total{action="fall back"}': 0,
    }
    assert {name: found[name] for name in expected} == expected


def test_a_port_alone_is_served_to_this_machine_only(monitor):
    assert monitor.serve("0") > 0
    assert monitor._server.server_address[0] == "127.0.0.1"
    assert parse_address("0.0.0.0:9464") == ("0.0.0.0", 9464)
    assert parse_address("[::]:80") == ("::", 80)
    assert parse_address(9464) == ("127.0.0.1", 9464)


@pytest.mark.parametrize("address", ["", "99999", "host:", ":9464", "9464/metrics", "-1"])
def test_other_addresses_are_refused(address):
    with pytest.raises(ConfigError, match="--metrics-port must be a port"):
        parse_address(address)


def test_a_port_in_use_is_refused(monitor):
    port = monitor.serve(0)
    with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1, port {port}"):
        OnlineMonitor().serve(port)


def test_the_board_shows_all_counters_and_no_others(monitor):
    board = json.loads(BOARD.read_text())
    texts = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = set(re.findall(r"gmeta_\w+", " ".join(texts)))
    made = {
        sample.name
        for metric in monitor.registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }
    assert shown == made | {"gmeta_progressive"}  # which has no sample before the first window
    metrics = ProgressiveMetrics(1)
    monitor.note_window(*metrics.update([1], [0.5]), metrics.overall())
    labels = {
        (sample.labels["metric"], sample.labels["window"])
        for metric in monitor.registry.collect()
        for sample in metric.samples
        if sample.name == "gmeta_progressive"
    }
    asked = set(re.findall(r'metric="(\w+)", window="(\w+)"', " ".join(texts)))
    assert asked < labels
    assert {metric for metric, _ in asked} == {metric for metric, _ in labels}


def test_the_board_can_be_imported():
    board = json.loads(BOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    sources = {target["datasource"]["uid"] for panel in panels for target in panel["targets"]}
    assert sources == {"${datasource}"}
    variables = {each["name"] for each in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", BOARD.read_text())) <= variables | {"__rate_interval", "__all"}
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
