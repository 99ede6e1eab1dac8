"""Exposures and late outcomes, against a join of one row at a time in plain Python."""

from __future__ import annotations

import math
import resource
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.io.streams.late_labels import LabelJoin
from support.reference.label_join import Event, ReferenceJoin, keeps_negative

COUNTERS = [
    *("exposures", "outcomes", "positives", "negatives", "thinned", "corrections", "late_exposures"),
    *("repeated_exposures", "repeated_outcomes", "unmatched_outcomes"),
]
EVERY = {0, 1, 2}


def key_columns(form: str, names: Sequence[int]) -> dict[str, Any]:
    """The key columns of rows by their names."""
    texts = pa.array([f"key {name}" + "-" * (name % 11) for name in names], pa.string())
    numbers = pa.array(names, pa.int64())
    return {
        "number": {"id": numbers},
        "text": {"id": texts},
        "dictionary": {"id": texts.dictionary_encode()},
        "both": {"user": numbers.cast(pa.int32()), "request": texts.cast(pa.large_string())},
    }[form]


def push(join: LabelJoin, events: Sequence[Event], form: str = "number") -> list[dict[str, Any]]:
    sides = [[event for event in events if event.side == side] for side in (0, 1)]
    shown = {
        "row": pa.array([event.row for event in sides[0]], pa.int64()),
        "words": pa.array([f"row {event.row}" for event in sides[0]], pa.string()),
        **key_columns(form, [event.name for event in sides[0]]),
    }
    came = {
        **key_columns(form, [event.name for event in sides[1]]),
        "value": pa.array([event.label for event in sides[1]], pa.float64()),
    }
    examples = join.push(
        np.array([event.key for event in events], np.int64),
        np.array([event.time for event in events], np.int64),
        np.array([event.side for event in events], np.uint8),
        np.array([event.part for event in events], np.int32),
        pa.record_batch(shown),
        pa.record_batch(came),
    )
    return examples.to_pylist()


def triples(examples: Sequence[dict[str, Any]]) -> list[tuple[int, float, float]]:
    assert all(example["words"] == f"row {example['row']}" for example in examples)
    return [(example["row"], example["label"], example["weight"]) for example in examples]


@st.composite
def logs(draw: st.DrawFn, names: int = 12, most: int = 60) -> list[Event]:
    """Rows whose key grows, of which many are late, and many repeated."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 1, 1, 2, 5, 30]),  # how much the key grows
                st.sampled_from([0, 0, 0, 1, 2, 5, 9, 40]),  # how late the row is
                st.integers(0, 1),
                st.integers(0, names - 1),
                st.sampled_from([1.0, 0.5, 3.0]),
            ),
            max_size=most,
        )
    )
    keys = np.cumsum([row[0] for row in rows]).tolist()
    return [
        Event(key, key - late, side, name % 3, name, number, label)
        for number, (key, (_, late, side, name, label)) in enumerate(zip(keys, rows, strict=True))
    ]


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "within": draw(st.sampled_from([1, 4, 10])),
        "lateness": draw(st.sampled_from([0, 3])),
        "corrections": draw(st.sampled_from([0, 5, 20])),
        "negatives": draw(st.sampled_from([1.0, 0.5])),
    }


def pair(given: dict[str, Any], form: str, **more: Any) -> tuple[LabelJoin, ReferenceJoin]:
    key = ["user", "request"] if form == "both" else ["id"]
    join = LabelJoin(key=key, outcome="value", **given, **more)

    def keeps(name: Any) -> bool:
        values = [column.to_pylist()[0] for column in key_columns(form, [name]).values()]
        return keeps_negative(values, given["negatives"])

    spans = (given["within"], given["lateness"], given["corrections"])
    return join, ReferenceJoin(*spans, keeps)


@given(
    logs(),
    settings(),
    st.sampled_from(["number", "text", "dictionary", "both"]),
    st.sets(st.integers(0, 60)),
    st.sets(st.integers(0, 60)),
    st.sampled_from([0, 200, 1 << 20]),
)
def test_any_cut_gives_what_row_by_row_gives(
    log: list[Event], given: dict[str, Any], form: str, cuts: set[int], saves: set[int], memory: int
) -> None:
    join, reference = pair(given, form, memory=memory)
    for event in log:
        reference.process(event)
    found, counts = [], dict.fromkeys(COUNTERS, 0)
    edges = sorted({0, len(log)} | {cut for cut in cuts | saves if cut < len(log)})
    for begin, end in pairwise(edges):
        if begin in saves:
            counts = {name: counts[name] + getattr(join.stats, name) for name in counts}
            state = join.state()
            join = pair(given, form, memory=memory)[0]
            join.restore([state], lambda parts: np.ones(len(parts), np.bool_))
        found += triples(push(join, log[begin:end], form))
        assert join.stats.memory_bytes <= memory
    assert join.stats.open == sum(exposure["status"] == "open" for exposure in reference.known.values())
    assert (join.stats.known, join.stats.waiting) == (len(reference.known), len(reference.waiting))
    assert found == reference.written
    reference.advance(math.inf)
    assert found + triples(join.finish().to_pylist()) == reference.written
    assert {name: counts[name] + getattr(join.stats, name) for name in counts} == {
        name: reference.counts[name] for name in counts
    }
    assert join.stats.known == join.stats.waiting == join.stats.memory_bytes == join.stats.spilled_bytes == 0


@given(logs(), settings(), st.integers(0, 60), st.integers(0, 60), st.sampled_from([0, 1 << 20]))
def test_states_are_split_over_ranks_and_joined_again(
    log: list[Event], given: dict[str, Any], one: int, other: int, memory: int
) -> None:
    first, second = sorted((min(one, len(log)), min(other, len(log))))
    ranks = [{0, 2}, {1}]
    joins = [pair(given, "number", memory=memory)]
    stages = [(log[:first], [EVERY]), (log[first:second], ranks), (log[second:], [EVERY])]
    for number, (events, owners) in enumerate(stages):
        if number:
            states = [join.state() for join, _ in joins]
            olds = [reference for _, reference in joins]
            joins = [pair(given, "number", memory=memory) for _ in owners]
            for (join, reference), own in zip(joins, owners, strict=True):
                join.restore(states, lambda parts, own=own: np.isin(parts, list(own)))
                reference.select(olds, own)
        for (join, reference), own in zip(joins, owners, strict=True):
            mine = [event for event in events if event.part in own]
            for event in mine:
                reference.process(event)
            assert triples(push(join, mine)) == reference.written
            reference.written.clear()
    ((join, reference),) = joins
    reference.advance(math.inf)
    assert triples(join.finish().to_pylist()) == reference.written


@given(logs(names=40), settings(), st.sets(st.integers(0, 60)))
def test_weights_add_up_to_the_truth(log: list[Event], given: dict[str, Any], cuts: set[int]) -> None:
    given = {**given, "negatives": 1.0}
    seen: set[int] = set()
    log = [
        replace(event, label=1.0)
        for event in log
        if event.side or not (event.name in seen or seen.add(event.name))  # an exposure a key
    ]
    join, _ = pair(given, "text")
    edges = sorted({0, len(log)} | {cut for cut in cuts if cut < len(log)})
    pieces = [push(join, log[begin:end], "text") for begin, end in pairwise(edges)]
    total: dict[tuple[int, float], float] = defaultdict(float)
    for row, label, weight in triples([*chain(*pieces), *join.finish().to_pylist()]):
        total[row, label] += weight
    longest = given["within"] + given["corrections"]
    known = longest + given["lateness"]
    truth = {}
    for place, shown in enumerate(log):
        if shown.side == 0:
            positive = any(
                shown.time <= came.time < shown.time + longest
                and (came.key <= shown.time + known if at > place else shown.key <= came.key + known)
                for at, came in enumerate(log)
                if came.side and came.name == shown.name
            )
            truth[shown.row, float(positive)] = 1.0
    assert {what: weight for what, weight in total.items() if weight} == truth


def test_a_correction_moves_the_gradient_of_the_negative_to_that_of_the_positive() -> None:
    join = LabelJoin(key=["id"], within=10, corrections=50)
    shown, came = Event(0, 0, 0, 0, 7, 0), Event(40, 9, 1, 0, 7, 1)
    assert triples(push(join, [shown])) == []
    late = triples(push(join, [came]))
    assert late == [(0, 0.0, 1.0), (0, 0.0, -1.0), (0, 1.0, 1.0)]
    for logit in (-3.0, 0.0, 2.0):
        p = 1 / (1 + math.exp(-logit))
        loss = sum(-w * math.log(p if label else 1 - p) for _, label, w in late[1:])
        assert loss == pytest.approx(-logit)
        assert sum(w * (p - label) for _, label, w in late[1:]) == pytest.approx(-1)
        assert sum(w * (p - label) for _, label, w in late) == pytest.approx(p - 1)


def test_the_offset_of_sampled_negatives_calibrates() -> None:
    rng, count, share = np.random.default_rng(0), 60_000, 0.1
    x = rng.normal(size=count)
    clicked = np.flatnonzero(rng.random(count) < 1 / (1 + np.exp(2.5 - 1.5 * x)))
    join = LabelJoin(key=["id"], within=10**6, negatives=share)
    times = np.arange(count + len(clicked))
    sides = (times >= count).astype(np.uint8)
    exposures = pa.record_batch({"id": np.arange(count), "x": x})
    outcomes = pa.record_batch({"id": clicked})
    parts = np.zeros(len(times), np.int32)
    found = [join.push(times, times, sides, parts, exposures, outcomes), join.finish()]
    rows = pa.Table.from_batches(found)
    x, y, offset = (rows[name].to_numpy() for name in ("x", "label", "log_odds"))
    assert join.stats.thinned == pytest.approx((1 - share) * (count - len(clicked)), rel=0.01)
    assert rows.num_rows == count - join.stats.thinned
    assert set(offset.tolist()) == {np.float32(-math.log(share))}
    features, weights = np.stack([np.ones_like(x), x], 1), np.array([math.log(share), 0])
    for _ in range(20):  # Newton's method on the log loss of z + log_odds
        p = 1 / (1 + np.exp(-(features @ weights + offset)))
        hessian = features.T @ (features * (p * (1 - p))[:, None])
        weights += np.linalg.solve(hessian, features.T @ (y - p))
    np.testing.assert_allclose(weights, [-2.5, 1.5], atol=0.06)


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("gmeta-exposures-")


def test_files_have_no_names_and_go_with_their_rows(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    join = LabelJoin(key=["id"], within=100, memory=1000, spill=folder)
    before = maps()
    for name in range(0, 2000, 50):
        push(join, [Event(name // 50, name // 50, 0, 0, each, each) for each in range(name, name + 50)])
    stats = join.stats
    assert stats.memory_bytes <= 1000 < 50_000 < stats.spilled_bytes
    assert maps() > before
    assert list(folder.iterdir()) == []
    log = [Event(41, 41, 1, 0, name, 0) for name in range(0, 2000, 3)]
    assert triples(push(join, log)) == [(name, 1.0, 1.0) for name in range(0, 2000, 3)]
    assert join.stats.spilled_bytes <= stats.spilled_bytes
    assert len(join.finish()) == 2000 - len(log)
    assert join.stats.spilled_bytes == 0
    assert maps() == before


def test_a_row_that_stays_keeps_only_itself(tmp_path: Path) -> None:
    join = LabelJoin(key=["id"], within=10, memory=4000, spill=tmp_path)
    for step in range(100):  # a wrong clock: one row a step closes in the far future
        rows = [Event(100 * step, 100 * step, 0, 0, 50 * step + i, 50 * step + i) for i in range(49)]
        push(join, [*rows, Event(100 * step, 10**9, 0, 0, 50 * step + 49, 50 * step + 49)])
    one = pa.record_batch({"row": [1], "words": ["row 4999"], "id": [1]}).nbytes
    assert join.stats.open == 149
    assert join.stats.memory_bytes + join.stats.spilled_bytes <= 5 * 149 * one


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    join = LabelJoin(key=["id"], within=100, memory=100_000, spill=tmp_path)
    log = [Event(0, 0, 0, 0, name, name) for name in range(10_000)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))  # as a disk with this much space
    try:
        with pytest.raises(GmetaError, match=f"can't write {tmp_path}/gmeta-exposures-.*: .*File too large"):
            push(join, log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_extreme_times_do_not_overflow() -> None:
    join = LabelJoin(key=["id"], within=2**61, lateness=2**61, corrections=2**61)
    low, high = -(2**63), 2**63 - 1
    assert push(join, [Event(low, low, 0, 0, 1, 0), Event(low, low, 0, 0, 2, 1)]) == []
    last = low + 2**62  # both are open until the key exceeds it
    assert triples(push(join, [Event(last, low + 5, 1, 0, 1, 0)])) == [(0, 1.0, 1.0)]
    assert triples(push(join, [Event(last + 1, low, 1, 0, 1, 0)])) == [(1, 0.0, 1.0)]
    ends = [Event(high, high, 0, 0, 3, 2), Event(high, high, 1, 0, 3, 0), Event(high, low, 1, 0, 3, 0)]
    assert triples(push(join, ends)) == [(2, 1.0, 1.0)]
    assert (join.stats.repeated_outcomes, join.stats.unmatched_outcomes, join.stats.known) == (1, 1, 1)
    assert len(join.finish()) == 0


BAD = [
    ({"id": pa.array([None], pa.int64())}, {"id": [1]}, "row 0 of the exposures"),
    ({"id": [1]}, {"id": pa.array([None], pa.int64())}, "row 0 of the outcomes"),
    ({"id": [1]}, {"id": [1], "value": [math.nan]}, "row 0 of the outcomes"),
    ({"id": [1]}, {"id": [1], "value": pa.array([None], pa.float32())}, "row 0 of the outcomes"),
]


def one_each(join: LabelJoin, exposures: Any, outcomes: Any, key: int = 0) -> pa.RecordBatch:
    keys, sides = np.full(2, key), np.array([0, 1], np.uint8)
    batches = pa.record_batch(exposures), pa.record_batch(outcomes)
    return join.push(keys, keys, sides, np.zeros(2, np.int32), *batches)


@pytest.mark.parametrize(("exposures", "outcomes", "message"), BAD)
def test_bad_rows(exposures: Any, outcomes: Any, message: str) -> None:
    outcome = "value" if "value" in outcomes else None
    with pytest.raises(DataError, match=message):
        one_each(LabelJoin(key=["id"], within=1, outcome=outcome), exposures, outcomes)
    join = LabelJoin(key=["id"], within=1, outcome=outcome, on_bad="skip")
    assert one_each(join, exposures, outcomes).num_rows == 0
    assert (join.stats.bad, join.stats.exposures + join.stats.outcomes) == (1, 1)


@pytest.mark.parametrize(
    ("exposures", "outcomes", "message"),
    [
        ({"id": [1], "label": [1]}, {"id": [1]}, "have a column 'label' already: .* choose another label="),
        ({"id": [1], "weight": [1]}, {"id": [1]}, "have a column 'weight' already: .* rename it"),
        ({"no": [1]}, {"id": [1]}, r"the exposures have no column 'id'; they have \['no'\]"),
        ({"id": [1]}, {"id": ["1"]}, "of the outcomes are .'texts'., but were .'integers'. before"),
        ({"id": [1.0]}, {"id": [1.0]}, "key 'id' must be integers or texts, it is double"),
        ({"id": [1]}, {"id": [1], "value": ["a"]}, "'value' must be numbers, it is string"),
    ],
)
def test_columns_that_do_not_fit(exposures: Any, outcomes: Any, message: str) -> None:
    outcome = "value" if "value" in outcomes else None
    with pytest.raises(ConfigError, match=message):
        one_each(LabelJoin(key=["id"], within=1, outcome=outcome), exposures, outcomes)


def test_logs_that_do_not_continue_are_refused() -> None:
    join = LabelJoin(key=["id"], within=10)
    one_each(join, {"id": [1]}, {"id": [1]}, key=7)
    with pytest.raises(DataError, match="row 0 has 6 after 7"):
        one_each(join, {"id": [2]}, {"id": [2]}, key=6)
    with pytest.raises(DataError, match="exposures have the columns id int64, x int64; earlier ones had id"):
        one_each(join, {"id": [2], "x": [2]}, {"id": [2]}, key=8)
    with pytest.raises(DataError, match="there are 2 exposures and 1 outcomes"):
        one_each(join, {"id": [2, 3]}, {"id": [2]}, key=8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "id"},
        {"key": []},
        {"key": ["id", "id"]},
        {"within": 0},
        {"lateness": -1},
        {"corrections": 2**62},
        {"negatives": 0},
        {"negatives": 1.5},
        {"label": "weight"},
        {"memory": -1},
        {"on_bad": "drop"},
    ],
)
def test_arguments_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LabelJoin(**{"key": ["id"], "within": 10, **wrong})


def test_states_that_cannot_be_restored() -> None:
    def everything(parts: Any) -> Any:
        return np.ones(len(parts), np.bool_)

    join = LabelJoin(key=["id"], within=10)
    push(join, [Event(0, 0, 0, 0, name, name) for name in range(5)] + [Event(0, 0, 1, 0, 9, 9)])
    state = join.state()
    for end in range(0, len(state), 7):
        with pytest.raises(DataError, match="aren't a whole state"):
            LabelJoin(key=["id"], within=10).restore([state[:end]], everything)
    with pytest.raises(ConfigError, match="saved with within=10, not 11"):
        LabelJoin(key=["id"], within=11).restore([state], everything)
    with pytest.raises(ConfigError, match="keep must return a bool for each"):
        join.restore([state], lambda parts: parts)
    join.restore([LabelJoin(key=["id"], within=10).state(), state], everything)
    assert (join.stats.known, join.stats.waiting) == (5, 1)
