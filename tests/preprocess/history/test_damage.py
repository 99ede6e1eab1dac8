"""A store that is damaged, or whose writer was killed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.history_manifest import (
    CURRENT,
    HistoryManifest,
    begin_to_drop,
    generation_folder,
    shard_files,
)
from gmeta.io import HistoryStore
from gmeta.preprocess import HistorySpec
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.example_sets import (
    ExampleSet,
    drop_generations,
    list_examples,
    refuse_needed,
    register,
    remove_examples,
)
from gmeta.preprocess.history.generation import Generation, generations, write_lock
from gmeta.preprocess.history.reading import export_history, read_histories, verify_history
from gmeta.preprocess.history.rebuild import compact_history, scrub_history
from support.disk_changes import wrap_changes
from support.reference.history import draw_day, write_day

SPEC = HistorySpec("user", "ts", shards=2, stripe_events=8)
USERS = range(30)


@pytest.fixture
def store(tmp_path):
    for day in (1, 2):
        path = write_day(tmp_path / f"{day}.parquet", draw_day(day, 200, day=day))
        append_history(tmp_path / "store", path, SPEC)
    return tmp_path / "store"


def everything(store):
    return read_histories(Generation(store), USERS, ["ts", "born", "item", "price"])


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def test_a_damaged_stripe_is_named_by_file_offset_and_user(store):
    path = shard_files(generation_folder(store, 1), 0)[0]
    flip(path, 100)
    faults = verify_history(store).faults
    assert len(faults) == 1
    assert str(path) in faults[0]
    assert "user" in faults[0]
    assert "doesn't match its checksum" in faults[0]
    with pytest.raises(DataError, match=r"shard-00000.events at byte \d+: user \d+, stripe of \d+ bytes: "):
        everything(store)


def test_every_byte_of_a_stripe_is_under_a_checksum(store):
    path = shard_files(generation_folder(store, 2), 1)[0]
    sound = path.read_bytes()
    for at in range(0, len(sound), 41):
        flip(path, at)
        assert len(verify_history(store).faults) == 1, at
        path.write_bytes(sound)


def test_a_damaged_index_is_found_before_it_is_used(store):
    path = shard_files(generation_folder(store, 2), 0)[1]
    flip(path, 50)
    assert "its SHA-256 isn't the one in the manifest" in verify_history(store).faults[0]
    with pytest.raises(DataError, match="its SHA-256 isn't the one in the manifest"):
        everything(store)
    assert verify_history(store, 1).faults == ()


def test_files_that_are_gone_are_named(store):
    shard_files(generation_folder(store, 1), 0)[0].unlink()
    assert all("the file isn't there" in fault for fault in verify_history(store).faults)
    with pytest.raises(DataError, match="it ends early"):
        everything(store)
    shard_files(generation_folder(store, 2), 1)[1].unlink()
    with pytest.raises(DataError, match="can't read it: No such file"):
        Generation(store).open(1)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda value: value.update(watermark=5), "its digest doesn't match its content"),
        (lambda value: value.update(version=9), "a manifest of version 9, this gmeta reads version 2"),
        (lambda value: value.update(format="x"), "not a gmeta-histories manifest"),
        (lambda value: value["shards"][0].update(events=-1), "events must be a whole number"),
        (lambda value: value.pop("groups"), "groups"),
    ],
)
def test_an_edited_manifest_is_refused(store, edit, message):
    path = generation_folder(store, 2) / "manifest.json"
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match=message):
        HistoryManifest.load(store, 2)


@pytest.mark.parametrize(
    "content",
    [b"two", "²".encode(), b"", b"0", b"-2", b"2.0", b"2 2", b"\xff\xfe", b"2 " + b"g" * 64, b"9" * 5000],
)
@pytest.mark.shown_by(case="two")
def test_a_damaged_pointer_is_refused(store, content):
    (store / CURRENT).write_bytes(content)
    for use in (Generation, compact_history, list_examples, verify_history):
        with pytest.raises(DataError, match=r"CURRENT: it holds .* in place of a generation's number and"):
            use(store)


def grow(folder, to):
    """Append a day to a store that has a generation less."""
    append_history(folder / "store", write_day(folder / f"{to}.parquet", draw_day(to, 200, day=to)), SPEC)


SET_BACK = {
    "a number that was edited": lambda number, newest: str(number),
    "an older copy": lambda number, newest: f"{number} {HistoryManifest.load(newest, number).digest}\n",
    "the number of one and the digest of another": lambda number, newest: (
        f"{number} {HistoryManifest.load(newest, 4).digest}"
    ),
    "nothing": None,
}


@pytest.mark.parametrize("pointer", SET_BACK)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.shown_by(case="1-a number that was edited")
def test_generations_after_the_pointer_are_not_lost(tmp_path, store, pointer, number):
    for generation in (3, 4):
        grow(tmp_path, generation)
    sound, newest = everything(store), (store / CURRENT).read_text()
    assert newest == f"4 {HistoryManifest.load(store, 4).digest}\n"
    if SET_BACK[pointer] is None:
        (store / CURRENT).unlink()
    else:
        (store / CURRENT).write_text(SET_BACK[pointer](number, store))
    day = write_day(tmp_path / "day.parquet", draw_day(9, 20))
    uses = (
        lambda: everything(store),
        lambda: append_history(store, day, SPEC),
        lambda: compact_history(store),
        lambda: scrub_history(store, [7]),
        lambda: drop_generations(store, [1]),
        lambda: verify_history(store),
        lambda: export_history(store, tmp_path / "out"),
        lambda: HistoryStore(store),
    )
    for use in uses:
        with pytest.raises(DataError, match=r"CURRENT: it .*generations? .*4 (is|are) there.* write 4 into"):
            use()
    assert [path.name for path in sorted((store / "generations").iterdir())] == [
        f"0000000{number}" for number in (1, 2, 3, 4)
    ]
    (store / CURRENT).write_text("4")  # as the error says, and as older versions of gmeta did
    assert (everything(store).columns["ts"] == sound.columns["ts"]).all()
    assert append_history(store, day).generation == 5


def test_a_pointer_that_fits_no_manifest_is_refused(tmp_path, store):
    for number in ("1", "2"):
        (store / CURRENT).write_text(f"{number} {'0' * 64}")
        with pytest.raises(DataError, match=r"CURRENT: it (doesn't match the manifest of|names) generation"):
            Generation(store)


def test_a_pointer_before_generations_that_were_dropped_is_refused(tmp_path, store):
    compact_history(store)
    drop_generations(store, [2])
    (store / CURRENT).write_text("1")
    with pytest.raises(DataError, match=r"it names generation 1, and generation 3 is there"):
        Generation(store)


def test_a_later_generation_without_its_manifest_is_not_overwritten(tmp_path, store):
    grow(tmp_path, 3)
    (store / CURRENT).write_text("2")
    (store / "generations" / "00000003" / "manifest.json").unlink()
    for use in (lambda: grow(tmp_path, 4), lambda: compact_history(store), lambda: verify_history(store)):
        with pytest.raises(DataError, match="it names generation 2, and generation 3 is there"):
            use()
    assert list((store / "generations" / "00000003").iterdir())


def test_generations_whose_deletion_was_cut_off_can_be_dropped(tmp_path, store):
    """As advised for a damaged DROPPING that was removed."""
    compact_history(store)
    whole = everything(store)
    (store / "generations" / "00000002" / "manifest.json").unlink()
    (line,) = verify_history(store).left
    assert line.endswith(f"restore it, or drop it with `gmeta history drop {store} 2`")
    drop_generations(store, [1, 2])
    found = verify_history(store)
    assert (found.faults, found.left) == ((), ())
    grow(tmp_path, 4)
    assert len(everything(store).columns["ts"]) > len(whole.columns["ts"])


def test_what_is_no_generation_is_left_alone_and_named(store):
    strange = [store / "generations" / name for name in ("0000abc", "00000001.bak", "3", "00000²")]
    for path in strange:
        path.mkdir()
    assert generations(store) == [1, 2]
    assert compact_history(store).generation == 3
    drop_generations(store, [1, 2])
    found = verify_history(store)
    assert found.faults == ()
    assert {line.partition(": ")[0] for line in found.left} == set(map(str, strange))
    assert CliRunner().invoke(main, ["history", "verify", str(store)]).exit_code == 1


def killed_at(count, work):
    """Run `work` in a process that dies before its `count`-th change of the disk; return whether it died."""
    child = os.fork()
    if child == 0:
        left = [count]

        def dying(real):
            def call(*arguments, **named):
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
                return real(*arguments, **named)

            return call

        wrap_changes(dying)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("write", ["append", "compact", "scrub"])
@pytest.mark.shown_by(case="compact-5")
def test_a_writer_that_is_killed_leaves_the_old_store_or_the_new_one(tmp_path, store, write, every):
    before = everything(store)
    day = write_day(tmp_path / "day.parquet", draw_day(5, 200, day=3))
    whole = shutil.copytree(store, tmp_path / "whole")
    point = 1

    def work():
        if write == "append":
            append_history(store, day)
        elif write == "compact":
            compact_history(store)
        else:
            scrub_history(store, [7])

    while killed_at(point, work):
        point += every
        number = Generation(store).manifest.generation
        assert verify_history(store).faults == ()
        if number == 2:
            assert all(
                (everything(store).columns[name] == before.columns[name]).all() for name in before.columns
            )
            assert len(verify_history(store).uncommitted) <= 3
        else:
            assert number == 3
            shutil.rmtree(store)
            shutil.copytree(whole, store)
    assert point > 10  # two files of two shards, the manifest, the generation and CURRENT
    assert Generation(store).manifest.generation == 3
    assert verify_history(store).faults == ()
    own = int(np.diff(before.row_splits)[7])
    events = {"append": 600, "compact": 400, "scrub": 400 - own}[write]
    assert len(everything(store).columns["ts"]) == events


NEXT_COMMANDS = [
    "show --user 3",
    "verify",
    "examples",
    "compact",
    "scrub --user 7",
    "drop 3",
    "append",
    "export",
]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.shown_by(case="5")
def test_what_a_killed_process_has_begun_to_drop_is_gone_after_the_next_command(tmp_path, store, every):
    before = everything(store)
    compact_history(store)
    compact_history(store)
    day = write_day(tmp_path / "day.parquet", draw_day(5, 20))
    whole, point, begun = shutil.copytree(store, store.with_name("whole")), 1, 0
    while killed_at(point, lambda: drop_generations(store, [1, 2])):
        point += every
        has_begun = (store / "DROPPING").exists()
        begun += has_begun
        name, *options = NEXT_COMMANDS[point % len(NEXT_COMMANDS)].split()
        options += {"append": ["--data", str(day)], "export": [str(tmp_path / f"out-{point}")]}.get(name, [])
        done = CliRunner().invoke(main, ["history", name, str(store), *options])
        there = {path.name for path in (store / "generations").iterdir()}
        if has_begun:
            assert not there & {"00000001", "00000002"}, (point, name)
            assert not (store / "DROPPING").exists()
        elif "00000001" in there:
            assert "00000002" in there
        assert done.exit_code == 0, done.output
        assert verify_history(store).faults == ()
        shutil.rmtree(store)
        shutil.copytree(whole, store)
    assert begun * every > 12  # the folders' files, their names, and DROPPING itself
    assert sorted(path.name for path in (store / "generations").iterdir()) == ["00000003", "00000004"]
    assert all((everything(store).columns[name] == before.columns[name]).all() for name in before.columns)


def test_who_can_not_finish_a_deletion_says_so(store, monkeypatch):
    compact_history(store)
    begin_to_drop(store, [1, 2])
    (store / "generations" / ".00000009.removed").mkdir()  # as older versions of gmeta left it

    def read_only(path, refusal):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("gmeta.preprocess.history.generation.lock_file", read_only)
        assert [line.partition(": ")[0] for line in verify_history(store).left] == [
            str(store / "generations" / name) for name in ("00000001", "00000002", ".00000009.removed")
        ]
        expected = r"00000001: its deletion was begun and isn't finished: Read-only file system; run `gmeta"
        with pytest.warns(UserWarning, match=expected):
            list_examples(store)
        shown = CliRunner().invoke(main, ["history", "verify", str(store)])
        assert shown.exit_code == 1
        assert shown.output.count("left: ") == 3
    with pytest.warns(UserWarning, match="the deletion of generations 1, 2 was begun and isn't finished"):
        assert HistoryStore(store).generation == 3
    for opened in (Generation, HistoryStore):
        with pytest.raises(DataError, match="there is no generation 2"):
            opened(store, 2)
    with write_lock(store):  # who writes finishes it
        assert list_examples(store) == []
        assert (store / "DROPPING").exists()
    assert verify_history(store).left == ()
    assert [path.name for path in (store / "generations").iterdir()] == ["00000003"]


def test_a_folder_that_can_not_be_removed_keeps_nobody_from_appending(tmp_path, store, monkeypatch):
    """As on NFS, while a process has a file of it open."""
    compact_history(store)
    rmtree = shutil.rmtree

    def busy(path, **options):
        if path == generation_folder(store, 1):
            raise OSError(39, "Directory not empty", str(path))
        rmtree(path, **options)

    day = write_day(tmp_path / "day.parquet", draw_day(5, 20))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        with pytest.raises(GmetaError, match=r"can't write .*00000001: Directory not empty"):
            drop_generations(store, [1, 2])
        with pytest.warns(
            UserWarning, match="00000001: its deletion was begun and isn't finished: Directory"
        ):
            assert append_history(store, day).generation == 4
        assert generations(store) == [3, 4]
        assert len(verify_history(store).left) == 1
    assert verify_history(store).left == ()
    assert sorted(path.name for path in (store / "generations").iterdir()) == ["00000003", "00000004"]


def test_a_damaged_list_of_what_is_dropped_removes_nothing(store):
    compact_history(store)
    begin_to_drop(store, [1])
    path = store / "DROPPING"
    for content in (path.read_bytes().replace(b"1 ", b"3 ", 1), b"", b"1", b"\xff"):
        path.write_bytes(content)
        for use in (verify_history, HistoryStore, compact_history):
            with pytest.raises(DataError, match=r"DROPPING: it holds .* in place of the numbers of gen"):
                use(store)
    path.unlink()
    assert generations(store) == [1, 2, 3]


CLICKS = ExampleSet("clicks", "/nowhere/clicks", "0" * 64, 20, (1, 2), 1000)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.shown_by(case="3")
def test_a_process_that_is_killed_while_it_registers_leaves_the_old_registration_or_the_new_one(store, every):
    register(store, CLICKS)
    other, point = replace(CLICKS, generations=(2,)), 1
    while killed_at(point, lambda: register(store, other)):
        point += every
        assert list_examples(store) in ([CLICKS], [other])
        assert verify_history(store).faults == ()
        with pytest.raises(ConfigError, match="'clicks' at /nowhere/clicks read generation 2 of"):
            refuse_needed(store, {2})
        register(store, CLICKS)
        assert [path.name for path in (store / "examples").iterdir()] == ["clicks.json"]
    assert point > 5  # the file's content, its name, the folder and the store
    assert list_examples(store) == [other]
    points = 0
    while killed_at(points + 1, lambda: remove_examples(store, "clicks")):
        points += 1
        assert list_examples(store) in ([], [other])
        register(store, other)
    assert points == 2
    assert list_examples(store) == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.shown_by(case="3")
def test_an_export_that_is_killed_leaves_no_file_that_looks_whole(tmp_path, store, every):
    def files(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    export_history(store, tmp_path / "whole")
    whole = files(tmp_path / "whole")
    assert set(whole) == {"_spec.toml", "shard-00000.parquet", "shard-00001.parquet"}
    out, point = tmp_path / "out", 1
    while killed_at(point, lambda: export_history(store, out)):
        point += every
        assert not out.exists() or files(out) == whole  # whole before its name is flushed to the disk
        shutil.rmtree(out, ignore_errors=True)
    assert point > 6
    assert files(out) == whole
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path, store, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    day = write_day(tmp_path / "day.parquet", draw_day(5, 20))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(GmetaError, match=r"can't write .*store.*: No space left on device"):
        append_history(store, day)
    monkeypatch.undo()
    assert sorted(path.name for path in (store / "generations").iterdir()) == ["00000001", "00000002"]
    assert append_history(store, day).generation == 3


def test_the_commands(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(main, ["history", *map(str, arguments)])

    day = write_day(tmp_path / "day.parquet", draw_day(5, 400))
    refused = run("append", tmp_path / "s", "--data", day, "--user", "user")
    assert refused.exit_code == 2
    assert "--user is of a new store, which needs --user and --time too" in refused.stderr
    made = run("append", tmp_path / "s", "--data", day, "--user", "user", "--time", "ts", "--shards", 2)
    assert made.exit_code == 0, made.output
    assert "generation 1: 400 events" in made.output
    assert "has 400 events of 30 users" in made.output
    assert run("verify", tmp_path / "s").exit_code == 0
    shown = run("show", tmp_path / "s", "--user", 3, "--longest", 2, "--until", 1800)
    history = [event for event in sorted(draw_day(5, 400)) if event.user == 3 and event.ts < 1800]
    assert shown.output.split()[:7] == ["events:", "2", "events", "ts", "born", "item", "price"]
    assert [line.split()[0] for line in shown.output.splitlines()[2:]] == [str(e.ts) for e in history[-2:]]
    flip(shard_files(generation_folder(tmp_path / "s", 1), 1)[0], 100)
    damaged = run("verify", tmp_path / "s")
    assert damaged.exit_code == 1
    assert "damaged: " in damaged.output
    assert "1 of them damaged" in damaged.output
