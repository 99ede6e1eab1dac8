"""A rank under Horovod's elastic driver: when it starts again, and which place it takes then."""

from __future__ import annotations

import http.server
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from gmeta.core.collectives import elastic
from gmeta.core.errors import CollectiveError
from gmeta.core.shares import SHARES

ANSWERS = {"/rank_and_size/here:0": b"1,3,0,1,1,3", "/rank_and_size/lost:0": b"-1,-1,-1,-1,-1,-1"}


class Driver(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = ANSWERS.get(self.path)
        self.send_response(404 if answer is None else 200)
        self.end_headers()
        self.wfile.write(answer or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The command lines that were run anew, under a driver that answers."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Driver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told = {"ELASTIC": "1", "GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": server.server_port}
    told |= {"HOSTNAME": "here", "RANK": 5, "SIZE": 6, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    told |= {"CROSS_RANK": 5, "CROSS_SIZE": 6}  # all of it is put back after the test
    for name, value in told.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    monkeypatch.setenv(SHARES, "6")
    lines: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, line: lines.append(line))
    monkeypatch.setattr(os, "set_inheritable", lambda *_: None)
    monkeypatch.setattr(elastic.atexit, "register", lambda function: None)
    yield lines
    elastic._again.clear()
    os.environ.pop(elastic._AGAIN, None)
    server.shutdown()
    server.server_close()


def test_a_rank_starts_again_when_it_was_told_so_and_not_for_ever(started: list[list[str]]) -> None:
    elastic.start_again()
    assert started == []
    elastic.start_again_at_exit()
    for _ in range(5):
        elastic.start_again()
    assert started == [[sys.executable, *sys.orig_argv[1:]]] * elastic.FRUITLESS
    elastic.note_checkpoint()
    elastic.start_again()
    assert len(started) == elastic.FRUITLESS + 1


def test_it_takes_the_place_that_the_driver_has_for_it_then(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic.find_place()
    assert os.environ["HOROVOD_RANK"] == "5"  # the driver has started it as that
    elastic.start_again_at_exit()
    elastic.start_again()
    elastic.find_place()
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [os.environ[f"HOROVOD_{name}"] for name in names] == ["1", "3", "0", "1", "1", "3"]
    monkeypatch.setenv("HOROVOD_HOSTNAME", "lost")
    with pytest.raises(SystemExit):
        elastic.find_place()
    monkeypatch.setenv("HOROVOD_HOSTNAME", "unknown")
    with pytest.raises(CollectiveError, match=r"has no place for unknown:0: .*404"):
        elastic.find_place()


def test_no_other_process_starts_again(started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_ELASTIC")
    elastic.start_again_at_exit()
    elastic.start_again()
    assert started == []
