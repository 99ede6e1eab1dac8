"""`gmeta.io.late` beside data sets that hold each history: the batches are equal, bit for bit."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from gmeta import io
from gmeta.core.errors import ConfigError
from gmeta.io.readers.read_options import OneEpoch
from gmeta.io.service.pieces import ServedPosition
from gmeta.preprocess import ColumnSpec, HistorySpec, PrepareConfig, TableSpec, prepare
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.synthetic.exposures import EXPOSURE_SPEC, ExposureConfig, write_exposures
from support import warm
from support.cells import slow_but
from support.drawn_batches import plain
from support.grouped_data import reading
from support.reading_workers import WorkerProcess

CONFIG = ExposureConfig(users=60, items=200, mean_events=40, most_events=120, exposures=8, page=2)
EVENTS = ["item", "category", "action", "timestamp"]
PARTS = {"targets": ["item", "timestamp"], "labels": ["click", "buy"], "contexts": ["city", "user"]}
SPEC = HistorySpec("user", "timestamp", groups={"events": ("item", "category", "action")}, stripe_events=16)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A log whose last rows are exposures, as one data set, and as a store beside exposures."""
    folder = tmp_path_factory.mktemp("late")
    write_exposures(folder / "log.parquet", CONFIG)
    log = pq.read_table(folder / "log.parquet")
    shown = log.filter(pc.equal(log["exposed"], 1))
    last = shown.group_by("user").aggregate([("timestamp", "max")])
    log = log.join(last, "user")
    log = log.filter(pc.less_equal(log["timestamp"], log["timestamp_max"])).drop_columns(["timestamp_max"])
    # An event at the very moment of an exposure is no history of it.
    moments = pa.table({"user": shown["user"], "timestamp": shown["timestamp"], "same": [1] * len(shown)})
    moments = moments.group_by(["user", "timestamp"]).aggregate([("same", "max")])
    log = log.join(moments, ["user", "timestamp"])
    log = log.filter(pc.or_(pc.equal(log["exposed"], 1), pc.is_null(log["same_max"])))
    log = log.drop_columns(["same_max"])
    events, shown = (log.filter(pc.equal(log["exposed"], flag)) for flag in (0, 1))
    for name, table in (("fat", log), ("events", events), ("shown", shown)):
        pq.write_table(table, folder / f"{name}.parquet")
    for name in ("fat", "shown"):
        prepare(folder / f"{name}.parquet", folder / name, spec=EXPOSURE_SPEC)
    prepare(folder / "shown.parquet", folder / "single", PrepareConfig(batch_rows=1), spec=EXPOSURE_SPEC)
    halves = np.array_split(np.random.default_rng(0).permutation(len(events)), 3)
    for day, rows in enumerate(halves):
        pq.write_table(events.take(rows), folder / f"day-{day}.parquet")
        append_history(folder / "store", folder / f"day-{day}.parquet", SPEC)
    return folder


def fat(data, history, longest, **arguments):
    return io.sequences(
        data / "fat" / "train",
        history=history,
        exposed=io.Flag("exposed"),
        longest=longest,
        **PARTS,
        **reading(**arguments),
    )


def late(data, history, longest, examples="shown", **arguments):
    store = io.HistoryStore(data / "store")
    return io.late(
        data / examples / "train", store, history=history, longest=longest, **PARTS, **reading(**arguments)
    )


@pytest.mark.parametrize("history", [EVENTS, ["item"], ["timestamp", "action"]])
@pytest.mark.parametrize("longest", slow_but([None, 7], [None, 1, 7, 40]))  # quick: None and 7
@pytest.mark.shown_by(case="None-history1")
def test_batches_are_those_of_rows_that_hold_their_histories(data, history, longest):
    options = {"sequences_per_batch": 7, "seed": 3, "shuffle_buffer": 16}
    ours, theirs = late(data, history, longest, **options), fat(data, history, longest, **options)
    assert ours.element_spec == theirs.element_spec
    assert ours.cardinality() == theirs.cardinality()
    found = [plain(batch) for batch in ours]
    assert found == [plain(batch) for batch in theirs]
    assert sum(len(batch["task"]) for batch in found) == 60


def test_each_exposure_as_an_example_has_the_history_before_it(data):
    events = pq.read_table(data / "events.parquet").to_pylist()
    seen = 0
    for batch in late(data, ["timestamp", "item"], 9, "single", sequences_per_batch=50):
        for row, user in enumerate(batch["task"].numpy().tolist()):
            times = batch["targets"]["timestamp"][row].numpy().tolist()
            before = sorted(
                e["timestamp"] for e in events if e["user"] == user and e["timestamp"] < times[-1]
            )
            assert batch["history"]["timestamp"][row].numpy().tolist() == before[-9:]
            seen += len(times)
    assert seen == 60 * 8


def read_by_a_worker(data, workers):
    """In a warm process: the batches of a worker that reads the store, and those that are made here."""
    worker = WorkerProcess(workers)
    worker.address()

    def examples(start):
        return late(data, EVENTS, 20, sequences_per_batch=9, seed=1, start=start)

    served = io.distribute(examples, workers, position=ServedPosition(3, epoch=1), at_once=1)
    found = [plain(batch) for batch in served]
    pieces = [OneEpoch(1, piece, 3) for piece in range(3)]
    return found, [plain(batch) for piece in pieces for batch in examples(piece)], worker.interrupt()


@pytest.mark.shown_by("io/service/test_distribute.py::test_workers_have_no_part_in_the_order")
def test_a_worker_gives_the_batches_of_one_process(data, tmp_path):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        found, here, (code, out, err) = warm.call(read_by_a_worker, data, tmp_path, timeout=200)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert found == here
    assert sum(len(batch["task"]) for batch in found) == 60
    assert (code, err) == (0, "")
    assert f"3 pieces begun, {len(here)} elements sent" in out


def test_a_saved_iterator_and_a_position_go_on(data, tmp_path):
    def make(**arguments):
        return late(data, EVENTS, 20, sequences_per_batch=9, seed=1, **arguments)

    whole = [plain(batch) for batch in make()]
    iterator = iter(make())
    next(iterator)
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "ckpt"))
    fresh = iter(make())
    tf.train.Checkpoint(iterator=fresh).read(path)
    assert [plain(batch) for batch in fresh] == whole[2:]
    position = io.ReadingPosition()
    dataset = make(start=position)
    assert [plain(batch) for batch in dataset.take(3)] == whole[:3]
    assert int(position.step) == 3
    assert [plain(batch) for batch in dataset] == whole[3:]


def test_ranks_read_different_examples_with_the_same_histories(data):
    whole = {}
    for batch in late(data, EVENTS, 20, sequences_per_batch=9):
        whole |= dict(zip(batch["task"].numpy().tolist(), batch["history"]["item"].to_list(), strict=True))
    parts = {}
    for rank in range(3):
        for batch in late(data, EVENTS, 20, sequences_per_batch=9, shard=(rank, 3)):
            own = dict(zip(batch["task"].numpy().tolist(), batch["history"]["item"].to_list(), strict=True))
            assert not parts.keys() & own.keys()
            parts |= own
    assert parts == whole


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Examples that name the generation that the ranker read, and carry what it had besides."""
    folder = tmp_path_factory.mktemp("logged")
    days = [
        {"user": [1, 1, 2], "ts": [10, 20, 15], "item": [101, 102, 201]},
        {"user": [1, 1, 1], "ts": [25, 12, 28], "item": [103, 104, 105]},  # 12 came late, 28 even later
        {"user": [1, 2], "ts": [14, 16], "item": [106, 202]},  # neither ranker had these
    ]
    for number, day in enumerate(days):
        pq.write_table(pa.table(day), folder / f"{number}.parquet")
        append_history(folder / "store", folder / f"{number}.parquet", HistorySpec("user", "ts"))
    shown = pa.table(
        {
            "user": [1, 2, 1],
            "ts": [30, 30, 22],
            "item": [7, 8, 9],
            "click": [1.0, 0.0, 1.0],
            "version": [1, 1, 1],
            # By 22 the event of 12 had come; by 30 that of 25 too, but not that of 28.
            "tail_ts": pa.array([[25, 12], [], [12]], pa.list_(pa.int64())),
            "tail_item": pa.array([[103, 104], [], [104]], pa.list_(pa.int64())),
        }
    )
    pq.write_table(shown, folder / "shown.parquet")
    spec = TableSpec("user", time="ts", label="click", columns={n: ColumnSpec() for n in shown.column_names})
    prepare(folder / "shown.parquet", folder / "shown", PrepareConfig(batch_rows=1), spec=spec)
    return folder


def histories_of(dataset):
    found = {}
    for batch in dataset:
        for row, user in enumerate(batch["task"].numpy().tolist()):
            moment = int(batch["targets"]["ts"][row][-1])
            found[user, moment] = {name: own[row].numpy().tolist() for name, own in batch["history"].items()}
    return found


@pytest.mark.parametrize("opened", [1, 2, 3])
@pytest.mark.shown_by(case="2")
def test_the_generation_and_the_tail_give_what_the_ranker_saw(logged, opened):
    dataset = io.late(
        logged / "shown" / "train",
        io.HistoryStore(logged / "store", opened),
        history=["item"],
        targets=["item", "ts"],
        generation="version",
        tail={"item": "tail_item", "ts": "tail_ts"},
        longest=3,
    )
    assert histories_of(dataset) == {
        (1, 22): {"item": [101, 104, 102]},
        (1, 30): {"item": [104, 102, 103]},
        (2, 30): {"item": [201]},
    }


def test_without_a_generation_all_events_before_the_exposure_count(logged):
    store = io.HistoryStore(logged / "store")
    dataset = io.late(logged / "shown" / "train", store, history=["item", "ts"], targets=["ts"])
    assert histories_of(dataset)[1, 22] == {"item": [101, 104, 106, 102], "ts": [10, 12, 14, 20]}
    part = io.late(logged / "shown" / "train", store, history=["item"], targets=["ts"], generation="version")
    assert histories_of(part)[1, 30] == {"item": [101, 102]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"history": []}, "history must be a list of the store's columns"),
        ({"history": "item"}, "history must be a list of the store's columns"),
        ({"history": ["clicks"]}, "no column 'clicks' in the histories"),
        ({"history": ["item"], "longest": 0}, "longest"),
        (
            {"history": ["item"], "tail": {"item": "tail_item"}},
            "needs those of the history and the store's time",
        ),
        (
            {"history": ["item"], "tail": {"item": "item", "ts": "tail_ts"}},
            "must be a list column, and 'item'",
        ),
        (
            {"history": ["born"], "tail": {"born": "tail_item", "ts": "tail_ts"}},
            "events of a tail have no 'born'",
        ),
        ({"history": ["item"], "generation": "click"}, "generation must be an int64 column"),
        ({"history": ["item"], "generation": "wrong"}, "schema has no column 'wrong'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(logged, arguments, message):
    with pytest.raises(ConfigError, match=message):
        io.late(logged / "shown" / "train", io.HistoryStore(logged / "store"), **arguments)


def test_examples_without_a_time_are_refused(logged, tmp_path):
    prepare(
        logged / "shown.parquet", tmp_path / "shown", spec=TableSpec("user", columns={"item": ColumnSpec()})
    )
    with pytest.raises(ConfigError, match="was prepared without a time: prepare it with --time"):
        io.late(tmp_path / "shown" / "train", io.HistoryStore(logged / "store"), history=["item"])
