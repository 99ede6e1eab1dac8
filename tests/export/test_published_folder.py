"""Compaction of a publisher's folder: every replica reaches what it reaches by each delta in turn."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.files import LocalFiles
from gmeta.export.model_deltas import Delta, Layout, TableChange, split
from gmeta.export.published_folder import PublishedFolder, span_name
from support.stored_files import stored

LAYOUT = Layout("s", {"a": 2, "b": 1}, {"w": ((3,), "float32"), "n": ((), "int64")})


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Let nothing wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


class Training:
    """Rows and weights that change at random, and the states that replicas have at each version.

    Attributes:
      states: Version -> the state of a replica: (table, id) -> row, and weight -> value.
    """

    def __init__(self, folder: PublishedFolder, seed: int) -> None:
        self.folder, self._random = folder, np.random.default_rng(seed)
        self._rows: dict[tuple[str, int], float] = {}
        self._touched: set[tuple[str, int]] = set()
        self._owes = False
        self.states: dict[int, dict[object, bytes]] = {1: {}}
        self.version = self._number = 1

    def publish(self, end: str = "written", dense: bool = False) -> None:
        """Change something, and write a delta; `end` says how: it is lost, or appears though it failed."""
        for key in [(table, int(each)) for table in "ab" for each in self._random.integers(0, 9, 3)]:
            self._touched.add(key)
            if self._random.random() < 0.6:
                self._rows[key] = self._random.random()
            else:
                self._rows.pop(key, None)
        dense = dense or self._owes
        self._number += 1
        tables = {}
        for table, width in LAYOUT.tables.items():
            ids = np.array([each for name, each in self._touched if name == table], np.int64)
            there = np.array([(table, each) in self._rows for each in ids.tolist()], bool)
            rows = [[self._rows[table, each]] * width for each in ids[there].tolist()]
            rows = np.array(rows, np.float32).reshape(-1, width)
            tables[table] = TableChange(ids[there], rows, ids[~there])
        weights = (
            {"w": self._random.random(3).astype(np.float32), "n": np.array(self._number)} if dense else {}
        )
        delta = Delta(self.version, self._number, tables, weights)
        if end != "lost":
            self.states[self._number] = apply(self.states[self.version], delta)
            self.folder.write(delta, LAYOUT)
        if end == "written":
            self._touched.clear()
            self.version, self._owes = self._number, False
        else:
            self._owes = dense


def apply(state: dict[object, bytes], delta: Delta) -> dict[object, bytes]:
    """Return a replica's state after a delta."""
    state = dict(state)
    for name, change in delta.tables.items():
        for key in change.removed.tolist():
            state.pop((name, key), None)
        for key, row in zip(change.ids.tolist(), change.rows, strict=True):
            state[name, key] = row.tobytes()
    return state | {name: value.tobytes() for name, value in delta.dense.items()}


def caught_up(folder: PublishedFolder, state: dict[object, bytes], version: int, at_once: int) -> object:
    """Return the version and state of a replica that has taken what there is, and the number of deltas."""
    taken = 0
    while delta := folder.changes(LAYOUT, version, at_once):
        assert delta.after == version
        state, version, taken = apply(state, delta), delta.version, taken + 1
    return version, state, taken


ACTIONS = st.lists(
    st.sampled_from(["written", "written", "dense", "lost", "appears", "compact"]), max_size=60
)


@given(ACTIONS, st.integers(0, 99), st.integers(2, 4), st.sampled_from([0, 200, 1 << 30]))
@settings(max_examples=40, deadline=None)
def test_replicas_of_every_version_reach_the_last_one(actions, seed, fanout, at_once):
    with tempfile.TemporaryDirectory() as folder:
        training = Training(PublishedFolder(folder), seed)
        reader = PublishedFolder(folder)
        for action in [*actions, "written", *["compact"] * 5]:
            if action == "compact":
                training.folder.compact(LAYOUT, fanout)
            else:
                training.publish("written" if action == "dense" else action, dense=action == "dense")
        for version, state in training.states.items():
            found = caught_up(reader, state, version, at_once)
            assert found[:2] == (training.version, training.states[training.version])


@given(st.integers(0, 99), st.sampled_from(["s3", "hdfs"]), st.integers(1, 6))
@settings(max_examples=10, deadline=None)
def test_a_killed_compaction_leaves_a_folder_from_which_all_continue(seed, kind, after):
    with tempfile.TemporaryDirectory() as path:
        files, system = stored(Path(path), kind)
        training = Training(PublishedFolder(files), seed)
        for number in range(12):
            training.publish(dense=number % 5 == 0)
        calls = []

        def fail(operation, _):
            if operation not in ("list", "open_input_file"):
                calls.append(operation)
                if len(calls) > after:
                    raise SystemError("killed")

        system.before = fail
        with suppress(GmetaError):
            training.folder.compact(LAYOUT, 4)
        system.before = lambda operation, _: None
        for _ in range(2):
            for version, state in training.states.items():
                found = caught_up(training.folder, state, version, 1 << 30)
                assert found[:2] == (training.version, training.states[training.version])
            PublishedFolder(files).compact(LAYOUT, 4)
        names = [span.name for span in training.folder.contents().deltas]
        assert span_name(1, 5) in names
        assert span_name(1, 2) not in names


def test_files_and_what_a_replica_reads_grow_by_logarithms(tmp_path):
    training = Training(PublishedFolder(LocalFiles(tmp_path)), 0)
    most = 0
    for _ in range(300):
        training.publish()
        training.folder.compact(LAYOUT, 4)
        most = max(most, len(training.folder.contents().deltas))
    assert most <= 2 * 4 * 5  # 300 is between 4**4 and 4**5
    contents = training.folder.contents()
    for behind in (1, 3, 20, 100, 299):
        spans = [*contents.following(training.version - behind)]
        assert sum(span.version - span.after for span in spans) <= 5 * behind
        assert len(spans) <= 2 * 4 * (1 + np.log(behind) / np.log(4))
    found = caught_up(training.folder, {}, 1, 0)
    assert found[:2] == (training.version, training.states[training.version])


def test_combinations_have_at_most_their_bytes(tmp_path):
    training = Training(PublishedFolder(LocalFiles(tmp_path)), 0)
    for _ in range(60):
        training.publish()
        training.folder.compact(LAYOUT, 2, largest=600)
    spans = training.folder.contents().deltas
    assert max(span.bytes for span in spans) <= 600 + 200  # the header
    assert max(span.version - span.after for span in spans) > 1
    found = caught_up(training.folder, {}, 1, 0)
    assert found[:2] == (training.version, training.states[training.version])


def test_readers_continue_while_deltas_are_combined(tmp_path):
    training = Training(PublishedFolder(LocalFiles(tmp_path)), 0)
    training.publish()
    wrong, reads, ended = [], [], threading.Event()

    def read(seed):
        random, folder = np.random.default_rng(seed), PublishedFolder(tmp_path)
        while not ended.is_set() or not reads:
            known = training.version
            version = int(random.integers(1, known + 1))
            try:
                reached, state, _ = caught_up(folder, training.states[version], version, 1 << 30)
                if reached < known or state != training.states[reached]:
                    wrong.append((version, reached))
            except Exception as error:
                wrong.append(error)
            reads.append(version)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(80):
        training.publish()
        training.folder.compact(LAYOUT, 2)
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(reads) > 5


def test_a_file_under_another_name_is_refused(tmp_path):
    training = Training(PublishedFolder(LocalFiles(tmp_path)), 0)
    training.publish()
    training.publish()
    (tmp_path / span_name(1, 2)).rename(tmp_path / span_name(2, 3))
    with pytest.raises(DataError, match="has the changes from version 1 to 2, unlike its name"):
        training.folder.changes(LAYOUT, 2, 0)
    (tmp_path / span_name(2, 3)).write_bytes(b"gmdelta1")
    with pytest.raises(DataError, match="not a delta of gmeta"):
        training.folder.changes(LAYOUT, 2, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=2), st.integers(1, 300))
def test_parts_of_changes_have_each_row_once_and_few_bytes(counts, limit):
    tables = {
        name: TableChange(
            np.arange(rows),
            np.arange(rows * width, dtype=np.float32).reshape(rows, width),
            100 + np.arange(gone),
        )
        for (name, width), (rows, gone) in zip(LAYOUT.tables.items(), counts, strict=True)
    }
    parts = [*split(tables, limit, {"a": 8, "b": 4})]
    for name, change in tables.items():
        for kind in ("ids", "rows", "removed"):
            joined = np.concatenate([getattr(part[name], kind) for part in parts])
            np.testing.assert_array_equal(joined, getattr(change, kind))
    for part in parts:
        assert set(part) == set(tables)
        size = Delta(0, 1, part, {}).size
        assert size <= limit or sum(len(each.ids) + len(each.removed) for each in part.values()) == 1
        assert size or len(parts) == 1
