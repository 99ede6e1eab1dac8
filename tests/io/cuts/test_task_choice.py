"""Parts of a split's tasks: disjoint, together all, and no bad records among what is passed over."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.io import ReaderStats, TaskChoice, tasks
from gmeta.testing.data.grouped_data import write_folder
from gmeta.testing.data.reader_arguments import reading


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


@pytest.mark.parametrize("options", [{"parts": 0}, {"min_rows": 0}, {"held_out": True}])
def test_a_choice_that_there_isnt(options):
    with pytest.raises(ConfigError, match="TaskChoice"):
        TaskChoice(**options)
