"""Records that are compressed: a reference reads them, so does the reader, and damage is noticed."""

import os
import re
import struct
import subprocess
import sys

import numpy as np
import pytest

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.group_index import GroupIndex
from gmeta.core.schema import Column, Schema
from gmeta.io import ReadOptions, groups
from gmeta.io.reader_stats import ReaderStats, data_errors
from gmeta.preprocess.shards.record_writer import RecordWriter
from support.grouped_data import SCHEMA, grouped_columns, write_file, write_folder
from support.reference import reader as reference
from support.reference.reader import crc32c, decode, records

SIZES = [40, 3, 1, 25]


def masked(data):
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_what_was_compressed_is_what_was_written(tmp_path):
    plain = write_file(tmp_path / "plain", SIZES, layout="columnar")
    packed = write_file(tmp_path / "packed", SIZES, layout="columnar", codec="zstd")
    assert packed.bytes < plain.bytes
    payloads = [payload for _, payload in records(tmp_path / "packed")]
    flags = [struct.unpack_from("<H", payload, 6)[0] for payload in payloads]
    assert flags == [1] * len(SIZES)
    for payload, (_, other) in zip(payloads, records(tmp_path / "plain"), strict=True):
        mine, expected = decode(payload), decode(other)
        assert (mine.key, mine.rows, mine.widths) == (expected.key, expected.rows, expected.widths)
        assert mine.columns.keys() == expected.columns.keys()
        for name, values in expected.columns.items():
            found = mine.columns[name]
            for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (found, values)), strict=True):
                np.testing.assert_array_equal(a, b)
    index = GroupIndex.load(tmp_path / "packed").groups
    assert [crc32c(payload) for payload in payloads] == index["crc"].tolist()


def test_what_isnt_made_smaller_stays_as_it_is(tmp_path):
    schema = Schema((Column("t"), Column("b"), Column("x")), task="t", batch="b")
    with RecordWriter(tmp_path / "a", schema, layout="columnar", codec="zstd") as writer:
        writer.write({"t": [3], "b": [0], "x": [0x123456789ABCDEF]})
    [(_, payload)] = records(tmp_path / "a")
    assert struct.unpack_from("<H", payload, 6) == (0,)
    assert decode(payload).columns["x"].tolist() == [0x123456789ABCDEF]


def test_readers_read_it_like_any_other(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    packed = write_folder(tmp_path / "a", SIZES, [9, 9], codec="zstd")
    plain = write_folder(tmp_path / "b", SIZES, [9, 9])
    files = [sorted(map(str, path.parent.glob("*.tfrecord"))) for path in (packed, plain)]
    expected = reference.groups(files[1], SCHEMA, "columnar")
    assert reference.groups(files[0], SCHEMA, "columnar") == expected
    for a, b in zip(
        groups(packed, options=ReadOptions(seed=4)), groups(plain, options=ReadOptions(seed=4)), strict=True
    ):
        np.testing.assert_array_equal(a["task"], b["task"])
        np.testing.assert_array_equal(a["columns"]["item"], b["columns"]["item"])
        np.testing.assert_array_equal(a["columns"]["genre"].values, b["columns"]["genre"].values)


@pytest.mark.parametrize("what", ["frame", "size", "huge"])
def test_a_frame_that_is_damaged_under_a_sound_checksum(tmp_path, what):
    path = write_folder(tmp_path, SIZES, codec="zstd")
    (file,) = path.parent.glob("*.tfrecord")
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    if what == "frame":
        data[12 + 70] ^= 255
    else:
        (size,) = struct.unpack_from("<Q", data, 12 + 40)
        struct.pack_into("<Q", data, 12 + 40, size + 1 if what == "size" else 1 << 60)
    data[12 + length : 16 + length] = masked(bytes(data[12 : 12 + length]))
    file.write_bytes(data)
    says = "the record isn't a group in the columnar layout"
    with pytest.raises(DataError, match=says) as raised, data_errors():
        list(groups(path))
    assert (raised.value.path, raised.value.offset) == (str(file), 0)
    stats = ReaderStats()
    left = [
        task
        for e in groups(path, options=ReadOptions(on_bad="skip", stats=stats))
        for task in e["task"].numpy().tolist()
    ]
    assert sorted(left) == [1, 2, 3]
    assert (stats.read().bad, stats.read().skipped) == ({"not_columnar": 1}, 40)


def test_codecs_that_make_no_sense(tmp_path):
    with pytest.raises(ConfigError, match="codec must be one of zstd, or None, got 'lz4'"):
        RecordWriter(tmp_path / "a", SCHEMA, layout="columnar", codec="lz4")
    with pytest.raises(ConfigError, match="compresses records of the layout columnar, not of example"):
        RecordWriter(tmp_path / "a", SCHEMA, codec="zstd")
    assert list(tmp_path.iterdir()) == []


def test_equal_rows_make_equal_files(tmp_path):
    for name in ("a", "b"):
        with RecordWriter(tmp_path / name, SCHEMA, layout="columnar", codec="zstd") as writer:
            writer.write(grouped_columns(SIZES))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


WITH_HOROVOD = """
import sys
import gmeta, tensorflow, horovod.tensorflow  # Horovod makes the symbols of TensorFlow's library everybody's
from gmeta.io import ReadOptions, groups
options = ReadOptions(shuffle=False)
print([e["task"].numpy().tolist() for e in groups(sys.argv[1], groups_per_element=1, options=options)])
"""


@pytest.mark.shown_by("test_readers_read_it_like_any_other")
def test_zstd_keeps_to_itself_beside_tensorflows(tmp_path):
    """TensorFlow has a zstd in it, of another version; mixed with it, decompressing ends the process."""
    pytest.importorskip("horovod")
    path = write_folder(tmp_path, SIZES, codec="zstd")
    log = tmp_path / "log"
    run = subprocess.run(
        [sys.executable, "-c", WITH_HOROVOD, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(log), "LD_BIND_NOW": "1"},
    )
    assert run.stdout == "[[0], [1], [2], [3]]\n", run.stderr
    said = "".join(path.read_text(errors="replace") for path in tmp_path.glob("log.*"))
    bound = re.findall(r"binding file (\S+) \[0\] to (\S+) \[0\]: normal symbol `ZSTD_", said)
    own = [(file, to) for file, to in bound if re.search(r"/libzstd\.so", file)]
    assert own
    assert [pair for pair in own if pair[0] != pair[1]] == []
