"""`gmeta.io.late` with users whose events were deleted, and with histories of a window."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta import io
from gmeta.core.errors import ConfigError
from gmeta.io.reader_stats import ReaderStats
from gmeta.preprocess import HistorySpec, PrepareConfig, TableSpec, prepare
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.rebuild import scrub_history
from support.grouped_data import reading
from support.reference.history import draw_day, history_of, write_day

DAYS = [draw_day(day, 300, users=12, day=day) for day in range(1, 4)]
DELETED = (3, 8)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A store that deletes two users after the second day and has events of them again, and exposures."""
    folder, drawn = tmp_path_factory.mktemp("deleted"), np.random.default_rng(1)
    for number, events in enumerate(DAYS):
        day = write_day(folder / f"{number}.parquet", events)
        append_history(folder / "store", day, HistorySpec("user", "ts"))
        if number == 1:
            scrub_history(folder / "store", DELETED)  # generation 3
    rows = []
    for number in range(60):
        user, time, version = (int(drawn.integers(*ends)) for ends in ((0, 14), (500, 4000), (1, 5)))
        tail = sorted(int(drawn.integers(0, time)) for _ in range(int(drawn.integers(3))))
        rows.append((user, time, number, 1.0, version, tail, [-1] * len(tail)))
    names = ["user", "ts", "item", "click", "version", "tail_ts", "tail_item"]
    table = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    pq.write_table(table, folder / "shown.parquet")
    spec = TableSpec("user", time="ts", label="click")
    prepare(folder / "shown.parquet", folder / "examples", PrepareConfig(batch_rows=1), spec=spec)
    return folder, {row[2]: row for row in rows}


def late(folder, **arguments):
    given_ = {"history": ["item", "ts"], "targets": ["item"]} | arguments
    return io.late(folder / "examples" / "train", io.HistoryStore(folder / "store"), **reading(**given_))


def histories(dataset):
    """The events of each example, (time, item), by its number."""
    found = {}
    for batch in dataset:
        items, times = (batch["history"][name].to_list() for name in ("item", "ts"))
        for number, own in enumerate(batch["targets"]["item"].to_list()):
            found[own[0]] = list(zip(times[number], items[number], strict=True))
    return found


@pytest.mark.parametrize("generation", ["version", None])
def test_examples_of_deleted_users_are_left_out_and_counted(shown, generation):
    folder, rows = shown
    stats = ReaderStats()
    found = histories(late(folder, generation=generation, stats=stats))
    gone = {
        number for number, row in rows.items() if row[0] in DELETED and (generation is None or row[4] < 3)
    }
    assert 0 < len(gone) < len(rows)
    assert set(found) == set(rows) - gone
    counts = stats.read()
    assert counts.bad == {"deleted": len(gone)}
    assert counts.skipped == len(gone)
    assert all("were deleted" in message for message in counts.messages)
    came_back = [n for n in found if rows[n][0] in DELETED and rows[n][4] == 4 and rows[n][1] > 3500]
    assert all(len(found[number]) > 0 for number in came_back)
    assert histories(late(folder, generation=generation)) == found


def test_a_window_of_1500_bounds_the_latest_7_events(shown):
    check_window(shown, window=1500, longest=7, with_tail=True)


@settings(max_examples=10)
@given(window=st.integers(1, 4000), longest=st.none() | st.integers(1, 20), with_tail=st.booleans())
@pytest.mark.shown_by("test_a_window_of_1500_bounds_the_latest_7_events")
def test_a_window_bounds_a_history_and_its_tail(shown, window, longest, with_tail):
    check_window(shown, window, longest, with_tail)


def check_window(shown, window, longest, with_tail):
    folder, rows = shown
    tail = {"item": "tail_item", "ts": "tail_ts"} if with_tail else None
    found = histories(late(folder, generation="version", window=window, longest=longest, tail=tail))
    births = [DAYS[0], DAYS[1], [], DAYS[2]]
    for number, own in found.items():
        user, time, _, _, version, tail_times, _ = rows[number]
        known = [[] if user in DELETED and born < 3 else day for born, day in enumerate(births, 1)]
        events = history_of(known, user, start=time - window, until=time, generation=version)
        expected = [(event.ts, event.item) for event in events]
        if with_tail:
            expected += [(when, -1) for when in tail_times if when >= time - window]
            expected.sort(key=lambda event: event[0])
        assert own == expected[max(0, len(expected) - (longest or len(expected))) :]


def test_a_window_of_nothing_is_refused(shown):
    with pytest.raises(ConfigError, match="late: window"):
        late(shown[0], window=0)
