"""What is asked of a store: how often, how much at once, and what happens when it doesn't answer."""

import threading
import time

import numpy as np
import pyarrow as pa
import pytest

from gmeta.core.errors import ConfigError, StoreError, StoreUnavailableError
from gmeta.core.schema import Column
from gmeta.io import ArrowSource, HBaseSource
from gmeta.io.features import FetchPolicy
from support.hbase_server import HBaseServer, hang_up

ROWS = pa.table({"key": range(100), "price": range(100), "tags": [[i, i] for i in range(100)]})


class Watched(ArrowSource):
    """Notes what is fetched; fails as often as it is told to."""

    def __init__(self, one_time=False, **policy):
        super().__init__({"item": ROWS}, policy=FetchPolicy(backoff=0.001, **policy))
        self.one_time = one_time
        self.fetched, self.fail = [], []

    def fetch(self, table, keys, columns, as_of):
        self.fetched.append((keys.tolist(), None if as_of is None else as_of.tolist()))
        if self.fail:
            raise self.fail.pop()
        return super().fetch(table, keys, columns, as_of)

    def prices(self, keys, as_of=None):
        return self.multi_get("item", keys, ["price"], as_of)["price"].to_pylist()


def test_equal_keys_are_fetched_once():
    source = Watched(cache_rows=0)
    asked = [5, 9, 5, 5, 1, 9] * 50
    assert source.prices(asked) == asked
    assert source.fetched == [([1, 5, 9], None)]
    assert source.prices([5, 5, 5, 1], as_of=[3, 3, 2, 2]) == [5, 5, 5, 1]
    assert source.fetched[1:] == [([1, 5, 5], [2, 2, 3])]
    counts = source.counts()
    assert (counts.rows, counts.distinct, counts.misses, counts.requests) == (304, 6, 6, 2)


def test_a_request_has_so_many_rows():
    source = Watched(cache_rows=0, batch_rows=4)
    assert source.prices(range(10)) == list(range(10))
    assert [keys for keys, _ in source.fetched] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert source.prices([]) == []
    assert source.counts().requests == 3


def test_a_request_has_one_time_where_the_store_takes_one():
    source = Watched(one_time=True, cache_rows=0, batch_rows=2)
    assert source.prices([1, 2, 3, 4, 5, 1], as_of=[7, 7, 7, 8, 8, 9]) == [1, 2, 3, 4, 5, 1]
    assert source.fetched == [([1, 2], [7, 7]), ([3], [7]), ([4, 5], [8, 8]), ([1], [9])]


def test_times_of_one_resolution_share_a_request():
    source = Watched(one_time=True, cache_rows=0, resolution=3600)
    source.prices([1, 2, 1], as_of=[7200, 7300, 10_799])
    assert source.fetched == [([1, 2], [7200, 7200])]  # rounded down, never up


def test_the_cache_keeps_what_was_used_last():
    source = Watched(cache_rows=3)
    for asked, fetched in [
        ([1, 2, 3], [1, 2, 3]),
        ([1, 3], None),
        ([4], [4]),  # takes 2's place
        ([1, 3, 4], None),
        ([2], [2]),  # takes 1's
        ([1], [1]),
        ([7, 8, 9, 10], [7, 8, 9, 10]),  # more than there is room for
        ([8, 9, 10], None),
    ]:
        before = len(source.fetched)
        assert source.prices(asked) == asked
        assert source.fetched[before:] == ([] if fetched is None else [(fetched, None)])
    counts = source.counts()
    assert (counts.hits, counts.misses) == (8, 10)


def test_the_cache_tells_times_and_columns_apart():
    source = Watched(cache_rows=100)
    assert source.prices([1, 2], as_of=5) == [1, 2]
    assert source.prices([1, 2], as_of=[5, 6]) == [1, 2]
    assert source.fetched[1:] == [([2], [6])]
    assert source.prices([1]) == [1]
    assert source.fetched[2:] == [([1], None)]
    rows = source.multi_get("item", [1, 1], ["tags", "price"], as_of=5)
    assert rows.to_pylist() == [{"tags": [1, 1], "price": 1}] * 2
    assert len(source.fetched) == 4


def test_the_newest_values_are_fetched_anew_after_a_while(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    source = Watched(cache_rows=100, cache_seconds=60, timeout=None)
    source.prices([1], as_of=1)
    source.prices([1])
    source.put("item", [1], {"price": [50]}, 1)
    assert source.prices([1]) == [1]
    now += 61
    assert source.prices([1]) == [50]
    assert source.prices([1], as_of=1) == [1]  # of a given time what is there stays
    assert source.counts().hits == 2


def test_threads_share_a_source():
    source, wrong = Watched(cache_rows=20), []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            keys = rng.integers(0, 100, 10).tolist()
            rows = source.multi_get("item", keys, ["price", "tags"])
            if rows.to_pylist() != [{"price": key, "tags": [key, key]} for key in keys]:
                wrong.append(keys)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    counts = source.counts()
    assert (counts.rows, counts.hits + counts.misses) == (2000, counts.distinct)


def test_a_failed_connection_is_tried_again_and_a_refused_request_is_not():
    source = Watched(attempts=3)
    source.fail = [StoreUnavailableError("down")] * 2
    assert source.prices([1]) == [1]
    assert (source.counts().requests, source.counts().retries) == (3, 2)
    source.fail = [StoreUnavailableError("down")] * 3
    with pytest.raises(StoreUnavailableError, match=r"table 'item', 1 keys from 2: down; tried 3 times in"):
        source.prices([2])
    source.fail = [StoreError("refused")]
    with pytest.raises(StoreError, match=r"^refused$"):
        source.prices([2])
    assert source.counts().requests == 7


def test_what_makes_no_sense_is_refused():
    for wrong, says in [
        ({"batch_rows": 0}, "batch_rows=0 must be at least 1"),
        ({"attempts": 0}, "attempts=0"),
        ({"timeout": 0}, "timeout=0 and"),
        ({"cache_seconds": 0}, "cache_seconds=0"),
        ({"missing": "zero"}, "'raise', 'null' or 'default', got 'zero'"),
    ]:
        with pytest.raises(ConfigError, match=says):
            FetchPolicy(**wrong)


@pytest.mark.parametrize("setting", ["byte_order", "transport", "protocol"])
def test_unknown_settings_of_hbase_are_refused(setting):
    with pytest.raises(ConfigError, match=rf"HBaseSource: {setting} must be \w+ or \w+, got 'other'"):
        HBaseSource("127.0.0.1", tables={}, **{setting: "other"})


@pytest.fixture
def server():
    with HBaseServer() as server:
        yield server


def hbase(server, **policy):
    policy = {"timeout": 600, "backoff": 0.001, "cache_rows": 0, **policy}
    tables = {"item": [Column("price")]}
    return HBaseSource("127.0.0.1", server.port, tables=tables, policy=FetchPolicy(**policy))


@pytest.fixture
def filled(server):
    source = hbase(server)
    source.create_table("item", versions=3)
    source.put("item", range(9), {"price": list(range(9))}, 7)
    return source


def one_line(error):
    line = str(error.value)
    assert "\n" not in line
    return line


def test_a_server_that_hangs_up_twice_is_asked_again(server, filled):
    answers = [hang_up, hang_up]

    def before():
        if answers:
            answers.pop()()

    server.before = before
    assert filled.multi_get("item", [3, 1], ["price"])["price"].to_pylist() == [3, 1]
    assert (filled.counts().requests, filled.counts().retries, filled.counts().timeouts) == (3, 2, 0)


def test_a_server_that_hangs_is_given_up_in_time(server, filled):
    gone = threading.Event()
    server.before = lambda: gone.wait(600)
    source = hbase(server, timeout=0.2, attempts=2)
    with pytest.raises(StoreUnavailableError) as raised:
        source.multi_get("item", [3, 1], ["price"])
    gone.set()
    line = one_line(raised)
    assert line.startswith(f"HBaseSource(127.0.0.1:{server.port}): table 'item', 2 keys from 1: ")
    assert "no answer within 0.2 s; tried 2 times in " in line
    assert source.counts().timeouts == 2


def test_an_error_that_comes_too_late_is_no_answer(monkeypatch):
    """The limit on the socket may run out too before the request's is looked at."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    source = Watched(timeout=600, attempts=1)

    def fetch(*_):
        nonlocal now
        now += 601
        raise StoreUnavailableError("timed out")

    source.fetch = fetch
    with pytest.raises(StoreUnavailableError, match="no answer within 600 s"):
        source.prices([1])
    assert source.counts().timeouts == 1


def test_a_server_that_drips_is_given_up_in_time(filled):
    """A limit on the socket would begin anew with every byte."""
    source = Watched(timeout=0.1, attempts=2)
    gone, fetch = threading.Event(), source.fetch
    source.fetch = lambda *given: (gone.wait(600), fetch(*given))[1]
    with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.1 s; tried 2 times"):
        source.prices([1])
    gone.set()
    assert source.counts().timeouts == 2


def test_a_server_that_dies_is_named(server, filled):
    assert filled.multi_get("item", [3], ["price"])["price"].to_pylist() == [3]
    server.stop()
    with pytest.raises(StoreUnavailableError) as raised:
        filled.multi_get("item", [3], ["price"])
    line = one_line(raised)
    assert f"Could not connect to ('127.0.0.1', {server.port}); tried 3 times" in line


def test_what_the_server_refuses_is_said_in_one_line(server, filled):
    wrong = HBaseSource("127.0.0.1", server.port, tables={"items": [Column("price")]})
    with pytest.raises(StoreError) as raised:
        wrong.multi_get("items", [3], ["price"])
    line = one_line(raised)
    assert (
        "table 'items': IOError: org.apache.hadoop.hbase.TableNotFoundException: items; see whether" in line
    )
    assert wrong.counts().requests == 1
    family = HBaseSource("127.0.0.1", server.port, tables={"item": [Column("price")]}, family="g")
    with pytest.raises(StoreError, match=r"NoSuchColumnFamilyException: Column family g .* its family 'g'"):
        family.multi_get("item", [3], ["price"])


def test_the_time_is_sent_as_hbase_takes_it(server, filled):
    keys = [(3).to_bytes(8, "big")]
    assert filled.multi_get("item", [3], ["price"], as_of=7)["price"].to_pylist() == [3]
    filled.multi_get("item", [3], ["price"])
    assert server.requests == [("item", keys, 8), ("item", keys, None)]  # it reads what is older than 8


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_client_and_server_speak_alike_or_it_is_said(framed, compact):
    spoken = {"transport": "framed" if framed else "buffered", "protocol": "compact" if compact else "binary"}
    policy = FetchPolicy(timeout=600, attempts=1)
    with HBaseServer(framed=framed, compact=compact) as server:
        tables = {"item": [Column("price")]}
        alike = HBaseSource("127.0.0.1", server.port, tables=tables, policy=policy, **spoken)
        alike.create_table("item", versions=1)
        alike.put("item", [3], {"price": [7]}, 0)
        assert alike.multi_get("item", [3], ["price"])["price"].to_pylist() == [7]
        for other in (
            {"transport": "buffered" if framed else "framed"},
            {"protocol": "binary" if compact else "compact"},
        ):
            source = HBaseSource(
                "127.0.0.1", server.port, tables=tables, policy=policy, **{**spoken, **other}
            )
            with pytest.raises(StoreUnavailableError) as raised:
                source.multi_get("item", [3], ["price"])
            assert "another transport= or protocol=" in one_line(raised)


def test_connections_are_kept_and_shared_by_threads(server, filled):
    def work():
        for _ in range(20):
            filled.multi_get("item", [1, 2], ["price"])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert filled.counts().requests == 80
    assert len(filled._idle) <= 5
    filled.close()
    assert not filled._idle
