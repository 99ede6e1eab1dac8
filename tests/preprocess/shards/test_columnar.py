"""The columnar layout and the index of groups: a reference reads what was written, and the index agrees."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.group_index import GroupIndex, index_path
from gmeta.core.schema import Column, Schema
from gmeta.preprocess.shards import record_encoder, record_writer
from gmeta.preprocess.shards import record_writer as shard_file
from gmeta.preprocess.shards.record_writer import RecordWriter
from support.drawn_batches import INT64, as_columns, rows_of, schemas
from support.grouped_data import SCHEMA, grouped_columns
from support.reference.reader import crc32c, decode, records
from support.reference.reader import groups as groups_of_examples

# Numbers of every width, and those on either side of the seams between widths.
INTS = st.one_of(
    INT64, *(st.integers(-(2**bits) - 1, 2**bits) for bits in (7, 15, 31)), st.sampled_from([-1, 0, 1])
)


@st.composite
def grouped_tables(draw):
    """A schema, and groups of its rows, each with a key of its own."""
    schema = draw(schemas())
    keys = draw(st.lists(st.tuples(INTS, INTS), max_size=4, unique=True))
    groups = []
    for key in keys:
        rows = draw(rows_of(schema, draw(st.integers(1, 5)), INTS))
        for row in rows:
            for name, value in zip(("task", "batch_id"), key, strict=True):
                row[[column.name for column in schema].index(name)] = [value]
        groups.append(rows)
    return schema, groups


def narrowest(values):
    return next(
        width
        for width in (1, 2, 4, 8)
        if all(-(1 << 8 * width - 1) <= value < 1 << 8 * width - 1 for value in values)
    )


def part(columns, start, stop):
    """Rows start to stop - 1 of some columns."""
    out = {}
    for name, values in columns.items():
        if isinstance(values, tuple):
            flat, splits = values
            out[name] = (flat[splits[start] : splits[stop]], splits[start : stop + 1] - splits[start])
        else:
            out[name] = values[start:stop]
    return out


def walk(path, layout, schema):
    """What an index of a file must say, from the file alone."""
    entries, first_row = [], 0
    if layout == "columnar":
        for offset, payload in records(path):
            group = decode(payload)
            entries.append((offset, first_row, group.rows, *group.key, crc32c(payload)))
            first_row += group.rows
        return entries
    stored = list(records(path))
    for rows in groups_of_examples([str(path)], schema):
        key = rows[0][schema.task][0], rows[0][schema.batch][0]
        mine = stored[first_row : first_row + len(rows)]
        joined = b"".join(payload for _, payload in mine)
        entries.append((mine[0][0], first_row, len(rows), *key, crc32c(joined)))
        first_row += len(rows)
    return entries


@given(grouped_tables())
def test_the_reference_reads_what_was_written(tmp_path_factory, table):
    schema, groups = table
    path = tmp_path_factory.mktemp("groups") / "x"
    with RecordWriter(path, schema, layout="columnar") as writer:
        writer.write(as_columns(schema, [row for group in groups for row in group]))
    assert writer.rows == sum(map(len, groups))
    assert writer.bytes == path.stat().st_size
    read = [decode(payload) for _, payload in records(path)]
    assert len(read) == len(groups)
    for group, rows in zip(read, groups, strict=True):
        expected = as_columns(schema, rows)
        assert group.key_names == ("task", "batch_id")
        assert group.key == (expected.pop("task")[0], expected.pop("batch_id")[0])
        assert group.rows == len(rows)
        assert list(group.columns) == sorted(expected, key=str.encode)
        for name, values in expected.items():
            is_list = schema[name].is_list
            for ours, theirs in zip(
                group.columns[name] if is_list else [group.columns[name]],
                values if is_list else [values],
                strict=True,
            ):
                np.testing.assert_array_equal(ours, theirs, strict=True)
            if schema[name].dtype == "int64":
                assert group.widths[name] == narrowest((values[0] if is_list else values).tolist())


@pytest.mark.parametrize("layout", ["example", "columnar"])
@given(table=grouped_tables(), data=st.data())
@pytest.mark.shown_by(case="columnar")
def test_the_index_agrees_with_a_walk_of_the_file(tmp_path_factory, layout, table, data):
    schema, groups = table
    path = tmp_path_factory.mktemp("groups") / "x"
    rows = [row for group in groups for row in group]
    columns = as_columns(schema, rows)
    # In the columnar layout a call brings whole groups; otherwise it may end anywhere.
    ends = np.cumsum([len(group) for group in groups]).tolist() if layout == "columnar" else range(len(rows))
    cuts = sorted(data.draw(st.sets(st.sampled_from(list(ends))) if len(ends) else st.just(set())))
    with RecordWriter(path, schema, layout=layout, index=True) as writer:
        for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            writer.write(part(columns, start, stop))
    index = GroupIndex.load(path)
    assert (index.layout, index.shard_bytes, index.rows) == (layout, path.stat().st_size, len(rows))
    assert index.groups.tolist() == walk(path, layout, schema)


@pytest.mark.parametrize("layout", ["example", "columnar"])
def test_blocks_leave_no_seam(tmp_path, monkeypatch, layout):
    columns = grouped_columns([7, 40, 1, 3])
    for name, block in (("one", 4 << 20), ("many", 300)):
        monkeypatch.setattr(record_writer, "_BLOCK", block)
        with RecordWriter(tmp_path / name, SCHEMA, layout=layout, index=True) as writer:
            writer.write(columns)
    for suffix in ("", ".gidx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"many{suffix}").read_bytes()
    assert GroupIndex.load(tmp_path / "one").groups["rows"].tolist() == [7, 40, 1, 3]


def test_the_key_alone_is_a_group_too(tmp_path):
    schema = Schema((Column("task"), Column("batch_id")))
    with RecordWriter(tmp_path / "x", schema, layout="columnar") as writer:
        writer.write({"task": [1] * 9 + [2], "batch_id": [0] * 10})
    read = [decode(payload) for _, payload in records(tmp_path / "x")]
    assert [(group.key, group.rows) for group in read] == [((1, 0), 9), ((2, 0), 1)]


def test_other_columns_may_be_the_key(tmp_path):
    schema = Schema((Column("x"), Column("day"), Column("user")), task="user", batch="day")
    with RecordWriter(tmp_path / "x", schema, layout="columnar") as writer:
        writer.write({"user": [1, 1, 2], "day": [5, 5, 5], "x": [7, 8, 9]})
    read = [decode(payload) for _, payload in records(tmp_path / "x")]
    assert [(g.key_names, g.key, g.columns["x"].tolist()) for g in read] == [
        (("user", "day"), (1, 5), [7, 8]),
        (("user", "day"), (2, 5), [9]),
    ]


@pytest.mark.parametrize("layout", ["example", "columnar"])
def test_a_group_that_begins_again_is_refused(tmp_path, layout):
    schema, whole = Schema((Column("task"), Column("batch_id"))), layout == "columnar"
    with RecordWriter(tmp_path / "x", schema, layout=layout, index=True) as writer:
        writer.write({"task": [1, 1, 2], "batch_id": [0, 1, 0]})
        before = writer.bytes
        for task, batch, row, key in (
            ([3, 1], [0, 0], 1, "task 1, batch 0"),
            ([3, 3, 4, 3], [0, 0, 0, 0], 3, "task 3, batch 0"),
            # In the example layout the last group may go on.
            ([2, 2, 1], [0, 1, 1], *((0, "task 2, batch 0") if whole else (2, "task 1, batch 1"))),
        ):
            with pytest.raises(
                DataError, match=f"^{tmp_path}/x: row {row} begins the group of {key} again; sort the rows"
            ):
                writer.write({"task": task, "batch_id": batch})
            assert writer.bytes == before
        writer.write({"task": [3, 3], "batch_id": [0, 0]})  # what was refused wasn't noted
    assert GroupIndex.load(tmp_path / "x").groups["task"].tolist() == [1, 1, 2, 3]


def test_without_an_index_example_rows_may_stand_in_any_order(tmp_path):
    schema = Schema((Column("task"), Column("batch_id")))
    with RecordWriter(tmp_path / "x", schema) as writer:
        writer.write({"task": [1, 2, 1], "batch_id": [0, 0, 0]})
    assert len(list(records(tmp_path / "x"))) == 3
    assert not index_path(tmp_path / "x").exists()


def test_an_unknown_layout_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="layout must be one of example, columnar, got 'rows'"):
        RecordWriter(tmp_path / "x", SCHEMA, layout="rows")


def test_no_index_stands_beside_another_shard(tmp_path):
    with RecordWriter(tmp_path / "x", SCHEMA, layout="columnar", index=True) as writer:
        writer.write(grouped_columns([3]))
    with pytest.raises(KeyError), RecordWriter(tmp_path / "x", SCHEMA, index=True) as writer:
        raise KeyError
    assert GroupIndex.load(tmp_path / "x").rows == 3
    with RecordWriter(tmp_path / "x", SCHEMA, layout="columnar") as writer:
        writer.write(grouped_columns([4]))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_index_that_cant_be_written_leaves_the_shard_as_it_was(tmp_path, monkeypatch):
    with RecordWriter(tmp_path / "x", SCHEMA, layout="columnar", index=True) as writer:
        writer.write(grouped_columns([3]))

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(shard_file, "write_atomically", full)
    with (
        pytest.raises(OSError, match="No space left"),
        RecordWriter(tmp_path / "x", SCHEMA, layout="columnar", index=True) as writer,
    ):
        writer.write(grouped_columns([4]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.gidx"]
    assert GroupIndex.load(tmp_path / "x").rows == 3


@pytest.mark.parametrize(("layout", "sizes"), [("columnar", [1, 2, 400, 3]), ("example", [1])])
def test_a_record_that_readers_would_refuse_is_refused(tmp_path, monkeypatch, layout, sizes):
    columns = grouped_columns(sizes)
    if layout == "example":
        columns["genre"] = (np.zeros(9000, np.int64), np.array([0, 9000]))
    monkeypatch.setattr(record_encoder, "MAX_RECORD", 8000)
    monkeypatch.setattr(record_encoder, "_HEADER", 1000)
    with RecordWriter(tmp_path / "x", SCHEMA, layout=layout, index=True) as writer:
        what = (
            "task 2, batch 2: its record of 400 rows"
            if layout == "columnar"
            else "task 0, batch 0: its record of 1 rows"
        )
        with pytest.raises(
            DataError, match=f"{what} would have [0-9,]+ bytes, readers take 8,000; cut tasks into"
        ):
            writer.write(columns)
        assert writer.bytes == 0
        writer.write(grouped_columns([1, 2, 30]))  # a bound would refuse the last one, its bytes don't
    assert GroupIndex.load(tmp_path / "x").groups["rows"].tolist() == [1, 2, 30]


def test_the_limit_of_a_record_is_that_of_the_reader():
    header = Path(record_encoder.__file__).parents[3] / "io/records/columnar.h"
    assert f"kMaxBody = uint64_t{{{record_encoder.MAX_RECORD >> 20}}} << 20" in header.read_text()
