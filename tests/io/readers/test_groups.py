"""Ranges of a prepared data set against their definition in plain Python: orders, ranks and states."""

import itertools
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.io import Balance, ReadingPosition, ReadOptions, groups
from gmeta.io.reader_stats import ReaderStats
from gmeta.io.readers.balance import SequenceCost
from gmeta.io.readers.epoch import EpochPlan
from gmeta.io.readers.group_reader import epoch_plan
from gmeta.io.readers.read_options import OneEpoch
from support.grouped_data import SCHEMA, reading, write_folder
from support.reference import reader as reference
from support.reference.balance import prefix_batches

LAYOUTS = ("columnar", "example")


def as_lists(values):
    if isinstance(values, tf.RaggedTensor):
        return values.to_list()
    return [[value] for value in values.numpy().tolist()]


def plain(element):
    """An element as the reference's groups of rows."""
    splits = element["row_splits"].numpy().tolist()
    columns = {name: as_lists(values) for name, values in element["columns"].items()}
    keys = zip(element["task"].numpy().tolist(), element["batch_id"].numpy().tolist(), strict=True)
    assert splits[0] == 0
    assert all(len(values) == splits[-1] for values in columns.values())
    return [
        [
            {"task": [task], "batch_id": [batch], **{name: v[row] for name, v in columns.items()}}
            for row in range(splits[i], splits[i + 1])
        ]
        for i, (task, batch) in enumerate(keys)
    ]


def shards(path):
    return sorted(str(file) for file in path.parent.glob("*.tfrecord"))


def on_disk(path, layout):
    return reference.groups(shards(path), SCHEMA, layout)


def tasks_of(dataset):
    return [element["task"].numpy().tolist() for element in dataset]


# What is shown of both layouts in less time: elements that are made of drawn groups.
SHOWN = pytest.mark.shown_by("test_balanced_elements_are_those_of_algorithm_1")


@pytest.fixture(
    scope="module", params=[LAYOUTS[0], *(pytest.param(each, marks=SHOWN) for each in LAYOUTS[1:])]
)
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, layout):
    """Three shards of 7, 0 and 16 groups of 1 to 5 rows."""
    sizes = [1 + i * 7 % 5 for i in range(23)]
    return write_folder(tmp_path_factory.mktemp("data"), sizes[:7], [], sizes[7:], layout=layout)


@settings(max_examples=8)
@given(
    sizes=st.lists(st.lists(st.integers(1, 6), max_size=9), min_size=1, max_size=3).filter(any),
    layout=st.sampled_from(LAYOUTS),
    per_element=st.integers(1, 6),
    window=st.integers(0, 30),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
    ranks=st.integers(1, 4),
    threads=st.integers(1, 3),
)
@pytest.mark.shown_by("test_an_epoch_goes_on_with_another_number_of_ranks")
def test_ranks_read_the_ranges_of_the_reference(
    sizes, layout, per_element, window, seed, epoch, ranks, threads
):
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder), *sizes, layout=layout)
        found = on_disk(path, layout)
        order = reference.epoch_order(len(found), min(window, len(found)), (seed, epoch))
        assert sorted(order) == list(range(len(found)))
        longest = -(-len(found) // ranks)
        for rank in range(ranks):
            stats = ReaderStats()
            dataset = groups(
                path,
                groups_per_element=per_element,
                start=epoch,
                options=ReadOptions(
                    shuffle=window > 0,
                    shuffle_buffer=window or None,
                    seed=seed,
                    shard=(rank, ranks),
                    threads=threads,
                    stats=stats,
                ),
            )
            own = order[rank * len(found) // ranks : (rank + 1) * len(found) // ranks]
            steps = range(0, per_element * -(-longest // per_element), per_element)
            elements = list(dataset)
            assert [plain(element) for element in elements] == [
                [found[group] for group in own[step : step + per_element]] for step in steps
            ]
            cursors = [int(element["cursor"][0]) for element in elements]
            assert cursors == [min(len(own), step + per_element) for step in steps]
            assert len(steps) == int(dataset.cardinality())
            assert {int(element["epoch"]) for element in elements} <= {epoch}
            counts = stats.read()
            assert (counts.groups, counts.records) == (len(own), sum(len(found[group]) for group in own))
            assert (counts.skipped, counts.bad) == (0, {})


@pytest.mark.parametrize("groups_in_all", [1, 63, 64, 1000, 1003])
@pytest.mark.parametrize("window", [1, 64, 200, 999])
def test_orders_are_permutations_that_differ_with_the_epoch(groups_in_all, window):
    orders = [reference.epoch_order(groups_in_all, window, (0, epoch)) for epoch in range(3)]
    assert all(sorted(order) == list(range(groups_in_all)) for order in orders)
    assert groups_in_all == 1 or orders[0] != orders[1] != orders[2]


def test_each_iteration_is_the_next_epoch(prepared):
    dataset = groups(prepared, groups_per_element=4, start=5, options=ReadOptions(seed=3))
    epochs = [tasks_of(dataset) for _ in range(3)]
    assert epochs == [
        tasks_of(groups(prepared, groups_per_element=4, start=e, options=ReadOptions(seed=3)))
        for e in (5, 6, 7)
    ]
    assert epochs[0] != epochs[1]
    still = groups(prepared, groups_per_element=4, start=OneEpoch(5), options=ReadOptions(seed=3))
    assert tasks_of(still) == tasks_of(still) == epochs[0]


def test_a_saved_iterator_goes_on_at_the_group_and_is_small(prepared, tmp_path):
    def make(stats=None):
        dataset = groups(
            prepared, groups_per_element=3, options=ReadOptions(shuffle_buffer=9, seed=5, stats=stats)
        )
        return dataset.map(lambda element: element["task"]).prefetch(2)

    whole = [element.numpy().tolist() for element in make()]
    for taken in range(0, len(whole) + 1, 2):
        iterator = iter(make())
        for _ in range(taken):
            next(iterator)
        path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / f"ckpt{taken}"))
        stats = ReaderStats()
        fresh = iter(make(stats))
        tf.train.Checkpoint(iterator=fresh).read(path)
        assert [element.numpy().tolist() for element in fresh] == whole[taken:]
    assert stats.read().groups == 0  # nothing is read again
    bare = iter(groups(prepared, groups_per_element=3, options=ReadOptions(shuffle_buffer=9, seed=5)))
    next(bare)
    path = tf.train.Checkpoint(iterator=bare).write(str(tmp_path / "bare"))
    assert Path(f"{path}.data-00000-of-00001").stat().st_size < 2048


def test_a_saved_iterator_of_another_plan_is_refused(prepared, tmp_path):
    iterator = iter(groups(prepared, groups_per_element=3, options=ReadOptions(seed=5, shuffle=False)))
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "ckpt"))
    fresh = iter(groups(prepared, groups_per_element=2, options=ReadOptions(seed=5, shuffle=False)))
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"gmeta: .*was of another plan"):
        tf.train.Checkpoint(iterator=fresh).read(path)


def test_an_epoch_goes_on_with_another_number_of_ranks(prepared, layout):
    """Killed after some steps of four ranks, then of three, ended by one: every group is read once."""
    options = {"groups_per_element": 2, "seed": 11, "shuffle_buffer": 8}
    plan, read = epoch_plan(prepared, seed=11, epoch=4), []
    for ranks, steps in ((4, 1), (3, 2), (1, 99)):
        plan = EpochPlan.from_json(plan.to_json())
        planned = plan.steps(ranks, 2)
        for rank in range(ranks):
            dataset = groups(prepared, **reading(start=plan, shard=(rank, ranks), **options))
            elements = list(dataset.take(steps))
            assert len(elements) == min(steps, planned)
            read += [task for element in elements for task in element["task"].numpy().tolist()]
            assert {int(element["epoch"]) for element in elements} == {4}
        plan = plan.after_steps(min(steps, planned), ranks=ranks, groups_per_step=2)
    assert plan.groups == 0
    assert sorted(read) == sorted(group[0]["task"][0] for group in on_disk(prepared, layout))


def test_after_a_resumed_epoch_comes_a_whole_one(prepared):
    rest = epoch_plan(prepared, seed=1, epoch=2).after_steps(3, ranks=1, groups_per_step=4)
    dataset = groups(prepared, groups_per_element=4, start=rest, options=ReadOptions(seed=1))
    whole = [
        tasks_of(groups(prepared, groups_per_element=4, start=e, options=ReadOptions(seed=1))) for e in (2, 3)
    ]
    assert tasks_of(dataset) == whole[0][3:]
    assert tasks_of(dataset) == whole[1]


def test_what_is_resumed_must_be_of_the_same_data(prepared, tmp_path):
    plan = epoch_plan(prepared, seed=1)
    other = write_folder(tmp_path, [3, 3], layout="columnar")
    with pytest.raises(ConfigError, match="EpochPlan is of another data set"):
        groups(other, start=plan, options=ReadOptions(seed=1))
    with pytest.raises(ConfigError, match="EpochPlan is of seed 1, and seed=2 gives another order"):
        groups(prepared, start=plan, options=ReadOptions(seed=2))
    with pytest.raises(ConfigError, match="isn't what to_json made"):
        EpochPlan.from_json({"digest": "d"})


@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 4)), max_size=4),
)
def test_plans_give_every_position_once(groups_in_all, stages):
    plan, read = EpochPlan.whole("d", groups=groups_in_all, seed=0, epoch=0), []
    for ranks, steps, per_step in [*stages, (1, 60, 1)]:
        lanes = plan.lanes(ranks)
        sizes = [sum(end - begin for begin, end in lane) for lane in lanes]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= plan.steps(ranks, per_step) * per_step < max(sizes) + per_step or not max(sizes)
        for lane in lanes:
            read += [p for begin, end in lane for p in range(begin, end)][: steps * per_step]
        plan = plan.after_steps(steps, ranks=ranks, groups_per_step=per_step)
    assert sorted(read) == list(range(groups_in_all))


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=25),
    target=st.floats(1, 200),
    quadratic=st.sampled_from([0.0, 0.1]),
    max_tokens=st.none() | st.integers(1, 60),
    longest=st.none() | st.integers(1, 40),
    layout=st.sampled_from(LAYOUTS),
)
def test_balanced_elements_are_those_of_algorithm_1(sizes, target, quadratic, max_tokens, longest, layout):
    cost = SequenceCost(1.0, quadratic)
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder), sizes, layout=layout)
        counted = [min(size, longest or size) for size in sizes]
        if max_tokens is not None:  # a group of more is refused
            max_tokens = max(max_tokens, *counted)
        balance = Balance(target, cost, max_tokens, longest=longest)
        elements = tasks_of(groups(path, balance=balance, options=ReadOptions(shuffle=False)))
        stream = [(float(cost.of([size])[0]), size) for size in counted]
        counts = list(prefix_batches(stream, target=target, max_tokens=max_tokens))
        assert [len(element) for element in elements] == counts
        assert [task for element in elements for task in element] == list(range(len(sizes)))


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    sequences=st.integers(1, 9),
    quadratic=st.sampled_from([0.0, 0.5]),
    longest=st.none() | st.integers(1, 40),
)
def test_a_balance_of_sequences_costs_what_they_cost_on_the_average(sizes, sequences, quadratic, longest):
    cost = SequenceCost(1.0, quadratic)
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder), sizes)
        balance = Balance.of(path, sequences=sequences, cost=cost, max_tokens=99, longest=longest)
    each = [float(cost.of(min(size, longest or size))) for size in sizes]
    np.testing.assert_allclose(balance.target, sequences * np.mean(each), rtol=1e-12)
    assert (balance.cost, balance.max_tokens, balance.longest) == (cost, 99, longest)


def test_a_balance_of_no_sequences_or_of_no_split_is_refused(prepared):
    with pytest.raises(ConfigError, match="sequences"):
        Balance.of(prepared, sequences=0)
    with pytest.raises(ConfigError, match="has no split 'gone'"):
        Balance.of(Path(prepared).parent / "gone", sequences=3)


def test_balancing_counts_the_values_of_a_list_column(prepared, layout):
    found = on_disk(prepared, layout)
    tokens = [sum(len(row["genre"]) for row in group) for group in found]
    elements = tasks_of(
        groups(prepared, balance=Balance(9, tokens="genre"), options=ReadOptions(shuffle=False))
    )
    expected = list(prefix_batches([(float(count), count) for count in tokens], target=9))
    assert [len(element) for element in elements] == expected
    with pytest.raises(tf.errors.InvalidArgumentError, match="token_column rating must be a list column"):
        tasks_of(groups(prepared, balance=Balance(9, tokens="rating")))


def test_a_balanced_iterator_is_saved_as_a_cursor(prepared, tmp_path):
    def make():
        return iter(groups(prepared, balance=Balance(7), start=1, options=ReadOptions(seed=2)))

    whole = [element["task"].numpy().tolist() for element in make()]
    for taken in range(0, len(whole), 3):
        iterator = make()
        for _ in range(taken):
            next(iterator)
        path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / f"ckpt{taken}"))
        fresh = make()
        tf.train.Checkpoint(iterator=fresh).read(path)
        assert [element["task"].numpy().tolist() for element in fresh] == whole[taken:]


def test_a_position_goes_with_the_model(prepared, tmp_path):
    def make(position):
        dataset = groups(prepared, groups_per_element=4, start=position, options=ReadOptions(seed=8))
        return position.count(dataset.map(lambda element: element["task"]).prefetch(2))

    everything = make(ReadingPosition())
    epochs = [[task.numpy().tolist() for task in everything] for _ in range(3)]
    steps = len(epochs[0])
    for taken in (0, 1, steps, steps + 2):
        before = ReadingPosition()
        dataset, left = make(before), taken
        while left:
            left -= sum(1 for _ in dataset.take(left))
        path = tf.train.Checkpoint(position=before).write(str(tmp_path / f"ckpt{taken}"))
        after = ReadingPosition()
        resumed = make(after)
        tf.train.Checkpoint(position=after).read(path).assert_consumed()
        flat = [task for epoch in epochs for task in epoch]
        rest = [task.numpy().tolist() for task in resumed]
        # An epoch that is over is followed by the next one.
        end = steps * (taken // steps + 1)
        assert rest == flat[taken:end]
        assert [task.numpy().tolist() for task in resumed] == flat[end : end + steps]


def test_keras_backup_goes_on_inside_an_epoch(prepared, tmp_path):
    class KilledError(Exception):
        pass

    class Seen(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.reading, self.tasks, self.left = ReadingPosition(), [], None
            self.weight = self.add_weight(name="w", shape=())
            self.compile("sgd", run_eagerly=True)

        def train_step(self, tasks):
            if self.left is not None and len(self.tasks) == self.left:
                raise KilledError
            self.tasks.append(tasks.numpy().tolist())
            return {"loss": self.weight}

    def fit(model):
        dataset = groups(prepared, groups_per_element=4, start=model.reading, options=ReadOptions(seed=8))
        dataset = model.reading.count(dataset.map(lambda element: element["task"]).prefetch(2))
        backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=1)
        steps = int(epoch_plan(prepared).steps(1, 4))  # Keras asks for it where it saves inside an epoch
        model.fit(dataset.repeat(), epochs=3, steps_per_epoch=steps, callbacks=[backup], verbose=0)
        return model.tasks

    alone = Seen()
    for _ in range(3):
        dataset = groups(prepared, groups_per_element=4, start=alone.reading, options=ReadOptions(seed=8))
        alone.tasks += [
            task.numpy().tolist() for task in alone.reading.count(dataset.map(lambda e: e["task"]))
        ]
    killed = Seen()
    killed.left = 8
    with pytest.raises(KilledError):
        fit(killed)
    assert killed.tasks == alone.tasks[:8]
    assert fit(Seen()) == alone.tasks[8:]


def test_threads_end_with_the_iterator(prepared):
    before = threading.active_count()
    dataset = groups(prepared, groups_per_element=1, options=ReadOptions(threads=4))
    for _ in range(20):
        iterator = iter(dataset)
        next(iterator)
        del iterator
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"groups_per_element": 0}, "groups_per_element=0"),
        ({"min_rows": 0}, "min_rows=0"),
        ({"epoch": -1}, "start=-1 must be"),
        ({"shuffle_buffer": 0}, "shuffle_buffer=0"),
        ({"threads": 0}, "threads=0"),
        ({"on_bad": "ignore"}, "on_bad"),
        ({"shard": (2, 2)}, r"shard=\(2, 2\) names no rank"),
        ({"start": "first"}, "start='first' must be"),
        ({"passed": [(2, 1)], "balance": Balance(5)}, "counts steps, and with balance"),
    ],
)
def test_arguments_that_make_no_sense(prepared, options, says):
    with pytest.raises(ConfigError, match=says):
        groups(prepared, **reading(**options))


@pytest.mark.parametrize(
    ("target", "most"),
    [(0, {}), (-1, {}), (float("nan"), {}), (5, {"max_tokens": 0}), (5, {"longest": 0})],
)
def test_balances_that_make_no_sense(target, most):
    with pytest.raises(ConfigError, match="Balance: target="):
        Balance(target, **most)


def test_a_rank_of_several_ranges_joins_their_steps(prepared, layout, monkeypatch):
    from gmeta.core import collectives
    from gmeta.core.shares import SHARES

    monkeypatch.setenv(SHARES, "3")
    alone = [
        tasks_of(groups(prepared, groups_per_element=2, options=ReadOptions(seed=3, shard=(r, 3))))
        for r in range(3)
    ]
    for rank in range(2):
        monkeypatch.setattr(collectives, "world", lambda rank=rank: collectives.World(rank, 2, rank))
        own = [alone[0]] if rank == 0 else alone[1:]
        joined = groups(prepared, groups_per_element=2, options=ReadOptions(seed=3))
        assert tasks_of(joined) == [[*itertools.chain(*parts)] for parts in zip(*own, strict=True)]
        assert np.array([e["cursor"] for e in joined]).shape[1] == len(own)


def test_it_takes_options_and_transformations(prepared):
    dataset = groups(prepared, **reading(groups_per_element=4, seed=3, again=True))
    options = tf.data.Options()
    options.autotune.enabled = True
    options.experimental_optimization.map_parallelization = True
    changed = dataset.with_options(options).repeat(2).prefetch(1).skip(1).take(8)
    assert tasks_of(changed) == (tasks_of(dataset) * 2)[1:9]


def test_a_distribution_strategy_takes_it(prepared):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    options = {"groups_per_element": 4, "seed": 3, "again": True}
    whole = tasks_of(groups(prepared, **reading(**options)))
    given = strategy.experimental_distribute_dataset(groups(prepared, **reading(**options)))
    assert tasks_of(given) == whole

    def part(context):
        rank = context.input_pipeline_id, context.num_input_pipelines
        return groups(prepared, **reading(shard=rank, **options))

    assert tasks_of(strategy.distribute_datasets_from_function(part)) == whole
