"""The index of a shard's groups: it comes back as it was, and whatever is wrong with it is named."""

import struct
import zlib

import numpy as np
import pytest

from gmeta.core.errors import DataError
from gmeta.core.group_index import ENTRY, GroupIndex, index_path


def three_groups():
    groups = np.zeros(3, ENTRY)
    groups["offset"] = [0, 100, 250]
    groups["rows"] = [5, 1, 7]
    groups["first_row"] = [0, 5, 6]
    groups["task"] = [-3, -3, 2**63 - 1]
    groups["batch_id"] = [0, 1, 0]
    groups["crc"] = [1, 0, 2**32 - 1]
    return groups


@pytest.fixture
def shard(tmp_path):
    """A shard of 400 bytes with an index of three groups."""
    path = tmp_path / "warm.tfrecord"
    path.write_bytes(bytes(400))
    index_path(path).write_bytes(GroupIndex("columnar", 400, three_groups()).to_bytes())
    return path


def reseal(body):
    return bytes(body) + struct.pack("<I", zlib.crc32(bytes(body)))


def test_it_comes_back_as_it_was(shard):
    index = GroupIndex.load(shard)
    assert (index.layout, index.shard_bytes, index.rows) == ("columnar", 400, 13)
    assert index.groups.tolist() == three_groups().tolist()
    assert index_path(shard).name == "warm.tfrecord.gidx"
    assert index_path(shard).stat().st_size == 32 + 3 * 48 + 4


def test_the_bytes_are_those_of_the_description():
    groups = three_groups()[1:2]
    groups["offset"] = groups["first_row"] = 0
    body = struct.pack("<4sIIIQQ", b"GIDX", 1, 0, 0, 1, 77) + struct.pack("<qqqqqII", 0, 0, 1, -3, 1, 0, 0)
    assert GroupIndex("example", 77, groups).to_bytes() == reseal(body)


def test_an_empty_shard_has_an_empty_index(tmp_path):
    (tmp_path / "x").touch()
    index_path(tmp_path / "x").write_bytes(GroupIndex("example", 0, np.zeros(0, ENTRY)).to_bytes())
    assert len(GroupIndex.load(tmp_path / "x").groups) == 0


def test_every_cut_and_any_flipped_bit_is_noticed(shard):
    path = index_path(shard)
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(DataError, match=f"^{path} at byte {cut}: .*cut"):
            GroupIndex.load(shard)
    for bit in range(0, 8 * len(data), 5):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(DataError, match=f"^{path} at byte \\d+: "):
            GroupIndex.load(shard)
    path.write_bytes(data + b"\0")
    with pytest.raises(DataError, match=f"at byte {len(data)}: .* appended to"):
        GroupIndex.load(shard)


@pytest.mark.parametrize(
    ("offset", "form", "value", "at", "says"),
    [
        (0, "4s", b"GCOL", 0, "not an index of groups"),
        (4, "I", 2, 4, "version 2 isn't known here, 1 is; read it with a newer gmeta"),
        (8, "I", 2, 8, "layout 2, 0 isn't known here"),
        (12, "I", 1, 8, "layout 1, 1 isn't known here"),
        (32, "q", 1, 32, "group 0: the first one doesn't begin at byte 0"),
        (80, "q", 250, 80, "group 1: it ends where it begins or before"),
        (80, "q", 0, 32, "group 0: it ends where it begins or before"),
        (128, "q", 400, 128, "group 2: it ends where it begins or before"),
        (80 + 8, "q", 4, 80, "group 1: first_row isn't the sum of the rows before"),
        (80 + 16, "q", 0, 80, "group 1: it has no rows"),
        (80 + 32, "q", 0, 80, "group 1: its task and batch_id are those of a group before"),
    ],
)
def test_contradictions_are_named(shard, offset, form, value, at, says):
    path = index_path(shard)
    body = bytearray(path.read_bytes()[:-4])
    struct.pack_into(f"<{form}", body, offset, value)
    path.write_bytes(reseal(body))
    with pytest.raises(DataError, match=f"^{path} at byte {at}: {says}"):
        GroupIndex.load(shard)


def test_groups_are_missing_from_a_shard_with_bytes(shard):
    index_path(shard).write_bytes(GroupIndex("example", 400, np.zeros(0, ENTRY)).to_bytes())
    with pytest.raises(DataError, match="at byte 32: group 0: there is none, in a shard of 400 bytes"):
        GroupIndex.load(shard)


def test_an_index_of_another_shard_is_refused(shard):
    shard.write_bytes(bytes(399))
    with pytest.raises(DataError, match=r"the index is of a shard of 400 bytes, warm.tfrecord has 399"):
        GroupIndex.load(shard)
    assert GroupIndex.load(shard, check_shard=False).shard_bytes == 400


def test_what_isnt_there_is_named(shard):
    shard.unlink()
    with pytest.raises(DataError, match=r"^\S*/warm.tfrecord: can't be read: No such file"):
        GroupIndex.load(shard)
    index_path(shard).unlink()
    with pytest.raises(DataError, match=r"^\S*/warm.tfrecord.gidx: can't be read: No such file"):
        GroupIndex.load(shard)
