"""The journal of `gmeta.io.RecentHistories`: whatever ends a process, events are there once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.event_file import event_form, read_events
from gmeta.io import RecentHistories
from gmeta.preprocess import HistorySpec
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.example_sets import drop_generations
from gmeta.preprocess.history.rebuild import compact_history
from support.reference.history import Event, draw_day, write_day

EVENT = {"ts": 5, "item": 7, "price": 0.5}


@pytest.fixture
def store(tmp_path):
    """A store of one generation, of other users than the tests'."""
    day = write_day(tmp_path / "0.parquet", [Event(1000, 1, 2, 0.5)])
    append_history(tmp_path / "store", day, HistorySpec("user", "ts"))
    return tmp_path / "store"


def opened(store, **arguments):
    return RecentHistories(
        store, ["item"], **({"journal": store.parent / "journal", "sync": None} | arguments)
    )


def items(recent, user=1):
    return recent.snapshot(user, 10**6).columns["item"].tolist()


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


def append_numbers(recent, numbers):
    for number in numbers:
        recent.append(1, EVENT | {"ts": number, "item": number})


def test_a_killed_process_loses_nothing(store):
    code = """
import os, signal, sys
from gmeta.io import RecentHistories
recent = RecentHistories(sys.argv[1], ["item"], journal=sys.argv[2], sync=None)
for number in range(300):
    recent.append(1, {"ts": number, "item": number, "price": 0.5})
    if number % 100 == 50:
        recent.drain(sys.argv[3])
os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = store.parent
    done = subprocess.run(
        [sys.executable, "-c", code, store, folder / "journal", folder / "out"], check=False
    )
    assert done.returncode == -signal.SIGKILL
    recent = opened(store)
    assert items(recent) == list(range(300))
    files = recent.drain(folder / "out")
    assert [len(read_events(path)) for path in files] == [51, 100, 100, 49]
    append_history(store, files)
    recent.refresh()
    assert (items(recent), recent.events) == (list(range(300)), 0)


@pytest.mark.parametrize("step", ["file", "log", "copy", "appended"])
def test_a_drain_that_was_killed_at_any_step_is_finished_by_the_next(store, step):
    """Each step leaves the folder as a process that is killed right after it does."""
    recent = opened(store)
    append_numbers(recent, range(20))
    journal, out = store.parent / "journal", store.parent / "out"
    log = (journal / "00000001.log").read_bytes()
    (first,) = recent.drain(out)
    drained = first.read_bytes()
    if step == "appended":
        append_history(store, first)
    append_numbers(recent, range(20, 25))
    recent.close()
    if step == "file":  # before the segment's file was renamed
        (journal / "00000001.log").write_bytes(log)
        (journal / "00000001.events.parquet").rename(journal / ".00000001.events.parquet.77.tmp")
    elif step == "log":  # before the log was removed
        (journal / "00000001.log").write_bytes(log)
    if step in ("file", "log", "copy"):
        first.unlink()
    again = opened(store)
    assert items(again) == list(range(25))
    files = again.drain(out)
    assert [event_form(path).time for path in files] == ["ts"] * (1 if step == "appended" else 2)
    if step != "appended":
        assert files[0].read_bytes() == drained
    append_history(store, files)
    again.refresh()
    assert items(again) == list(range(25))
    assert [name for name in names(journal) if name != "manifest.json"] == ["00000004.log"]


def test_an_append_refuses_a_segment_that_the_store_has(store):
    recent = opened(store)
    append_numbers(recent, range(5))
    files = recent.drain(store.parent / "out")
    append_history(store, files)
    assert recent.generation == 1  # nothing has refreshed it
    with pytest.raises(DataError, match=r"generation 2 holds the events of recent-.*-00000001"):
        append_history(store, files)
    assert recent.drain(store.parent / "out") == []
    assert recent.generation == 2


def test_segments_go_into_the_store_in_any_order(store):
    recent = opened(store)
    files = []
    for begin in (0, 10, 20):
        append_numbers(recent, range(begin, begin + 10))
        files = recent.drain(store.parent / "out")
    append_history(store, files[1])
    recent.refresh()
    assert (items(recent), recent.events) == (list(range(30)), 20)
    append_history(store, [files[0], files[2]])
    compact_history(store)
    drop_generations(store, [1, 2, 3])
    recent.refresh()
    assert (items(recent), recent.events) == (list(range(30)), 0)
    recent.close()
    assert items(opened(store)) == list(range(30))


def test_without_a_journal_a_drained_segment_stays_the_same(store):
    recent = opened(store, journal=None)
    append_numbers(recent, range(5))
    (first,) = recent.drain(store.parent / "out")
    (second,) = recent.drain(store.parent / "elsewhere")
    assert first.read_bytes() == second.read_bytes()
    append_history(store, second)
    recent.refresh()
    assert (items(recent), recent.events) == (list(range(5)), 0)


@pytest.mark.parametrize("cut", [1, 8, 37])
def test_an_incomplete_end_is_cut_off_and_reported(store, cut):
    recent = opened(store)
    append_numbers(recent, range(4))
    recent.close()
    log = store.parent / "journal" / "00000001.log"
    os.truncate(log, log.stat().st_size - cut)
    with pytest.warns(UserWarning, match=r"00000001.log: the last \d+ bytes are incomplete and were cut off"):
        again = opened(store)
    assert items(again) == [0, 1, 2]
    append_numbers(again, [3])
    again.close()
    assert items(opened(store)) == [0, 1, 2, 3]


def test_damage_before_the_end_is_an_error(store):
    recent = opened(store)
    append_numbers(recent, range(4))
    recent.close()
    opened(store).close()
    log = store.parent / "journal" / "00000001.log"
    content = bytearray(log.read_bytes())
    content[60] ^= 1
    log.write_bytes(content)
    with pytest.raises(DataError, match=r"00000001.log at byte 40: a record doesn't match its checksum"):
        opened(store)


def test_a_journal_is_of_one_process_and_of_one_form_of_events(store):
    recent = opened(store)
    with pytest.raises(GmetaError, match="another process has the journal"):
        opened(store)
    recent.close()
    with pytest.raises(GmetaError, match="these recent histories are closed"):
        recent.append(1, EVENT)
    with pytest.raises(GmetaError, match="these recent histories are closed"):
        recent.drain(store.parent / "out")
    other = store.parent / "other"
    day = write_day(store.parent / "1.parquet", draw_day(0, 5))
    append_history(other, day, HistorySpec("user", "ts", groups={"one": ("item",)}))
    with pytest.raises(ConfigError, match=r"has events with columns user .* price .*, and the store has"):
        opened(other)


@pytest.mark.parametrize("sync", ["always", 0.01, None])
def test_the_journal_is_flushed_as_often_as_stated(store, sync, monkeypatch):
    recent = opened(store, sync=sync)
    threads = [thread for thread in threading.enumerate() if thread.name == "gmeta-recent-flush"]
    assert len(threads) == (sync == 0.01)
    append_numbers(recent, range(3))
    recent.sync()
    recent.close()
    del recent
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert items(opened(store)) == [0, 1, 2]


def test_a_full_drive_refuses_the_event_and_keeps_the_others(store):
    code = """
import resource, signal, sys
from gmeta.core.errors import GmetaError
from gmeta.io import RecentHistories
recent = RecentHistories(sys.argv[1], ["item"], journal=sys.argv[2], sync=None)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    for number in range(100):
        recent.append(1, {"ts": number, "item": number, "price": 0.5})
except GmetaError as error:
    print(number, len(recent.snapshot(1, 1000).columns["item"]), error)
"""
    words = [sys.executable, "-c", code, store, store.parent / "journal"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "25 25 can't write the journal of recent events: File too large\n"
    assert items(opened(store)) == list(range(25))


def test_appends_go_on_while_segments_are_drained(store):
    recent, stop, count = opened(store), threading.Event(), [0, 0]

    def append(which):
        while not stop.is_set():
            recent.append(which, EVENT | {"ts": count[which], "item": count[which]})
            count[which] += 1

    threads = [threading.Thread(target=append, args=[which]) for which in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        append_history(store, recent.drain(store.parent / "out"))
        recent.refresh()
        for user in range(2):  # its own history has no gap, whatever moves
            found = items(recent, user)
            assert found == list(range(len(found)))
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert [items(recent, user) for user in range(2)] == [list(range(each)) for each in count]
    recent.close()
    assert [items(opened(store, journal=None), user) != [] for user in range(2)] == [True, True]
    again = opened(store)
    assert [items(again, user) for user in range(2)] == [list(range(each)) for each in count]
