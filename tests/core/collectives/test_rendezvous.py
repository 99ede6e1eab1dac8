"""The rendezvous of ranks: who has no secret gets nothing, and what a stranger sends is never unpickled."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from horovod.runner.common.util import network
from horovod.runner.common.util import secret as secrets
from horovod.runner.elastic.worker import HostsUpdatedRequest
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from gmeta.core.collectives import rendezvous
from gmeta.core.collectives.elastic import safe_wire
from gmeta.core.collectives.rendezvous import SECRET, ask, guard, signature
from gmeta.core.errors import ConfigError
from gmeta.core.launcher.horovodrun import _of_json, main
from gmeta.core.launcher.meeting import meet_by_horovod

THE_SECRET = "5ec2e7"


def asked(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RendezvousHTTPServer]:
    """A server of a job over several machines, which this process is a rank of."""
    server = RendezvousHTTPServer(("127.0.0.1", 0), guard(RendezvousHandler, THE_SECRET, signed=True), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in (
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1"),
        ("HOROVOD_GLOO_RENDEZVOUS_PORT", str(server.server_port)),
        (SECRET, THE_SECRET),
        ("GMETA_RENDEZVOUS", ""),  # put back after the test
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GMETA_RENDEZVOUS")
    rendezvous.through_proxy.cache_clear()
    rendezvous.through_proxy()
    yield server
    server.shutdown()
    server.server_close()
    os.environ.pop("GMETA_RENDEZVOUS", None)
    rendezvous.through_proxy.cache_clear()


def test_a_job_on_one_machine_listens_on_loopback_alone_and_asks_for_its_secret() -> None:
    with meet_by_horovod(2) as environments:
        address = environments[0]["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        host, _, secret = address.partition("/")
        port = int(host.partition(":")[2])
        listening = [each.laddr for each in psutil.Process().net_connections() if each.status == "LISTEN"]
        assert [each.ip for each in listening if each.port == port] == ["127.0.0.1"]
        assert asked(port, "PUT", "/global/rank_0", b"x") == 403
        assert asked(port, "PUT", f"/{'0' * len(secret)}:{port}/global/rank_0", b"x") == 403
        assert asked(port, "GET", "/") == asked(port, "DELETE", "/global/rank_0") == 403
        assert asked(port, "PUT", f"/{secret}:{port}/global/rank_0", b"x") == 200
        assert asked(port, "GET", f"/{secret}:{port}/global/rank_0") == 200
        assert asked(port, "GET", f"/{secret}:{port}/../../etc/passwd") == 400
        assert asked(port, "PUT", f"/{secret}:{port}/a/b", Content_Length="9" * 12) == 403


def test_over_machines_a_request_without_the_jobs_signature_is_refused(server: RendezvousHTTPServer) -> None:
    port = server.server_port
    assert ask("PUT", "/global/rank_0", b"address") == (200, b"")
    assert ask("GET", "/global/rank_0") == (200, b"address")
    assert ask("GET", "/global/rank_1") == (404, b"")
    assert asked(port, "GET", "/global/rank_0") == 403
    number = "1.x"
    forged = signature("another", b"GET", b"/global/rank_0", number.encode(), b"")
    assert asked(port, "GET", "/global/rank_0", X_Gmeta_Number=number, X_Gmeta_Signature=forged) == 403
    # One that was signed long ago, and one that is sent twice.
    old = signature(THE_SECRET, b"GET", b"/global/rank_0", number.encode(), b"")
    assert asked(port, "GET", "/global/rank_0", X_Gmeta_Number=number, X_Gmeta_Signature=old) == 403
    number = f"{int(rendezvous.time.time())}.x"
    fresh = signature(THE_SECRET, b"PUT", b"/global/rank_0", number.encode(), b"1")
    again = {"X_Gmeta_Number": number, "X_Gmeta_Signature": fresh}
    assert asked(port, "PUT", "/global/rank_0", b"2", **again) == 403
    assert [asked(port, "PUT", "/global/rank_0", b"1", **again) for _ in range(2)] == [200, 403]


def test_a_server_without_the_secret_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
    threading.Thread(target=plain.serve_forever, daemon=True).start()
    try:
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(plain.server_port))
        monkeypatch.setenv("GMETA_RENDEZVOUS", f"127.0.0.1:{plain.server_port}")
        monkeypatch.setenv(SECRET, THE_SECRET)
        with pytest.raises(ValueError, match="doesn't have this job's signature"):
            ask("GET", "/global/rank_0")
    finally:
        plain.shutdown()
        plain.server_close()


def test_the_proxy_signs_for_this_process_alone(server: RendezvousHTTPServer) -> None:
    address, _, own = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")
    proxy = int(address.partition(":")[2])
    assert asked(proxy, "PUT", f"/{own}:{server.server_port}/global/rank_0", b"x") == 200
    assert asked(proxy, "GET", f"/{own}:{server.server_port}/global/rank_0") == 200
    assert asked(proxy, "GET", f"/other:{server.server_port}/global/rank_0") == 403
    server.shutdown()
    server.server_close()
    assert asked(proxy, "GET", f"/{own}:{server.server_port}/global/rank_0") == 502


class Forged:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_forged_pickle_is_never_loaded(tmp_path: Path) -> None:
    forged, key = pickle.dumps(Forged(tmp_path / "ran")), b"k" * 32
    for signer, allowed in ((b"another" * 4, False), (key, True)):
        message = secrets.compute_digest(signer, forged) + struct.pack("i", len(forged)) + forged
        if allowed:  # even from who has the key
            assert isinstance(safe_wire(key).read(io.BytesIO(message)), network.PingRequest)
        else:
            with pytest.raises(ValueError, match="without this job's signature"):
                safe_wire(key).read(io.BytesIO(message))
    told = io.BytesIO()
    network.Wire(key).write(HostsUpdatedRequest(3), told)
    told.seek(0)
    assert isinstance(safe_wire(key).read(told), HostsUpdatedRequest)

    registered: list[Any] = []

    class Driven(RendezvousHandler):
        def _put_worker_addresses(self, *what: Any) -> None:
            registered.append(what)

    handler = _of_json(Driven, THE_SECRET)
    put = handler._put_value
    with pytest.raises(ValueError, match=r"Expecting value|Invalid"):
        put(object.__new__(handler), "worker_addresses", "here:0", base64.b64encode(forged))
    put(
        object.__new__(handler), "worker_addresses", "here:0", json.dumps({"lo": [["127.0.0.1", 7]]}).encode()
    )
    assert registered[0][:3] == ("here", 0, {"lo": [("127.0.0.1", 7)]})
    assert not (tmp_path / "ran").exists()


def test_the_network_interface_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match="--network-interface eth0"):
        main(["-np", "2", "true"])


@pytest.mark.slow
@pytest.mark.ranks
def test_horovods_launcher_with_a_secret_runs_ranks_that_have_it() -> None:
    code = "import gmeta; w = gmeta.init(); print('rank', w.rank, 'of', w.size)"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gmeta.core.launcher.horovodrun", "-np", "2"),
            *("--network-interface", "lo", sys.executable, "-c", code),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} of 2" in done.stdout for rank in range(2))
