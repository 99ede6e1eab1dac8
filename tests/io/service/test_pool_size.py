"""When workers are added and sent away."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.io.service.worker_pool import Load, workers_to_add

shares = st.floats(0, 1)


@pytest.mark.parametrize(
    ("load", "added"),
    [
        (Load(waited=0.06, busy=1.0, ready=2), 1),
        (Load(waited=0.04, busy=1.0, ready=2), 0),
        (Load(waited=1.0, busy=1.0, ready=2, starting=1), 0),  # that one may be enough
        (Load(waited=1.0, busy=1.0, ready=4), 0),  # there are no more
        (Load(waited=0.0, busy=0.3, ready=2), -1),
        (Load(waited=0.0, busy=0.5, ready=2), 0),  # the other one would be busy all the time
        (Load(waited=0.0, busy=0.5, ready=4), -1),
        (Load(waited=0.06, busy=0.1, ready=4), 0),  # training waits, whatever they say
        (Load(waited=0.0, busy=0.0, ready=1), 0),  # there is always one
        (Load(waited=0.0, busy=0.0, ready=0), 1),
        (Load(waited=0.0, busy=1.0, ready=6), -2),
    ],
)
def test_decisions(load, added):
    assert workers_to_add(load, least=1, most=4) == added


@given(
    waited=shares, busy=shares, ready=st.integers(0, 5), starting=st.integers(0, 2), least=st.integers(1, 5)
)
def test_limits_are_kept_and_decisions_settle(waited, busy, ready, starting, least):
    added = workers_to_add(Load(waited, busy, ready, starting), least=least, most=5)
    there = ready + starting + added
    assert least <= there <= 5
    if added == -1 and ready + starting <= 5:  # the work of one that was sent away doesn't call it back
        left = Load(waited, min(1.0, busy * ready / (ready - 1)), ready - 1)
        assert workers_to_add(left, least=least, most=5) <= 0
