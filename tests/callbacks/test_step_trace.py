"""The trace of measured steps: what viewers need of it, and its bounds."""

import json
from itertools import groupby, pairwise

from gmeta.callbacks import step_trace
from gmeta.callbacks.step_clock import Mark, Span, Step
from gmeta.callbacks.step_trace import Offsets, StepTrace
from gmeta.core.step import SpanKind

MARKS = (Mark("data", 1), Mark("forward", 5), Mark("backward", 8), Mark("update", 12))
SPANS = (
    Span(SpanKind("lookup", "items", batches_ahead=1, beside=True), 1, 6),
    Span(SpanKind("lookup", "users", batches_ahead=1, beside=True), 2, 4),
    Span(SpanKind("exchange", "keys", "tcp", batches_ahead=1, beside=True), 3, 4),
    Span(SpanKind("exchange", "gradients", "tcp"), 8, 10),
    Span(SpanKind("data", "next batch", batches_ahead=2, beside=True), 0, 3),
)


def step(number, late=0.0):
    return Step(number, 20.0 * number, 20.0 * number + 12, MARKS, SPANS).earlier(-20.0 * number - late)


def written(tmp_path, steps):
    trace = StepTrace(tmp_path / "trace.json")
    trace.add(steps, Offsets((0.0, 0.0), 2e-4))
    trace.write()
    return json.loads((tmp_path / "trace.json").read_text())


def test_a_trace_is_what_viewers_read(tmp_path):
    told = written(tmp_path, [[step(0), step(0, late=1.0)]])
    assert told["otherData"] == {"clocks agree within, in us": 200.0}
    drawn = [event for event in told["traceEvents"] if event["ph"] == "X"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in told["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert {name for (rank, _), name in names.items() if rank == 1} == {
        "step",
        "exchange",
        "ahead: data",
        "ahead: lookup",
    }
    assert list(names.values()).count("ahead: lookup") == 4  # two lines on each rank, as they overlap
    assert all(event["dur"] >= 0 for event in drawn)
    assert {event["pid"] for event in drawn} == {0, 1}
    first = [(e["name"], e["ts"], e["dur"]) for e in drawn if e["pid"] == 0 and e["cat"] == "step"]
    assert first[:3] == [("data", 0.0, 1e6), ("forward", 1e6, 4e6), ("backward", 5e6, 3e6)]
    sent = [event for event in drawn if event["pid"] == 0 and event["cat"] == "exchange"]
    keys, waits = ([event for event in sent if event["name"] == name] for name in ("keys", "wait"))
    assert (keys[0]["args"], keys[0]["dur"]) == ({"batch": 1, "lane": "tcp"}, 0.0)
    assert [(each["args"]["for"], each["dur"]) for each in waits] == [("keys", 1e6), ("gradients", 1e6)]


def test_events_of_a_thread_do_not_overlap(tmp_path):
    told = written(tmp_path, [[step(number)] for number in range(3)])
    drawn = [event for event in told["traceEvents"] if event["ph"] == "X"]
    for _, line in groupby(drawn, key=lambda event: (event["pid"], event["tid"])):
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-3 for one, other in pairwise(line))


def test_only_the_latest_steps_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(step_trace, "MOST_EVENTS", 100)
    told = written(tmp_path, [[step(number)] for number in range(40)])
    kept = {event["args"]["batch"] for event in told["traceEvents"] if event.get("cat") == "step"}
    assert max(kept) == 39
    assert 1 <= len(kept) <= 4
    assert len(told["traceEvents"]) <= 100


def test_a_training_without_measured_steps_writes_nothing(tmp_path):
    written_to = tmp_path / "trace.json"
    StepTrace(written_to).write()
    assert not written_to.exists()
