"""Stores of rows have those of each version, whatever ends a delivery."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress

import numpy as np
import pytest
import redis
import rocksdict
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError, StoreError, StoreUnavailableError
from gmeta.export import Publisher, table_changes
from gmeta.export.delivery import catch_up_rows, deliver
from gmeta.export.model_deltas import Delta, Layout, TableChange, combine
from gmeta.export.published_folder import STREAM, PublishedFolder
from gmeta.export.row_stores import BUCKETS, Change, Position, RedisRows, encode_rows, row_store
from support.external_model import EXTERNAL, client_of, make, rows_of, train
from support.row_stores import free_port, redis_cluster, redis_server


def versions_in(folder):
    return [delta.version for delta in PublishedFolder(folder).contents().deltas]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A publisher's folder at six times, with what a store then has: Table and id -> row."""
    folder = tmp_path_factory.mktemp("published")
    model, found = make(), []
    options = {"external": EXTERNAL}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_changes, "PIECE", 400)
        publisher = Publisher(model, folder / "online", export=options)
        for seed in range(6):
            train(model, seed)
            if seed == 2:
                publisher.publish_base()
                assert publisher.version in versions_in(folder / "online")  # a store needs no load
            elif seed == 4:
                publisher.close()
                model.collection.tables[0].remove(tf.range(130, dtype=tf.int64))  # which no delta has
                publisher = Publisher(model, folder / "online", export=options)
                publisher.publish()
                assert publisher.version not in versions_in(folder / "online")
            else:
                model.collection.tables[0].remove(tf.range(10 * seed, dtype=tf.int64))  # some users
                assert publisher.publish().removed or seed == 0
            found.append((shutil.copytree(folder / "online", folder / str(seed)), rows_of(model)))
        left = PublishedFolder(folder / "online").contents()
        assert tuple(left.rows) == left.models[-2:]
        publisher.close()
    return found


@pytest.fixture(scope="module")
def server():
    with redis_server() as port:
        yield port


@pytest.fixture(scope="module")
def cluster():
    with redis_cluster() as ports:
        yield ports


@pytest.fixture(params=["redis", "cluster", "rocksdb"])
def url(request, tmp_path):
    if request.param == "rocksdb":
        return f"rocksdb://{tmp_path}/rows"
    if request.param == "cluster":
        ports = request.getfixturevalue("cluster")
        return f"redis://127.0.0.1:9,127.0.0.1:{ports[1]}/{tmp_path.name}"  # of which one is down
    return f"redis://127.0.0.1:{request.getfixturevalue('server')}/{tmp_path.name}"


@pytest.fixture
def redis_url(server, tmp_path):
    return f"redis://127.0.0.1:{server}/{tmp_path.name}"


def content(url):
    """Table and id -> row, of all that is in a store."""
    found = {}
    if url.startswith("rocksdb"):
        kind = rocksdict.AccessType.read_only()
        store = rocksdict.Rdict(url[10:], rocksdict.Options(raw_mode=True), access_type=kind)
        for key, value in store.items():
            if key != b"position":
                table, _, number = key.partition(b"\0")
                found[table.decode(), int.from_bytes(number, "big", signed=True)] = value[8:]
        store.close()
        return found
    store = RedisRows(url)._redis.client
    prefix = url.rpartition("/")[2].encode()
    keys = [key for key in store.scan_iter(count=1000) if key.startswith(prefix + b":") and key[-1:] != b"}"]
    values = getattr(store, "mget_nonatomic", store.mget)(keys) if keys else []
    for key, value in zip(keys, values, strict=True):
        _, table, number = key.rsplit(b":", 2)
        found[table.decode(), int(number)] = value[8:]
    store.close()
    return found


def test_a_store_has_the_rows_of_each_version(published, url):
    """New, changed and removed rows; a new SavedModel; and a publisher that starts again."""
    said = []
    for folder, rows in published:
        (version,) = deliver(folder, [url], say=said.append).values()
        assert version == PublishedFolder(folder).contents().version
        assert content(url) == rows
    assert sum("the load of version" in line for line in said) == 2
    assert sum("part " in line for line in said) > 4
    rows = published[-1][1]
    ids = {table: [key for name, key in rows if name == table] + [10**9] for table in EXTERNAL}
    found = client_of(url).get(ids)
    for table, of in ids.items():
        assert [value[8:] for value in found[table]] == [rows.get((table, key), b"") for key in of]


@pytest.mark.shown_by("test_a_store_has_the_rows_of_each_version")
def test_a_store_that_missed_versions_gets_them(published, url):
    for place in (1, 3, 5):
        deliver(published[place][0], [url], say=str)
        assert content(url) == published[place][1]


@pytest.mark.shown_by(case="60")
@pytest.mark.parametrize("every", [1, 60, 200])
def test_a_delivery_that_is_killed_anywhere_resumes(published, redis_url, every):
    """It ends before each of some writes; what a script does is whole or not done."""
    random = np.random.default_rng(every)
    killed = 0

    class KilledError(Exception):
        pass

    def deliver_and_kill(folder):
        nonlocal killed
        store = row_store(redis_url)
        left, do = int(random.integers(every, BUCKETS * 2 + every)), store._redis.client.eval

        def some(*words):
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return do(*words)

        store._redis.client.eval = some
        try:
            return catch_up_rows(folder, store, say=str)
        except KilledError:
            killed += 1
            return None
        finally:
            store.close()

    for folder, rows in published:
        assert any(deliver_and_kill(folder) for _ in range(2000))
        assert content(redis_url) == rows
    assert killed > 10


def test_deliveries_at_the_same_time_do_not_disturb_each_other(published, redis_url):
    """Each of another state of the folder, as on machines that copy it."""
    failed = []

    def follow(seed):
        random = np.random.default_rng(seed)
        try:
            for place in np.sort(random.integers(0, len(published), 10)).tolist():
                with suppress(DataError):  # the store is further than this folder
                    deliver(published[place][0], [redis_url], say=str)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=follow, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    deliver(published[-1][0], [redis_url], say=str)
    assert content(redis_url) == published[-1][1]


def draw_deltas(random, count):
    def change():
        ids = random.permutation(12)[: random.integers(0, 9)].astype(np.int64)
        removed = random.permutation(12)[: random.integers(0, 5)].astype(np.int64)
        return TableChange(ids, random.normal(size=(len(ids), 2)).astype(np.float32), removed)

    return [Delta(version, version + 1, {"a": change(), "b": change()}, {}) for version in range(count)]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_changes_that_are_combined_repeated_or_out_of_order_do_what_they_do_in_turn(
    seed, server, tmp_path_factory
):
    random = np.random.default_rng(seed)
    deltas = draw_deltas(random, 6)
    right = {}
    for delta in deltas:
        for table, change in delta.tables.items():
            for key in change.removed.tolist():
                right.pop((table, key), None)
            right |= {
                (table, key): row.tobytes() for key, row in zip(change.ids.tolist(), change.rows, strict=True)
            }
    folder = tmp_path_factory.mktemp("changes")
    for url in (f"redis://127.0.0.1:{server}/{folder.name}", f"rocksdb://{folder}/rows"):
        store = row_store(url)
        store.change(Change("", 0, 1, Position("s", 0), 0, "float32", {}))
        while {each.at for each in store.positions()} != {len(deltas)}:
            first, last = np.sort(random.integers(0, len(deltas) + 1, 2)).tolist()
            if first < last:
                one = combine(deltas[first:last])
                store.change(
                    Change("s", one.after, one.version, Position("s", one.version), 1, "float32", one.tables)
                )
                store.change(Change("t", one.after, one.version, Position("t", 99), 1, "float32", one.tables))
        store.close()
        assert content(url) == right


@given(st.integers(0, 2**56 - 1), st.integers(0, 5), st.integers(1, 9))
def test_values_are_a_head_and_little_endian_floats(version, count, dim):
    rows = np.random.default_rng(count).normal(size=(count, dim)).astype(np.float32)
    for value, row in zip(encode_rows(rows, "float32", version), rows, strict=True):
        assert value[0] == 1
        assert int.from_bytes(value[1:8], "little") == version
        assert value[8:] == row.astype("<f4").tobytes()


def test_rows_of_another_stream_or_program_are_refused(published, tmp_path, url):
    folder, rows = published[0]
    deliver(folder, [url], say=str)
    other = shutil.copytree(folder, tmp_path / "other")
    layout = Layout.load(other / STREAM)
    (other / STREAM).write_text(Layout("other", layout.tables, layout.dense).to_json())
    with pytest.raises(StoreError, match=r"another model or training.*another prefix or folder"):
        deliver(other, [url], say=str)
    assert content(url) == rows
    if url.startswith("rocksdb"):
        store = rocksdict.Rdict(str(tmp_path / "foreign"), rocksdict.Options(raw_mode=True))
        store[b"mine"] = b"1"
        store.close()
        with pytest.raises(StoreError, match="something other than rows"):
            deliver(folder, [f"rocksdb://{tmp_path}/foreign"], say=str)
    else:
        client = RedisRows(url)._redis.client
        client.set(f"{tmp_path.name}:{{3}}", b"something")
        client.close()
        with pytest.raises(StoreError, match="b'something' isn't a position"):
            deliver(folder, [url], say=str)


def test_a_store_that_does_not_answer_is_named_and_tried_again(published, tmp_path):
    folder, rows = published[0]
    port = free_port()
    url = f"redis://127.0.0.1:{port}/rows"
    with pytest.raises(StoreUnavailableError, match=rf"{port}/rows can't be reached.*start Redis"):
        deliver(folder, [url], say=str)
    with pytest.raises(StoreUnavailableError, match=r"me:\*\*\*@127"):
        deliver(folder, [url.replace("127", "me:secret@127")], say=str)
    failed, done = threading.Event(), threading.Event()

    class StopError(Exception):
        pass

    def say(line):
        if "can't be reached" in line:
            failed.set()
        if ": version 1, in" in line:
            done.set()
            raise StopError

    def follow():
        with pytest.raises(StopError):
            deliver(folder, [url], follow=True, every=0.01, say=say)

    thread = threading.Thread(target=follow)
    thread.start()
    assert failed.wait(60)
    with redis_server(port=port):
        assert done.wait(60)
        thread.join()
        assert content(url) == rows
    path = tmp_path / "locked"
    held = rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True))
    with pytest.raises(StoreUnavailableError, match="one process may write a folder"):
        deliver(folder, [f"rocksdb://{path}"], say=str)
    held.close()


def test_a_redis_that_evicts_or_refuses_is_an_error(published):
    folder, rows = published[0]
    with redis_server("--maxmemory", "2mb", "--maxmemory-policy", "allkeys-lru") as port:
        url = f"redis://127.0.0.1:{port}/rows"
        with pytest.raises(StoreError, match="set maxmemory-policy noeviction"):
            deliver(folder, [url], say=str)
        with redis.Redis(port=port) as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "500kb")
            with pytest.raises(StoreError, match=r"refuses: .*memory"):
                deliver(folder, [url], say=str)
            client.config_set("maxmemory", "0")
        deliver(folder, [url], say=str)
        assert content(url) == rows


@pytest.mark.parametrize(
    "bad",
    ["redis://", "redis://h:1", "redis://h/a{b}", "redis://h/p?db=1", "rocksdb://", "grpc://h:1", "h:8501"],
)
def test_addresses_that_are_not_one_are_refused(published, bad):
    with pytest.raises(ConfigError, match=r"must (be|begin)"):
        deliver(published[0][0], [bad], say=str)


def test_a_publisher_without_external_tables_has_no_rows_for_a_store(published, tmp_path, redis_url):
    folder = shutil.copytree(published[0][0], tmp_path / "other")
    shutil.rmtree(folder / "rows")
    with pytest.raises(DataError, match=r"no rows for a store.*export=\{'external'"):
        deliver(folder, [redis_url], say=str)
