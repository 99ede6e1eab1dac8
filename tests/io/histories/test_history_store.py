"""`gmeta.io.HistoryStore` beside the reader without TensorFlow, which tests compare with plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta import io
from gmeta.core.data.history_manifest import generation_folder, shard_files
from gmeta.core.errors import ConfigError, DataError
from gmeta.preprocess import HistorySpec, append_history
from gmeta.preprocess.history.files.generation import Generation
from gmeta.preprocess.history.files.shard_reader import encode_index
from gmeta.testing.reference.io.history import draw_day, history_of, write_day

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
    error = io.as_data_error(raised.value)
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
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(tf.errors.DataLossError) as raised:
        io.HistoryStore(path).read(list(range(30)), COLUMNS)
    assert str(io.as_data_error(raised.value)).startswith(f"{index}: a block is damaged; restore the file")


def test_an_index_that_claims_too_much_takes_no_memory(tmp_path):
    path = make_store(tmp_path)
    index_path = shard_files(generation_folder(path, 4), 0)[1]
    index = Generation(path).open(0).index()
    for places in (index.places[:3], index.places[3:6]):
        places["bytes"], places["offset"] = 2**31 - 1, [2**31 * number for number in range(3)]
    index_path.write_bytes(encode_index(index))
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
        io.as_data_error(raised.value)
    )
