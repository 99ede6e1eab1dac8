"""Redis, a cluster of Redis, and RocksDB folders that tests fill."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import redis

ROOT = Path(__file__).resolve().parents[2]


def row_client() -> ModuleType:
    """The client that users copy."""
    spec = importlib.util.spec_from_file_location("row_client", ROOT / "tools/dev/row_client.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    """A port that no client is given; a cluster's node also uses the one 10,000 above."""
    for port in range(21000, 29000):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10000))
                return port
            except OSError:
                continue
    raise AssertionError("no free port")


@contextmanager
def redis_server(*settings: str, port: int = 0) -> Iterator[int]:
    """Run Redis without a disk; yield its port."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server isn't installed")
    port = port or free_port()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            ["redis-server", "--port", str(port), "--save", "", "--dir", folder, *settings],
            stdout=subprocess.DEVNULL,
        )
        try:
            with redis.Redis(port=port) as client:
                wait_for(lambda: client.ping(), "Redis doesn't start")
            yield port
        finally:
            process.kill()
            process.wait()


@contextmanager
def redis_cluster(nodes: int = 3) -> Iterator[list[int]]:
    """Run a cluster of Redis; yield its ports."""
    with ExitStack() as stack:
        of_cluster = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
        ports = [stack.enter_context(redis_server(*of_cluster)) for _ in range(nodes)]
        places = [f"127.0.0.1:{port}" for port in ports]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *places, "--cluster-yes"],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )
        for port in ports:
            with redis.Redis(port=port) as client:
                wait_for(
                    lambda client=client: (
                        client.info("cluster") and client.cluster("info")["cluster_state"] == "ok"
                    ),
                    "the cluster doesn't start",
                )
        yield ports


def wait_for(done: object, why: str, seconds: float = 30.0) -> None:
    """Call a function until it returns something true."""
    until = time.monotonic() + seconds
    while True:
        try:
            if done():  # type: ignore[operator]
                return
        except redis.exceptions.RedisError:
            pass
        assert time.monotonic() < until, why
        time.sleep(0.02)
