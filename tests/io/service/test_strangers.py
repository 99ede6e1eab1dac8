"""Who doesn't know the key of a worker gets nothing from it, changes nothing, and keeps nobody waiting."""

import json
import os
import pickle
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress

import cloudpickle
import pytest
import tensorflow as tf
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import ConfigError
from gmeta.io import distribute
from gmeta.io.service import worker as service
from gmeta.io.service.pieces import ServedPosition
from gmeta.io.service.worker import key_of, split_address
from gmeta.io.service.worker_pool import WorkerPool
from support.reading_workers import worker_thread


@pytest.fixture(scope="module", autouse=True)
def _sent():
    """This module isn't installed where workers are, so its functions travel as they are."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def numbers(start):
    begin, end = start.part_of(40)
    return tf.data.Dataset.range(min(begin + start.taken, end), end)


def read_all(workers, **options):
    """All elements of an epoch of three pieces, in the order of their numbers."""
    served = distribute(numbers, workers, position=ServedPosition(3), at_once=3, **options)
    return sorted(int(number) for number in served)


def write_announcement(folder, name, address, identity):
    told = {"address": address, "identity": identity, "loopback": []}
    (folder / f"{name}.worker").write_text(json.dumps(told))


def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path):
    with worker_thread(tmp_path / "made"):
        key = tmp_path / "made" / "key"
        assert key.stat().st_mode & 0o777 == 0o600
        assert len(key.read_bytes()) == 64
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["key"]


OPEN_KEYS = {
    "empty": (lambda folder, key: key.write_text(""), "a key needs 16 characters, and has 0: remove it"),
    "short": (lambda folder, key: key.write_text("secret\n"), "a key needs 16 characters, and has 6"),
    "world-writable": (lambda folder, key: key.chmod(0o602), "can be read or written by everybody"),
    "world-readable": (lambda folder, key: key.chmod(0o644), "can be read or written by everybody"),
    "of another user": (
        lambda folder, key: os.chown(key, 12345, -1),
        "belongs to user 12345, and .* to",
    ),
    "in a folder of all": (
        lambda folder, key: folder.chmod(0o777),
        "could put another key there.*: chmod",
    ),
}


@pytest.mark.parametrize("kind", OPEN_KEYS)
def test_a_key_that_others_could_know_or_replace_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.delenv("GMETA_WORKERS_KEY", raising=False)
    folder = tmp_path / "workers"
    sound = key_of(folder)
    spoil, expected = OPEN_KEYS[kind]
    if kind == "of another user" and os.geteuid():
        pytest.skip("only root gives files to others")
    spoil(folder, folder / "key")
    for use in (key_of, WorkerPool):
        with pytest.raises(ConfigError, match=expected):
            use(folder)
    refused = CliRunner().invoke(main, ["workers", str(folder)])
    assert (refused.exit_code, refused.output.count("\n")) == (2, 1)
    folder.chmod(0o1777)  # nobody replaces another's files there
    (folder / "key").unlink()
    (folder / "key").write_bytes(sound + b"\n")
    (folder / "key").chmod(0o640)
    assert key_of(folder) == sound


class Relay:
    """A stranger who has the address of a worker that has ended, and hands all on to another one.

    Args:
      to: The other worker's address.
      change: Makes of what comes from the worker, behind the greeting, what the caller gets.
    """

    def __init__(self, to, change=lambda data: data):
        self.to, self.change, self.calls, self.passed = to, change, 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                self.calls += 1
                far = socket.create_connection(split_address(self.to))
                for way in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self.forward, args=way, daemon=True).start()

    def forward(self, source, to, is_worker):
        seen = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_worker and seen >= 96:  # a hello and a proof
                    data = self.change(data)
                    self.passed += len(data)
                seen += len(data)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)


def test_a_relay_at_the_address_of_a_worker_that_has_ended_gets_nothing(tmp_path):
    with worker_thread(tmp_path) as gone, worker_thread(tmp_path) as there:
        relay = Relay(there.address)
        gone.close()
        write_announcement(tmp_path, "a", relay.address, gone._identity.hex())
        pool = WorkerPool(tmp_path)
        while not relay.calls:
            pool.ready()
            time.sleep(0.02)
        assert read_all(pool) == list(range(40))
        assert pool.ready() == [there.address]
        assert relay.passed == 0
        assert "it isn't the one that was announced here" in pool._workers[relay.address].reason
        # Another worker may get the port of one that was killed.
        write_announcement(tmp_path, "b", there.address, "11" * 16)
        assert WorkerPool(tmp_path).call(there.address)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data + pickle.dumps(Forged()),
        lambda data: pickle.dumps(Forged()),
        lambda data: data + data,
        lambda data: data[1:],
    ],
)
@pytest.mark.shown_by(case="<lambda>4")
def test_who_forwards_a_connection_can_not_change_an_element(tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GMETA_WORKERS_KEY", "k" * 32)
    monkeypatch.setattr("gmeta.io.service.worker_pool._ANSWER_SECONDS", 0.5)
    with worker_thread(tmp_path) as worker:
        relay = Relay(worker.address, change)
        pool = WorkerPool([relay.address, worker.address])
        assert read_all(pool, patience=1) == list(range(40))
        while not relay.passed:
            time.sleep(0.02)
        assert not (tmp_path / "ran").exists()


class Forged:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_strangers_keep_a_worker_from_nobody(tmp_path):
    with worker_thread(tmp_path) as worker, ExitStack() as stack:
        for number in range(3 * service._MOST_CALLERS):
            stranger = stack.enter_context(socket.create_connection(split_address(worker.address)))
            if number % 3:
                stranger.sendall(b"\xff\xff\xff\x7f" * number)  # such as a message of 2 GB
        assert read_all(tmp_path) == list(range(40))
        assert len(worker._threads) <= service._MOST_CALLERS + 3
