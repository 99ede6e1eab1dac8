"""Deletions, the look-back, and another form of a store, beside plain Python."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gmeta import io
from gmeta.cli import main
from gmeta.core.errors import ConfigError
from gmeta.preprocess import ColumnSpec, HistorySpec
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.example_sets import drop_generations
from gmeta.preprocess.history.generation import Generation, generations
from gmeta.preprocess.history.reading import read_histories, verify_history
from gmeta.preprocess.history.rebuild import compact_history, scrub_history
from support.reference.history import draw_day, write_day

USERS = range(-1, 31)
SPEC = HistorySpec("user", "ts", groups={"what": ("item",), "cost": ("price",)}, shards=2, stripe_events=4)


class Model:
    """What a store has, as a list of events.

    Attributes:
      events: (user, time, birth, item, price), in no order.
      deletions: User -> the generation that deleted all events before it.
      newest: The newest generation.
    """

    def __init__(self):
        self.events, self.deletions, self.newest = [], {}, 0

    def append(self, day):
        self.newest += 1
        self.events += [(e.user, e.ts, self.newest, e.item, e.price) for e in day]

    def rebuild(self, start=None, users=()):
        self.newest += 1
        self.deletions |= {e[0]: self.newest for e in self.events if e[0] in users}
        self.events = [e for e in self.events if e[0] not in users and (start is None or e[1] >= start)]

    def history(self, user, generation, until, longest):
        found = [e[1:] for e in self.events if e[0] == user and e[1] < until and e[2] <= generation]
        return sorted(found)[max(0, len(found) - longest) :]

    def is_deleted(self, user, generation):
        return generation < self.deletions.get(user, 0)


def histories(opened, names=("ts", "born", "item"), **moment):
    found = read_histories(opened, USERS, names, **moment)
    rows = list(zip(*(found.columns[name].tolist() for name in names), strict=True))
    return [rows[a:b] for a, b in zip(found.row_splits, found.row_splits[1:], strict=False)]


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 99)),
        st.tuples(st.just("compact"), st.none() | st.integers(0, 3000)),
        st.tuples(st.just("scrub"), st.sets(st.integers(0, 29), min_size=1, max_size=20)),
    ),
    min_size=1,
    max_size=6,
)


def change(store, model, kind, given, number):
    """Change a store and its model in the same way."""
    if kind == "append":
        day = draw_day(given, 40, day=number + 1)
        append_history(store, write_day(store.with_name(f"{number}.parquet"), day), SPEC)
        model.append(day)
    elif kind == "compact" and (given is None or given < Generation(store).manifest.watermark):
        compact_history(store, start=given)
        model.rebuild(start=given)
    elif kind == "compact":
        with pytest.raises(ConfigError, match="leaves no event"):
            compact_history(store, start=given)
    elif any(event[0] in given for event in model.events):
        scrub_history(store, given)
        model.rebuild(users=given)
    else:
        with pytest.raises(ConfigError, match="none of the"):
            scrub_history(store, given)


@settings(max_examples=10)
@example(changes=[("scrub", {0}), ("scrub", {0, 1})], until=9000, opened=2, longest=999)
@given(
    changes=CHANGES, until=st.integers(0, 9000), opened=st.integers(0, 9), longest=st.sampled_from([2, 999])
)
@pytest.mark.shown_by("test_a_scrub_and_a_drop_leave_nothing_of_a_user")
def test_a_store_is_what_plain_python_has(tmp_path_factory, changes, until, opened, longest):
    store, model = tmp_path_factory.mktemp("changes") / "store", Model()
    change(store, model, "append", 5, 1)
    for number, (kind, given_) in enumerate(changes, 2):
        change(store, model, kind, given_, number)
    assert verify_history(store).faults == ()
    newest = Generation(store)
    assert newest.manifest.generation == model.newest
    then = min(model.newest, max(1, opened))
    for generation in (then, model.newest):
        moment = {"generation": generation, "until": until, "longest": longest}
        found = histories(newest, **moment)
        expected = [[e[:3] for e in model.history(user, generation, until, longest)] for user in USERS]
        assert found == expected
        prices = histories(newest, ["price"], **moment)
        assert prices == [
            [(e[3],) for e in model.history(user, generation, until, longest)] for user in USERS
        ]
        told = [newest.is_deleted(user, generation) for user in USERS]
        assert told == [model.is_deleted(user, generation) for user in USERS]
        assert io.HistoryStore(store).deleted(USERS, generation).numpy().tolist() == told
    shards = newest.manifest.shards
    assert sum(shard.users for shard in shards) == len({event[0] for event in model.events})
    assert sum(shard.events for shard in shards) == len(model.events)
    assert sum(shard.deleted for shard in shards) == len(model.deletions)


def test_a_scrub_and_a_drop_leave_nothing_of_a_user(tmp_path):
    store = tmp_path / "store"
    for number in (1, 2):
        append_history(store, write_day(tmp_path / f"{number}.parquet", draw_day(number, 300)), SPEC)
    own = sum(
        len(rows) for user, rows in zip(USERS, histories(Generation(store)), strict=True) if user in (7, 8)
    )
    done = scrub_history(store, [7, 8, 999])
    assert (done.generation, done.deleted, done.events) == (3, 2, 600 - own)
    drop_generations(store, [1, 2])
    opened = Generation(store)
    indexes = [opened.open(shard).index() for shard in (0, 1)]
    assert {7, 8} <= {user for index in indexes for user in index.users.tolist()}  # as deleted
    assert 999 not in {user for index in indexes for user in index.users.tolist()}
    # Each byte of the files belongs to a stripe, and none of these is of a deleted user.
    for shard, index in enumerate(indexes):
        path = opened.files(shard)[3]
        assert int(index.places["bytes"].sum()) == path.stat().st_size
    assert histories(opened)[8] == histories(opened)[9] == []


def test_the_look_back_moves_only_forward(tmp_path):
    store = tmp_path / "store"
    append_history(store, write_day(tmp_path / "1.parquet", draw_day(1, 300)), SPEC)
    assert io.HistoryStore(store).start is None
    compact_history(store, start=1500)
    compact_history(store, start=1200)
    assert io.HistoryStore(store).start == 1500
    append_history(store, write_day(tmp_path / "2.parquet", draw_day(2, 300, day=2)))
    assert io.HistoryStore(store).start == 1500
    with pytest.raises(ConfigError, match=r"start 9999 leaves no event of .*store: all are before"):
        compact_history(store, start=9999)


CHANGED = {
    "other groups and shards": HistorySpec(
        "user", "ts", groups={"all": ("price", "item")}, shards=3, stripe_events=16
    ),
    "one shard": HistorySpec("user", "ts", shards=1),
    "a column less": HistorySpec("user", "ts", groups={"what": ("item",)}, shards=2),
    "a column more": HistorySpec(
        "user",
        "ts",
        columns={
            "shop": ColumnSpec(dtype="int64", default=-1),
            "rate": ColumnSpec(dtype="float32", default=0.5),
        },
        groups={"new": ("shop", "rate"), "old": ("item", "price")},
        shards=5,
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_store_takes_another_form(tmp_path, name):
    spec, store = CHANGED[name], tmp_path / "store"
    for number in (1, 2):
        append_history(
            store, write_day(tmp_path / f"{number}.parquet", draw_day(number, 200, day=number)), SPEC
        )
    scrub_history(store, [3])
    before, prices = histories(Generation(store)), histories(Generation(store), ["price"])
    compact_history(store, spec=spec)
    assert verify_history(store).faults == ()
    opened = Generation(store)
    assert len(opened.manifest.shards) == spec.shards
    assert list(opened.manifest.groups) == list(spec.groups or ["events"])
    assert histories(opened) == before
    assert opened.is_deleted(3)
    columns = {column.name for group in opened.manifest.groups.values() for column in group}
    if "price" in columns:
        assert histories(opened, ["price"]) == prices
    if "shop" in columns:
        assert {row for own in histories(opened, ["shop", "rate"]) for row in own} == {(-1, 0.5)}
        return  # a day has no such columns
    append_history(store, write_day(tmp_path / "3.parquet", draw_day(3, 50, day=3)))
    assert verify_history(store).faults == ()
    assert histories(Generation(store), generation=3) == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (HistorySpec("who", "ts"), "user is 'user' in the store and 'who' in the spec"),
        (HistorySpec("user", "ts", groups={"a": ("shop",)}), "column 'shop' isn't in the store"),
        (
            HistorySpec("user", "ts", columns={"shop": ColumnSpec(default=1)}),
            "column 'shop' isn't in the store: give it the dtype",
        ),
        (
            HistorySpec("user", "ts", columns={"item": ColumnSpec(dtype="float32")}),
            "column 'item' is of int64 in the store, and a column can't change its type",
        ),
        (
            HistorySpec(
                "user",
                "ts",
                columns={"item": ColumnSpec(), "price": ColumnSpec()},
                groups={"a": ("item",)},
            ),
            "groups: no group has column price",
        ),
    ],
)
def test_what_a_store_cannot_become_is_refused(tmp_path, spec, message):
    store = tmp_path / "store"
    append_history(store, write_day(tmp_path / "1.parquet", draw_day(1, 20)), SPEC)
    with pytest.raises(ConfigError, match=message):
        compact_history(store, spec=spec)
    assert generations(store) == [1]


def test_the_command_deletes_users_by_number_or_text(tmp_path):
    def run(*arguments, **named):
        return CliRunner().invoke(main, ["history", *map(str, arguments)], **named)

    csv = tmp_path / "events.csv"
    csv.write_text("who,ts,item\n" + "".join(f"u{i % 5},{i},{i}\n" for i in range(50)))
    store = tmp_path / "store"
    assert run("append", store, "--data", csv, "--user", "who", "--time", "ts").exit_code == 0
    assert "no user is named" in run("scrub", store).stderr
    assert run("scrub", store, "--user", "nobody").exit_code == 2
    done = run("scrub", store, "--user", "u1", "--users", "-", input="u2\n\nnobody\n")
    assert done.exit_code == 0, done.output
    assert "generation 2: 30 events, 20 fewer" in done.output
    assert f"gmeta history drop {store} 1" in done.output
    shown = run("show", store, "--user", "u2")
    assert shown.output.splitlines()[:2] == ["events of user u2 were deleted", "events: 0 events"]
    assert "deleted" not in run("show", store, "--user", "nobody").output
    assert "deleted" not in run("show", store, "--user", "u3").output
    assert run("drop", store, "1").exit_code == 0
    number = tmp_path / "number"
    run(
        "append",
        number,
        "--data",
        write_day(tmp_path / "d.parquet", draw_day(1, 50)),
        "--user",
        "user",
        "--time",
        "ts",
    )
    refused = run("scrub", number, "--user", "u1")
    assert "user 'u1' is no whole number" in refused.stderr
