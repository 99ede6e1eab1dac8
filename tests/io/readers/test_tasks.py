"""Task batches: the split, the order of epochs, the length, and training over them."""

import dataclasses
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core import collectives
from gmeta.core.data_manifest import Manifest, Split
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.shares import SHARES
from gmeta.io import After, Flag, ReadOptions, tasks
from gmeta.io.reader_stats import ReaderStats, as_data_error, data_errors
from support.drawn_batches import plain, rows_by_task
from support.grouped_data import SCHEMA, reading, record_offsets, write_folder
from support.reference import reader as reference

ALL = ["item", "task", "genre", "timestamp", "rating", "weights"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Twenty tasks of 4 to 9 rows in two shards."""
    sizes = np.random.default_rng(0).integers(4, 10, 20).tolist()
    return write_folder(tmp_path_factory.mktemp("data"), sizes[:8], sizes[8:])


@pytest.fixture
def copy(prepared, tmp_path):
    """The same, to be spoilt."""
    shutil.copytree(prepared.parent, tmp_path / "data")
    return tmp_path / "data" / prepared.name


def order(dataset):
    return [task for batch in dataset for task in batch["task"].numpy().tolist()]


def shards(path):
    return [str(path.parent / shard.name) for shard in Manifest.load(path.parent).splits[path.name].shards]


@settings(max_examples=10)  # each one traces a few functions
@given(
    sizes=st.lists(st.lists(st.integers(3, 8), min_size=1, max_size=5), min_size=1, max_size=3),
    per_batch=st.integers(1, 6),
    query=st.integers(1, 2),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
)
def test_batches_are_the_reference_s(tmp_path_factory, sizes, per_batch, query, seed, epoch):
    path = write_folder(tmp_path_factory.mktemp("data"), *sizes)
    dataset = tasks(
        path,
        tasks_per_batch=per_batch,
        query=query,
        features=ALL,
        start=epoch,
        options=ReadOptions(seed=seed),
    )
    count = sum(map(len, sizes))
    found = reference.groups(shards(path), SCHEMA, "columnar")
    groups = [found[group] for group in reference.epoch_order(count, count, (seed, epoch))]
    expected = [
        reference.task_batch(groups[i : i + per_batch], SCHEMA, "rating", query)
        for i in range(0, count, per_batch)
    ]
    for batch in expected:
        del batch["features"]["batch_id"]
    assert [plain(batch) for batch in dataset] == expected
    assert dataset.cardinality().numpy() == len(expected)


def test_specs_and_the_columns_taken_by_default(prepared):
    spec = tasks(prepared, query=3).element_spec
    assert set(spec["features"]) == {"item", "genre", "weights"}
    assert isinstance(spec["features"]["genre"], tf.RaggedTensorSpec)
    assert spec["label"].dtype == tf.float32
    assert spec["query"]["index"].shape.as_list() == [None, 3]
    assert spec["support"]["mask"].dtype == tf.float32
    assert set(tasks(prepared, query=3, label="item").element_spec["features"]) == {
        *("genre", "weights", "rating")
    }


def test_gathering_by_index_gives_the_rows_of_each_task(prepared):
    for batch in tasks(prepared, query=3, tasks_per_batch=6, features=["task", "timestamp"]):
        owner, time = batch["features"]["task"], batch["features"]["timestamp"]
        latest = []
        for part in ("support", "query"):
            index, mask = batch[part]["index"], batch[part]["mask"]
            found = tf.boolean_mask(tf.gather(owner, index) - batch["task"][:, None], mask > 0)
            assert not found.numpy().any()
            latest.append(tf.reduce_max(tf.gather(time, index) * tf.cast(mask, tf.int64), 1).numpy())
        assert (latest[0] < latest[1]).all()
        used = sum(float(tf.reduce_sum(batch[part]["mask"])) for part in ("support", "query"))
        assert used == len(batch["label"])


def test_each_iteration_is_the_next_epoch(prepared):
    dataset = tasks(prepared, query=3, options=ReadOptions(seed=9))
    epochs = [order(dataset) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    for epoch in (2, 0, 1):
        assert order(tasks(prepared, query=3, start=epoch, options=ReadOptions(seed=9))) == epochs[epoch]
    assert order(tasks(prepared, query=3, options=ReadOptions(seed=8))) != epochs[0]
    # An iterator that is made but not read is no epoch.
    dataset = tasks(prepared, query=3, options=ReadOptions(seed=9))
    iter(dataset)
    assert order(dataset) == epochs[0]


def test_without_shuffling_the_order_is_that_of_the_files(prepared):
    dataset = tasks(prepared, query=3, options=ReadOptions(shuffle=False))
    assert order(dataset) == order(dataset) == list(range(20))


def test_the_batch_size_doesnt_change_the_order(prepared):
    assert order(tasks(prepared, query=3, tasks_per_batch=7)) == order(tasks(prepared, query=3))


def test_a_saved_iterator_goes_on_in_its_epoch(prepared, tmp_path):
    epochs = [order(tasks(prepared, query=3, tasks_per_batch=4, start=e)) for e in range(2)]
    dataset = tasks(prepared, query=3, tasks_per_batch=4)
    order(dataset)
    iterator = iter(dataset)
    next(iterator)
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "ckpt"))
    # In the next process the count begins again; the iterator knows that it was in epoch 1.
    fresh = iter(tasks(prepared, query=3, tasks_per_batch=4))
    tf.train.Checkpoint(iterator=fresh).read(path)
    assert order(fresh) == epochs[1][8:]


class Mean(tf.keras.Model):
    """The least that trains on a task batch; it writes down which tasks it saw."""

    def __init__(self):
        super().__init__()
        self.mean = tf.Variable(0.0)
        self.seen = tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)

    def train_step(self, batch):
        self.seen.assign(tf.concat([self.seen, batch["task"]], 0))
        with tf.GradientTape() as tape:
            error = tf.gather(batch["label"], batch["query"]["index"]) - self.mean
            loss = tf.reduce_sum(error**2 * batch["query"]["mask"]) / tf.reduce_sum(batch["query"]["mask"])
        self.optimizer.apply_gradients([(tape.gradient(loss, self.mean), self.mean)])
        return {"loss": loss, "genres": tf.reduce_sum(batch["features"]["genre"].row_lengths())}


def fit(dataset, **options):
    model = Mean()
    model.compile(tf.keras.optimizers.SGD(0.3))
    return model, model.fit(dataset, verbose=0, **options).history


def test_fit_sees_every_task_once_an_epoch_in_the_stated_order(prepared):
    model, history = fit(tasks(prepared, query=3, tasks_per_batch=6, options=ReadOptions(seed=4)), epochs=3)
    epochs = [order(tasks(prepared, query=3, start=e, options=ReadOptions(seed=4))) for e in range(3)]
    assert model.seen.numpy().tolist() == [task for epoch in epochs for task in epoch]
    assert history["loss"][2] < history["loss"][0]


def test_fit_reports_bad_data_in_a_line(copy):
    shard = Path(shards(copy)[1])
    data, offset = bytearray(shard.read_bytes()), record_offsets(shard)[5]
    data[offset + 60] ^= 1
    shard.write_bytes(data)
    with pytest.raises(tf.errors.OpError) as raised:
        fit(tasks(copy, query=3))
    found = as_data_error(raised.value)
    assert str(found).startswith(f"{shard} at byte {offset}: the record of ")
    assert "\n" not in str(found)
    assert (found.path, found.offset) == (str(shard), offset)


def test_tasks_too_small_to_split(tmp_path):
    path = write_folder(tmp_path, [5, 3, 4, 2, 6])
    with pytest.raises(DataError, match="task 1, batch 1 has 3 rows, 4 are needed"), data_errors():
        order(tasks(path, query=3, options=ReadOptions(shuffle=False)))
    stats = ReaderStats()
    dataset = tasks(
        path, query=3, tasks_per_batch=2, options=ReadOptions(shuffle=False, on_bad="skip", stats=stats)
    )
    assert [batch["task"].numpy().tolist() for batch in dataset] == [[0], [2], [4]]  # as many as planned
    assert int(dataset.cardinality()) == 3
    counts = stats.read()
    assert (counts.bad, counts.skipped, counts.groups) == ({"too_small": 2}, 5, 3)
    assert "task 1, batch 1 has 3 rows" in counts.messages[0]
    assert "task 3, batch 0 has 2 rows" in counts.messages[1]
    model, _ = fit(tasks(path, query=3, tasks_per_batch=2, options=ReadOptions(on_bad="skip")), epochs=2)
    assert sorted(model.seen.numpy()) == [0, 0, 2, 2, 4, 4]


def test_a_shard_that_was_cut(copy):
    shard = copy.parent / "warm-00000-of-00002.tfrecord"
    offsets = record_offsets(shard)
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(DataError, match=f"^{shard}: .* bytes, the manifest says {offsets[-1]}"):
        tasks(copy, query=3)
    stats = ReaderStats()
    with pytest.warns(UserWarning, match=f"{shard}: not as long as the manifest says"):
        dataset = tasks(copy, query=3, options=ReadOptions(on_bad="skip", stats=stats))
    assert len(order(dataset)) == 19
    assert stats.read().bad == {"truncated": 1}
    assert (
        stats.read().messages[0].startswith(f"{shard} at byte {offsets[-2]}: the file ends inside a record")
    )


def test_a_manifest_of_another_number_of_groups(copy):
    manifest = Manifest.load(copy.parent)
    first, second = manifest.splits["warm"].shards
    wrong = Split((first, dataclasses.replace(second, groups=second.groups + 40)))
    Manifest(SCHEMA, {"warm": wrong}).save(copy.parent)
    says = (
        f"{copy.parent / second.name}.gidx at byte 0: the index has 12 groups .* the manifest says 52 groups"
    )
    with pytest.raises(DataError, match=says), data_errors():
        order(tasks(copy, query=3))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tasks_per_batch": 0}, "tasks_per_batch must be a whole number from 1 on, got 0"),
        ({"query": 0}, "query=0 must be"),
        ({"epoch": -1}, "start=-1 must be"),
        ({"shuffle_buffer": 0}, "shuffle_buffer=0"),
        ({"label": "stars"}, "no column 'stars'"),
        ({"label": "genre"}, "label='genre'"),
        ({"label": "task"}, "label='task'"),
        ({"features": ["item", "colour"]}, "no column 'colour'"),
        ({"features": ["batch_id"]}, "'batch_id' numbers the batches"),
        ({"on_bad": "ignore"}, "on_bad"),
        ({"support": 0}, "support must be a whole number from 1 on, got 0"),
        ({"rows": "first"}, "rows must be one of latest, random, got 'first'"),
        ({"rows": "latest", "resample": True}, "leave out rows='latest'"),
        ({"query": True}, "query=True must be"),
        ({"query": 1.0}, "query=1.0 must be"),
        ({"tasks_per_batch": 2.5}, "tasks_per_batch must be a whole number from 1 on, got 2.5"),
        (
            {"query": After("timestamp", "2001-01-01")},
            "the time must be a finite number, got '2001-01-01'",
        ),
        ({"query": After("genre", 3)}, "a column of one value a record"),
        ({"query": After("timestamp", float("nan"))}, "finite"),
        ({"query": After("timestamp", 3, until=4)}, "until is for gmeta.io.sequences"),
        ({"query": Flag("rating")}, "an int64 column of one value a record"),
        ({"query": Flag("task")}, "no key"),
        ({"query": Flag("timestamp"), "resample": True}, "defines the query rows"),
        ({"label": []}, "label must name a column"),
        ({"label": ["rating", "rating"]}, "each once"),
        ({"label": ["rating", "genre"]}, "label='genre'"),
    ],
)
def test_arguments_that_make_no_sense(prepared, options, says):
    with pytest.raises(ConfigError, match=says):
        tasks(prepared, **reading(**options))


def test_folders_and_splits_that_arent_there(prepared, tmp_path):
    with pytest.raises(ConfigError, match="has no split 'hot'; it has warm"):
        tasks(prepared.with_name("hot"))
    with pytest.raises(DataError, match="no manifest"):
        tasks(tmp_path / "nowhere" / "warm")
    (tmp_path / "data").mkdir()
    path = write_folder(tmp_path / "data", [3, 4])
    for wrong in (path.parent, tmp_path / "dok", tmp_path):
        with pytest.raises(ConfigError, match=f"^{wrong} is no split of a prepared .*; there are {path}$"):
            tasks(wrong)
    Manifest(SCHEMA, {"empty": Split(())}, layout="example").save(tmp_path)
    with pytest.raises(DataError, match="the split holds no group"):
        tasks(tmp_path / "empty")


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.shown_by(case="2")
def test_ranks_read_ranges_of_an_epoch_in_as_many_steps(prepared, ranks):
    whole = order(tasks(prepared, query=2, options=ReadOptions(seed=3)))
    parts = [
        tasks(prepared, tasks_per_batch=4, query=2, options=ReadOptions(seed=3, shard=(r, ranks)))
        for r in range(ranks)
    ]
    assert [task for part in parts for task in order(part)] == whole
    assert {len(list(part)) for part in parts} == {int(part.cardinality()) for part in parts}
    with pytest.raises(ConfigError, match=r"shard=\(2, 2\) names no rank"):
        tasks(prepared, query=2, options=ReadOptions(shard=(2, 2)))


def test_a_rank_without_tasks_in_a_step_has_a_batch_of_none(prepared):
    batches = list(
        tasks(prepared, tasks_per_batch=6, query=2, options=ReadOptions(seed=3, shard=(0, 3)))
    )  # 6, 7 and 7 tasks
    assert [len(batch["task"]) for batch in batches] == [6, 0]
    assert batches[1]["query"]["index"].shape == (0, 2)
    assert batches[1]["support"]["mask"].shape == (0, 1)
    assert len(batches[1]["label"]) == 0


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.shown_by(case="1")
def test_ranks_of_several_shares_have_the_tasks_of_all_in_one_element(prepared, monkeypatch, size):
    total, per_batch = 3, 2
    options = {"tasks_per_batch": per_batch, "query": 2, "seed": 3, "features": ALL}
    shares = [
        [plain(batch) for batch in tasks(prepared, **reading(shard=(v, total), **options))]
        for v in range(total)
    ]
    monkeypatch.setenv(SHARES, str(total))
    for rank in range(size):
        monkeypatch.setattr(collectives, "world", lambda rank=rank: collectives.World(rank, size, rank))
        own = shares[rank * total // size : (rank + 1) * total // size]
        dataset = tasks(prepared, **reading(**options))
        batches = [plain(batch) for batch in dataset]
        for name in ("task", "label"):
            steps = zip(*([batch[name] for batch in share] for share in own), strict=True)
            assert [batch[name] for batch in batches] == [[*itertools.chain(*step)] for step in steps]
        assert int(dataset.cardinality()) == len(batches)
        assert len(list(tasks(prepared, **reading(on_bad="skip", **options)))) == len(batches)


def test_supports_are_bounded_by_their_latest_rows(prepared):
    [whole] = tasks(prepared, query=2, features=["timestamp"], options=ReadOptions(shuffle=False))
    [cut] = tasks(prepared, query=2, support=3, features=["timestamp"], options=ReadOptions(shuffle=False))
    rows, latest = rows_by_task(whole, "support"), rows_by_task(cut, "support")
    assert latest == {task: values[-3:] for task, values in rows.items()}
    assert rows_by_task(whole, "query") == rows_by_task(cut, "query")


def test_weights_stand_in_the_masks(prepared):
    for batch in tasks(prepared, query=2, weight="rating", features=["item"]):
        for part in ("support", "query"):
            index, mask = batch[part]["index"], batch[part]["mask"]
            real = mask > 0
            np.testing.assert_array_equal(
                tf.boolean_mask(mask, real), tf.gather(batch["label"], tf.boolean_mask(index, real))
            )
    with pytest.raises(ConfigError, match="weight='item' must be a float32 column"):
        tasks(prepared, weight="item")


def test_lists_can_be_padded(prepared):
    [ragged] = tasks(prepared, query=2, features=["genre"], options=ReadOptions(shuffle=False))
    [padded] = tasks(prepared, query=2, features=["genre"], pad_value=-7, options=ReadOptions(shuffle=False))
    expected = ragged["features"]["genre"].to_tensor(-7)
    np.testing.assert_array_equal(padded["features"]["genre"], expected)
    assert -7 in padded["features"]["genre"].numpy()
