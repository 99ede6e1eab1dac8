"""`gmeta.io.HistoryStore` beside the reader without TensorFlow, which tests compare with plain Python."""

from __future__ import annotations

import functools
import hashlib
import itertools
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta import io
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.history_manifest import CURRENT, HistoryManifest, generation_folder, shard_files
from gmeta.io.reader_stats import as_data_error
from gmeta.preprocess import HistorySpec
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.generation import Generation
from gmeta.preprocess.history.reading import read_histories, verify_history
from gmeta.preprocess.history.shard_reader import encode_index
from support.reference.history import draw_day, history_of, write_day

DAYS = [draw_day(day, 400, day=day) for day in range(1, 5)]
SPEC = HistorySpec("user", "ts", groups={"what": ("item",), "cost": ("price",)}, shards=3, stripe_events=8)
COLUMNS = ["ts", "born", "item"]


def make_store(folder):
    for number, events in enumerate(DAYS):
        append_history(folder / "store", write_day(folder / f"{number}.parquet", events), SPEC)
    return folder / "store"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("histories"))


def expected(request, longest, columns=COLUMNS):
    user, start, until, generation = request
    found = history_of(DAYS, user, start=start, until=until, generation=generation, longest=longest)
    return [[getattr(event, name) for event in found] for name in columns]


REQUESTS = st.lists(
    st.tuples(st.integers(-1, 31), st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 4)), max_size=80
)


@given(requests=REQUESTS, longest=st.integers(0, 40), opened=st.integers(1, 4))
def test_histories_are_those_of_plain_python(path, requests, longest, opened):
    requests = [(*request[:3], min(request[3], opened)) for request in requests]
    users, start, until, generation = np.array(requests, np.int64).reshape(-1, 4).T
    moment = {"start": start, "until": until, "generation": generation, "longest": longest}
    store = io.HistoryStore(path, opened)
    found = store.read(users, COLUMNS, **moment)
    cost = store.read(users, ["price"], **moment)["price"]
    assert cost.dtype == tf.float32
    for number, request in enumerate(requests):
        assert [found[name][number].numpy().tolist() for name in COLUMNS] == expected(request, longest)
        assert [cost[number].numpy().tolist()] == expected(request, longest, ["price"])


def test_a_dataset_reads_histories_in_parallel_and_in_order(path):
    store = io.HistoryStore(path)
    users = np.arange(3000) % 30
    times = np.arange(3000) + 1000
    requests = tf.data.Dataset.from_tensor_slices({"user": users, "time": times}).batch(64)
    batches = requests.map(
        lambda r: {**r, "history": store.read(r["user"], COLUMNS, until=r["time"], longest=5)},
        num_parallel_calls=4,
    )
    seen = 0
    for batch in batches:
        for row in range(0, len(batch["user"]), 9):
            request = int(batch["user"][row]), 0, int(batch["time"][row]), 4
            history = [batch["history"][name][row].numpy().tolist() for name in COLUMNS]
            assert history == expected(request, 5)
        seen += len(batch["user"])
    assert seen == 3000


def test_moments_may_be_one_for_all_or_left_out(path):
    store = io.HistoryStore(path)
    assert (store.generation, store.time) == (4, "ts")
    assert store.columns == {"what": ["item"], "cost": ["price"]}
    found = store.read([3, 4], ["ts"], until=2500, generation=2)["ts"]
    assert found.to_list() == [expected((user, 0, 2500, 2), 10**6, ["ts"])[0] for user in (3, 4)]
    everything = store.read([3], ["ts"])["ts"].to_list()
    assert everything == expected((3, 0, 10**6, 4), 10**6, ["ts"])
    assert store.read([], ["ts"])["ts"].shape == (0, None)


def test_a_store_on_another_file_system_is_read(path):
    for file in path.rglob("*"):
        if file.is_file():
            to = f"ram://histories/{file.relative_to(path)}"
            tf.io.gfile.makedirs(to.rpartition("/")[0])
            tf.io.gfile.copy(str(file), to, overwrite=True)
    store = io.HistoryStore("ram://histories")
    assert store.read([3], ["ts"])["ts"].to_list() == expected((3, 0, 10**6, 4), 10**6, ["ts"])


def test_another_store_in_the_same_folder_is_not_taken_for_the_first(tmp_path):
    for item in (5, 6):
        day = write_day(tmp_path / f"{item}.parquet", [DAYS[0][0]._replace(user=1, item=item)])
        append_history(tmp_path / "store", day, SPEC)
        assert io.HistoryStore(tmp_path / "store").read([1], ["item"])["item"].to_list() == [[item]]
        (tmp_path / "store").rename(tmp_path / f"old-{item}")


def test_a_damaged_stripe_is_named_or_skipped(tmp_path):
    path = make_store(tmp_path)
    events = shard_files(generation_folder(path, 2), 1)[0]
    data = bytearray(events.read_bytes())
    data[200] ^= 1
    events.write_bytes(data)
    store, users = io.HistoryStore(path), list(range(30))
    with pytest.raises(tf.errors.DataLossError) as raised:
        store.read(users, COLUMNS)
    error = as_data_error(raised.value)
    assert (error.path, error.offset) == (str(events), error.offset)
    assert "generation 4, stripe of" in str(error)
    found = store.read(users, COLUMNS, on_bad="skip")["ts"].to_list()
    empty = [user for user in users if not found[user]]
    assert len(empty) == 1
    assert f"user {empty[0]}," in str(error)
    assert all(
        found[user] == expected((user, 0, 10**6, 4), 10**6, ["ts"])[0] for user in set(users) - set(empty)
    )


def test_a_file_that_is_gone_is_named(tmp_path):
    path = make_store(tmp_path)
    shard_files(generation_folder(path, 2), 1)[0].unlink()
    with pytest.raises(tf.errors.DataLossError, match=r"shard-00001.events: user \d+ has events in it: "):
        io.HistoryStore(path).read(list(range(30)), COLUMNS)


def test_a_damaged_index_is_named(tmp_path):
    path = make_store(tmp_path)
    index = shard_files(generation_folder(path, 4), 2)[1]
    sound = index.read_bytes()
    index.write_bytes(sound[:-1])
    with pytest.raises(tf.errors.DataLossError) as raised:
        io.HistoryStore(path).read(list(range(30)), COLUMNS)
    said = str(as_data_error(raised.value))
    assert said.startswith(f"{index}: its SHA-256 isn't the one in the manifest; restore the file")
    put_index(path, 2, sound[:-1])
    with pytest.raises(tf.errors.DataLossError, match=r"shard-00002.index: a block is damaged; restore the"):
        io.HistoryStore(path).read(list(range(30)), COLUMNS)


def put_index(path, shard, data):
    """Give a shard of generation 4 another index, and the manifest its digest."""
    shard_files(generation_folder(path, 4), shard)[1].write_bytes(data)
    manifest = HistoryManifest.load(path, 4)
    shards = list(manifest.shards)
    shards[shard] = replace(shards[shard], index_sha256=hashlib.sha256(data).hexdigest())
    replace(manifest, shards=tuple(shards)).save(generation_folder(path, 4))
    (path / CURRENT).write_text("4\n")


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_an_index_of_another_generation_is_refused(path, tmp_path, on_bad):
    """It is sound by itself, and would give shorter histories."""
    users = list(range(30))
    for shard, number in itertools.product(range(3), (1, 2, 3)):
        other = shutil.copytree(path, tmp_path / f"{shard}-{number}")  # what is open stays open
        old, own = (shard_files(generation_folder(other, which), shard)[1] for which in (number, 4))
        own.write_bytes(old.read_bytes())
        store = io.HistoryStore(other)
        for use in (functools.partial(store.read, columns=COLUMNS, on_bad=on_bad), store.deleted):
            with pytest.raises(tf.errors.DataLossError, match=f"{own}: its SHA-256 isn't the one in the"):
                use(users)


def test_stripes_of_another_store_are_refused(tmp_path):
    """They are sound by themselves, and lie at the same places."""
    days = [[(user, time, 7, 0.5) for user in range(30) for time in range(at, at + 3)] for at in (100, 200)]
    stores = [tmp_path / "one", tmp_path / "other"]
    for store, day in zip(stores, days, strict=True):
        events = [DAYS[0][0]._make(event) for event in day]
        append_history(store, write_day(tmp_path / f"{store.name}.parquet", events), SPEC)
    ours, theirs = (shard_files(generation_folder(store, 1), 1)[0] for store in stores)
    assert len(ours.read_bytes()) == len(theirs.read_bytes())
    ours.write_bytes(theirs.read_bytes())
    store, said = (
        io.HistoryStore(stores[0]),
        "it isn't the stripe that the index means: its events have other",
    )
    with pytest.raises(tf.errors.DataLossError, match=f"shard-00001.events at byte .*{said}"):
        store.read(list(range(30)), COLUMNS)
    with pytest.raises(DataError, match=said):
        read_histories(Generation(stores[0]), range(30), COLUMNS)
    assert sorted({len(times) for times in store.read(range(30), ["ts"], on_bad="skip")["ts"].to_list()}) == [
        0,
        3,
    ]
    assert all("times or births" in fault for fault in verify_history(stores[0]).faults)


def test_a_file_of_stripes_that_only_the_manifest_tells_apart_is_found(tmp_path):
    days = [[DAYS[0][0]._make((user, 100, item, 0.5)) for user in range(30)] for item in (7, 8)]
    stores = [tmp_path / "one", tmp_path / "other"]
    for store, day in zip(stores, days, strict=True):
        append_history(store, write_day(tmp_path / f"{store.name}.parquet", day), SPEC)
    ours, theirs = (shard_files(generation_folder(store, 1), 1)[0] for store in stores)
    ours.write_bytes(theirs.read_bytes())
    assert verify_history(stores[0]).faults == (
        f"{ours}: its SHA-256 isn't the one in the manifest of generation 1",
    )


def test_an_index_that_claims_too_much_takes_no_memory(tmp_path):
    path = make_store(tmp_path)
    index = Generation(path).open(0).index()
    for places in (index.places[:3], index.places[3:6]):
        places["bytes"], places["offset"] = 2**31 - 1, [2**31 * number for number in range(3)]
    put_index(path, 0, encode_index(index))
    with pytest.raises(tf.errors.DataLossError, match="it ends early"):
        io.HistoryStore(path).read(list(range(30)), COLUMNS)


def test_what_is_not_there_is_refused(path, tmp_path):
    with pytest.raises(DataError, match="there is no store of histories here"):
        io.HistoryStore(tmp_path)
    with pytest.raises(DataError, match="there is no generation 5; the newest is 4"):
        io.HistoryStore(path, 5)
    store = io.HistoryStore(path, 2)
    with pytest.raises(ConfigError, match="no column 'clicks' in the histories"):
        store.read([1], ["clicks"])
    with pytest.raises(ConfigError, match="of several groups"):
        store.read([1], ["item", "price"])
    with pytest.raises(ConfigError, match="columns is empty"):
        store.read([1], [])
    with pytest.raises(ConfigError, match="longest"):
        store.read([1], ["item"], longest=-1)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        store.read([7], ["item"], generation=3)
    assert "user 7: generation 3 is asked for, and this is 2; open a newer" in str(
        as_data_error(raised.value)
    )
