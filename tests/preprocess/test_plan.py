"""The pure functions: map, reduce, split, and the order of the batches."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.preprocess import local_engine, plan
from gmeta.preprocess.bad_records import BadRecord, BadRecords, Reason
from gmeta.preprocess.config import PrepareConfig
from gmeta.preprocess.movielens import ML_1M, ML_100K

IDS = range(1, 10)
CONFIG = PrepareConfig()


def ratings(rows):
    """Sorted ratings of dtype RATING from (task, timestamp, item, rating) rows."""
    return local_engine.shuffle([np.array([(*row, line) for line, row in enumerate(rows, 1)], plan.RATING)])


def task_of(size):
    return ratings([(3, 100 + i, i, 4.0) for i in range(size)])


@pytest.mark.parametrize(
    ("form", "line"), [(ML_100K.ratings, b"2\t7\t4\t881250949"), (ML_1M.ratings, b"2::7::4::881250949")]
)
def test_map_reads_both_forms(form, line):
    assert plan.map_rating(line, form, IDS, IDS) == (2, 881250949, 7, 4.0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"2\t7\t4", Reason.MISSING_FIELD),
        (b"2\t7\t4\t5\t6", Reason.EXTRA_FIELD),
        (b"2\t7\tgood\t5", Reason.NOT_A_NUMBER),
        (b"2\t7\tnan\t5", Reason.NOT_A_NUMBER),
        (b"2\t7\t\t5", Reason.NOT_A_NUMBER),
        (b"2\t7\t4_0\t5", Reason.NOT_A_NUMBER),
        (b"2\t7\t1e99\t5", Reason.OUT_OF_RANGE),
        (b"2\t7\t0\t5", Reason.OUT_OF_RANGE),
        (b"2\t7\t5.5\t5", Reason.OUT_OF_RANGE),
        (b"2\t7\t-3\t5", Reason.OUT_OF_RANGE),
        (b"2\t7\t4\t-5", Reason.NOT_A_NUMBER),
        (b"2\t7\t4\t9999999999999999999", Reason.OUT_OF_RANGE),
        (b"2\t7\t4\t\xb2", Reason.NOT_A_NUMBER),
        (b"+2\t7\t4\t5", Reason.NOT_A_NUMBER),
        (b"\xff\xfe2\t7\t4\t5", Reason.NOT_A_NUMBER),
        (b"77\t7\t4\t5", Reason.UNKNOWN_USER),
        (b"2\t77\t4\t5", Reason.UNKNOWN_ITEM),
    ],
)
def test_map_refuses(line, reason):
    with pytest.raises(BadRecord) as caught:
        plan.map_rating(line, ML_100K.ratings, IDS, IDS)
    assert caught.value.reason is reason
    assert str(caught.value)


@pytest.mark.parametrize(("text", "stars"), [(b"0.5", 0.5), (b"3.5", 3.5), (b"5", 5.0), (b"4.0", 4.0)])
def test_map_takes_half_stars(text, stars):
    assert plan.map_rating(b"2\t7\t" + text + b"\t5", ML_100K.ratings, IDS, IDS).rating == stars


@pytest.mark.parametrize(("size", "kept"), [(1, False), (12, False), (13, True), (100, True), (101, False)])
def test_the_bounds_of_the_selection_are_inclusive(size, kept):
    reduced = plan.reduce_task(task_of(size), CONFIG)
    assert len(reduced.batches) == kept
    assert (reduced.left_out is None) == kept


@given(size=st.integers(13, 100), batch_rows=st.integers(13, 120))
def test_batches_are_consecutive_even_and_not_too_small(size, batch_rows):
    batches = plan.reduce_task(task_of(size), PrepareConfig(batch_rows=batch_rows)).batches
    sizes = [len(batch.ratings) for batch in batches]
    assert [batch.batch_id for batch in batches] == list(range(len(batches)))
    np.testing.assert_array_equal(np.concatenate([batch.ratings for batch in batches]), task_of(size))
    assert min(sizes) >= min(size, batch_rows)
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) < 2 * batch_rows


def test_a_repeated_item_keeps_its_earliest_rating():
    rows = [(3, 100 + i, i, 4.0) for i in range(13)]
    reduced = plan.reduce_task(ratings([*rows, (3, 90, 5, 1.0), (3, 105, 5, 2.0)]), CONFIG)
    (batch,) = reduced.batches
    kept = batch.ratings[batch.ratings["item"] == 5]
    assert kept["timestamp"].tolist() == [90]
    assert len(batch.ratings) == 13
    assert reduced.repeated["timestamp"].tolist() == [105, 105]


def test_repeated_ratings_do_not_count_towards_a_tasks_size():
    reduced = plan.reduce_task(ratings([(3, 100 + i, i % 12, 4.0) for i in range(13)]), CONFIG)
    assert reduced.left_out == "task has fewer than 13 ratings"


def splitmix(x):
    """The reference, on Python's integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_the_reference_is_splitmix64():
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the generator's first output from state 0


@given(seed=st.integers(0, 2**63 - 1), task=st.integers(0, 2**63 - 1), number=st.integers(0, 1000))
def test_order_key(seed, task, number):
    key = plan.order_key(seed, np.array([task], np.int64), np.array([number], np.int64))
    assert int(key[0]) == splitmix(splitmix(splitmix(seed) ^ task) ^ number)


def test_order_is_pinned():
    """Data sets that are prepared elsewhere and later have this order too."""
    key = plan.order_key(0, np.arange(1, 9), np.zeros(8, np.int64))
    assert np.argsort(key).tolist() == [4, 2, 0, 6, 3, 5, 1, 7]


@given(shards=st.integers(1, 70))
def test_shards_are_equal_ranges_of_the_key(shards):
    edges = [(number << 64) // shards for number in range(1, shards)]
    keys = np.array(
        [0, *itertools.chain(*((edge - 2**33, edge + 2**33) for edge in edges)), 2**64 - 1], np.uint64
    )
    expected = [number for number in range(shards) for _ in range(2)]
    assert plan.shard_of(keys, shards).tolist() == expected


@given(data=st.data())
def test_mappers_may_take_the_lines_in_any_order_and_parts(data):
    """Sorting what any number of mappers made of any parts is sorting the tuples of one mapper."""
    row = st.tuples(st.sampled_from(IDS), st.sampled_from(IDS), st.sampled_from("12345"), st.integers(0, 3))
    lines = [
        f"{user}\t{item}\t{stars}\t{time}".encode()
        for user, item, stars, time in data.draw(st.lists(row, min_size=1, max_size=40))
    ]
    order = data.draw(st.permutations(lines))
    cut = data.draw(st.integers(0, len(lines)))
    bad = BadRecords()

    def map_line(line):
        return plan.map_rating(line, ML_100K.ratings, IDS, IDS)

    parts = [
        local_engine.map_lines(enumerate(part, 1), map_line, bad, Path("u.data"))
        for part in (order[:cut], order[cut:])
    ]
    shuffled = local_engine.shuffle(parts)
    assert [row[:4] for row in shuffled.tolist()] == sorted(map(map_line, lines))


def test_by_task_cuts_where_the_task_changes():
    rows = ratings([(task, time, 1, 3.0) for task in (5, 2, 9) for time in range(task)])
    assert [(int(part["task"][0]), len(part)) for part in local_engine.by_task(rows)] == [
        (2, 2),
        (5, 5),
        (9, 9),
    ]
    assert list(local_engine.by_task(rows[:0])) == []
