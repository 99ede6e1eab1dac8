"""A step's moments and their parts: by hand, and that they always add up."""

import doctest
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.callbacks import step_trace
from gmeta.callbacks.step_clock import PARTS, Mark, Span, Step, StepSeconds
from gmeta.callbacks.step_trace import exchanges_of, offsets_of, parts_of, seconds_of, slices_of
from gmeta.core.step import SpanKind

MARKS = (Mark("data", 1), Mark("forward", 5), Mark("backward", 8), Mark("update", 12))


def span(kind, begin, end, name="", **about):
    return Span(SpanKind(kind, name or kind, **about), begin, end)


def step_of(*spans, marks=MARKS, end=12.0):
    return Step(0, 0.0, end, marks, spans)


def parts(*steps):
    """Each rank's slices, as (part, seconds)."""
    found = exchanges_of(steps)
    return [
        [(part, end - begin) for part, begin, end in slices_of(step, own)]
        for step, own in zip(steps, found, strict=True)
    ]


def test_a_step_without_spans_is_its_marks():
    assert parts(step_of()) == [[("data", 1), ("forward", 4), ("backward", 3), ("update", 4)]]


def test_waiting_is_until_the_slowest_rank_is_there():
    early, late = (step_of(span("exchange", begin, 10.0)) for begin in (8.5, 9.5))
    first, second = parts(early, late)
    assert first[3:] == [("update", 0.5), ("wait", 1), ("exchange", 0.5), ("update", 2)]
    assert second[3:] == [("update", 1.5), ("exchange", 0.5), ("update", 2)]
    times = seconds_of([early, late])
    assert (times.seconds["wait"], times.seconds["exchange"], times.waits) == (1, 1, (1, 0))


def test_ranks_that_take_no_part_are_not_waited_for():
    of_two = [span("exchange", 8.5 + rank / 2, 10.0, ranks=(0, 1)) for rank in (0, 1)]
    first, *_ = parts(*map(step_of, of_two), step_of(span("exchange", 9.9, 10.0, ranks=(2,))))
    assert ("wait", 0.5) in first


def test_an_exchange_within_a_lookup_is_the_exchange():
    looked_up = step_of(span("lookup", 1.0, 4.0), span("exchange", 2.0, 3.0))
    assert parts(looked_up)[0][:5] == [
        ("data", 1),
        ("lookup", 1),
        ("exchange", 1),
        ("lookup", 1),
        ("forward", 1),
    ]


def test_what_is_hidden_behind_computing_costs_nothing():
    hidden = span("exchange", 2.0, 6.0, beside=True)
    ahead = span("exchange", 8.0, 11.0, beside=True, batches_ahead=1)
    assert parts(step_of(hidden, ahead)) == parts(step_of())


def test_an_exchange_of_the_batch_that_lasts_into_the_update_costs_what_is_not_hidden():
    beside = span("exchange", 6.0, 9.0, beside=True)
    assert parts(step_of(beside))[0] == [
        ("data", 1),
        ("forward", 4),
        ("backward", 3),
        ("exchange", 1),
        ("update", 3),
    ]


def test_an_exchange_that_stands_behind_another_is_in_what_that_does():
    """Rank 1 is late with keys of the next batch, so rank 0's gradients stand behind them."""

    def rank(keys):
        keys = span("exchange", keys, 10.0, "keys", lane="tcp", beside=True, batches_ahead=1)
        return step_of(keys, span("exchange", 8.0, 11.0, "gradients", lane="tcp"))

    first, _ = parts(rank(2.0), rank(9.0))
    assert first[3:] == [("wait", 1), ("exchange", 2), ("update", 1)]


def test_a_step_that_ends_late_shows_what_it_fetched():
    fetched = [
        span("data", 0.0, 14.0, beside=True, batches_ahead=1),
        span("lookup", 14.0, 17.0, beside=True, batches_ahead=1),
        span("exchange", 15.0, 16.0, beside=True, batches_ahead=1),
    ]
    (found,) = parts(step_of(*fetched, end=18.0))
    assert found[4:] == [("data", 2), ("lookup", 1), ("exchange", 1), ("lookup", 1), ("update", 1)]


def test_a_step_that_tells_of_no_parts():
    assert parts(step_of(marks=(Mark("data", 1),))) == [[("data", 1), ("step", 11)]]
    assert parts_of(step_of(span("exchange", 2, 3), marks=(Mark("data", 1),))) == [
        "data",
        "exchange",
        "wait",
        "step",
    ]


times = st.floats(0, 20).map(lambda time: round(time, 3))
kinds = st.builds(
    SpanKind,
    kind=st.sampled_from(["data", "lookup", "exchange"]),
    name=st.sampled_from(["a", "b"]),
    lane=st.sampled_from(["tcp", "horovod"]),
    batches_ahead=st.integers(0, 2),
    beside=st.booleans(),
)


@st.composite
def drawn_steps(draw):
    begin, *marked, end = sorted(draw(st.lists(times, min_size=4, max_size=8)))
    names = ["data", *draw(st.lists(st.sampled_from(PARTS[4:9]), min_size=len(marked) - 1, max_size=9))]
    spans = [Span(what, *sorted(draw(st.tuples(times, times)))) for what in draw(st.lists(kinds, max_size=6))]
    return Step(3, begin, end, tuple(map(Mark, names, marked)), tuple(spans))


@given(st.lists(drawn_steps(), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_parts_add_up_to_the_step_and_slices_follow_each_other(ranks):
    total = seconds_of(ranks)
    assert total.total == pytest.approx(sum(step.end - step.begin for step in ranks), abs=1e-9)
    assert min(total.seconds.values()) >= 0
    for step, exchanges in zip(ranks, exchanges_of(ranks), strict=True):
        found = slices_of(step, exchanges)
        assert all(one.end == other.begin for one, other in pairwise(found))
        assert {each.part for each in found} <= set(parts_of(step))
        assert all(each.begin <= each.all_there <= each.span.end for each in exchanges) or not exchanges
        assert Step.from_list(step.to_list()) == step


def test_readings_add_up():
    first, second = StepSeconds({"data": 1.0}, 2, (1.0,)), StepSeconds({"data": 2.0, "inner": 1.0}, 3, (1, 2))
    both = first + second
    assert both == StepSeconds({"data": 3.0, "inner": 1.0}, 5, (2.0, 2))


def test_clocks_of_machines_are_made_to_agree():
    """Rank 1's clock is 5 s ahead; a sum is over for nobody before both have entered it."""
    rounds = [[[0.0, 0.3], [1.0, 1.1]], [[5.1, 5.35], [6.02, 6.12]]]
    found = offsets_of(rounds)
    assert found.ahead[0] == 0
    assert abs(found.ahead[1] - 5) <= found.error < 0.11
    assert step_of().earlier(5.0).end == 7.0


def test_clocks_that_may_agree_do():
    assert offsets_of([[[0.0, 0.3]], [[0.1, 0.2]]]).ahead == (0.0, 0.0)
    assert offsets_of([[]]) == step_trace.Offsets((0.0,), 0.0)


def test_examples():
    assert doctest.testmod(step_trace).failed == 0
