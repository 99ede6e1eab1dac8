"""Batches of sequences: the groups' order, ranks and states, who is left out, and training over them."""

import shutil

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError, DataError
from gmeta.io import After, Balance, Flag, ReadingPosition, ReadOptions, groups, sequences
from gmeta.io.cuts.sequence_split import SequenceSplit
from gmeta.io.reader_stats import ReaderStats, data_errors
from gmeta.io.readers.balance import SequenceCost
from gmeta.io.readers.group_reader import epoch_plan
from gmeta.preprocess import TableSpec, prepare
from support.drawn_batches import plain
from support.grouped_data import reading, record_offsets, write_folder

PARTS = {
    "contexts": ["task", "weights"],
    "history": ["item", "genre", "timestamp"],
    "targets": ["item"],
    "labels": ["rating"],
    "exposed": 2,
    "longest": 4,
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Twenty users of 1 to 9 rows in two shards."""
    sizes = np.random.default_rng(0).integers(1, 10, 20).tolist()
    return write_folder(tmp_path_factory.mktemp("data"), sizes[:8], sizes[8:])


def order(dataset):
    return [task for batch in dataset for task in batch["task"].numpy().tolist()]


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 5, "epoch": 3, "shuffle_buffer": 7, "passed": [(2, 1)], "shard": (0, 2)},
        {"shuffle": False, "again": True, "min_rows": 3, "on_bad": "skip"},
        {"balance": Balance(17.0, SequenceCost(1.0, 0.1), max_tokens=20, longest=9)},
    ],
)
@pytest.mark.shown_by(case="options1")
def test_batches_are_the_elements_of_groups_cut(prepared, options):
    elements = groups(prepared, **reading(groups_per_element=3, **options))
    batches = sequences(prepared, **reading(sequences_per_batch=3, **PARTS, **options))
    split = SequenceSplit(**PARTS)
    assert [plain(batch) for batch in batches] == [plain(split(element)) for element in elements]
    assert batches.cardinality() == elements.cardinality()


def test_an_epoch_goes_on_from_a_plan_and_a_position(prepared):
    options = {"sequences_per_batch": 3, "seed": 2, **PARTS}
    dataset = sequences(prepared, **reading(**options))
    whole = [order(dataset), order(dataset)]
    plan = epoch_plan(prepared, seed=2).after_steps(2, ranks=1, groups_per_step=3)
    assert order(sequences(prepared, **reading(start=plan, **options))) == whole[0][6:]
    position = ReadingPosition()
    dataset = sequences(prepared, **reading(start=position, **options))
    assert order(dataset.take(2)) == whole[0][:6]
    assert (int(position.epoch), int(position.step)) == (0, 2)
    assert [order(dataset), order(dataset)] == [whole[0][6:], whole[1]]


def test_a_saved_iterator_goes_on_behind_a_prefetch(prepared, tmp_path):
    def make():
        return iter(sequences(prepared, **reading(sequences_per_batch=3, seed=1, **PARTS)).prefetch(2))

    whole, iterator = [plain(batch) for batch in make()], make()
    next(iterator)
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "ckpt"))
    fresh = make()
    tf.train.Checkpoint(iterator=fresh).read(path)
    assert [plain(batch) for batch in fresh] == whole[2:]


def test_batches_of_equal_cost_count_no_more_of_a_history_than_is_kept(prepared):
    def cut(balance, longest):
        dataset = sequences(
            prepared, history=["item"], longest=longest, balance=balance, options=ReadOptions(shuffle=False)
        )
        return [len(batch["task"]) for batch in dataset]

    stated = [
        len(e["task"])
        for e in groups(prepared, balance=Balance(6, longest=2), options=ReadOptions(shuffle=False))
    ]
    assert cut(Balance(6), 2) == cut(Balance(6, longest=2), 4) == stated
    assert cut(Balance(6), None) != stated


class Clicks(tf.keras.Model):
    """The least that trains on sequences: a label is told from a sum over the user's history."""

    def __init__(self):
        super().__init__()
        self.slope = tf.Variable([0.0, 0.0])
        self.seen = tf.keras.metrics.Sum(name="samples")

    def train_step(self, batch):
        labels, times = batch["labels"]["rating"], tf.cast(batch["history"]["timestamp"], tf.float32)
        history = tf.repeat(tf.reduce_sum(times, axis=1), labels.row_lengths()) / 1000
        with tf.GradientTape() as tape:
            told = self.slope[0] * history + self.slope[1]
            loss = tf.math.divide_no_nan(
                tf.reduce_sum((labels.values - told) ** 2), tf.cast(tf.size(labels.values), tf.float32)
            )
        self.optimizer.minimize(loss, [self.slope], tape=tape)
        self.seen.update_state(tf.size(labels.values))
        return {"loss": loss, "samples": self.seen.result()}


def test_fit_trains_on_every_exposure(prepared):
    model = Clicks()
    model.compile(tf.keras.optimizers.Adam(0.3))
    data = sequences(prepared, **reading(sequences_per_batch=6, **PARTS))
    history = model.fit(data, epochs=6, verbose=0).history
    exposures = sum(len(row) for batch in data for row in plain(batch["labels"]["rating"]))
    assert history["samples"] == [exposures] * 6
    assert history["loss"][-1] < history["loss"][0]


def test_users_who_were_shown_nothing_are_left_out_and_counted_or_kept(tmp_path):
    path = write_folder(tmp_path, [4, 1, 4])  # timestamps 0 to 8
    stats, rule = ReaderStats(), After("timestamp", 7)
    options = {"history": ["timestamp"], "targets": ["timestamp"], "exposed": rule, "shuffle": False}
    [batch] = sequences(path, **reading(**options, stats=stats))
    assert plain(batch["task"]) == [2]
    assert plain(batch["history"]["timestamp"]) == [[5, 6]]
    counts = stats.read()
    assert (counts.records, counts.groups, counts.skipped, counts.bad) == (4, 1, 5, {"unexposed": 2})
    assert counts.messages[1] == (
        f"{path}: task 1, batch 1 has 0 exposed rows of 1 by {rule}; such users are left out"
    )
    [batch] = sequences(path, **reading(**options, unexposed="keep", stats=stats))
    assert plain(batch["task"]) == [0, 1, 2]
    assert plain(batch["targets"]["timestamp"]) == [[], [], [7, 8]]
    assert stats.read().groups == 4


def test_leave_last_out_is_one_argument(tmp_path):
    path = write_folder(tmp_path, [4, 2, 3])  # timestamps 0 to 8
    stats = ReaderStats()

    def read(part):
        [batch] = sequences(
            path,
            history=["timestamp"],
            targets=["timestamp"],
            exposed=part,
            options=ReadOptions(shuffle=False, stats=stats),
        )
        return [plain(batch[name]) for name in ("task",)] + [
            plain(batch[name]["timestamp"]) for name in ("history", "targets")
        ]

    assert read("train") == [[0, 1, 2], [[0, 1], [4, 5], [6]], [[], [], []]]
    assert read("validation") == [[0, 2], [[0, 1], [6]], [[2], [7]]]
    assert stats.read().bad == {"unexposed": 1}
    assert read("test") == [[0, 2], [[0, 1, 2], [6, 7]], [[3], [8]]]
    with pytest.raises(
        ConfigError, match="exposed must be one of train, validation, test, or a rule, got 'tset'"
    ):
        read("tset")


def test_times_cut_training_validation_and_test(tmp_path):
    path = write_folder(tmp_path, [4, 2, 3])  # timestamps 0 to 8

    def read(rule):
        [batch] = sequences(
            path,
            history=["timestamp"],
            targets=["timestamp"],
            exposed=rule,
            options=ReadOptions(shuffle=False),
        )
        return [plain(batch["task"]), *(plain(batch[name]["timestamp"]) for name in ("history", "targets"))]

    assert read(After("timestamp", 3, until=3)) == [[0, 1, 2], [[0, 1, 2], [], []], [[], [], []]]
    assert read(After("timestamp", 3, until=5)) == [[0, 1], [[0, 1, 2], []], [[3], [4]]]
    assert read(After("timestamp", 5)) == [[1, 2], [[4], []], [[5], [6, 7, 8]]]
    with pytest.raises(ConfigError, match="until must be at least the time, got 2"):
        read(After("timestamp", 3, until=2))


def test_a_batch_may_hold_no_sequence(prepared):
    [batch] = sequences(
        prepared, **reading(sequences_per_batch=20, **{**PARTS, "exposed": After("rating", 6)})
    )
    assert plain(batch["task"]) == plain(batch["history"]["item"]) == plain(batch["labels"]["rating"]) == []
    assert plain(batch["contexts"]["weights"]) == []


def test_bad_data_is_that_of_groups(prepared, tmp_path):
    shutil.copytree(prepared.parent, tmp_path / "data")
    path = tmp_path / "data" / prepared.name
    shard = sorted(path.parent.glob("*.tfrecord"))[1]
    content = bytearray(shard.read_bytes())
    content[record_offsets(shard)[1] + 12] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"tfrecord at byte \d+: "), data_errors():
        order(sequences(path, **reading(**PARTS)))
    stats = ReaderStats()
    assert len(order(sequences(path, **reading(**PARTS, on_bad="skip", stats=stats)))) == 19
    assert stats.read().bad == {"data_crc": 1}


def test_columns_are_known_before_anything_is_read(prepared):
    with pytest.raises(ConfigError, match="no column 'itme'; it has item, task, genre, rating, weights"):
        sequences(prepared, history=["itme"])
    with pytest.raises(ConfigError, match="sequences_per_batch must be a whole number from 1 on, got 0"):
        sequences(prepared, history=["item"], sequences_per_batch=0)


def test_a_log_becomes_a_sequence_a_user(tmp_path):
    """Events and exposures of two users, in any order, from a table to a batch."""
    lines = ["user,ts,item,age,shown,click"]
    log = [(7, 3, 30, 41, 1, 1), (5, 9, 90, 23, 0, 0), (7, 1, 10, 41, 0, 1), (5, 2, 20, 23, 1, 0)]
    log += [(7, 5, 50, 41, 1, 0), (5, 4, 40, 23, 0, 1)]
    (tmp_path / "log.csv").write_text("\n".join([*lines, *(",".join(map(str, row)) for row in log)]))
    prepare(tmp_path / "log.csv", tmp_path / "data", spec=TableSpec("user", time="ts", label="click"))
    dataset = sequences(
        tmp_path / "data" / "train",
        contexts=["user", "age"],
        history=["item", "ts"],
        targets=["item"],
        labels=["click"],
        exposed=Flag("shown"),
        options=ReadOptions(shuffle=False),
    )
    [batch] = [plain(batch) for batch in dataset]
    columns = [*batch["contexts"].values(), *batch["history"].values(), batch["targets"]["item"]]
    assert sorted(zip(*columns, batch["labels"]["click"], strict=True)) == [
        (5, 23, [40, 90], [4, 9], [20], [0.0]),
        (7, 41, [10], [1], [30, 50], [1.0, 0.0]),
    ]
