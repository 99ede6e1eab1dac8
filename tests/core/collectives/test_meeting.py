"""Where ranks meet without Horovod: a store that answers the job's ranks alone, and their places on hosts."""

from __future__ import annotations

import doctest
import http.client
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest

from gmeta.core.collectives.place import RankPlace, launched_size, told_place
from gmeta.core.collectives.rendezvous import SECRET, STORE, Store
from gmeta.core.errors import CollectiveError, ConfigError
from gmeta.core.launcher import meeting
from gmeta.core.launcher import meeting as hosts
from gmeta.core.launcher.meeting import (
    HERE,
    Host,
    host_of_each,
    meet_by_horovod,
    meet_by_store,
    parse_hosts,
    places_of,
)


def enter(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_ranks_tell_each_other_values_and_learn_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    places = places_of([HERE] * 3)
    with meet_by_store(places) as (environments, _):
        enter(monkeypatch, environments[2])
        assert told_place() == RankPlace(2, 3, 2, 3)
        assert launched_size() == 3
        with ThreadPoolExecutor(3) as ranks:
            asked = [ranks.submit(Store().gather, "a/b c", r, 3, {"rank": (r, b"x")}, 60) for r in range(3)]
        assert [each.result() for each in asked] == [[{"rank": (r, b"x")} for r in range(3)]] * 3
        assert Store().values("other") == {}


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with meet_by_store(places_of([HERE] * 3)) as (environments, _):
        enter(monkeypatch, environments[1])
        said = "rank 1 of 3 lost its peers: timed out: rank 0, rank 2 did not come to 'lanes'"
        with pytest.raises(CollectiveError, match=said):
            Store().gather("lanes", 1, 3, None, 1)
    with pytest.raises(CollectiveError, match=r"the launcher at 127\.0\.0\.1:.* can't be reached"):
        Store().values("lanes")


def test_the_store_listens_on_loopback_and_answers_only_who_knows_the_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with meet_by_store(places_of([HERE] * 2)) as (environments, values):
        host, _, port = environments[0][STORE].partition(":")
        listening = [each.laddr for each in psutil.Process().net_connections() if each.status == "LISTEN"]
        assert [each.ip for each in listening if each.port == int(port)] == ["127.0.0.1"]
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("PUT", "/lanes/0", b"x")
        assert connection.getresponse().status == 403
        connection.close()
        enter(monkeypatch, {**environments[0], SECRET: "another"})
        with pytest.raises(CollectiveError, match="doesn't have this job's signature"):
            Store().put("lanes", "0", 1)
        assert values.of("lanes") == {}
        enter(monkeypatch, environments[0])
        with pytest.raises(CollectiveError, match=r"signature|answers 403|reset|pipe"):
            Store().put("lanes", "0", b"x" * (1 << 21))
        assert values.of("lanes") == {}


def test_strangers_keep_no_rank_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_MOST_CALLERS", 8)
    with meet_by_store(places_of([HERE] * 2)) as (environments, _), ExitStack() as stack:
        enter(monkeypatch, environments[0])
        host, _, port = environments[0][STORE].partition(":")
        before = threading.active_count()
        for number in range(40):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(b"PUT /lanes/0 HTTP/1.1\r\nContent-Length: 9" * (number % 2))
        Store().put("lanes", "1", 2)
        assert Store().values("lanes") == {"1": 2}
        until = time.monotonic() + 20
        while threading.active_count() > before + 8 and time.monotonic() < until:
            time.sleep(0.02)
        assert threading.active_count() <= before + 8


def test_a_process_without_a_launcher_has_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORE, raising=False)
    with pytest.raises(ConfigError, match="start ranks by `gmeta launch`"):
        Store()
    monkeypatch.setenv("GMETA_SIZE", "2")
    with pytest.raises(ConfigError, match=r"GMETA_RANK='', GMETA_SIZE='2'.* no place of a rank"):
        told_place()


def test_ranks_fill_one_host_after_the_other() -> None:
    assert doctest.testmod(hosts).failed == 0
    names = host_of_each(parse_hosts("a:2, b:1"), 3)
    assert places_of(names) == [RankPlace(0, 3, 0, 2), RankPlace(1, 3, 1, 2), RankPlace(2, 3, 0, 1)]
    with pytest.raises(ConfigError, match="3 ranks, but the hosts have room for 2"):
        host_of_each([Host("a", 2)], 3)


@pytest.mark.parametrize("text", ["a", "a:0", ":2", "a:2,", "-oProxyCommand=x:1", "a:2,a:1"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"give such as a:2,b:2|is named twice"):
        parse_hosts(text)


@pytest.mark.horovod
def test_what_horovods_launcher_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("horovod.runner")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "yaml", None)
    says = r"^Horovod 0\.28\.1's launcher doesn't load: .*yaml.*; `pip install horovod==0\.28\.1` adds"
    with pytest.raises(ConfigError, match=says), meet_by_horovod(2):
        pass
