from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from gmeta import initializers, ops, optimizers
from gmeta.checkpoint.chain import CheckpointReader
from gmeta.checkpoint.manifest import Manifest
from gmeta.checkpoint.sharded import load, save
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.shares import LOGICAL_SHARDS, owned_shards
from gmeta.ops.table.records import Records
from support import warm
from support.reference.table import logical_shards
from support.tables import assert_same_tables, sorted_records
from support.thread_ranks import run_thread_ranks

DIM = 3


def new_table(optimizer: optimizers.SparseOptimizer | None = None, dim: int = DIM) -> ops.HashTable:
    return ops.HashTable(dim, optimizer or optimizers.Adam(0.1), initializers.Normal(), seed=4, name="t")


def train(table: ops.HashTable, keys: np.ndarray, seed: int = 0) -> None:
    keys = np.unique(np.asarray(keys, np.int64))
    if len(keys):
        table.lookup(keys)
        grads = np.random.default_rng(seed).normal(size=(len(keys), table.dim))
        table.apply_gradients(keys, grads.astype(np.float32))


def some_keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count)


def save_as_ranks(folder: Path, tables: list[dict[str, ops.HashTable]], **arguments) -> list:
    """Every rank in a thread of its own."""
    size = len(tables)
    return run_thread_ranks(
        size,
        lambda rank, gather: save(
            folder, tables[rank], rank=rank, world_size=size, gather=gather, **arguments
        ),
    )


@pytest.mark.parametrize(
    "optimizer",
    [optimizers.SGD(0.1), optimizers.Adam(0.1), optimizers.Adagrad(0.1), optimizers.RowWiseAdagrad(0.1)],
    ids=lambda o: o.kind,
)
def test_what_is_saved_comes_back_to_the_last_bit(tmp_path, optimizer):
    table, other = new_table(optimizer), new_table(optimizer, dim=5)
    for step in range(3):
        train(table, some_keys(2000, step))
    train(other, [1, 2, 3])
    info = save(tmp_path / "a", {"item": table, "a/b+c": other})
    assert info.rows == {"item": 6000, "a/b+c": 3}
    assert info.kinds == {"item": "full", "a/b+c": "full"}
    again, other_again = new_table(optimizer), new_table(optimizer, dim=5)
    train(again, [77])  # replaced
    loaded = load(tmp_path / "a", {"item": again, "a/b+c": other_again})
    assert loaded.rows == info.rows
    assert_same_tables(again, table)
    assert_same_tables(other_again, other)
    train(table, some_keys(50, 0), seed=9)  # step and slots are the same too
    train(again, some_keys(50, 0), seed=9)
    assert_same_tables(again, table)


def test_an_empty_table_is_a_checkpoint_too(tmp_path):
    save(tmp_path / "a", {"item": new_table()})
    table = new_table()
    train(table, [5])
    assert load(tmp_path / "a", {"item": table}).rows == {"item": 0}
    assert int(table.size()) == 0


def test_the_files_are_arrows_own(tmp_path):
    table = new_table()
    train(table, some_keys(3000))
    save(tmp_path / "a", {"item": table})
    (path,) = (tmp_path / "a").glob("item/*.arrow")
    with pa.memory_map(str(path)) as source:
        file = pa.ipc.open_file(source)
        batches = [file.get_batch(i) for i in range(file.num_record_batches)]
    assert json.loads(file.schema.metadata[b"gmeta.dim"]) == DIM
    for batch in batches:
        keys = batch.column("key").to_numpy()
        assert len(set(logical_shards(keys).tolist())) == 1
        assert np.all(np.diff(keys.astype(object)) > 0)
    whole = pa.Table.from_batches(batches).sort_by("key")
    records = sorted_records(table)
    np.testing.assert_array_equal(whole["key"].to_numpy(), records["keys"])
    weights = np.stack(whole["weights"].to_numpy(zero_copy_only=False))
    np.testing.assert_array_equal(weights, records["rows"])
    slots = np.stack(whole["slots"].to_numpy(zero_copy_only=False))
    np.testing.assert_array_equal(slots, records["slots"])
    np.testing.assert_array_equal(whole["frequency"].to_numpy(), records["frequency"])
    np.testing.assert_array_equal(whole["last_step"].to_numpy(), records["last_step"])


@pytest.mark.parametrize("saved_by", [1, 4])
@pytest.mark.parametrize("loaded_by", [1, 3, 4])
def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path, saved_by, loaded_by):
    keys = some_keys(4000)
    whole = new_table()
    train(whole, keys)
    ranks = []
    for rank in range(saved_by):
        part = new_table()
        load_into(part, whole, owned_shards(rank, saved_by))
        ranks.append({"item": part})
    infos = save_as_ranks(tmp_path / "a", ranks)
    assert sum(info.rows["item"] for info in infos) == len(keys)
    stored = Manifest.load(tmp_path / "a").tables["item"].bytes
    read, size = 0, 0
    for rank in range(loaded_by):
        table, shards = new_table(), owned_shards(rank, loaded_by)
        info = load(tmp_path / "a", {"item": table}, rank=rank, world_size=loaded_by)
        expected = new_table()
        load_into(expected, whole, shards)
        assert_same_tables(table, expected)
        # A rank reads the batches that it owns, and no byte of another's.
        own = sum(
            segment.bytes
            for part in Manifest.load(tmp_path / "a").tables["item"].parts
            for segment in part.rows.segments
            if segment.shard in shards
        )
        assert info.bytes == own
        assert info.bytes < 1.1 * stored / loaded_by
        read, size = read + info.bytes, size + int(table.size())
    assert size == len(keys)
    assert read < stored


def load_into(table: ops.HashTable, whole: ops.HashTable, shards: range) -> None:
    """Fills a table with the records of some logical shards of another."""
    part = whole.export_shards(shards.start, shards.stop)
    records = Records(part.keys, part.rows, part.slots, part.frequency, part.last_step, part.step)
    table.import_(records, replace=True)


operation = st.one_of(
    st.tuples(st.just("train"), st.lists(st.integers(-30, 30), max_size=15)),
    st.tuples(st.just("look up"), st.lists(st.integers(-30, 30), max_size=5)),
    st.tuples(st.just("remove"), st.lists(st.integers(-30, 30), max_size=15)),
    st.tuples(st.just("import"), st.lists(st.integers(-30, 30), max_size=5, unique=True)),
    st.tuples(st.just("save"), st.booleans()),
    st.tuples(st.just("reload"), st.none()),
)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(operations=st.lists(operation, max_size=14), seed=st.integers(0, 99))
def test_a_chain_of_increments_equals_a_full_save(tmp_path_factory, operations, seed):
    folder = tmp_path_factory.mktemp("chain")
    table, base = new_table(), None
    for number, (kind, argument) in enumerate([*operations, ("save", True)]):
        if kind == "train":
            train(table, argument, seed + number)
        elif kind == "look up":
            table.lookup(np.array(argument, np.int64))
        elif kind == "remove":
            table.remove(np.array(argument, np.int64))
        elif kind == "import":
            n = len(argument)
            zeros = np.zeros(n, np.int64)
            rows, slots = np.ones((n, DIM), np.float32), np.ones((n, 2 * DIM), np.float32)
            table.import_(Records(np.array(argument, np.int64), rows, slots, zeros, zeros, 0))
        elif kind == "save":
            name = folder / str(number)
            save(name, {"item": table}, base=base if argument else None, journal=1000)
            base = name
            chain = new_table()
            load(name, {"item": chain})
            assert_same_tables(chain, table)
        elif base is not None:
            table = new_table()
            load(base, {"item": table}, journal=1000)


def test_an_increment_holds_what_was_touched_and_removed_and_nothing_else(tmp_path):
    table = new_table()
    train(table, np.arange(1000))
    train(table, [1, 2])
    save(tmp_path / "a", {"item": table}, journal=100)
    train(table, [500, 501, 5000])
    table.remove([3, 4])
    info = save(tmp_path / "b", {"item": table}, base=tmp_path / "a", journal=100)
    assert info.kinds == {"item": "increment"}
    assert info.rows == {"item": 5}  # and 1, 2 of the very step of the first save
    manifest = Manifest.load(tmp_path / "b")
    assert manifest.base == "a"
    (part,) = manifest.tables["item"].parts
    assert part.removed is not None
    assert sum(segment.rows for segment in part.removed.segments) == 2
    assert manifest.tables["item"].size == int(table.size())


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda table, folder: table.import_(table.export()), "imported into"),
        (lambda table, folder: table.remove(np.arange(900)), "overflowed"),
        (lambda table, folder: save(folder / "other", {"item": table}, journal=128), "another checkpoint"),
    ],
)
def test_a_table_that_cannot_tell_its_changes_is_saved_in_full(tmp_path, spoil, reason):
    table = new_table()
    train(table, np.arange(1000))
    save(tmp_path / "a", {"item": table}, journal=128)
    spoil(table, tmp_path)
    info = save(tmp_path / "b", {"item": table}, base=tmp_path / "a", journal=128)
    assert info.kinds == {"item": "full"}
    assert reason in info.reasons["item"]
    assert Manifest.load(tmp_path / "b").base is None
    again = new_table()
    load(tmp_path / "b", {"item": again})
    assert_same_tables(again, table)


def test_full_and_incremental_parts_of_one_checkpoint(tmp_path):
    tables = {"a": new_table(), "b": new_table()}
    for table in tables.values():
        train(table, np.arange(200))
    save(tmp_path / "1", tables, journal=1000)
    tables["a"].import_(tables["a"].export())
    tables["a"].remove([7])
    tables["b"].remove([8])
    info = save(tmp_path / "2", tables, base=tmp_path / "1", journal=1000)
    assert info.kinds == {"a": "full", "b": "increment"}
    again = {"a": new_table(), "b": new_table()}
    load(tmp_path / "2", again)
    for name in tables:
        assert_same_tables(again[name], tables[name])


def test_a_failed_increment_loses_no_removal(tmp_path, monkeypatch):
    table = new_table()
    train(table, np.arange(300))
    save(tmp_path / "a", {"item": table}, journal=1000)
    table.remove(np.arange(10))

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gmeta.checkpoint.lock.commit", full_disk)
        with pytest.raises(Exception, match="No space left on device; make room"):
            save(tmp_path / "b", {"item": table}, base=tmp_path / "a", journal=1000)
    assert not (tmp_path / "b").exists()
    table.remove([20])
    assert save(tmp_path / "b", {"item": table}, base=tmp_path / "a").kinds == {"item": "increment"}
    again = new_table()
    load(tmp_path / "b", {"item": again})
    assert_same_tables(again, table)


FULL_DISK = r"""
import resource, sys
from pathlib import Path
import gmeta
import numpy as np
from gmeta import initializers, ops, optimizers
from gmeta.core.errors import GmetaError
from gmeta.checkpoint.store import CheckpointStore

root, limit = Path(sys.argv[1]), int(sys.argv[2])
table = ops.HashTable(64, optimizers.SGD(0.1))
store = CheckpointStore(root)
table.lookup_keys(np.arange(10))
store.save({"item": table}, 1)
table.lookup_keys(np.arange(2000))
dense = lambda folder: (folder / "weights").write_bytes(bytes(600_000))
# A write beyond it fails, as on a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    store.save({"item": table}, 2, dense=dense)
except GmetaError as error:
    print(error)
print(sorted(path.name for path in root.iterdir()))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
print(store.save({"item": table}, 2, dense=dense).folder.name)
"""


@pytest.mark.parametrize(
    ("limit", "file"), [(100_000, "item/rows-00000-of-00001.arrow"), (590_000, None)], ids=["rows", "dense"]
)
def test_a_full_disk_is_named_by_its_file_and_leaves_nothing_half_done(tmp_path, limit, file):
    done = warm.run([sys.executable, "-c", FULL_DISK, str(tmp_path), str(limit)], timeout=300)
    assert done.returncode == 0, done.stderr
    said, left, saved = done.stdout.splitlines()
    assert said.startswith(f"{tmp_path}/step-000000000002: the checkpoint can't be written: File too large")
    assert file is None or f".step-000000000002.partial/{file})" in said
    assert left == "['.lock', 'step-000000000001']"
    assert saved == "step-000000000002"


def test_increments_of_ranks_that_loaded_another_number(tmp_path):
    table = new_table()
    train(table, some_keys(500))
    save(tmp_path / "a", {"item": table})
    ranks = [{"item": new_table()} for _ in range(3)]
    for rank, tables in enumerate(ranks):
        load(tmp_path / "a", tables, rank=rank, world_size=3, journal=1000)
        own = tables["item"].export().keys.numpy()
        for each in (table, tables["item"]):
            each.lookup(own[:5])
            each.remove(own[5:9])
    infos = save_as_ranks(tmp_path / "b", ranks, base=tmp_path / "a", journal=1000)
    assert [info.kinds["item"] for info in infos] == ["increment"] * 3
    again = new_table()
    load(tmp_path / "b", {"item": again})
    assert_same_tables(again, table)


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_damage_is_named(tmp_path):
    table = new_table()
    train(table, some_keys(3000))
    save(tmp_path / "a", {"item": table}, dense=lambda folder: (folder / "w").write_text("weights"))
    (path,) = (tmp_path / "a").glob("item/*.arrow")
    segment = Manifest.load(tmp_path / "a").tables["item"].parts[0].rows.segments[100]
    whole = path.read_bytes()

    damage(path, segment.offset + segment.bytes - 20)
    with pytest.raises(
        DataError, match=rf"{path} at byte {segment.offset}: logical shard {segment.shard} is"
    ):
        load(tmp_path / "a", {"item": new_table()})
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=rf"{len(whole) - 1} bytes, the manifest says {len(whole)}"):
        load(tmp_path / "a", {"item": new_table()})
    path.unlink()
    with pytest.raises(DataError, match=r"can't be read: No such file or directory; bring the file back"):
        load(tmp_path / "a", {"item": new_table()})
    path.write_bytes(whole)
    with CheckpointReader(tmp_path / "a") as reader:
        reader.verify()
    damage(tmp_path / "a" / "dense" / "w", 2)
    with CheckpointReader(tmp_path / "a") as reader, pytest.raises(DataError, match="dense/w: damaged"):
        reader.verify()
    damage(tmp_path / "a" / "manifest.json", 300)
    with pytest.raises(DataError, match=r"manifest\.json: damaged"):
        load(tmp_path / "a", {"item": new_table()})
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(DataError, match="no checkpoint here"):
        load(tmp_path / "a", {"item": new_table()})


def test_a_base_that_is_missing_or_another_is_named(tmp_path):
    table = new_table()
    train(table, np.arange(10))
    save(tmp_path / "a", {"item": table}, journal=100)
    train(table, [3])
    save(tmp_path / "b", {"item": table}, base=tmp_path / "a", journal=100)
    (tmp_path / "a").rename(tmp_path / "kept")
    with pytest.raises(DataError, match="an increment on a, which can't be read"):
        load(tmp_path / "b", {"item": new_table()})
    save(tmp_path / "a", {"item": table})
    with pytest.raises(DataError, match="an increment on a, but another checkpoint has that name now"):
        load(tmp_path / "b", {"item": new_table()})


def test_a_table_of_another_form_is_refused(tmp_path):
    table = new_table()
    train(table, np.arange(10))
    save(tmp_path / "a", {"item": table})
    with pytest.raises(ConfigError, match=r"saved with dim 3, .* to fill has dim 4, .*make it with"):
        load(tmp_path / "a", {"item": new_table(dim=4)})
    with pytest.raises(ConfigError, match=r"saved with .* adam .* has .* sgd"):
        load(tmp_path / "a", {"item": new_table(optimizers.SGD(0.1))})
    with pytest.raises(DataError, match=r"no table 'user' in this checkpoint; it has 'item'"):
        load(tmp_path / "a", {"user": new_table()})


def test_misuse_is_refused_before_anything_is_written(tmp_path):
    table = new_table()
    train(table, some_keys(100))
    with pytest.raises(ConfigError, match="pass gather="):
        save(tmp_path / "a", {"item": table}, world_size=2)
    with pytest.raises(ConfigError, match="no tables"):
        save(tmp_path / "a", {})
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "a", {"item": table})
    with pytest.raises(ConfigError, match="exists already: a checkpoint isn't overwritten"):
        save(tmp_path / "a", {"item": table})
    with pytest.raises(ConfigError, match="base must lie beside"):
        save(tmp_path / "b" / "c", {"item": table}, base=tmp_path / "a")


def test_keys_of_other_ranks_are_not_lost_without_a_word(tmp_path):
    ranks = [{"item": new_table()} for _ in range(2)]
    train(ranks[0]["item"], some_keys(100))  # half of them belong to rank 1
    results = save_as_ranks(tmp_path / "a", ranks)
    assert isinstance(results[0], ConfigError)
    assert "keys of logical shards outside [0, 512)" in str(results[0])
    assert not (tmp_path / "a").exists()


def test_owned_shards_divide_all():
    for world_size in (1, 2, 3, 7, 1000, 1024):
        parts = [owned_shards(rank, world_size) for rank in range(world_size)]
        assert [shard for part in parts for shard in part] == list(range(LOGICAL_SHARDS))
        for rank, part in enumerate(parts):
            assert all(shard * world_size // LOGICAL_SHARDS == rank for shard in part)
    for rank, world_size in ((0, 0), (2, 2), (-1, 2), (0, 1025)):
        with pytest.raises(ConfigError):
            owned_shards(rank, world_size)


def test_saves_among_batches_are_completed_by_the_next(tmp_path):
    table = new_table()
    train(table, np.arange(3000))
    running = True

    def batches() -> None:
        random = np.random.default_rng(1)
        while running:
            train(table, random.integers(0, 4000, 200))
            table.remove(random.integers(0, 4000, 20))

    thread = threading.Thread(target=batches)
    thread.start()
    base, journal = None, 10**9  # room for what is removed between two saves, however long they take
    for number in range(2):
        info = save(tmp_path / str(number), {"item": table}, base=base, journal=journal)
        base = info.folder
        load(base, {"item": new_table()})  # each has the rows that it says it has
    running = False
    thread.join()
    save(tmp_path / "last", {"item": table}, base=base, journal=journal)
    assert Manifest.load(tmp_path / "last").base == "1"
    again = new_table()
    load(tmp_path / "last", {"item": again})
    assert_same_tables(again, table)
