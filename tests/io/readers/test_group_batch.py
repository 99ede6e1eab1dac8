"""The native GroupBatch dataset against its definition in plain Python, over sound files and bad ones."""

import collections
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.schema import Column, Schema
from gmeta.io.reader_stats import ReaderStats, as_data_error, data_errors
from gmeta.io.readers.group_dataset import group_batch
from gmeta.preprocess.shards.record_writer import RecordWriter
from support.grouped_data import SCHEMA, grouped_columns, record_offsets, write_file
from support.reference import reader as reference


def as_groups(dataset):
    """A dataset's elements as lists of groups of rows, the form of the reference."""
    elements = []
    for element in dataset:
        splits = element["row_splits"].numpy()
        columns = {name: as_lists(values) for name, values in element["columns"].items()}
        groups = []
        for i, (task, batch) in enumerate(
            zip(element["task"].numpy(), element["batch_id"].numpy(), strict=True)
        ):
            groups.append(
                [
                    {"task": [task], "batch_id": [batch], **{name: v[row] for name, v in columns.items()}}
                    for row in range(splits[i], splits[i + 1])
                ]
            )
        assert splits[0] == 0
        assert all(len(values) == splits[-1] for values in columns.values())
        elements.append(groups)
    return elements


def as_lists(values):
    if isinstance(values, tf.RaggedTensor):
        return values.to_list()
    return [[value] for value in values.numpy().tolist()]


def read(files, **options):
    return [group for element in as_groups(group_batch(files, SCHEMA, **options)) for group in element]


def chunks(items, size):
    return [items[i : i + size] for i in range(0, len(items), size)]


def tasks_of(files, **options):
    return [group[0]["task"][0] for group in read(files, **options)]


@pytest.fixture
def files(tmp_path):
    """Two files of five groups: tasks 0 to 2 with 3, 1 and 4 rows, and 3 and 4 with 2 and 5."""
    write_file(tmp_path / "a", [3, 1, 4])
    write_file(tmp_path / "b", [2, 5], first_task=3)
    return [str(tmp_path / "a"), str(tmp_path / "b")]


@given(
    sizes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=6), min_size=1, max_size=3),
    per_element=st.integers(1, 5),
    buffer=st.integers(0, 8),
    seed=st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000)),
)
def test_it_reads_what_the_reference_reads(tmp_path_factory, sizes, per_element, buffer, seed):
    folder, first_task, paths = tmp_path_factory.mktemp("shards"), 0, []
    for number, shard in enumerate(sizes):
        write_file(folder / str(number), shard, first_task=first_task)
        first_task += len(shard)
        paths.append(str(folder / str(number)))
    stats = ReaderStats()
    dataset = group_batch(
        paths,
        SCHEMA,
        groups_per_element=per_element,
        shuffle_buffer=buffer,
        seed=tf.constant(seed, tf.int64),
        stats=stats,
    )
    if buffer:
        expected = reference.shuffle(reference.groups(reference.permute(paths, seed), SCHEMA), buffer, seed)
    else:
        expected = reference.groups(paths, SCHEMA)
    assert as_groups(dataset) == chunks(expected, per_element)
    counts = stats.read()
    assert (counts.groups, counts.records) == (first_task, sum(map(sum, sizes)))
    assert (counts.skipped, counts.bad, counts.messages) == (0, {}, ())


def test_records_of_other_writers_are_read(tmp_path):
    schema = Schema((Column("task"), Column("batch_id"), Column("x", "float32", is_list=True)))
    with tf.io.TFRecordWriter(str(tmp_path / "a")) as writer:
        for i in range(3):
            record = tf.train.Example()
            record.features.feature["unknown"].bytes_list.value.append(b"passed over")
            record.features.feature["x"].float_list.value.extend([0.5] * i)
            record.features.feature["x"].float_list.SetInParent()
            record.features.feature["task"].int64_list.value.append(7)
            record.features.feature["batch_id"].int64_list.value.append(i // 2)
            writer.write(record.SerializeToString())
    [element] = group_batch(tmp_path / "a", schema, groups_per_element=4)
    assert element["task"].numpy().tolist() == [7, 7]
    assert element["batch_id"].numpy().tolist() == [0, 1]
    assert element["row_splits"].numpy().tolist() == [0, 2, 3]
    assert element["columns"]["x"].to_list() == [[], [0.5], [0.5, 0.5]]


def test_one_seed_gives_one_order(files):
    for seed in (0, 7, -1):
        assert tasks_of(files, shuffle_buffer=9, seed=seed) == tasks_of(files, shuffle_buffer=9, seed=seed)
    dataset = group_batch(files, SCHEMA, shuffle_buffer=9)  # drawn once, when the dataset is made
    assert as_groups(dataset) == as_groups(dataset)


def test_orders_are_uniform(tmp_path):
    write_file(tmp_path / "a", [1, 1, 1])
    seen = collections.Counter()
    seeds = tf.data.Dataset.range(1200).flat_map(
        lambda i: group_batch(
            tmp_path / "a", SCHEMA, shuffle_buffer=3, seed=tf.stack([11, i]), groups_per_element=3
        )
    )
    for element in seeds.as_numpy_iterator():
        seen[tuple(element["task"])] += 1
    assert len(seen) == 6
    assert sum((count - 200) ** 2 / 200 for count in seen.values()) < 20.5  # one in a thousand, 5 degrees


def test_a_shuffled_dataset_takes_its_options_and_transformations(files):
    dataset = group_batch(files, SCHEMA, groups_per_element=2)
    options = tf.data.Options()
    options.autotune.enabled = True
    options.experimental_optimization.map_parallelization = True
    changed = dataset.with_options(options).repeat(2).prefetch(1).skip(1).take(4)
    twice = as_groups(dataset) * 2
    assert as_groups(changed) == twice[1:5]


def test_saving_and_restoring_goes_on_where_it_was(files, tmp_path):
    def make():
        return group_batch(files, SCHEMA, shuffle_buffer=3, seed=5).prefetch(2)

    whole = as_groups(make())
    for taken in range(len(whole) + 1):
        stats, iterator = ReaderStats(), iter(make())
        for _ in range(taken):
            next(iterator)
        path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / f"ckpt{taken}"))
        fresh = iter(group_batch(files, SCHEMA, shuffle_buffer=3, seed=5, stats=stats).prefetch(2))
        tf.train.Checkpoint(iterator=fresh).read(path)
        assert as_groups(fresh) == whole[taken:]
    assert stats.read().groups == 0  # what a restored iterator reads again isn't counted again


def test_restoring_over_fewer_files_says_so(files, tmp_path):
    iterator = iter(group_batch(files, SCHEMA))
    for _ in range(5):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "ckpt"))
    fresh = iter(group_batch(files[:1], SCHEMA))
    with pytest.raises(tf.errors.DataLossError) as raised:
        tf.train.Checkpoint(iterator=fresh).read(path)
    assert "had made 5 elements, the files hold 3" in str(as_data_error(raised.value))


# What is done to file "a", which holds records 0 to 7 at `offsets`: the new bytes, where the fault is
# reported, what is said, how it is counted, how many records are skipped, and which ones are left.
def cut_in_length(data, offsets):
    return data[: offsets[7] + 5], offsets[7], "the file ends inside a record", "truncated", 0, range(7)


def cut_in_length_crc(data, offsets):
    return data[: offsets[7] + 11], offsets[7], "the file ends inside a record", "truncated", 0, range(7)


def cut_after_header(data, offsets):
    return data[: offsets[7] + 12], offsets[7], "the file ends inside a record", "truncated", 0, range(7)


def cut_in_payload(data, offsets):
    return data[: offsets[5] + 40], offsets[5], "the file ends inside a record", "truncated", 0, range(5)


def cut_in_crc(data, offsets):
    return data[:-1], offsets[7], "the file ends inside a record", "truncated", 0, range(7)


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def flip_length(data, offsets):
    says = "the record's length fails its checksum, so the rest can't be read"
    return flip(data, offsets[2]), offsets[2], says, "length_crc", 0, range(2)


def flip_length_crc(data, offsets):
    says = "the record's length fails its checksum, so the rest can't be read"
    return flip(data, offsets[2] + 9), offsets[2], says, "length_crc", 0, range(2)


def flip_payload(data, offsets):
    size = offsets[3] - offsets[2] - 16
    says = f"the record of {size} bytes fails its checksum"
    return flip(data, offsets[2] + 50), offsets[2], says, "data_crc", 1, [0, 1, 3, 4, 5, 6, 7]


def flip_payload_crc(data, offsets):
    size = offsets[1] - 16
    says = f"the record of {size} bytes fails its checksum"
    return flip(data, offsets[1] - 1), 0, says, "data_crc", 1, range(1, 8)


def replaced(data, offsets, row, payload):
    return data[: offsets[row]] + framed(payload) + data[offsets[row + 1] :]


def framed(payload):
    with tempfile.TemporaryDirectory() as folder:
        with tf.io.TFRecordWriter(f"{folder}/record") as writer:
            writer.write(payload)
        return Path(folder, "record").read_bytes()


def changed(data, offsets, row, change):
    record = tf.train.Example.FromString(data[offsets[row] + 12 : offsets[row + 1] - 4])
    change(record.features.feature)
    return replaced(data, offsets, row, record.SerializeToString())


def not_an_example(data, offsets):
    left = [0, 1, 2, 3, 5, 6, 7]
    says = "the record isn't a tf.train.Example"
    return replaced(data, offsets, 4, b"\xffhello"), offsets[4], says, "not_example", 1, left


def missing_column(data, offsets):
    bad = changed(data, offsets, 7, lambda features: features.pop("rating"))
    return bad, offsets[7], "the record has no column 'rating'", "missing_column", 1, range(7)


def empty_payload(data, offsets):
    return (
        replaced(data, offsets, 7, b""),
        offsets[7],
        "the record has no column",
        "missing_column",
        1,
        range(7),
    )


def wrong_type(data, offsets):
    bad = changed(data, offsets, 0, lambda features: features["rating"].int64_list.value.append(3))
    says = "column 'rating' holds an int64 list, the schema says float32"
    return bad, 0, says, "wrong_type", 1, range(1, 8)


def bytes_for_a_task(data, offsets):
    bad = changed(data, offsets, 0, lambda features: features["task"].bytes_list.value.append(b"user 3"))
    return bad, 0, "column 'task' holds a bytes list, the schema says int64", "wrong_type", 1, range(1, 8)


def two_values(data, offsets):
    bad = changed(data, offsets, 0, lambda features: features["item"].int64_list.value.append(3))
    return bad, 0, "column 'item' holds 2 values, the schema says one", "not_scalar", 1, range(1, 8)


def no_value(data, offsets):
    bad = changed(data, offsets, 0, lambda features: features["item"].int64_list.value.pop())
    return bad, 0, "column 'item' holds 0 values, the schema says one", "not_scalar", 1, range(1, 8)


def empty_file(data, offsets):
    return b"", 0, "the file is empty", "empty_file", 0, []


def not_contiguous(data, offsets):
    # Task 0 has records 0 to 2, task 1 has 3.
    says = "the records of task 0, batch 0 don't stand together: the group was closed before"
    return data + data[: offsets[2]], offsets[8], says, "not_contiguous", 2, range(8)


def not_a_tfrecord(data, offsets):
    says = "the record's length fails its checksum"
    return b"user,item,rating\n1,2,3\n", 0, says, "length_crc", 0, []


BAD = [
    cut_in_length,
    cut_in_length_crc,
    cut_after_header,
    cut_in_payload,
    cut_in_crc,
    flip_length,
    flip_length_crc,
    flip_payload,
    flip_payload_crc,
    not_an_example,
    missing_column,
    empty_payload,
    wrong_type,
    bytes_for_a_task,
    two_values,
    no_value,
    empty_file,
    not_contiguous,
    not_a_tfrecord,
]


@pytest.mark.parametrize("damage", BAD, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("buffer", [0, 2])
def test_bad_input_is_named_and_raised_or_skipped(files, tmp_path, damage, buffer):
    path, sound = tmp_path / "a", read(files)
    rows = [row for group in sound[:3] for row in group]
    bad, offset, says, reason, skipped, left = damage(path.read_bytes(), record_offsets(path))
    path.write_bytes(bad)
    kept = [rows[i] for i in left]
    expected = [[row for row in group if row in kept] for group in sound[:3]] + sound[3:]
    expected = [group for group in expected if group]

    with pytest.raises(DataError) as raised, data_errors():
        read(files, shuffle_buffer=buffer)
    line = str(raised.value)
    assert line.startswith(f"{path} at byte {offset}: {says}")
    assert "on_bad='skip'" in line.rsplit("; ", 1)[1]
    assert "\n" not in line
    assert (raised.value.path, raised.value.offset) == (str(path), offset)
    assert isinstance(raised.value.__cause__, (tf.errors.DataLossError, tf.errors.InvalidArgumentError))

    stats = ReaderStats()
    groups = read(files, shuffle_buffer=buffer, seed=1, on_bad="skip", stats=stats)
    assert sorted(groups, key=lambda group: group[0]["task"]) == expected
    counts = stats.read()
    assert counts.bad == {reason: 1}
    assert counts.skipped == skipped
    assert counts.records == sum(map(len, expected))
    assert counts.groups == len(expected)
    assert counts.messages == (line,)


def test_small_groups_are_bad_where_a_least_size_is_asked_for(files):
    with (
        pytest.raises(DataError, match="task 1, batch 1 has 1 rows, 2 are needed; ask for fewer"),
        data_errors(),
    ):
        read(files, min_rows=2)
    stats = ReaderStats()
    dataset = group_batch(files, SCHEMA, min_rows=3, groups_per_element=2, on_bad="skip", stats=stats)
    assert [element["task"].numpy().tolist() for element in dataset] == [[0, 2], [4]]  # full again
    counts = stats.read()
    assert (counts.bad, counts.skipped) == ({"too_small": 2}, 3)
    assert [re.search(r"task \d+", message)[0] for message in counts.messages] == ["task 1", "task 3"]


def test_a_group_over_two_files_is_bad(tmp_path):
    write_file(tmp_path / "a", [2, 3])
    write_file(tmp_path / "b", [4], first_task=1)
    with (
        pytest.raises(DataError, match=rf"^{tmp_path}/b at byte 0: .*task 1, batch 1 don't stand"),
        data_errors(),
    ):
        read([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_a_missing_file_is_never_skipped(files, tmp_path, on_bad):
    stats = ReaderStats()
    with pytest.raises(tf.errors.NotFoundError) as raised:
        read([files[0], tmp_path / "nowhere", files[1]], on_bad=on_bad, stats=stats)
    line = str(as_data_error(raised.value))
    assert line == f"{tmp_path}/nowhere: can't be opened: No such file or directory; check the path"
    assert stats.read().bad == {"open": 1}
    with pytest.raises(DataError, match=f"^{tmp_path}: can't be opened: it is a folder"), data_errors():
        read(tmp_path, on_bad=on_bad)


def test_going_on_after_an_error_loses_only_what_is_bad(files, tmp_path):
    data, offsets = (tmp_path / "a").read_bytes(), record_offsets(tmp_path / "a")
    (tmp_path / "a").write_bytes(flip(data, offsets[2] + 50))
    dataset = group_batch(files, SCHEMA, groups_per_element=2)
    skipped = as_groups(group_batch(files, SCHEMA, groups_per_element=2, on_bad="skip"))
    assert as_groups(dataset.ignore_errors()) == skipped


def test_counters_add_up_until_they_are_reset(files):
    stats = ReaderStats()
    read(files, stats=stats)
    read(files, stats=stats)
    assert stats.read().records == 30
    stats.reset()
    assert stats.read().records == 0


def test_counters_can_be_dropped_while_they_are_counted_into(files):
    stats = ReaderStats()
    iterator = iter(group_batch(files, SCHEMA, stats=stats))
    next(iterator)
    del stats
    assert len(list(iterator)) == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"groups_per_element": 0}, "groups_per_element=0"),
        ({"shuffle_buffer": -1}, "shuffle_buffer=-1"),
        ({"min_rows": 0}, "min_rows=0"),
        ({"on_bad": "ignore"}, "on_bad must be 'raise' or 'skip', got 'ignore'"),
    ],
)
def test_arguments_that_make_no_sense(files, options, says):
    with pytest.raises(ConfigError, match=says):
        group_batch(files, SCHEMA, **options)
    with pytest.raises(ConfigError, match="no files"):
        group_batch([], SCHEMA)


def test_other_errors_are_left_alone():
    with pytest.raises(tf.errors.InvalidArgumentError), data_errors():
        tf.reshape(tf.zeros(3), [2])
    assert as_data_error(ValueError("something else")) is None


def test_a_wide_record_passes_the_look_ahead(tmp_path):
    schema = Schema((Column("task"), Column("batch_id"), Column("x", is_list=True)))
    wide = np.arange(300_000)  # 900 kB, the look-ahead holds 256
    with RecordWriter(tmp_path / "a", schema) as writer:
        for task in range(3):
            writer.write({"task": [task], "batch_id": [0], "x": (wide + task, [0, len(wide)])})
    for task, element in enumerate(group_batch(tmp_path / "a", schema)):
        np.testing.assert_array_equal(element["columns"]["x"][0], wide + task)
    assert task == 2


def test_columns_of_every_dtype_keep_their_values(files):
    columns = grouped_columns([3, 1, 4])
    [element] = group_batch(files[0], SCHEMA, groups_per_element=9)
    for name in ("item", "rating", "timestamp"):
        np.testing.assert_array_equal(element["columns"][name], columns[name])
    for name in ("genre", "weights"):
        np.testing.assert_array_equal(element["columns"][name].values, columns[name][0])
        np.testing.assert_array_equal(element["columns"][name].row_splits, columns[name][1])
    assert element["columns"]["rating"].dtype == tf.float32
