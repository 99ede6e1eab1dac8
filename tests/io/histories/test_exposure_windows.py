"""Windows of exposures beside plain Python, and what a target of a window sees beside what its ranker saw."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta import io
from gmeta.core.errors import ConfigError
from gmeta.io.histories.late_reader import ExposureWindows
from gmeta.preprocess import ColumnSpec, HistorySpec, TableSpec, prepare
from gmeta.preprocess.history.append import append_history
from support.grouped_data import reading
from support.reference.history import Shown, windows_of

TAIL = {"ts": "tail_ts", "item": "tail_item"}
NIGHT = 1000
WITHIN = 120

TIMES = st.integers(-5, 60) | st.sampled_from([-(2**63), 2**63 - 2, 2**63 - 1])
EXPOSURE = st.builds(
    Shown,
    TIMES,
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(-5, 60), st.integers(0, 1)), max_size=3).map(tuple),
)


def element_of(users):
    rows = [exposure for user in users for exposure in user]
    lengths = [len(user) for user in users]
    tails = [[event[place] for event in row.tail] for place in (0, 1) for row in rows]
    ragged = tf.ragged.constant(tails, tf.int64, ragged_rank=1, row_splits_dtype=tf.int64)
    return {
        "task": tf.range(len(users), dtype=tf.int64) + 100,
        "batch_id": tf.range(len(users), dtype=tf.int64),
        "row_splits": tf.constant(np.cumsum([0, *lengths]), tf.int64),
        "columns": {
            "ts": tf.constant([row.ts for row in rows], tf.int64),
            "version": tf.constant([row.generation for row in rows], tf.int64),
            "tail_ts": ragged[: len(rows)],
            "tail_item": ragged[len(rows) :],
        },
        "epoch": tf.constant(3, tf.int64),
    }


@given(
    users=st.lists(st.lists(EXPOSURE, min_size=1, max_size=12), max_size=5),
    within=st.integers(1, 70) | st.just(2**63 - 1),
    by_generation=st.booleans(),
    by_tail=st.booleans(),
)
def test_windows_are_those_of_plain_python(users, within, by_generation, by_tail):
    users = [sorted(user, key=lambda exposure: exposure.ts) for user in users]
    cut = ExposureWindows("ts", within, "version" if by_generation else None, TAIL if by_tail else {}, "ts")
    found = cut(element_of(users))
    plain = [
        [
            row._replace(generation=row.generation if by_generation else 1, tail=row.tail if by_tail else ())
            for row in user
        ]
        for user in users
    ]
    windows = [windows_of(user, within) for user in plain]
    lengths = [len(window) for user in windows for window in user]
    owners = [number for number, user in enumerate(windows) for _ in user]
    assert found["row_splits"].numpy().tolist() == np.cumsum([0, *lengths]).tolist()
    assert found["task"].numpy().tolist() == [100 + owner for owner in owners]
    assert found["batch_id"].numpy().tolist() == owners
    assert int(found["epoch"]) == 3


def test_thousands_of_windows_of_a_user_are_found():
    times = np.cumsum(np.random.default_rng(0).integers(1, 5, 5000))
    shown = [Shown(int(time)) for time in times]
    found = ExposureWindows("ts", 7, None, {}, "ts")(element_of([shown, shown[:1]]))
    lengths = [len(window) for window in windows_of(shown, 7)]
    assert found["row_splits"].numpy().tolist() == np.cumsum([0, *lengths, 1]).tolist()


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A store whose events arrive late, and exposures with the generation and the tail of their moments."""
    folder, drawn = tmp_path_factory.mktemp("logged"), np.random.default_rng(0)
    events = {}
    for user in range(12):
        times = drawn.choice(4 * NIGHT, 80, replace=False)
        late = np.where(drawn.random(80) < 0.2, drawn.integers(0, 700, 80), 0)
        events[user] = sorted(zip(times.tolist(), (times + late).tolist(), range(80), strict=True))
    for night in range(1, 5):
        day = [
            (user, time, item)
            for user, own in events.items()
            for time, arrived, item in own
            if NIGHT * (night - 1) <= arrived < NIGHT * night
        ]
        names = ["user", "ts", "item"]
        table = dict(zip(names, map(list, zip(*day, strict=True)), strict=True))
        pq.write_table(pa.table(table), folder / f"{night}.parquet")
        append_history(folder / "store", folder / f"{night}.parquet", HistorySpec("user", "ts"))
    rows, saw = [], {}
    for user, own in events.items():
        for time in sorted(drawn.choice(range(NIGHT, 4 * NIGHT), 60, replace=False).tolist()):
            generation = time // NIGHT
            seen = [(ts, item) for ts, arrived, item in own if ts < time and arrived < time]
            stored = {item for _, arrived, item in own if arrived < NIGHT * generation}
            tail = [event for event in seen if event[1] not in stored]
            row = (user, time, len(rows), time % 2, generation, [t for t, _ in tail], [i for _, i in tail])
            rows.append(row)
            saw[user, time] = Shown(time, generation, tuple(tail)), seen
    names = ["user", "ts", "item", "click", "version", "tail_ts", "tail_item"]
    table = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    pq.write_table(table, folder / "shown.parquet")
    spec = TableSpec("user", time="ts", label="click", columns={name: ColumnSpec() for name in names})
    prepare(folder / "shown.parquet", folder / "shown", spec=spec)
    return folder, saw


def shared(logged, **arguments):
    given = {"share": "window", "within": WITHIN, "generation": "version", "tail": TAIL} | arguments
    return io.late(
        logged[0] / "shown" / "train",
        io.HistoryStore(logged[0] / "store"),
        **{"history": ["item", "ts"], "targets": ["item", "ts"], **reading(**given)},
    )


def test_every_target_of_a_window_sees_what_its_ranker_saw(logged):
    seen, joined = 0, 0
    for batch in shared(logged, sequences_per_batch=5):
        users, clicks = batch["task"].numpy().tolist(), batch["labels"]["click"].to_list()
        columns = [batch["history"][name].to_list() for name in ("ts", "item")]
        for row, (user, times) in enumerate(zip(users, batch["targets"]["ts"].to_list(), strict=True)):
            history = [*zip(*(column[row] for column in columns), strict=True)]
            for time in times:
                before = [event for event in history if event[0] < time]
                assert before == logged[1][user, time][1]
            assert clicks[row] == [time % 2 for time in times]
            seen, joined = seen + len(times), joined + (len(times) > 1)
    assert seen == 12 * 60
    assert joined > 100


def test_windows_follow_users_and_times(logged):
    found = []
    for batch in shared(logged, sequences_per_batch=5, shuffle=False):
        times = batch["targets"]["ts"].to_list()
        found += zip(batch["task"].numpy().tolist(), times, strict=True)
    expected = []
    for user in dict.fromkeys(user for user, _ in found):
        exposures = [exposure for (own, _), (exposure, _) in logged[1].items() if own == user]
        windows = windows_of(exposures, WITHIN)
        expected += [(user, [exposure.ts for exposure in window]) for window in windows]
    assert found == expected


def test_without_a_generation_only_time_cuts(logged):
    lengths = [
        length
        for batch in shared(logged, generation=None, tail=None, within=10**9, history=["item"])
        for length in batch["targets"]["ts"].row_lengths().numpy().tolist()
    ]
    assert lengths == [60] * 12


def test_a_saved_iterator_of_windows_goes_on(logged, tmp_path):
    def make():
        return shared(logged, sequences_per_batch=25, seed=3)

    whole = [batch["targets"]["ts"].to_list() for batch in make()]
    iterator = iter(make())
    next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "ckpt"))
    fresh = iter(make())
    tf.train.Checkpoint(iterator=fresh).read(path)
    assert [batch["targets"]["ts"].to_list() for batch in fresh] == whole[1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": "day"}, "share='window' and within go together, got 'day'"),
        ({"within": None}, "share='window' and within go together"),
        ({"share": None}, "share='window' and within go together"),
        ({"within": 0}, "within must be a whole number from 1 on, got 0"),
        ({"balance": io.Balance(100)}, "balance counts a user as one sequence"),
    ],
)
def test_arguments_that_cannot_be_are_refused(logged, arguments, message):
    with pytest.raises(ConfigError, match=message):
        shared(logged, **arguments)
