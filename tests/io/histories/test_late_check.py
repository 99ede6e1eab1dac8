"""`gmeta.io.late` with what rankers logged of their histories: checksums, lengths, and their cost."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from gmeta import io
from gmeta.core.errors import ConfigError
from gmeta.io.reader_stats import ReaderStats, as_data_error
from gmeta.preprocess import ColumnSpec, HistorySpec, PrepareConfig, TableSpec, prepare
from gmeta.preprocess.history.append import append_history
from support.drawn_batches import plain
from support.grouped_data import reading
from support.reference.balance import prefix_batches
from support.reference.history import crc_of, draw_day, history_of, write_day

DAYS = [draw_day(day, 300, users=12, day=day) for day in range(1, 4)]
LONGEST = 15
WRONG = (7, 30)
"""Rows whose logged numbers are not those of their histories."""


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A store of three days, and exposures with what rankers saw, of which two logged something else."""
    folder, drawn = tmp_path_factory.mktemp("logged"), np.random.default_rng(0)
    for number, events in enumerate(DAYS):
        day = write_day(folder / f"{number}.parquet", events)
        append_history(folder / "store", day, HistorySpec("user", "ts"))
    rows = []
    for number in range(60):
        user, time, version = (int(drawn.integers(*ends)) for ends in ((0, 14), (500, 4000), (1, 4)))
        seen = history_of(DAYS, user, until=time, generation=version, longest=LONGEST)
        crc = crc_of([[event.item for event in seen], [event.price for event in seen]])
        whole = len(history_of(DAYS, user, until=time, generation=version))
        wrong = number in WRONG
        length = abs(len(seen) - wrong)
        rows.append((user, time, number, 1.0, version, crc ^ wrong, length, whole, 0.5))
    names = ["user", "ts", "item", "click", "version", "history_crc", "history_length", "whole", "score"]
    pq.write_table(
        pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), folder / "shown.parquet"
    )
    spec = TableSpec("user", time="ts", label="click", columns={name: ColumnSpec() for name in names})
    prepare(folder / "shown.parquet", folder / "single", PrepareConfig(batch_rows=1), spec=spec)
    prepare(folder / "shown.parquet", folder / "grouped", spec=spec)
    return folder, rows


def late(logged, examples="single", **arguments):
    given = {"history": ["item", "price"], "longest": LONGEST, "generation": "version"} | arguments
    store = io.HistoryStore(logged[0] / "store")
    return io.late(
        logged[0] / examples / "train", store, targets=["item", "ts"], contexts=["user"], **reading(**given)
    )


@pytest.mark.parametrize(("check", "place", "words"), [("crc", 5, "the checksum"), ("length", 6, "events")])
def test_a_history_that_is_not_the_logged_one_ends_the_reading(logged, check, place, words):
    with pytest.raises(tf.errors.DataLossError) as raised:
        list(late(logged, check=check, shuffle=False))
    error = as_data_error(raised.value)
    assert error is not None
    assert str(error.path) == str(logged[0] / "single" / "train")
    row = next(logged[1][number] for number in WRONG if f"user {logged[1][number][0]}," in str(error))
    seen = history_of(DAYS, row[0], until=row[1], generation=row[4], longest=LONGEST)
    found = row[place] ^ 1 if check == "crc" else len(seen)
    assert f"user {row[0]}, generation {row[4]}: the history has" in str(error)
    assert f" {found}" in str(error)
    assert f"and the ranker's {row[place]}; read from" in str(error)
    assert words in str(error)


def part_of(batch, row):
    """One sequence of a plain batch."""
    return {
        part: own[row] if part == "task" else {name: values[row] for name, values in own.items()}
        for part, own in batch.items()
    }


@pytest.mark.parametrize("check", ["crc", "length"])
def test_such_examples_are_left_out_and_counted(logged, check):
    stats = ReaderStats()
    found = [plain(batch) for batch in late(logged, check=check, on_bad="skip", stats=stats, seed=4)]
    items = [item for batch in found for (item,) in batch["targets"]["item"]]
    assert sorted(items) == [number for number in range(60) if number not in WRONG]
    counts = stats.read()
    assert counts.bad == {"other_history": 2}
    assert (counts.records, counts.skipped, counts.histories) == (58, 2, 60)
    assert sum("the history has" in message for message in counts.messages) == 2
    # What is left is what there is without the check, part by part.
    whole = {}
    for batch in map(plain, late(logged, seed=4)):
        for row, (item,) in enumerate(batch["targets"]["item"]):
            whole[item] = part_of(batch, row)
    for batch in found:
        for row, (item,) in enumerate(batch["targets"]["item"]):
            assert part_of(batch, row) == whole[item]


def test_sound_batches_are_those_without_a_check(logged):
    arguments = {"check": "length", "check_column": "whole", "longest": None, "sequences_per_batch": 7}
    ours, theirs = late(logged, **arguments), late(logged, longest=None, sequences_per_batch=7)
    assert ours.element_spec == theirs.element_spec
    expected = [plain(batch) for batch in theirs]
    assert [plain(batch) for batch in ours] == expected
    # A reader that takes fewer events than the ranker saw compares as many.
    assert sum(len(batch["task"]) for batch in late(logged, **arguments | {"longest": 4})) == 60
    skipping = late(logged, **arguments, on_bad="skip")
    assert skipping.element_spec == theirs.element_spec
    assert [plain(batch) for batch in skipping] == expected


@pytest.mark.parametrize(
    ("examples", "column"), [("single", None), ("single", "whole"), ("grouped", "whole")]
)
@pytest.mark.parametrize("longest", [pytest.param(None, marks=pytest.mark.slow), 9])  # quick: 9
@pytest.mark.shown_by(case="9-single-None")
def test_batches_of_equal_cost_count_histories_and_exposures(logged, examples, column, longest):
    cost = io.SequenceCost(1.0, 0.05)
    lengths = {(row[1], row[0]): row[7 if column else 6] for row in logged[1]}
    stream = []
    for batch in late(logged, examples, longest=longest, shuffle=False):
        for user, times in zip(batch["task"].numpy().tolist(), batch["targets"]["ts"].to_list(), strict=True):
            events = lengths[times[-1], user]
            tokens = min(events, longest or events) + len(times)
            stream.append((float(cost.of([tokens])[0]), tokens))
    most = max(tokens for _, tokens in stream)  # a user with more would be refused
    balance = io.Balance(60.0, cost, max_tokens=most, tokens=column)
    found = [
        batch["targets"]["ts"].to_list()
        for batch in late(logged, examples, balance=balance, longest=longest, shuffle=False)
    ]
    assert [len(batch) for batch in found] == list(prefix_batches(stream, target=60.0, max_tokens=most))
    assert len(found) > 3


def test_batches_of_equal_cost_go_on_at_a_position(logged):
    arguments = {"balance": io.Balance(60.0), "seed": 4}
    whole = [plain(batch) for batch in late(logged, **arguments)]
    before, after = io.ReadingPosition(), io.ReadingPosition()
    found = [plain(batch) for batch in late(logged, start=before, **arguments).take(3)]
    for to, of in zip(after.variables, before.variables, strict=True):
        to.assign(of)
    assert [*found, *(plain(batch) for batch in late(logged, start=after, **arguments))] == whole


def test_what_was_read_is_counted_and_the_requests_of_a_user_read_once(logged):
    store = io.HistoryStore(logged[0] / "store")
    counts = []
    for repeats in (1, 20):
        stats = ReaderStats()
        users = np.repeat(np.arange(12), repeats)
        np.random.default_rng(1).shuffle(users)
        found = store.read(users, ["item"], until=2500, longest=10, stats=stats)["item"].to_list()
        counts.append(stats.read())
        for user, items in zip(users.tolist(), found, strict=True):
            assert items == [event.item for event in history_of(DAYS, user, until=2500, longest=10)]
    assert [count.histories for count in counts] == [12, 240]
    assert counts[0].history_reads == counts[1].history_reads >= 12
    assert counts[0].history_bytes == counts[1].history_bytes > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"check": "sha"}, "check must be 'crc', 'length' or None, got 'sha'"),
        ({"check_column": "whole"}, "check_column='whole' needs check='crc' or check='length'"),
        ({"check": "crc", "check_column": "none"}, "check='crc' needs 'none', an int64 column .* no 'none'"),
        ({"check": "crc", "check_column": "score"}, "needs 'score', an int64 column"),
        ({"balance": io.Balance(10, tokens="score")}, "balance needs 'score', an int64 column"),
    ],
)
def test_arguments_that_cannot_be_are_refused(logged, arguments, message):
    with pytest.raises(ConfigError, match=message):
        late(logged, **arguments)
