"""Positions that count groups: steps of equal cost go on at the very next group, on any number of ranks."""

import itertools
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.position import position_of, uncounted
from gmeta.core.shares import SHARES, Shares
from gmeta.io import Balance, ReadingPosition, ReadOptions, groups, sequences, tasks
from gmeta.io.reader_stats import data_errors
from gmeta.io.readers.epoch import UNKNOWN, EpochPlan, only_own
from gmeta.io.readers.group_reader import epoch_plan
from gmeta.io.readers.position import Reached, go_on
from support.grouped_data import write_folder
from support.thread_ranks import run_thread_ranks

SIZES = [3, 1, 9, 2, 2, 7, 1, 1, 4, 12, 5, 2, 3, 3, 8, 1, 2, 6]
BALANCE = Balance(9.0)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("prepared"), SIZES[:7], SIZES[7:])


def by_groups(path, start, balance=BALANCE, **options):
    """Task ids, as a user makes them of groups: nothing of an element's cursor is left at its end."""
    elements = groups(path, balance=balance, start=start, options=ReadOptions(seed=5, **options))
    dataset = elements.map(lambda element: element["task"], num_parallel_calls=2).prefetch(3)
    return start.count(dataset) if isinstance(start, ReadingPosition) else dataset


def by_sequences(path, start, balance=BALANCE, **options):
    dataset = sequences(
        path, history=["item"], balance=balance, start=start, options=ReadOptions(seed=5, **options)
    )
    return dataset.map(lambda batch: batch["task"])


def by_tasks(path, start, balance=BALANCE, **options):
    options = ReadOptions(seed=5, on_bad="skip", **options)
    dataset = tasks(path, balance=balance, query=1, start=start, options=options)
    return dataset.map(lambda batch: batch["task"])


def listed(dataset):
    return [element.numpy().tolist() for element in dataset]


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("make", [by_groups, by_sequences, by_tasks])
@pytest.mark.shown_by(case="by_groups")
def test_a_restored_position_goes_on_with_the_next_element(prepared, tmp_path, make):
    before, after = ReadingPosition(), ReadingPosition()
    dataset, resumed = make(prepared, before), make(prepared, after)
    beginning = [variable.numpy() for variable in before.variables]
    whole = [listed(make(prepared, epoch)) for epoch in range(3)]
    assert [listed(dataset) for _ in range(3)] == whole
    assert whole[0] != whole[1]
    steps = len(whole[0])
    some = {0, 1, steps // 2, steps - 1, steps, steps + 2}  # beginnings, ends, and the next epoch
    for taken in range(steps + 3) if "GMETA_ALL_CASES" in os.environ else sorted(some):
        for variable, value in zip(before.variables, beginning, strict=True):
            variable.assign(value)
        left = taken
        while left:
            left -= sum(1 for _ in dataset.take(left))
        path = tf.train.Checkpoint(position=before).write(str(tmp_path / f"ckpt{taken}"))
        tf.train.Checkpoint(position=after).read(path).assert_consumed()
        epoch = int(taken >= len(whole[0]))  # an epoch that is over is followed by the next one
        assert listed(resumed) == whole[epoch][taken - epoch * len(whole[0]) :]
        assert listed(resumed) == whole[epoch + 1]


def test_elements_have_the_cursors_of_an_uninterrupted_epoch(prepared):
    def cursors(start):
        elements = groups(prepared, balance=BALANCE, start=start, options=ReadOptions(seed=5))
        return [element["cursor"].numpy().tolist() for element in elements]

    whole, position = cursors(0), ReadingPosition()
    for _ in by_groups(prepared, position).take(3):
        pass
    assert int(position.step) == 3
    assert position.cursors.numpy().tolist() == whole[2]
    assert cursors(position) == whole[3:]


def gather(positions):
    """What ranks that have a job together do: here they are threads."""
    own = threading.local()
    with patch.object(collectives, "allgather_objects", lambda told: own.gather(told)):

        def work(rank, gather):
            own.gather = gather
            positions[rank].gather_ranks()

        results = run_thread_ranks(len(positions), work)
    for error in filter(None, results):
        raise error


def place_at(position, saved):
    """What restoring a checkpoint does: of the same rank, or of another."""
    for to, of in zip(position.variables, saved.variables, strict=True):
        to.assign(of)


def copy(position):
    made = ReadingPosition()
    place_at(made, position)
    return made


@settings(max_examples=6)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=24), st.floats(1, 40), st.data())
@pytest.mark.shown_by("test_a_restored_position_goes_on_with_the_next_element")
def test_any_step_of_any_epoch_is_a_place_to_go_on(sizes, target, data):
    with tempfile.TemporaryDirectory() as folder:
        path, position = write_folder(Path(folder), sizes), ReadingPosition()
        whole = listed(by_groups(path, 0, Balance(target)))
        dataset, begun = by_groups(path, position, Balance(target)), ReadingPosition()
        taken = data.draw(st.integers(0, len(whole) - 1))
        if taken:
            assert listed(dataset.take(taken)) == whole[:taken]
        else:
            place_at(position, begun)
        assert listed(dataset) == whole[taken:]


# Quick: few, and unequal, which are many.
@pytest.fixture(scope="module", params=[pytest.param("many", marks=pytest.mark.slow), "few", "unequal"])
def on_ranks(request, tmp_path_factory):
    """Data of 1 to 4 ranks: by number of ranks, the position and the dataset of each; made once."""
    sizes = {"many": SIZES, "few": [1, 2, 1], "unequal": [40, 1, 1, 1, 1, 1, 1, 40]}[request.param]
    path, made = write_folder(tmp_path_factory.mktemp(request.param), sizes), {}
    for ranks in range(1, 5):
        positions = [ReadingPosition() for _ in range(ranks)]
        made[ranks] = [
            (position, by_groups(path, position, shard=(r, ranks))) for r, position in enumerate(positions)
        ]
    return path, len(sizes), made


stages = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=4)


@settings(max_examples=5)
@given(stages)
@pytest.mark.shown_by(case="few")
def test_every_group_is_read_once_whatever_the_ranks_were(on_ranks, stages):
    """Ranks take different numbers of steps and are stopped; others go on, and the last end the epoch."""
    (path, count, made), read, saved = on_ranks, [], ReadingPosition()
    for steps in [*stages, [99, 99]]:
        ranks = made[len(steps)]
        for (position, dataset), taken in zip(ranks, steps, strict=True):
            place_at(position, saved)
            if taken:  # or the rank is stopped before its first step
                read += itertools.chain(*listed(dataset.take(taken)))
        gather([position for position, _ in ranks])
        saved = copy(ranks[-1][0])
        plan = epoch_plan(path, seed=5)
        left = replace(plan, left=tuple(map(tuple, saved.left.numpy().tolist())) or plan.left)
        cursors = saved.cursors.numpy().tolist()
        assert (left.after(cursors) if cursors else left).groups == count - len(read)
        if len(read) == count:
            break
    assert sorted(read) == list(range(count))


def test_a_rank_that_has_ended_before_the_others_waits_for_them(prepared):
    """Rank 1 has read its range, rank 0 hasn't: a rest of no element, and then the next epoch."""
    positions = [ReadingPosition() for _ in range(2)]
    made = [by_groups(prepared, p, shard=(rank, 2)) for rank, p in enumerate(positions)]
    first, ended = listed(made[0].take(1)), listed(made[1])
    gather(positions)
    resumed = [by_groups(prepared, copy(positions[0]), shard=(rank, 2)) for rank in range(2)]
    rest = [listed(resumed[0]), listed(resumed[1])]
    assert rest[1] == []
    assert [*first, *rest[0]] == listed(by_groups(prepared, 0, shard=(0, 2)))
    assert ended == listed(by_groups(prepared, 0, shard=(1, 2)))
    for rank in range(2):
        assert listed(resumed[rank]) == listed(by_groups(prepared, 1, shard=(rank, 2)))


def test_what_one_rank_saved_isnt_the_place_of_another(prepared):
    saved = ReadingPosition()
    listed(by_groups(prepared, saved, shard=(0, 2)).take(1))
    assert saved.cursors.numpy()[1] == UNKNOWN
    assert listed(by_groups(prepared, copy(saved), shard=(0, 2)))
    says = r"the place of rank 1 of 2 in epoch 0 isn't known, .* gather_ranks"
    with pytest.raises(DataError, match=says), data_errors():
        listed(by_groups(prepared, copy(saved), shard=(1, 2)))
    says = r"2 ranks have read of epoch 0, and the places of 1 aren't known"
    with pytest.raises(DataError, match=says), data_errors():
        listed(by_groups(prepared, copy(saved), shard=(0, 3)))


def test_ranks_in_different_epochs_have_no_common_place(prepared):
    positions = [ReadingPosition() for _ in range(2)]
    made = [by_groups(prepared, p, shard=(rank, 2)).repeat() for rank, p in enumerate(positions)]
    for dataset, steps in zip(made, (1, 9), strict=True):
        listed(dataset.take(steps))
    with pytest.raises(ConfigError, match=r"read the epochs \[0, 2\]: .* leave out repeat\(\)"):
        gather(positions)


def test_each_rank_may_save_its_own_place(prepared):
    """A plan of the cursors, for ranks that gmeta doesn't know of."""
    positions = [ReadingPosition() for _ in range(3)]
    read = []
    for rank, position in enumerate(positions):
        read += itertools.chain(*listed(by_groups(prepared, position, shard=(rank, 3)).take(rank)))
    cursors = [int(p.cursors[rank]) if rank else 0 for rank, p in enumerate(positions)]
    rest = epoch_plan(prepared, seed=5).after(cursors)
    for rank in range(2):
        dataset = by_groups(prepared, rest, shard=(rank, 2))
        read += itertools.chain(*listed(dataset))
    assert sorted(read) == list(range(len(SIZES)))


def test_a_rank_that_takes_over_anothers_range_goes_on_in_both(prepared, monkeypatch):
    monkeypatch.setenv(SHARES, "3")
    worlds = [collectives.World(rank, 2, rank) for rank in range(2)]

    def make(rank, start):
        monkeypatch.setattr(collectives, "world", lambda: worlds[rank])
        return by_groups(prepared, start)

    whole = [listed(make(rank, 0)) for rank in range(2)]
    positions = [ReadingPosition() for _ in range(2)]
    for rank, position in enumerate(positions):
        assert listed(make(rank, position).take(1)) == whole[rank][:1]
    assert [p.cursors.shape.rank and p.cursors.numpy().size for p in positions] == [3, 3]
    gather(positions)
    for rank in range(2):
        assert listed(make(rank, copy(positions[0]))) == whole[rank][1:]


@pytest.mark.shown_by("io/readers/test_groups.py::test_keras_backup_goes_on_inside_an_epoch")
def test_keras_backup_goes_on_inside_a_balanced_epoch(prepared, tmp_path):
    class KilledError(Exception):
        pass

    class Seen(tf.keras.Model):
        def __init__(self, left=None):
            super().__init__()
            self.reading, self.tasks, self.left = ReadingPosition(), [], left
            self.weight = self.add_weight(name="w", shape=())
            self.compile("sgd", run_eagerly=True)

        def train_step(self, tasks):
            if len(self.tasks) == self.left:
                raise KilledError
            self.tasks.append(tasks.numpy().tolist())
            return {"loss": self.weight}

    steps = [len(listed(by_groups(prepared, epoch))) for epoch in range(3)]

    def fit(model):
        # Keras asks for the steps of an epoch where it saves inside one.
        backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=1)
        data = by_sequences(prepared, model.reading).repeat()
        model.fit(data, epochs=3, steps_per_epoch=4, callbacks=[backup], verbose=0)
        return model.tasks

    flat = list(itertools.chain(*(listed(by_sequences(prepared, epoch)) for epoch in range(3))))[:12]
    assert sum(steps) >= 12
    killed = Seen(left=6)
    with pytest.raises(KilledError):
        fit(killed)
    assert killed.tasks == flat[:6]
    assert fit(Seen()) == flat[6:]


def test_what_is_looked_at_isnt_counted(prepared):
    position = ReadingPosition()
    dataset = by_groups(prepared, position).map(lambda task: task)
    assert position_of(dataset) is position
    with uncounted(dataset):
        first = listed(dataset.take(1))
    assert listed(dataset)[:1] == first


@given(st.integers(1, 30), st.integers(1, 5), st.data())
def test_a_place_is_always_in_its_range(count, ranks, data):
    whole = EpochPlan.whole("d", groups=count, seed=0, epoch=0)
    sizes = [sum(end - begin for begin, end in lane) for lane in whole.lanes(ranks)]
    cursors = tuple(data.draw(st.integers(0, size)) for size in sizes)
    for rank in range(ranks):
        shares = Shares.of(rank, ranks)
        after = go_on(Reached(whole, cursors), whole, shares)
        ended = all(cursor == size for cursor, size in zip(cursors, sizes, strict=True))
        assert after.plan.epoch == int(ended)
        assert after.cursors == only_own([0 if ended else cursors[rank]], shares)
