"""Parts of a split's tasks: disjoint, together all, bounded in size; nothing passed over counts as bad."""

import re
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.io import tasks
from gmeta.io.cuts.task_choice import TaskChoice
from gmeta.io.reader_stats import ReaderStats
from support.grouped_data import reading, write_folder


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Forty tasks of 1 to 6 rows."""
    sizes = np.random.default_rng(0).integers(1, 7, 40).tolist()
    return write_folder(tmp_path_factory.mktemp("data"), sizes[:20], sizes[20:])


def read(path, **options):
    batches = list(tasks(path, **reading(tasks_per_batch=3, query=2, shuffle=False, **options)))
    return [int(task) for batch in batches for task in batch["task"]], batches


def test_parts_are_disjoint_and_together_all_that_can_be_split(path):
    stats = ReaderStats()
    one, _ = read(path, only=TaskChoice(parts=3, held_out=True), stats=stats)
    rest, batches = read(path, only=TaskChoice(parts=3), stats=stats)
    whole, _ = read(path, on_bad="skip")
    assert not set(one) & set(rest)
    assert sorted(one + rest) == sorted(whole)
    assert one
    assert rest
    assert stats.read().bad == {}
    for batch in batches:  # what is left fits together
        rows = len(batch["label"])
        assert int(tf.reduce_sum(batch["support"]["mask"]) + tf.reduce_sum(batch["query"]["mask"])) == rows
        assert all(values.shape[0] == rows for values in batch["features"].values())


def test_ranks_take_as_many_steps_though_elements_shrink(path):
    parts = [read(path, only=TaskChoice(parts=4, held_out=True), shard=(rank, 2)) for rank in (0, 1)]
    assert len(parts[0][1]) == len(parts[1][1])
    whole, _ = read(path, only=TaskChoice(parts=4, held_out=True))
    assert sorted(parts[0][0] + parts[1][0]) == sorted(whole)


TASKS = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(1, 9)), max_size=30)


def chosen(choice, found):
    task, rows = (tf.constant([each[side] for each in found], tf.int64) for side in (0, 1))
    return choice.keeps(task, rows).numpy()


@given(TASKS, st.integers(2, 5), st.sampled_from(["hash", "id"]), st.integers(1, 6), st.integers(0, 3))
def test_a_task_of_the_part_is_held_out_if_its_size_is_within_bounds_and_else_among_the_others(
    found, parts, by, fewest, more
):
    sizes = np.array([rows for _, rows in found], int)
    within = (sizes >= fewest) & (sizes <= fewest + more)
    times = np.zeros(len(found), int)
    for part in range(parts):
        others = TaskChoice(parts, part, by, held_out_rows=(fewest, fewest + more))
        held_out = chosen(replace(others, held_out=True), found)
        assert not (held_out & ~within).any()
        np.testing.assert_array_equal(chosen(others, found), ~held_out)
        times += held_out
    np.testing.assert_array_equal(times, within)  # each in exactly one part


def test_the_part_by_id_is_the_id_modulo_parts():
    found = [(task, 1) for task in (-5, -1, 0, 4, 5, 9)]
    assert chosen(TaskChoice(5, 4, "id", held_out=True), found).tolist() == [
        False,
        True,
        False,
        True,
        False,
        True,
    ]


def test_what_is_read_is_limited_by_size_whichever_tasks_are_held_out():
    found = [(task, rows) for task in range(4) for rows in (1, 2, 3, 4)]
    for choice in (TaskChoice(), TaskChoice(2), TaskChoice(2, held_out=True, held_out_rows=(2, 0))):
        whole, part = (chosen(each, found) for each in (choice, replace(choice, min_rows=2, max_rows=3)))
        np.testing.assert_array_equal(part, whole & [rows in (2, 3) for _, rows in found])
        np.testing.assert_array_equal(
            chosen(choice.at_least(4), found), whole & [rows == 4 for _, rows in found]
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"parts": 0}, "parts must be a whole number from 1 on, got 0"),
        ({"parts": 3, "part": 3}, "part=3 of parts=3: parts count from 0"),
        ({"parts": 3, "by": "size"}, "by must be one of hash, id, got 'size'"),
        ({"min_rows": 0}, "min_rows and max_rows: the fewest must be a whole number from 1 on"),
        ({"min_rows": 4, "max_rows": 3}, "the most, 3, is below the fewest, 4; 0: any number"),
        ({"parts": 2, "held_out_rows": (4, 3)}, "held_out_rows: the most, 3, is below"),
        ({"held_out": True}, "one part holds out nothing: give parts of at least 2"),
        ({"by": "id"}, "one part holds out nothing"),
        ({"held_out_rows": (2, 0)}, "one part holds out nothing"),
    ],
)
def test_a_choice_that_there_isnt(options, says):
    with pytest.raises(ConfigError, match=f"TaskChoice: .*{re.escape(says)}"):
        TaskChoice(**options)
