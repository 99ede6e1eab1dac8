"""Sets of examples that point into a store: what they hold, what they read later, and what they keep."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from click.testing import CliRunner

from gmeta import io
from gmeta.cli import main
from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.history_manifest import generation_folder
from gmeta.preprocess import ColumnSpec, HistorySpec, PrepareConfig, TableSpec, prepare
from gmeta.preprocess.history import example_writer as exposure_source
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.example_sets import (
    drop_generations,
    find_faults,
    list_examples,
    remove_examples,
)
from gmeta.preprocess.history.example_writer import history_examples
from gmeta.preprocess.history.generation import generations
from gmeta.preprocess.history.rebuild import compact_history
from support.reference.history import crc_of, draw_day, history_of, write_day

STORE = HistorySpec("user", "ts", groups={"what": ("item", "price")}, shards=3, stripe_events=4)
SPEC = TableSpec("user", time="ts", label="click")
DAYS = [draw_day(number, 150, day=number) for number in range(1, 6)]
LONGEST = 6


def append(folder, number):
    append_history(folder / "store", write_day(folder / f"{number}.parquet", DAYS[number - 1]), STORE)


@pytest.fixture
def folder(tmp_path):
    """A store of two days, and exposures at times of both and behind."""
    append(tmp_path, 1)
    append(tmp_path, 2)
    write_shown(tmp_path)
    return tmp_path


def write_shown(folder, rows=80, **more):
    drawn = np.random.default_rng(1)
    shown = {
        "user": drawn.integers(0, 33, rows),
        "ts": drawn.integers(600, 3300, rows),
        "shown": np.arange(rows),
        "click": drawn.integers(0, 2, rows),
    }
    pq.write_table(pa.table({**shown, **more}), folder / "shown.parquet")
    return pq.read_table(folder / "shown.parquet").to_pylist()


def make(folder, batch_rows=1, **arguments):
    return history_examples(
        folder / "store",
        folder / "shown.parquet",
        folder / "clicks",
        SPEC,
        PrepareConfig(batch_rows=batch_rows),
        longest=LONGEST,
        **arguments,
    )


def seen_at(row, generation, days=2):
    """The history that a ranker saw which read `generation` when that many days were there."""
    return history_of(DAYS[:days], row["user"], until=row["ts"], generation=generation, longest=LONGEST)


def late(folder, generation="generation", opened=None, columns=("shown",), **arguments):
    """What `gmeta.io.late` gives of each exposure, by its number; those of one moment have one history."""
    found = {}
    dataset = io.late(
        folder / "clicks" / "train",
        io.HistoryStore(folder / "store", opened),
        history=["ts", "item"],
        targets=columns,
        generation=generation,
        longest=LONGEST,
        **arguments,
    )
    for batch in dataset:
        for row, numbers in enumerate(batch["targets"]["shown"].to_list()):
            own = {name: values[row].numpy().tolist() for name, values in batch["history"].items()}
            rest = {name: values[row].numpy().tolist() for name, values in batch["targets"].items()}
            for place, number in enumerate(numbers):
                found[number] = {**own, **{name: values[place] for name, values in rest.items()}}
    return found


@pytest.mark.shown_by("test_exposures_side_by_side_are_examples_each_and_readers_check_them")
def test_a_later_generation_gives_the_histories_of_the_time_of_writing(folder):
    rows = write_shown(folder)
    then = [seen_at(row, 2) for row in rows]
    done = make(folder)
    assert done.examples.generations == (2,)
    assert done.empty == sum(not history for history in then)
    append(folder, 3)  # of its 150 events many come late: they are of days before
    late_events = [event._replace(ts=event.ts - 2500) for event in DAYS[3]]
    append_history(folder / "store", write_day(folder / "late.parquet", late_events))
    compact_history(folder / "store")
    drop_generations(folder / "store", [3, 4])
    changed = 0
    for opened in (2, 5):
        found = late(folder, opened=opened, columns=("shown", "history_length", "generation"))
        assert found.keys() == {*range(80)}
        for row, history in zip(rows, then, strict=True):
            own = found[row["shown"]]
            assert own["ts"] == [event.ts for event in history]
            assert own["item"] == [event.item for event in history]
            assert (own["history_length"], own["generation"]) == (len(history), 2)
    for number, own in late(folder, generation=None).items():
        changed += own["ts"] != [event.ts for event in then[number]]
    assert changed > 20  # without the generation, late events are in the histories


@pytest.mark.parametrize("values", [1, 13, 1 << 22])
@pytest.mark.shown_by(case="13")
def test_each_row_has_the_length_and_the_checksum_of_its_own_generation(folder, monkeypatch, values):
    monkeypatch.setattr(exposure_source, "_VALUES", values)
    append(folder, 3)
    rows = write_shown(folder, version=np.random.default_rng(2).choice([1, 3], 80))
    done = make(folder, generation="version", check="crc", columns=["price", "ts"])
    assert done.examples.generations == (1, 3)
    columns = ("shown", "version", "history_length", "history_crc")
    found = late(folder, generation="version", columns=columns)
    assert len(found) == 80
    assert "generation" not in Manifest.load(folder / "clicks").schema
    for row in rows:
        history, own = seen_at(row, row["version"], days=3), found[row["shown"]]
        assert own["version"] == row["version"]
        assert own["history_length"] == len(history)
        assert own["history_crc"] == crc_of([[e.price for e in history], [e.ts for e in history]])


@pytest.mark.parametrize("check", [pytest.param("length", marks=pytest.mark.slow), "crc"])  # quick: crc
def test_exposures_side_by_side_are_examples_each_and_readers_check_them(folder, check):
    """From a later generation `late` raises if a history isn't the one of which the set keeps the number."""
    rows = write_shown(folder)
    then = [seen_at(row, 2) for row in rows]
    make(folder, batch_rows=None, check="crc", columns=["ts", "item"])
    append_history(
        folder / "store",
        write_day(folder / "late.parquet", [event._replace(ts=event.ts - 2500) for event in DAYS[3]]),
    )
    found = late(folder, check=check, share="window", within=1)
    assert [found[row["shown"]]["ts"] for row in rows] == [[event.ts for event in own] for own in then]
    with pytest.raises(tf.errors.DataLossError, match="clicks"):
        late(folder, generation=None, check=check, share="window", within=1)


def test_an_exposure_costs_few_bytes_beside_what_was_shown(tmp_path):
    """Of users' exposures side by side, what points into the store takes at most 48 bytes a row."""
    events = draw_day(0, 5000, users=200)
    append_history(tmp_path / "store", write_day(tmp_path / "1.parquet", events), HistorySpec("user", "ts"))
    drawn = np.random.default_rng(0)
    rows = {
        "user": drawn.integers(0, 200, 4000),
        "ts": drawn.integers(600, 3300, 4000),
        "click": np.ones(4000),
    }
    pq.write_table(pa.table(rows), tmp_path / "shown.parquet")
    done = history_examples(
        tmp_path / "store",
        tmp_path / "shown.parquet",
        tmp_path / "out",
        SPEC,
        check="crc",
        columns=["item"],
    )
    label = 4
    assert done.bytes / 4000 - label <= 48
    bare = prepare(tmp_path / "shown.parquet", tmp_path / "bare", spec=SPEC)
    shards = Manifest.load(bare.out).splits["train"].shards
    assert done.bytes > sum(shard.bytes for shard in shards)


def test_a_set_that_is_there_is_used_as_it_is_until_the_store_grows(folder):
    first = make(folder)
    remove_examples(folder / "store", "clicks")
    again = make(folder)
    assert again.prepared.reused
    assert again.empty is None
    assert replace(again.examples) == first.examples
    assert list_examples(folder / "store") == [first.examples]
    append(folder, 3)
    with pytest.raises(GmetaError, match=r"was prepared otherwise \(other input files: histories\)"):
        make(folder)
    assert make(folder, overwrite=True).examples.generations == (3,)
    assert [each.generations for each in list_examples(folder / "store")] == [(3,)]


def test_what_a_registered_set_reads_is_not_dropped(folder):
    make(folder)
    append(folder, 3)
    compact_history(folder / "store")
    with pytest.raises(
        ConfigError,
        match=r"examples 'clicks' at .*/clicks read generation 2 of .*store: keep it, or unregister them "
        r"with `gmeta history examples .*/store --remove clicks`",
    ):
        drop_generations(folder / "store", [1, 2, 3])
    with pytest.raises(ConfigError, match=r"generation 2 of .* reads stripes of generation 1"):
        drop_generations(folder / "store", [1])
    drop_generations(folder / "store", [3])
    assert generations(folder / "store") == [1, 2, 4]
    shutil.rmtree(folder / "clicks")
    with pytest.raises(ConfigError, match="read generation 2"):
        drop_generations(folder / "store", [2])
    remove_examples(folder / "store", "clicks")
    drop_generations(folder / "store", [1, 2])
    assert generations(folder / "store") == [4]


def test_a_generation_that_is_gone_when_a_set_is_registered_is_an_error(folder, monkeypatch):
    from gmeta.preprocess.history import example_writer

    real = example_writer.prepare_source

    def slow(*arguments, **named):
        found = real(*arguments, **named)
        append(folder, 3)
        compact_history(folder / "store")
        drop_generations(folder / "store", [1, 2, 3])
        return found

    monkeypatch.setattr(example_writer, "prepare_source", slow)
    with pytest.raises(DataError, match=r"generation 2, which the examples at .* read, isn't there any more"):
        make(folder)
    assert list_examples(folder / "store") == []


def test_faults_of_registered_sets_are_found(folder):
    store = folder / "store"
    make(folder)
    assert [*find_faults(store)] == []
    append(folder, 3)
    compact_history(store)
    shutil.rmtree(generation_folder(store, 2))
    assert [*find_faults(store)] == ["examples 'clicks': they read generation 2, which isn't there"]
    prepare(folder / "shown.parquet", folder / "clicks", spec=SPEC, overwrite=True)
    assert "clicks holds another data set than the one that was registered" in next(find_faults(store))
    next((folder / "clicks").glob("*.tfrecord")).unlink()
    assert "missing" in next(find_faults(store))
    shutil.rmtree(folder / "clicks")
    assert "no manifest" in next(find_faults(store))
    path = store / "examples" / "clicks.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "generations": [1]}))
    assert "its digest doesn't match its content" in next(find_faults(store))
    with pytest.raises(DataError, match="its digest doesn't match its content: it was edited"):
        drop_generations(store, [1])  # nobody knows what the set reads
    remove_examples(store, "clicks")
    assert [*find_faults(store)] == []


def test_generations_that_are_not_there_are_named_with_the_row(folder):
    write_shown(folder, version=np.array([1] * 70 + [7] * 10))
    with pytest.raises(
        DataError, match=r"shown.parquet.*row 71: generation 7 was read, and .*store has 1, 2"
    ):
        make(folder, generation="version", on_bad="skip")
    csv = folder / "shown.csv"
    csv.write_text("user,ts,click,version\n1,2000,1,2\n1,2000,0,3\n")
    with pytest.raises(DataError, match=r"shown.csv:3: generation 3 was read, and .*store has 1, 2"):
        history_examples(folder / "store", csv, folder / "clicks", SPEC, generation="version")
    assert not (folder / "clicks").exists()


def test_bad_rows_are_left_out_and_counted(folder):
    (folder / "shown.csv").write_text("user,ts,click,version\n1,2000,1,2\n1,x,0,1\n2,2000,0,\n")
    arguments = (folder / "store", folder / "shown.csv", folder / "clicks", SPEC)
    with pytest.raises(DataError, match=r"shown.csv:3: not a number: ts must be"):
        history_examples(*arguments)
    done = history_examples(*arguments, on_bad="skip", generation="version")
    assert done.prepared.rows == 1
    assert sum(kind.count for kind in done.prepared.bad) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"longest": 0}, "longest must be a whole number from 1 on, got 0"),
        ({"check": "sum"}, "check must be one of length, crc, none, got 'sum'"),
        ({"check": "crc"}, r"columns must be those of which check='crc' .* got \(\) and check='crc'"),
        ({"columns": ["item"]}, r"columns must be those of which check='crc' .*'length'"),
        ({"check": "crc", "columns": ["clicks"]}, "no column 'clicks' in the histories"),
        ({"generation": "version"}, "no column 'version' in the table"),
        ({"generation": "weight"}, "weight must be a whole number"),
        ({"name": "a/b"}, r"must be a name without slashes, got 'a/b.json': give another --name"),
        ({"spec": TableSpec("user", label="click")}, "examples need the time of each exposure"),
    ],
)
def test_arguments_that_cannot_be_are_refused(folder, arguments, message):
    write_shown(folder, weight=np.full(80, 0.5))
    given = {"spec": SPEC, **arguments}
    with pytest.raises((ConfigError, DataError), match=message):
        history_examples(folder / "store", folder / "shown.parquet", folder / "clicks", **given)
    assert not (folder / "clicks").exists()
    assert list_examples(folder / "store") == []


def test_names_that_are_taken_are_refused(folder):
    make(folder)
    other = (folder / "store", folder / "shown.parquet", folder / "other", SPEC)
    with pytest.raises(
        ConfigError, match=r"has examples 'clicks' at .*/clicks already, and these are 'clicks'"
    ):
        history_examples(*other, name="clicks")
    with pytest.raises(
        ConfigError, match=r"has examples 'clicks' at .*/clicks already, and these are 'mine'"
    ):
        make(folder, name="mine")
    write_shown(folder, history_length=np.ones(80, np.int64))
    with pytest.raises(
        ConfigError, match=r"'history_length', .*: keep what the ranker logged with --check none"
    ):
        history_examples(*other)
    write_shown(folder, generation=np.ones(80, np.int64))
    with pytest.raises(
        ConfigError, match=r"'generation', .*: say with --generation that it is .*, or leave it"
    ):
        history_examples(*other)
    write_shown(folder, generation=np.ones(80, np.int64), history_length=np.full(80, 5))
    done = history_examples(*other, generation="generation", check="none")
    assert done.empty is None
    names = {column.name for column in Manifest.load(done.prepared.out).schema}
    assert names == {"user", "batch_id", "ts", "shown", "click", "generation", "history_length"}
    assert done.examples.generations == (1,)
    assert [each.name for each in list_examples(folder / "store")] == ["clicks", "other"]


def test_a_spec_that_names_columns_keeps_the_generation_too(folder):
    write_shown(folder, version=np.ones(80, np.int64))
    spec = replace(SPEC, columns={"shown": ColumnSpec()})
    out = folder / "clicks"
    history_examples(folder / "store", folder / "shown.parquet", out, spec, generation="version")
    names = {column.name for column in Manifest.load(out).schema}
    assert names == {"user", "batch_id", "ts", "click", "shown", "version", "history_length"}


def test_the_command(folder):
    store = folder / "store"

    def run(*arguments):
        return CliRunner().invoke(main, ["history", *map(str, arguments)])

    shown = ("--data", folder / "shown.parquet", "--user", "user", "--time", "ts", "--label", "click")
    assert "store has no sets of examples" in run("examples", store).output
    made = run(
        *("examples", store, *shown, "--out", folder / "clicks", "--longest", 6, "--check", "crc"),
        *("--columns", "item, ts"),
    )
    assert made.exit_code == 0, made.output
    assert "rows have no event in the store before them" in made.output
    assert "as 'clicks', which keeps generation 2" in made.output
    assert Manifest.load(folder / "clicks").splits["train"].groups < 80
    assert run("verify", store).exit_code == 0
    listed = run("examples", store)
    assert listed.output == f"clicks: 80 rows at {folder / 'clicks'}; keeps generation 2, longest 6\n"
    shutil.rmtree(folder / "clicks")
    assert ", which isn't there; keeps" in run("examples", store).output
    checked = run("verify", store)
    assert checked.exit_code == 1
    assert "not as registered: examples 'clicks': " in checked.output
    assert run("examples", store, "--remove", "clicks").output == f"unregistered 'clicks' from {store}\n"
    for arguments, message in (
        (("--remove", "clicks"), "has no set of examples 'clicks'; it has none"),
        (("--out", "x"), "--out is of a new set: name its --data too"),
        (("--spec", "x", "--remove", "clicks"), "--spec doesn't go with --remove"),
        ((*shown, "--remove", "clicks"), "--data doesn't go with --remove"),
        (shown, "name the folder to make, with --out"),
        ((*shown[:2], "--out", "x"), "name the columns of users and times"),
    ):
        refused = run("examples", store, *arguments)
        assert refused.exit_code == 2
        assert message in refused.stderr
