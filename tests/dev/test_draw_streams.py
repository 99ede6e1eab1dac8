"""The picture of a GPU's streams: what a profile holds, and that it is drawn."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "dev"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    return __import__("draw_streams")


def write_profile(folder: Path) -> None:
    """Write a profile: a step's product, and beside it keys, rows of a later batch and a copy."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/device:GPU:0")
    plane.stat_metadata[1].name = "tf_op"
    events = [
        ("Stream #13(Compute)", "gemm", "dense/MatMul:MatMul", 0, 5),
        ("Stream #18(Compute)", "Claim", "GmetaUnique:GmetaUnique", 1, 1),
        ("Stream #18(Compute)", "FindRows", "GmetaHashTablePeek:GmetaHashTablePeek", 2, 1),
        ("Stream #14(MemcpyH2D)", "MemcpyH2D", "", 0, 1),
    ]
    lines = {stream: plane.lines.add(name=stream, timestamp_ns=7) for stream, *_ in events}
    for number, (stream, kernel, op, begin, length) in enumerate(events):
        plane.event_metadata[number].name = kernel
        milli = 10**9  # in picoseconds
        event = lines[stream].events.add(
            metadata_id=number, offset_ps=begin * milli, duration_ps=length * milli
        )
        event.stats.add(metadata_id=1, str_value=op)
    folder.mkdir()
    (folder / "host.xplane.pb").write_bytes(space.SerializeToString())


def test_events_have_streams_times_and_kinds(tool: ModuleType, tmp_path: Path) -> None:
    write_profile(tmp_path / "profile")
    events = tool.read(tmp_path)
    names = tool.stream_names(events)
    assert {(names[each.stream], each.kind, round(each.begin), round(each.length)) for each in events} == {
        ("compute stream", "dense layers and the rest", 0, 5),
        ("side stream", "keys", 1, 1),
        ("side stream", "rows of a later batch", 2, 1),
        ("copies to the GPU", "copy", 0, 1),
    }
    tool.draw(events, 0, 5, tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_a_profile_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no profile of a GPU"):
        tool.read(tmp_path)
