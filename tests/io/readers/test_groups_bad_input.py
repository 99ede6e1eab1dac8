"""What the reader of groups says about bad data: each kind, in both layouts, raised and skipped."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import tensorflow as tf

from gmeta.core.data_manifest import Manifest, Split
from gmeta.core.errors import DataError
from gmeta.core.group_index import GroupIndex, index_path
from gmeta.core.schema import Column, Schema
from gmeta.io import ReadOptions, groups
from gmeta.io.reader_stats import ReaderStats, as_data_error, data_errors
from gmeta.io.readers.read_options import OneEpoch
from gmeta.preprocess.shards.record_writer import RecordWriter
from support.grouped_data import SCHEMA, grouped_columns, reading, write_folder

SIZES = ([3, 1, 4, 2], [2, 5, 1])  # tasks 0 to 3 and 4 to 6


# Quick: a flipped bit in each layout, and of columnar shards all else.
@pytest.fixture(
    params=["columnar", pytest.param("example", marks=pytest.mark.shown_by("test_a_flipped_bit_of_a_group"))]
)
def prepared(request, tmp_path):
    return write_folder(tmp_path, *SIZES, layout=request.param)


def shard(path, number):
    return path.parent / Manifest.load(path.parent, check_shards=False).splits["warm"].shards[number].name


def offsets(path):
    return GroupIndex.load(path).groups["offset"].tolist()


def flip(path, at, bit=4):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def tasks_of(path, **options):
    dataset = groups(path, **reading(shuffle=False, groups_per_element=2, **options))
    return [task for element in dataset for task in element["task"].numpy().tolist()]


def check(path, says, reason, left, where, skipped=None):
    """Raised: one line with file and offset. Skipped: counted, and only what is bad is missing."""
    with pytest.raises(DataError) as raised, data_errors():
        tasks_of(path)
    line = str(raised.value)
    assert line.startswith(f"{where[0]} at byte {where[1]}: {says}")
    assert line.endswith("or pass on_bad='skip' to leave it out")
    assert "\n" not in line
    assert (raised.value.path, raised.value.offset) == (str(where[0]), where[1])
    stats = ReaderStats()
    assert sorted(set(tasks_of(path, on_bad="skip", stats=stats))) == left
    counts = stats.read()
    assert set(counts.bad) == {reason}
    assert counts.messages[0] == line
    if skipped is not None:
        assert (counts.bad, counts.skipped) == ({reason: 1}, skipped)


def resized(path, number):
    """The manifest with a shard's true size, so that what is inside is read."""
    manifest = Manifest.load(path.parent, check_shards=False)
    shards = list(manifest.splits["warm"].shards)
    shards[number] = dataclasses.replace(shards[number], bytes=shard(path, number).stat().st_size)
    dataclasses.replace(manifest, splits={"warm": Split(tuple(shards))}).save(path.parent)


def test_a_flipped_bit_of_a_group(prepared):
    file, columnar = shard(prepared, 0), Manifest.load(prepared.parent).layout == "columnar"
    at = offsets(file)[1]  # of task 1, which has one row in either layout
    flip(file, at + 20)
    left = [0, 2, 3, 4, 5, 6]
    check(prepared, "the record of ", "data_crc", left, (file, at), skipped=1)
    assert columnar or len(file.read_bytes()) > 0


def test_a_length_that_fails_its_checksum_costs_its_group(prepared):
    file = shard(prepared, 0)
    at = offsets(file)[2]
    flip(file, at)
    says = "the record's length fails its checksum"
    check(prepared, says, "length_crc", [0, 1, 3, 4, 5, 6], (file, at), skipped=4)


def test_a_record_of_two_gigabytes(prepared, tmp_path):
    file = shard(prepared, 0)
    at, data = offsets(file)[2], bytearray(file.read_bytes())
    with tf.io.TFRecordWriter(str(tmp_path / "empty")) as writer:
        writer.write(b"")
    data[at : at + 8] = (2 << 30).to_bytes(8, "little")
    data[at + 8 : at + 12] = masked_crc32c(bytes(data[at : at + 8])).to_bytes(4, "little")
    file.write_bytes(data)
    says = "a record reaches beyond its group, which the index says has "
    check(prepared, says, "truncated", [0, 1, 3, 4, 5, 6], (file, at), skipped=4)


def test_a_sound_record_of_other_content(prepared):
    file = shard(prepared, 0)
    at, data = offsets(file)[2], bytearray(file.read_bytes())
    length = int.from_bytes(data[at : at + 8], "little")
    payload = b"\xff" * length
    data[at + 12 : at + 16 + length] = payload + masked_crc32c(payload).to_bytes(4, "little")
    file.write_bytes(data)
    if Manifest.load(prepared.parent).layout == "columnar":
        says = "the record isn't a group in the columnar layout"
        check(prepared, says, "not_columnar", [0, 1, 3, 4, 5, 6], (file, at), skipped=4)
    else:
        says = "the record isn't a tf.train.Example"
        check(prepared, says, "not_example", [0, 1, 2, 3, 4, 5, 6], (file, at), skipped=1)


def masked_crc32c(data):
    from support.reference.reader import crc32c

    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_a_shard_that_was_cut(prepared):
    file = shard(prepared, 1)
    at = offsets(file)[2]
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DataError, match=f"^{file}: .* bytes, the manifest says"):
        groups(prepared)
    resized(prepared, 1)
    check(prepared, "the file ends inside a record", "truncated", [0, 1, 2, 3, 4, 5], (file, at), skipped=1)


def test_an_empty_shard(prepared):
    file = shard(prepared, 1)
    file.write_bytes(b"")
    resized(prepared, 1)
    check(prepared, "the file ends inside a record", "truncated", [0, 1, 2, 3], (file, 0))


def test_a_shard_that_has_grown(prepared):
    file = shard(prepared, 1)
    file.write_bytes(file.read_bytes() + b"more")
    resized(prepared, 1)
    says = "the index is of a shard of "
    check(prepared, says, "bad_index", [0, 1, 2, 3], (index_path(file), 0))


@pytest.mark.parametrize(
    ("entry", "field", "change", "says", "reason"),
    [
        (
            1,
            "task",
            9,
            "the index says task 9, batch 1, 1 rows; there are task 1, batch 1,",
            "index_mismatch",
        ),
        (
            1,
            "rows",
            2,
            "the index says task 1, batch 1, 2 rows; there are task 1, batch 1, 1",
            "index_mismatch",
        ),
        (1, "rows", 0, "the group of task 1, batch 1 can't have 0 rows at bytes ", "bad_index"),
        (
            1,
            "offset",
            1 << 40,
            "the group of task 1, batch 1 can't have 1 rows at bytes 1099511627776",
            "bad_index",
        ),
    ],
)
def test_an_index_that_disagrees_with_its_shard(prepared, entry, field, change, says, reason):
    file = shard(prepared, 0)
    index = GroupIndex.load(file)
    at = int(index.groups["offset"][entry])
    content = index_path(file).read_bytes()
    wrong = index.groups.copy()
    wrong[field][entry] = change
    body = content[:32] + wrong.tobytes() + content[-4:]
    index_path(file).write_bytes(body)
    where = (file, at) if reason == "index_mismatch" else (index_path(file), 0)
    left = [0, 2, 3, 4, 5, 6] if field != "offset" else [2, 3, 4, 5, 6]
    if field == "offset":  # the group before now ends there too
        says = "the group of task 0, batch 0 can't have 3 rows at bytes 0 to 1099511627776"
    check(prepared, says, reason, left, where)
    with pytest.raises(DataError, match="its checksum is"):
        GroupIndex.load(file)


def test_a_shard_of_the_same_size_with_other_content(prepared, tmp_path):
    (tmp_path / "other").mkdir()
    layout = Manifest.load(prepared.parent).layout
    other = write_folder(tmp_path / "other", *SIZES, layout=layout)
    with RecordWriter(shard(other, 0), SCHEMA, layout=layout, index=True) as writer:
        writer.write(grouped_columns(SIZES[0], seed=5))
    for name in ("", ".gidx"):
        shutil.copy(f"{shard(other, 0)}{name}", f"{shard(prepared, 0)}{name}")
    resized(prepared, 0)
    file = shard(prepared, 0)
    says = "the index isn't the one that the manifest names: its checksum differs"
    check(prepared, says, "bad_index", [4, 5, 6], (index_path(file), 0))


@pytest.mark.parametrize("missing", ["", ".gidx"])
@pytest.mark.parametrize("on_bad", ["raise", "skip"])
def test_a_file_that_isnt_there_is_never_skipped(prepared, missing, on_bad):
    file = Path(f"{shard(prepared, 1)}{missing}")
    stats = ReaderStats()
    dataset = groups(prepared, options=ReadOptions(shuffle=False, on_bad=on_bad, stats=stats))
    file.unlink()
    with pytest.raises(tf.errors.NotFoundError) as raised:
        list(dataset)
    line = str(as_data_error(raised.value))
    assert line == f"{file}: can't be opened: No such file or directory; check the path"
    assert stats.read().bad == {"open": 1}
    file.mkdir()
    with pytest.raises(DataError, match=f"^{file}: can't be opened: it is a folder"), data_errors():
        list(dataset)


def test_small_groups_are_bad_where_a_least_size_is_asked_for(prepared):
    says = "task 1, batch 1 has 1 rows, 3 are needed; ask for fewer"
    with pytest.raises(DataError, match=says), data_errors():
        tasks_of(prepared, min_rows=3)
    stats = ReaderStats()
    assert tasks_of(prepared, min_rows=3, on_bad="skip", stats=stats) == [0, 2, 5]
    counts = stats.read()
    assert (counts.bad, counts.skipped) == ({"too_small": 4}, 6)
    assert [re.search(r"task \d+", message)[0] for message in counts.messages] == [
        "task 1",
        "task 3",
        "task 4",
        "task 6",
    ]


def test_counters_add_up_until_they_are_reset(prepared):
    stats = ReaderStats()
    dataset = groups(prepared, options=ReadOptions(stats=stats))
    list(dataset)
    once = stats.read().records
    list(dataset)
    assert stats.read().records == 2 * once > 0
    stats.reset()
    assert stats.read().records == 0


def test_counters_can_be_dropped_while_they_are_counted_into(prepared):
    stats = ReaderStats()
    iterator = iter(groups(prepared, groups_per_element=1, options=ReadOptions(stats=stats)))
    next(iterator)
    del stats
    assert len(list(iterator)) == 6


def test_other_errors_are_left_alone():
    with pytest.raises(tf.errors.InvalidArgumentError), data_errors():
        tf.reshape(tf.zeros(3), [2])
    assert as_data_error(ValueError("something else")) is None


@pytest.mark.parametrize(
    ("column", "says", "reason"),
    [
        (Column("colour"), "the record has no column 'colour'", "missing_column"),
        (Column("rating"), "column 'rating' holds a float list, the schema says int64", "wrong_type"),
        (Column("genre"), "column 'genre' holds ", "not_scalar"),
    ],
)
def test_a_schema_that_has_drifted(prepared, column, says, reason):
    manifest = Manifest.load(prepared.parent)
    columns = {c.name: c for c in SCHEMA} | {column.name: column}
    dataclasses.replace(manifest, schema=Schema(tuple(columns.values()))).save(prepared.parent)
    with pytest.raises(DataError, match=says) as raised, data_errors():
        tasks_of(prepared)
    assert str(raised.value).startswith(f"{shard(prepared, 0)} at byte ")
    stats = ReaderStats()
    left = tasks_of(prepared, on_bad="skip", stats=stats)
    assert set(stats.read().bad) == {reason}
    assert reason == "not_scalar" or left == []


def test_a_task_id_of_another_type(prepared):
    manifest = Manifest.load(prepared.parent)
    columns = tuple(Column("task", "int64") if c.name == "task" else c for c in SCHEMA)
    swapped = Schema(columns, task="timestamp", batch="batch_id")
    dataclasses.replace(manifest, schema=swapped).save(prepared.parent)
    with pytest.raises(DataError) as raised, data_errors():
        tasks_of(prepared)
    says = {
        "columnar": "column 'timestamp' isn't what the group was cut by, as the schema says",
        "example": "the index says task 0, batch 0, 3 rows; there are task ",
    }
    assert str(raised.value).startswith(f"{shard(prepared, 0)} at byte 0: {says[manifest.layout]}")


def test_a_group_over_two_shards(prepared):
    layout = Manifest.load(prepared.parent).layout
    file = shard(prepared, 1)
    with RecordWriter(file, SCHEMA, layout=layout, index=True) as writer:
        writer.write(grouped_columns([2, 5], first_task=3))  # task 3 is the last one of the first shard
    manifest = Manifest.load(prepared.parent, check_shards=False)
    first, second = manifest.splits["warm"].shards
    second = dataclasses.replace(
        second, groups=2, rows=7, bytes=file.stat().st_size, index=GroupIndex.load(file).checksum
    )
    dataclasses.replace(manifest, splits={"warm": Split((first, second))}).save(prepared.parent)
    says = f"the group of task 3, batch 0 was begun in the shard before, {shard(prepared, 0)}"
    check(prepared, says, "not_contiguous", [0, 1, 2, 3, 4], (file, 0), skipped=2)


def test_the_layout_of_another_manifest(prepared):
    manifest = Manifest.load(prepared.parent)
    other = "example" if manifest.layout == "columnar" else "columnar"
    dataclasses.replace(manifest, layout=other).save(prepared.parent)
    says = "the index is of a shard in another layout than the manifest says"
    check(prepared, says, "bad_index", [], (index_path(shard(prepared, 0)), 0))


def test_going_on_after_an_error_loses_only_what_is_bad(prepared):
    file = shard(prepared, 0)
    flip(file, offsets(file)[1] + 20)
    whole = groups(prepared, groups_per_element=2, start=OneEpoch(), options=ReadOptions(shuffle=False))
    gone_on = [element["task"].numpy().tolist() for element in whole.ignore_errors()]
    skipped = groups(prepared, groups_per_element=2, options=ReadOptions(shuffle=False, on_bad="skip"))
    assert gone_on == [element["task"].numpy().tolist() for element in skipped]
