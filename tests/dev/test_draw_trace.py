"""The picture of a trace: which events it has, and that it is drawn."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "dev"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    return __import__("draw_trace")


def trace() -> dict[str, Any]:
    def event(rank: int, lane: str, name: str, batch: int, begin: float, end: float) -> dict[str, Any]:
        where = {"ph": "X", "pid": rank, "tid": 0, "cat": lane, "name": name}
        return {**where, "ts": begin, "dur": end - begin, "args": {"batch": batch}}

    steps = [event(r, "step", "forward", b, 1e4 * b, 1e4 * (b + 1)) for b in range(4) for r in (0, 1)]
    keys = [event(1, "exchange", "items/keys", 2, 15e3, 25e3), event(0, "exchange", "wait", 2, 25e3, 28e3)]
    read = [event(0, "ahead: data", "next batch", 2, 10e3, 12e3)]
    return {"traceEvents": [{"ph": "M", "pid": 0, "name": "process_name"}, *steps, *keys, *read]}


def test_events_are_cut_to_the_steps(tool: ModuleType) -> None:
    found = {(e["pid"], e["name"]): (e["ts"], e["dur"]) for e in tool.chosen_events(trace(), 1, 1)}
    assert found == {
        (0, "forward"): (0, 10),
        (1, "forward"): (0, 10),
        (1, "items/keys"): (5, 5),
        (0, "next batch"): (0, 2),
    }


def test_a_picture_is_drawn(tool: ModuleType, tmp_path: Path) -> None:
    tool.draw(tool.chosen_events(trace(), 1, 2), tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_steps_that_the_trace_lacks_are_named(tool: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"no step of the batches 7 to 8; it has \[0, 1, 2, 3\]"):
        tool.chosen_events(trace(), 7, 2)
