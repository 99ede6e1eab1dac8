"""Groups and tasks that workers of tf.data service read, in this process and in another one."""

import collections
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.io import (
    Balance,
    HistoryStore,
    OneEpoch,
    ReaderStats,
    ReadingPosition,
    ReadingTime,
    ReadOptions,
    groups,
    tasks,
)
from gmeta.io.readers.data_service import distribute
from gmeta.preprocess import HistorySpec, append_history
from gmeta.testing.data.grouped_data import write_folder
from gmeta.testing.data.reader_arguments import reading
from gmeta.testing.reference.io.history import draw_day, write_day

service = tf.data.experimental.service
ROOT = Path(__file__).resolve().parents[3]
SIZES = ([3, 2, 4, 2, 6] * 3, [2, 5, 3] * 4)
TASKS = range(sum(map(len, SIZES)))

SERVERS = """
import sys
import gmeta
import tensorflow as tf
from gmeta.io import data_service
data_service.load_ops()
service = tf.data.experimental.service
dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
address = dispatcher.target.split("://")[1]
worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address, port=0))
print(dispatcher.target, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data"), *SIZES)


@pytest.fixture(scope="module")
def target():
    """A dispatcher and two workers in this process."""
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    address = dispatcher.target.split("://")[1]
    # A worker that is told to stop may do so at its next beat only, half a minute apart by default.
    config = service.WorkerConfig(dispatcher_address=address, port=0, heartbeat_interval_ms=500)
    workers = [service.WorkerServer(config) for _ in "ab"]
    yield dispatcher.target
    del workers


@contextlib.contextmanager
def other_process():
    words = [sys.executable, "-c", SERVERS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, cwd=ROOT, text=True, **pipes) as servers:
        try:
            yield servers.stdout.readline().strip()
        finally:
            servers.kill()


def counted(dataset):
    return collections.Counter(task for element in dataset for task in element["task"].numpy().tolist())


def test_pieces_joined_are_the_epoch(prepared):
    options = {
        "groups_per_element": 2,
        "seed": 4,
        "epoch": 3,
        "shuffle_buffer": 8,
    }
    whole = [e["task"].numpy().tolist() for e in groups(prepared, **reading(pieces=1, **options))]
    for pieces in (2, 5, 14, 40):
        cut = list(groups(prepared, **reading(pieces=pieces, **options)))
        assert [e["task"].numpy().tolist() for e in cut] == whole
        assert [int(e["cursor"][0]) for e in cut] == [
            min(2 * k, len(TASKS)) for k in range(1, len(whole) + 1)
        ]


def test_workers_are_dealt_the_pieces(prepared, target):
    epoch = groups(
        prepared, groups_per_element=2, start=OneEpoch(pieces=6), options=ReadOptions(shard=(0, 1))
    )
    assert counted(distribute(epoch, target)) == dict.fromkeys(TASKS, 1)
    rank = groups(
        prepared,
        groups_per_element=2,
        start=OneEpoch(pieces=6),
        options=ReadOptions(shard=(1, 3), shuffle=False),
    )
    assert sorted(counted(distribute(rank, target))) == [*range(9, 18)]


def test_or_each_worker_reads_all(prepared, target):
    stats = ReaderStats()
    epoch = groups(prepared, start=OneEpoch(), options=ReadOptions(shard=(0, 1), stats=stats))
    assert counted(distribute(epoch, target, dynamic=False)) == dict.fromkeys(TASKS, 2)
    assert stats.read().groups == 2 * len(TASKS)  # as the workers are in this process


def test_another_process_reads_tasks(prepared):
    batches = tasks(
        prepared,
        tasks_per_batch=3,
        query=1,
        resample=True,
        start=OneEpoch(pieces=4),
        options=ReadOptions(shard=(0, 1)),
    )
    here = {tuple(b["task"].numpy()): b["label"].numpy().tolist() for b in batches}
    with other_process() as target:
        time = ReadingTime()
        there = {
            tuple(b["task"].numpy()): b["label"].numpy().tolist()
            for b in time.of(distribute(batches, target, job_name="epoch 0"))
        }
        assert there == here
        assert time.read().elements == len(here) - 1


def test_another_process_reads_histories(tmp_path):
    day = write_day(tmp_path / "day.parquet", draw_day(0, 300))
    append_history(tmp_path / "store", day, HistorySpec("user", "ts", shards=2))
    store = HistoryStore(tmp_path / "store")
    batches = tf.data.Dataset.range(30).batch(8).map(lambda users: store.read(users, ["ts", "item"]))
    here = [{name: own.to_list() for name, own in batch.items()} for batch in batches]
    with other_process() as target:
        spread = service.distribute(processing_mode=service.ShardingPolicy.OFF, service=target)
        there = [{name: own.to_list() for name, own in batch.items()} for batch in batches.apply(spread)]
    assert there == here


def test_what_workers_do_not_have_is_refused(prepared, target):
    for dataset in (
        groups(prepared),
        tasks(prepared, query=1),
        tasks(prepared, query=1, start=ReadingPosition()),
        ReadingTime().of(groups(prepared, start=OneEpoch())),
    ):
        for dynamic in (False, True):
            with pytest.raises(ConfigError, match=r"counts in variables .* pass start=OneEpoch"):
                distribute(dataset.prefetch(1), target, dynamic=dynamic)
    whole = groups(prepared, start=OneEpoch()).map(lambda element: element["task"])
    with pytest.raises(ConfigError, match=r"in pieces can be dealt out to workers: pass start=OneEpoch\("):
        distribute(whole, target)


def test_an_iterator_of_the_service_can_not_be_saved(prepared, target, tmp_path):
    epoch = groups(prepared, start=OneEpoch(), options=ReadOptions(shard=(0, 1)))
    iterator = iter(distribute(epoch, target, dynamic=False))
    next(iterator)
    with pytest.raises(tf.errors.UnimplementedError, match="not yet supported"):
        tf.train.Checkpoint(iterator=iterator).save(str(tmp_path / "saved"))


def test_pieces_that_make_no_sense(prepared):
    with pytest.raises(ConfigError, match="pieces=0 at least 1"):
        OneEpoch(pieces=0)
    with pytest.raises(ConfigError, match="counts steps, and with balance"):
        groups(prepared, start=OneEpoch(pieces=2), balance=Balance(5))
