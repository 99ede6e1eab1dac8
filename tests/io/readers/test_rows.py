"""Shuffled rows for ordinary models: what a batch has, the order of epochs, ranks, and going on."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.core.schema import Column
from gmeta.core.shares import SHARES
from gmeta.io import ReadOptions, groups, rows
from gmeta.io.readers.group_reader import epoch_plan
from gmeta.io.readers.read_options import OneEpoch
from gmeta.io.readers.row_reader import row_batches
from support.grouped_data import SCHEMA, reading, write_folder
from support.reference import reader as reference


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Forty tasks of 1 to 9 rows in two shards, 13 rows or more a block of 16."""
    sizes = np.random.default_rng(0).integers(1, 10, 40).tolist()
    return write_folder(tmp_path_factory.mktemp("data"), sizes[:18], sizes[18:])


def times(dataset):
    """What tells rows apart: task and time, batch by batch."""
    found = []
    for features, *_ in dataset:
        pairs = zip(features["task"].numpy().tolist(), features["timestamp"].numpy().tolist(), strict=True)
        found.append(list(pairs))
    return found


def keyed(path, **options):
    return rows(
        path, **reading(features=["task", "timestamp"], **{"batch_size": 8, "shuffle_buffer": 64, **options})
    )


@settings(max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # each traces functions
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3),
    size=st.integers(1, 9),
    buffer=st.integers(1, 40),
    ranks=st.integers(1, 3),
    epoch=st.integers(0, 3),
)
def test_ranks_have_every_row_once_in_full_batches(tmp_path_factory, sizes, size, buffer, ranks, epoch):
    path = write_folder(tmp_path_factory.mktemp("data"), *sizes)
    found = [
        times(keyed(path, batch_size=size, shuffle_buffer=buffer, epoch=epoch, shard=(rank, ranks)))
        for rank in range(ranks)
    ]
    for batches in found:
        assert all(len(batch) == size for batch in batches[:-1])
    every = sorted(row for batches in found for batch in batches for row in batch)
    total = sum(map(sum, sizes))
    assert len(set(every)) == len(every) == total


@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3),
    size=st.integers(1, 12),
    per_element=st.integers(1, 6),
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    epoch=st.integers(0, 3),
    drop=st.booleans(),
)
def test_batches_are_the_references(tmp_path_factory, sizes, size, per_element, seed, epoch, drop):
    path = write_folder(tmp_path_factory.mktemp("data"), *sizes)
    elements = groups(
        path, groups_per_element=per_element, start=OneEpoch(epoch), options=ReadOptions(seed=4)
    )
    structure = ({c.name: c for c in SCHEMA if c.name != "batch_id"}, Column("timestamp", "float32"))
    options = {"task": "task", "batch_size": size, "shuffle_seed": seed, "drop_remainder": drop}
    found = [
        list(zip(*(_listed(features[name]) for name in features), label.numpy(), strict=True))
        for features, label in row_batches(elements, structure, **options)
    ]
    read = []
    for element in elements:
        columns = {**element["columns"], "task": np.repeat(element["task"], np.diff(element["row_splits"]))}
        named = [_listed(columns[name]) for name in structure[0]]
        read.append(
            (int(element["cursor"][0]), list(zip(*named, map(float, columns["timestamp"]), strict=True)))
        )
    expected = reference.row_batches(read, size, None if seed is None else (seed, epoch))
    if drop and len(expected[-1]) < size:
        expected.pop()
    assert found == expected


def _listed(column):
    """A column's values, or lists of them."""
    return (
        [tuple(row) for row in column.to_list()]
        if isinstance(column, tf.RaggedTensor)
        else list(np.array(column))
    )


@pytest.mark.parametrize(
    ("element", "says"),
    [
        (([1], [0, 2], [5, 6], [5, 6], [0, 1, 2], [7]), "three numbers or none, got 1"),
        (([], [0, 3, 2], [5, 6], [5, 6], [0, 1, 2], [7, 8]), "row splits must ascend"),
        (([], [0, 2], [5, 6, 7], [5, 6], [0, 1, 2], [7]), "column 0, of kind row, has 3 values"),
        (([], [0, 2], [5, 6], [5, 6], [0, 3, 2], [7]), "column 1, of kind list, has 2 values"),
        (([], [0, 2], [5, 6], [5, 6], [0, 2], [7]), "column 1, of kind list"),
        (([], [0, 2], [5, 6], [5, 6], [0, 1, 2], [7, 8]), "column 2, of kind group, has 2 values"),
    ],
)
def test_the_op_refuses_tensors_that_do_not_fit(element, says):
    with pytest.raises(tf.errors.InvalidArgumentError, match=says):
        next(iter(_raw_batches(element)))
    whole = ([], [0, 2], [5, 6], [5, 6], [0, 1, 2], [7])
    assert [part.numpy().tolist() for part in next(iter(_raw_batches(whole)))] == [
        [5, 6],
        [5, 6],
        [0, 1, 2],
        [7, 7],
    ]


def _raw_batches(element, kinds=("row", "list", "group")):
    """The op over one element, by hand."""
    data = tf.data.Dataset.from_tensors(tuple(tf.constant(part, tf.int64) for part in element))
    specs = (tf.TensorSpec((None,), tf.int64),) * 4
    variant = load_op_library("io").gmeta_row_batches_dataset(
        data._variant_tensor,
        tf.constant(4, tf.int64),
        False,
        column_kinds=list(kinds),
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
    )
    return tf.data.experimental.from_variant(variant, specs)


def test_a_batch_is_a_dict_of_features_with_the_label(prepared):
    (features, label) = next(iter(rows(prepared, batch_size=8)))
    assert set(features) == {"item", "task", "genre", "weights"}
    assert isinstance(features["genre"], tf.RaggedTensor)
    assert (label.shape, label.dtype) == ((8,), tf.float32)
    assert rows(prepared, batch_size=8).cardinality() == len(list(rows(prepared, batch_size=8)))
    _, labels, weight = next(
        iter(rows(prepared, batch_size=4, label=["item", "timestamp"], weight="rating", pad_value=-1))
    )
    assert (labels.shape, weight.dtype) == ((4, 2), tf.float32)
    padded = next(iter(rows(prepared, batch_size=50, pad_value=-1)))[0]["genre"]
    assert isinstance(padded, tf.Tensor)
    assert (padded.numpy() == -1).any()


def test_columns_of_a_row_stay_together(prepared):
    def whole(**options):
        found = set()
        for features, label in rows(
            prepared, **reading(features=["task", "timestamp", "item", "genre"], **options)
        ):
            columns = [features[name].numpy().tolist() for name in ("task", "timestamp", "item")]
            found |= set(zip(*columns, map(tuple, features["genre"].to_list()), label.numpy(), strict=True))
        return found

    assert whole(batch_size=8, shuffle_buffer=50) == whole(batch_size=1024, shuffle=False)


def test_each_epoch_mixes_rows_of_tasks_in_an_order_of_its_own(prepared):
    dataset = keyed(prepared)
    epochs = [times(dataset) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch in (2, 0, 1):
        assert times(keyed(prepared, epoch=epoch)) == epochs[epoch]
    assert times(keyed(prepared, seed=1)) != epochs[0]
    # Rows of a task aren't neighbours any more: groups alone would give 8 rows of two or three tasks.
    tasks = [len({task for task, _ in batch}) for batch in epochs[0]]
    assert np.mean(tasks) > 4
    flat = [task for batch in times(keyed(prepared, shuffle=False)) for task, _ in batch]
    assert flat == sorted(flat)


@pytest.mark.parametrize("steps", [1, 5, -1])
@pytest.mark.shown_by(case="-1")
def test_an_epoch_goes_on_from_a_saved_iterator_and_from_counted_steps(prepared, tmp_path, steps):
    whole = [times(keyed(prepared, epoch=epoch)) for epoch in range(2)]
    steps %= len(whole[0])  # the last one but one: rows wait, and nothing is left to read
    iterator = iter(keyed(prepared))
    for _ in range(steps):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "ckpt"))
    fresh = iter(keyed(prepared))
    tf.train.Checkpoint(iterator=fresh).read(path)
    assert times(fresh) == whole[0][steps:]
    counted = keyed(prepared, passed=[(1, steps - 1), (1, 1)])
    assert [times(counted), times(counted)] == [whole[0][steps:], whole[1]]


def test_an_epoch_goes_on_from_a_plan(prepared):
    plan = epoch_plan(prepared).after_steps(2, ranks=2, groups_per_step=4)
    left = {
        task
        for rank in range(3)
        for batch in times(keyed(prepared, start=plan, shard=(rank, 3)))
        for task, _ in batch
    }
    assert len(left) == plan.groups == 24


def test_a_rank_of_two_shares_has_the_rows_of_both(prepared, monkeypatch):
    parts = [times(keyed(prepared, shard=(share, 2))) for share in range(2)]
    monkeypatch.setenv(SHARES, "2")
    joined = times(keyed(prepared))
    steps = max(map(len, parts))
    expected = [[row for part in parts for row in part[step : step + 1]] for step in range(steps)]
    expected = [[row for batch in step for row in batch] for step in expected]
    assert joined == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "rows: batch_size must be a whole number from 1 on, got 0"),
        ({"label": "genre"}, "rows: label='genre'"),
        ({"features": ["batch_id"]}, "rows: 'batch_id' numbers the batches"),
        ({"features": "item"}, "rows: features must be a list of columns"),
        ({"weight": "item"}, "rows: weight='item' must be a float32 column"),
        ({"passed": [(2, 3)]}, "counts steps of 2 ranks, and there are 1"),
        ({"shuffle_buffer": 0}, "ReadOptions: shuffle_buffer=0"),
    ],
)
def test_arguments_that_make_no_sense(prepared, options, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        rows(prepared, **reading(**options))


def test_an_ordinary_model_fits(prepared):
    inputs = {"timestamp": tf.keras.Input([], name="timestamp", dtype=tf.int64)}
    x = tf.keras.layers.Lambda(lambda t: tf.cast(t[:, None], tf.float32) / 100)(inputs["timestamp"])
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(x))
    model.compile("sgd", "mse")
    data = rows(prepared, features=["timestamp"], batch_size=16)
    assert np.isfinite(model.fit(data, epochs=2, verbose=0).history["loss"]).all()
