"""A run's checkpoints: names, retention, chains; killed savers; memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from gmeta import initializers, ops, optimizers
from gmeta.checkpoint.manifest import Manifest
from gmeta.checkpoint.store import CheckpointStore
from gmeta.core.errors import ConfigError, DataError
from support import warm
from support.tables import assert_same_tables


def new_table() -> ops.HashTable:
    return ops.HashTable(3, optimizers.Adam(0.1), initializers.Normal(), seed=4, name="t")


def train(table: ops.HashTable, keys: np.ndarray) -> None:
    rows = table.lookup_keys(keys)
    table.apply_gradients(keys, rows)


def names(store: CheckpointStore) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in store.checkpoints()]


def test_the_last_are_kept_with_what_they_continue(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, max_increments=3)
    table = new_table()
    train(table, np.arange(500))
    train(table, np.arange(1))
    seen, kinds = [], []
    for step in range(1, 9):
        train(table, np.arange(10 * step, 10 * step + 10))
        table.remove([10 * step])
        kinds.append(store.save({"item": table}, step).kinds["item"][0])
        seen.append(names(store))
        again = new_table()
        store.load({"item": again})
        assert_same_tables(again, table)
        store.load({"item": again}, store.checkpoints()[-2] if step > 1 else None)
    assert "".join(kinds) == "fiiifiii"  # a full one when the chain is full
    assert seen[3] == [1, 2, 3, 4]  # 3 and 4 are kept, and need 1 and 2
    assert seen[4] == [1, 2, 3, 4, 5]
    assert seen[5] == [5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        *(f"step-{s:012d}" for s in seen[-1]),
    ]


def test_a_chain_as_large_as_half_a_full_save_ends(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, max_increments=100)
    table = new_table()
    train(table, np.arange(60_000))
    kinds = []
    for step in range(6):
        train(table, np.arange(15_000))
        kinds.append(store.save({"item": table}, step).kinds["item"][0])
    assert "".join(kinds) == "fiifii"


def test_no_increments_if_none_are_wanted(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, max_increments=0)
    table = new_table()
    for step in range(3):
        train(table, np.arange(10))
        assert store.save({"item": table}, step).kinds == {"item": "full"}
    assert names(store) == [2]


def test_what_cannot_be_is_refused(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    assert store.latest() is None
    with pytest.raises(DataError, match="no checkpoint in this folder"):
        store.load({"item": new_table()})
    store.save({"item": new_table()}, 5)
    with pytest.raises(ConfigError, match="a checkpoint of step 5 would come before it"):
        store.save({"item": new_table()}, 5)
    with pytest.raises(ConfigError, match="keep must be at least 1"):
        CheckpointStore(tmp_path, keep=0)


# A saver's whole state is a function of its step, so whoever finds a checkpoint knows what must be in it.
# TensorFlow is imported once and children are forked before it starts its threads, so a kill costs little.
KILLS = r"""
import os, random, signal, sys, time
import gmeta
import numpy as np
from gmeta import initializers, ops, optimizers
from gmeta.checkpoint.chain import CheckpointReader
from gmeta.checkpoint.store import CheckpointStore, step_of

KEYS = 300
root, kills = sys.argv[1], int(sys.argv[2])
store = CheckpointStore(root, keep=2, max_increments=3)

def touched(step):
    return np.arange(step % 13, KEYS, 13)

def removed(step):
    return step * 5 % KEYS

def save_for_ever(ready):
    table = ops.HashTable(2, optimizers.SGD(1.0), initializers.Zeros())
    step = 0
    if store.latest() is not None:
        store.load({"item": table})
        step = step_of(store.latest())
    os.write(ready, b".")
    while True:
        step += 1
        keys = touched(step)
        table.lookup_keys(keys)
        table.apply_gradients(keys, -np.ones((len(keys), 2), np.float32))
        table.remove([removed(step)])
        store.save({"item": table}, step)

def expected(step):
    rows = {}
    for s in range(1, step + 1):
        for key in touched(s).tolist():
            rows[key] = rows.get(key, 0) + 1
        rows.pop(removed(s), None)
    return rows

generator = random.Random(7)
partial, last, kill = 0, 0, 0
# On a machine with much else to do a saver gets less far in the same time: more of them, and later kills.
while kill < kills or (not (partial and last) and kill < 10 * kills):
    kill += 1
    get, put = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(put)
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(1)
    os.close(put)
    assert os.read(get, 1) == b".", "the saver failed before its first save"
    os.close(get)
    time.sleep(generator.uniform(0, 0.4) * max(1, kill / kills))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the saver failed"
    partial += any(name.endswith(".partial") for name in os.listdir(root))
    for checkpoint in store.checkpoints():
        step, rows = step_of(checkpoint), {}
        with CheckpointReader(checkpoint) as reader:
            for shard in range(1024):
                columns = reader.read_shard("item", shard)
                rows.update(zip(columns["key"].tolist(), columns["weights"][:, 0].tolist()))
        assert rows == expected(step), (kill, step)
    now = step_of(store.latest()) if store.latest() else 0
    assert now >= last, "a whole checkpoint is gone"
    last = now
print(kill, partial, last)
"""


def run(code: str, *arguments: object) -> list[str]:
    done = warm.run([sys.executable, "-c", code, *arguments], timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()


@pytest.mark.shown_by("checkpoint/test_folder_lock.py::test_a_job_that_was_killed_goes_on_at_once")
def test_a_killed_saver_leaves_whole_checkpoints(tmp_path):
    kills = int(os.environ.get("GMETA_TEST_KILLS", "12"))
    count, partial, last = map(int, run(KILLS, tmp_path, kills))
    assert count >= kills
    assert partial > 0  # some were killed in the middle of a save
    assert last > 0


MEMORY = r"""
import sys
from pathlib import Path
import gmeta
import numpy as np
from gmeta import initializers, ops, optimizers
from gmeta.checkpoint.sharded import load, save

def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024

def new_table():
    return ops.HashTable(64, optimizers.Adam(0.1), seed=3)

folder, rows = sys.argv[1], int(sys.argv[2])
warm = new_table()
warm.lookup_keys(np.arange(5000))
save(folder + "/warm", {"item": warm})
load(folder + "/warm", {"item": warm})

def measured(work):
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    work()
    return status("VmHWM") - before

table = new_table()
for begin in range(0, rows, 20000):
    keys = np.arange(begin, min(rows, begin + 20000))
    table.apply_gradients(keys, table.lookup_keys(keys))
saved = measured(lambda: save(folder + "/a", {"item": table}))
loaded = measured(lambda: load(folder + "/a", {"item": new_table()}))
print(int(table.statistics().bytes), saved, loaded)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_memory_stays_near_the_tables_own(tmp_path):
    table, saved, loaded = map(int, run(MEMORY, tmp_path, 200_000))
    assert saved < 0.2 * table
    assert loaded < 1.2 * table


def test_a_checkpoint_of_the_store_names_its_base(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    table = new_table()
    train(table, np.arange(1000))
    train(table, np.arange(3))
    store.save({"item": table}, 3, metadata={"epoch": 1})
    store.save({"item": table}, 4)
    assert Manifest.load(tmp_path / "step-000000000004").base == "step-000000000003"
    assert Manifest.load(tmp_path / "step-000000000003").metadata == {"epoch": 1}
