"""Waiting and working are told apart; training from memory reads nothing."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.io import ReadOptions, tasks
from gmeta.io.reader_stats import ReaderStats
from gmeta.io.readers.read_options import ReadingTime, Waiting, from_memory
from support.grouped_data import write_folder


class FakeTime:
    """A time that passes where a test says so, however slow the machine is."""

    def __init__(self):
        self.seconds = 100.0

    def now(self):
        return tf.ensure_shape(tf.numpy_function(lambda: np.float64(self.seconds), [], tf.float64), [])

    def slow(self, seconds):
        """Elements that take so long to be read."""

        def wait(x):
            self.seconds += seconds
            return x

        return tf.data.Dataset.range(10).map(
            lambda x: tf.ensure_shape(tf.numpy_function(wait, [x], tf.int64), [])
        )


@pytest.mark.parametrize(("reading", "working", "bound"), [(0.5, 0.25, "data"), (0.25, 0.5, "compute")])
def test_time_goes_where_it_is_spent(reading, working, bound, monkeypatch):
    time = FakeTime()
    monkeypatch.setattr(tf, "timestamp", time.now)
    timed = ReadingTime()
    for _ in range(2):
        for number, element in enumerate(timed.of(time.slow(reading))):
            assert element.numpy() == number
            time.seconds += working
        time.seconds += 60  # between the epochs
    found = timed.read()
    assert found.elements == 18  # of each epoch but the first one
    assert (found.waited, found.worked) == (18 * reading, 18 * working)
    assert (found.share > 0.5) == (bound == "data")
    assert str(found).startswith(f"bound by {bound}: {found.share:.0%} of ")
    timed.reset()
    assert timed.read() == Waiting()
    assert found + Waiting(1.0, 2.0, 3) == Waiting(found.waited + 1, found.worked + 2, 21)


def test_elements_keep_their_structure_and_number(tmp_path):
    path = write_folder(tmp_path, [3, 4, 5], [6, 3])
    dataset = tasks(path, query=2, tasks_per_batch=2, options=ReadOptions(seed=3))
    timed = ReadingTime().of(dataset)
    assert timed.cardinality() == dataset.cardinality()
    tf.nest.assert_same_structure(timed.element_spec, dataset.element_spec, expand_composites=True)
    assert [b["task"].numpy().tolist() for b in timed] == [
        b["task"].numpy().tolist()
        for b in tasks(path, query=2, tasks_per_batch=2, options=ReadOptions(seed=3))
    ]


def test_training_from_memory_reads_its_elements_once(tmp_path):
    path, stats = write_folder(tmp_path, [3] * 40), ReaderStats()
    dataset = tasks(path, query=2, tasks_per_batch=4, options=ReadOptions(shuffle=False, stats=stats))
    memory = from_memory(dataset, elements=2)
    seen = [batch["task"].numpy().tolist() for batch in memory]
    assert len(seen) == int(dataset.cardinality()) == 10
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 5
    before = stats.read().groups
    assert [batch["task"].numpy().tolist() for batch in memory] == seen
    assert stats.read().groups == before
    endless = from_memory(dataset.repeat(), elements=2)
    assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
    assert np.array([len(b["task"]) for b in endless.take(25)]).sum() == 100
