"""Data sets that workers read: each element once, in an order that workers have no part in."""

import json
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from itertools import chain

import cloudpickle
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, DataError
from gmeta.io import ReadOptions, distribute, groups, tasks
from gmeta.io.reader_stats import ReaderStats, data_errors
from gmeta.io.readers.read_options import OneEpoch, ReadingTime
from gmeta.io.service.pieces import ServedPosition
from gmeta.io.service.worker import WorkerServer
from gmeta.io.service.worker_pool import WorkerPool
from support.grouped_data import write_folder
from support.reading_workers import worker_thread

SIZES = ([3, 2, 4, 2, 6] * 3, [2, 5, 3] * 4)
TASKS = sum(map(len, SIZES))


@pytest.fixture(scope="module", autouse=True)
def _sent():
    """This module isn't installed where workers are, so its functions travel as they are."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data"), *SIZES)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with two workers."""
    folder = tmp_path_factory.mktemp("two")
    with worker_thread(folder), worker_thread(folder):
        yield folder


def numbers(start, count=40):
    """An epoch of ragged elements, without files, and without a function that would have to be traced."""
    begin, end = start.part_of(count)
    k = np.arange(min(begin + start.taken, end), end)
    lists = tf.RaggedTensor.from_row_lengths(np.repeat(k, 3), np.tile([1, 2], len(k)))
    rows = tf.RaggedTensor.from_uniform_row_length(lists, 2)
    parts = {"k": np.stack([k, k + 1000], 1), "epoch": np.full([len(k), 2], start.epoch), "r": rows}
    return tf.data.Dataset.from_tensor_slices(parts)


def read(dataset):
    return [int(e["k"][0]) for e in dataset]


def merged(pieces, at_once, count=40):
    """Lane after lane gives one: the order, in plain Python."""
    lanes = [[] for _ in range(min(at_once, pieces))]
    for piece in range(pieces):
        lanes[piece % len(lanes)] += range(*OneEpoch(0, piece, pieces).part_of(count))
    return [lane[k] for k in range(count) for lane in lanes if k < len(lane)]


def test_workers_have_no_part_in_the_order(tmp_path, prepared):
    def train(start):
        return tasks(prepared, tasks_per_batch=3, query=1, resample=True, start=start)

    def content(dataset):
        return [(b["task"].numpy().tolist(), b["label"].numpy().tolist()) for b in dataset]

    here = list(chain(*(content(train(OneEpoch(1, piece, 2))) for piece in range(2))))
    found = []
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(worker_thread(tmp_path))
            found.append(content(distribute(train, tmp_path, position=ServedPosition(2, epoch=1))))
    assert found[0] == found[1]
    assert Counter(map(str, found[0])) == Counter(map(str, here))


@settings(deadline=None, max_examples=4)
@given(pieces=st.integers(1, 5), at_once=st.integers(1, 5), taken=st.integers(0, 40), loose=st.booleans())
@pytest.mark.shown_by("test_fit_trains_on_it_and_goes_on_where_it_was_interrupted")
def test_reading_goes_on_after_any_element(two, pieces, at_once, taken, loose):
    def served(position):
        return distribute(numbers, two, position=position, at_once=at_once, deterministic=not loose)

    position = ServedPosition(pieces)
    begun = read(served(position).take(taken))
    saved = json.loads(json.dumps(position.state()))
    assert sum(saved["taken"]) == taken
    resumed = ServedPosition(pieces)
    resumed.restore(saved)
    epoch = served(resumed)
    rest = read(epoch) if taken < 40 else []
    if loose:
        assert sorted(begun + rest) == list(range(40))
    else:
        assert begun + rest == merged(pieces, at_once)
    following = list(epoch)
    assert sorted(int(e["k"][0]) for e in following) == list(range(40))
    assert {int(e["epoch"][0]) for e in following} == {1}
    assert following[0]["r"].to_list() == [[following[0]["k"][0]], [following[0]["k"][0]] * 2]


@pytest.mark.parametrize("taken", [1, 19, 23])
@pytest.mark.shown_by(case="23")
def test_a_checkpoint_holds_the_position_inside_a_block_of_base_batches(two, tmp_path, taken):
    def served(position):
        return distribute(numbers, two, position=position, at_once=3, batches=2, shuffle=8, seed=5)

    def rows(dataset):
        return [batch["k"].numpy().tolist() for batch in dataset]

    whole = served(ServedPosition(5))
    epochs = [rows(whole), rows(whole)]
    assert [len(batch) for batch in epochs[0]] == [4] * 20
    every = sorted([*range(40), *range(1000, 1040)])
    assert [sorted(chain(*epoch)) for epoch in epochs] == [every, every]
    assert epochs[0] != epochs[1]
    position = ServedPosition(5)
    begun = rows(served(position).repeat().take(taken))
    path = tf.train.Checkpoint(reading=position).write(str(tmp_path / "saved"))
    resumed = ServedPosition(5)
    tf.train.Checkpoint(reading=resumed).read(path).assert_consumed()
    rest = rows(served(resumed).repeat().take(40 - taken))
    assert begun + rest == [*epochs[0], *epochs[1]]


def test_a_lost_worker_costs_no_element_and_repeats_none(tmp_path):
    with worker_thread(tmp_path) as first, worker_thread(tmp_path):
        served = iter(distribute(numbers, tmp_path, position=ServedPosition(3), at_once=3, ahead=1))
        begun = [next(served) for _ in range(5)]
        first.close()
        rest = list(served)
    assert [int(e["k"][0]) for e in begun + rest] == merged(3, 3)


def test_a_worker_that_joins_takes_over_pieces(tmp_path):
    joined = tmp_path / "joined"

    def waits(start):
        def wait(k):
            until = time.monotonic() + 20
            while k[0] % 10 >= 4 and not joined.exists() and time.monotonic() < until:
                time.sleep(0.02)
            return k

        return numbers(start).map(lambda e: {"k": tf.numpy_function(wait, [e["k"]], tf.int64)})

    with worker_thread(tmp_path) as first:
        pool = WorkerPool(tmp_path)
        served = iter(distribute(waits, pool, position=ServedPosition(4), at_once=4, ahead=1))
        begun = [next(served) for _ in range(3)]
        with worker_thread(tmp_path) as second:
            while len(pool.ready()) < 2:
                time.sleep(0.02)
            joined.touch()
            rest = list(served)
            assert second.elements > 2
            assert first.elements > 2
    assert [int(e["k"][0]) for e in begun + rest] == merged(4, 4)


def test_a_worker_that_is_sent_away_hands_over_its_pieces(tmp_path):
    with worker_thread(tmp_path) as first, worker_thread(tmp_path) as second:
        pool = WorkerPool(tmp_path)
        served = iter(distribute(numbers, pool, position=ServedPosition(4), at_once=4, ahead=1))
        begun = [next(served) for _ in range(3)]
        pool.send_away(first.address)
        rest = list(served)
        assert pool.ready() == [second.address]
    assert [int(e["k"][0]) for e in begun + rest] == merged(4, 4)


def test_without_workers_the_error_names_all_and_says_what_to_do(tmp_path):
    with worker_thread(tmp_path) as only:
        pool = WorkerPool(tmp_path, timeout=1)
        served = iter(distribute(numbers, pool, ahead=1, position=ServedPosition(2)))
        next(served)
        only.close()
        write_announcement(tmp_path, "gone", "127.0.0.1:1")
        write_announcement(tmp_path, "back", only.address)
        write_announcement(tmp_path, "far", "127.0.0.1:2", loopback=["other", "boot", "net"])
        (tmp_path / "old.worker").write_text("127.0.0.1:3")
        told = (
            rf"{only.address} \(",
            r"127.0.0.1:1 \(.*refused",
            r"127.0.0.1:2 \(it listens for processes of other alone: start it with --host 0.0.0.0\)",
            r"old.worker \(another version of gmeta announced it\)",
        )
        expected = f"none of the workers {''.join(f'(?=.*{one})' for one in told)}.* for 1 s; start one"
        with pytest.raises(DataError, match=expected), data_errors():
            list(served)
    empty = tmp_path / "empty"
    empty.mkdir()
    nobody = distribute(numbers, WorkerPool(empty, timeout=0.1))
    expected = r"no worker is announced in .*, and none came for 0 s; start"
    with pytest.raises(DataError, match=expected), data_errors():
        list(nobody)


def write_announcement(folder, name, address, identity="00" * 16, loopback=()):
    told = {"address": address, "identity": identity, "loopback": list(loopback)}
    (folder / f"{name}.worker").write_text(json.dumps(told))


def test_wrong_addresses(monkeypatch, tmp_path):
    monkeypatch.delenv("GMETA_WORKERS_KEY", raising=False)
    with pytest.raises(ConfigError, match="GMETA_WORKERS_KEY isn't set"):
        distribute(numbers, ["host:5050"])
    monkeypatch.setenv("GMETA_WORKERS_KEY", "one" * 5)
    with pytest.raises(ConfigError, match=r"GMETA_WORKERS_KEY: a key needs 16 .* has 15: make one with"):
        distribute(numbers, ["host:5050"])
    monkeypatch.setenv("GMETA_WORKERS_KEY", "one" * 6)
    for wrong in ("host", "host:port", ":5", "host:0", "host:70000"):
        with pytest.raises(ConfigError, match=r"is no worker's address: give HOST:PORT"):
            distribute(numbers, [wrong])
    with pytest.raises(ConfigError, match="names no worker"):
        distribute(numbers, [])
    with pytest.raises(ConfigError, match=r"is no folder: make it, .* give a list, \['host:5050'\]"):
        distribute(numbers, "host:5050")
    with worker_thread(tmp_path) as other, socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setattr("gmeta.io.service.worker._GREETING_SECONDS", 0.3)
        monkeypatch.setenv("GMETA_WORKERS_KEY", "two" * 6)
        mute = f"127.0.0.1:{deaf.getsockname()[1]}"
        pool = WorkerPool([other.address, mute], timeout=1)
        expected = rf"{other.address} \(it has another key.*{mute} \(it doesn't greet: something"
        with pytest.raises(DataError, match=expected), data_errors():
            list(distribute(numbers, pool))


def test_errors_of_the_function_are_raised_here(two, tmp_path):
    def bad(start):
        if start.pieces > 1 and start.number == 1:
            raise FileNotFoundError("no such store")
        return numbers(start)

    expected = r"FileNotFoundError: no such store \(the worker 127.0.0.1:.*element 0 of piece 1"
    with pytest.raises(DataError, match=expected), data_errors():
        list(distribute(bad, two, position=ServedPosition(2)))
    damaged = write_folder(tmp_path, *SIZES)
    shard = next(tmp_path.glob("*.tfrecord"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    served = distribute(lambda start: groups(damaged, start=start), two, position=ServedPosition(2))
    with pytest.raises(DataError, match=rf"{shard.name} at byte \d+: "), data_errors():
        list(served)


def test_an_element_that_ends_every_worker_is_named(tmp_path, monkeypatch):
    whole = WorkerServer._messages

    def crash(self, function, start):
        yield from list(whole(self, function, start))[: max(0, 2 - start.taken)]
        raise ConnectionResetError("as if it was killed")

    monkeypatch.setattr(WorkerServer, "_messages", crash)
    with worker_thread(tmp_path):
        served = distribute(numbers, tmp_path, position=ServedPosition(1))
        expected = r"3 workers in a row were lost at element 2 of piece 0"
        with pytest.raises(DataError, match=expected), data_errors():
            list(served)


def test_a_worker_that_hangs_is_lost(tmp_path, monkeypatch):
    hung, go_on = [], threading.Event()
    whole = WorkerServer._messages

    def hang(self, function, start):
        for message in whole(self, function, start):
            if start.number == 1 and (not hung or hung == [self.address]):
                hung.append(self.address)
                del hung[1:]
                go_on.wait(20)
            yield message

    monkeypatch.setattr(WorkerServer, "_messages", hang)
    with worker_thread(tmp_path), worker_thread(tmp_path):
        served = distribute(numbers, tmp_path, position=ServedPosition(2), patience=1)
        assert read(served) == merged(2, 2)
        go_on.set()
    assert hung


def test_what_can_not_be_sent_or_has_no_place_is_refused(two, prepared):
    with pytest.raises(ConfigError, match="must be a function of a start"):
        distribute(groups(prepared), two)
    with pytest.raises(ConfigError, match=r"counts in variables .* start=start"):
        distribute(lambda start: tasks(prepared, query=1), two)
    with pytest.raises(ConfigError, match="counts in variables"):
        distribute(lambda start: ReadingTime().of(numbers(start)), two)
    with pytest.raises(ConfigError, match="never ends"):
        distribute(lambda start: numbers(start).repeat(), two)
    with pytest.raises(ConfigError, match=r"must return a tf\.data\.Dataset"):
        distribute(lambda start: start, two)
    stats = ReaderStats()
    with pytest.raises(ConfigError, match=r"can't be sent to workers.*ReaderStats"):
        distribute(lambda start: groups(prepared, start=start, options=ReadOptions(stats=stats)), two)
    with pytest.raises(ConfigError, match="couldn't resume inside it"):
        distribute(numbers, two, deterministic=False, shuffle=8)


def test_a_state_of_another_position_is_refused():
    with pytest.raises(ConfigError, match=r"make it with ServedPosition\(pieces=3\)"):
        ServedPosition(4).restore(ServedPosition(3).state())
    with pytest.raises(ConfigError, match="isn't what state"):
        ServedPosition(4).restore({"epoch": 1})


def test_one_rank_saves_the_positions_of_all(two, tmp_path, monkeypatch):
    def on(rank, size=2):
        monkeypatch.setattr(collectives, "world", lambda: collectives.World(rank, size, rank))

    def served(position):
        return distribute(numbers, two, position=position, at_once=2)

    whole, positions = [], []
    for rank in range(2):
        on(rank)
        whole.append(read(served(ServedPosition(3))))
        positions.append(ServedPosition(3))
        assert read(served(positions[rank]).take(3 + rank)) == whole[rank][: 3 + rank]
    vectors = [position._vector().numpy().tolist() for position in positions]
    on(0)
    monkeypatch.setattr(collectives, "allgather_objects", lambda own: vectors)
    positions[0].gather_ranks()
    path = tf.train.Checkpoint(reading=positions[0]).write(str(tmp_path / "saved"))
    for rank in range(2):
        on(rank)
        resumed = ServedPosition(3)
        tf.train.Checkpoint(reading=resumed).read(path).assert_consumed()
        assert read(served(resumed)) == whole[rank][3 + rank :]
    on(0, size=3)
    resumed = ServedPosition(3)
    tf.train.Checkpoint(reading=resumed).read(path)
    says = "2 ranks have read, and this is rank 0 of 3: resume on as many"
    with pytest.raises(DataError, match=says), data_errors():
        read(distribute(numbers, two, position=resumed))


def test_a_position_that_another_rank_saved_for_itself_is_refused(two, tmp_path, monkeypatch):
    path = tf.train.Checkpoint(reading=ServedPosition(3)).write(str(tmp_path / "saved"))
    monkeypatch.setattr(collectives, "world", lambda: collectives.World(1, 2, 1))
    resumed = ServedPosition(3)
    tf.train.Checkpoint(reading=resumed).read(path)
    with pytest.raises(DataError, match="other ranks have read, and this is rank 1 of 2"), data_errors():
        read(distribute(numbers, two, position=resumed))


def test_elements_of_every_type_arrive(two):
    def kinds(start):
        words = tf.constant([["ä", ""], ["b\0c", "d" * 5000]])
        sparse = tf.sparse.from_dense([[0, 1.5], [2.5, 0]])
        each = {
            "words": words,
            "lists": tf.ragged.constant([["x"], ["y", "z"]]),
            "sparse": sparse,
            "half": tf.cast([[1.5], [2.5]], tf.bfloat16),
            "flags": tf.constant([True, False]),
            "complex": tf.constant([1 + 2j, 3j]),
            "small": tf.constant([[-1], [7]], tf.int8),
            "large": tf.reshape(tf.range(2 * 3000, dtype=tf.float64), [2, 3000]),
            "nothing": tf.zeros([2, 0], tf.int32),
        }
        return tf.data.Dataset.from_tensor_slices(each)

    found, wanted = list(distribute(kinds, two, position=ServedPosition(1))), list(kinds(None))
    assert len(found) == len(wanted) == 2
    for one, other in zip(found, wanted, strict=True):
        for name, value in one.items():
            assert value.dtype == other[name].dtype, name
            flat = [tf.nest.flatten(parts, expand_composites=True) for parts in (value, other[name])]
            for own, expected in zip(*flat, strict=True):
                np.testing.assert_array_equal(own.numpy(), expected.numpy(), err_msg=name)


def test_fit_trains_on_it_and_goes_on_where_it_was_interrupted(two, tmp_path):
    def batches(start):
        return numbers(start).map(lambda e: (tf.cast(e["k"], tf.float32)[:, None], e["k"]))

    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = tf.keras.layers.Dense(1)
            self.reading = ServedPosition(2)
            self.seen = []

        def call(self, inputs):
            return self.layer(inputs)

        def train_step(self, data):
            self.add_seen(data[1])
            return {"loss": tf.reduce_mean(self(data[0]))}

        def add_seen(self, k):
            tf.numpy_function(lambda k: (self.seen.append(int(k[0])), k)[1], [k], tf.int64)

    class Interrupt(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 24:
                raise InterruptedError

    def fit(model, *callbacks):
        model.compile()
        data = distribute(batches, two, position=model.reading).repeat()
        backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path), save_freq=5)
        model.fit(data, epochs=2, steps_per_epoch=40, callbacks=[backup, *callbacks], verbose=0)
        return model.seen

    first, second = Model(), Model()
    with pytest.raises(InterruptedError):
        fit(first, Interrupt())
    rest = fit(second)
    assert first.seen == merged(2, 2)[:25]
    assert first.seen + rest[:15] == merged(2, 2)
    assert rest[15:] == merged(2, 2)
