"""`gmeta inspect`: what it says of checkpoints, whole and damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gmeta import initializers, ops, optimizers, policies
from gmeta.checkpoint.callback import tables_by_name
from gmeta.checkpoint.sharded import save
from gmeta.checkpoint.store import CheckpointStore
from gmeta.cli import main
from gmeta.layers import EmbeddingCollection, FeatureConfig


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A full checkpoint and an increment on it."""
    store = CheckpointStore(tmp_path / "ck", keep=2)
    table = ops.HashTable(2, optimizers.Adam(0.1), initializers.Constant(1.0), seed=6, name="t")
    keys = np.arange(1000)
    table.apply_gradients(keys, np.zeros((1000, 2), np.float32) * table.lookup_keys(keys))
    table.apply_gradients([1], np.zeros((1, 2), np.float32))
    records = table.export()
    rows = records.rows.numpy()
    rows[records.keys.numpy() == 17] = [30.0, 40.0]
    table.import_(records._replace(rows=rows))
    store.save({"item": table, "empty": ops.HashTable(4, optimizers.SGD(0.1))}, 1, metadata={"epoch": 3})
    table.remove([5, 6])
    store.save({"item": table}, 2, dense=lambda folder: (folder / "w").write_bytes(b"12345"))
    return store


def inspect(*arguments: object) -> str:
    done = CliRunner().invoke(main, ["inspect", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def test_what_is_said_of_a_full_checkpoint(store):
    text = inspect(store.checkpoints()[0])
    assert "saved by 1 rank" in text
    assert "epoch = 3" in text
    assert "table item\n  1,000 rows of 2, step 2, adam (m, v), " in text
    assert "  full: 1,000 rows\n" in text
    assert "initializer: Constant(value=1.0)" in text
    assert "\n    50           key 17, frequency 1, last step 1\n" in text
    assert "table empty\n  0 rows of 4, step 0, sgd, " in text


def test_rows_that_are_not_finite_stand_before_the_largest(tmp_path):
    table = ops.HashTable(2, optimizers.SGD(0.1), initializers.Constant(1.0), name="t")
    table.lookup(np.arange(100))
    table.apply_gradients([7, 8], np.array([[np.nan, 0], [-1e9, 0]], np.float32), finite=False)
    save(tmp_path / "ck", {"t": table})
    listed = [line.split(",")[0].split() for line in inspect(tmp_path / "ck", "--top", 2).splitlines()[-2:]]
    assert [(words[0], words[-1]) for words in listed] == [("nan", "7"), ("1e+08", "8")]


def test_the_tables_that_are_merged_in_one_are_listed(tmp_path):
    features = [FeatureConfig(name, dim=2, hash=name == "b") for name in ("a", "b")]
    save(tmp_path / "ck", tables_by_name(EmbeddingCollection(features, name="c")))
    text = inspect(tmp_path / "ck")
    assert "table c/a+b\n" in text
    assert "\n  tables: a, b\n  hashed: b\n" in text


def test_the_latest_of_a_folder_of_checkpoints_as_json(store):
    value = json.loads(inspect(store.root, "--json", "--top", 2, "--verify"))
    assert value["folder"] == str(store.latest())
    assert value["chain"] == ["step-000000000001", "step-000000000002"]
    assert value["files"] == {"dense/w": 5}
    assert list(value["tables"]) == ["item"]
    item = value["tables"]["item"]
    assert (item["rows"], item["kind"], item["changed"], item["removed"]) == (998, "increment", 1, 2)
    assert [row["key"] for row in item["largest"]] == [17, 0]
    assert item["largest"][0]["norm"] == 50.0
    assert item["mean_norm"] == pytest.approx((50 + 997 * 2**0.5) / 998)
    assert value["bytes"] < item["bytes"] < value["chain_bytes"]


def test_an_increment_names_what_it_continues(store):
    text = inspect(store.latest(), "--verify")
    assert "continues step-000000000001; " in text
    assert "  increment: 1 row, 2 removed keys\n" in text
    assert text.endswith("file dense/w: 5 B\nevery checksum agrees\n")


def test_what_admission_remembers(tmp_path):
    exact = ops.HashTable(2, optimizers.SGD(0.1), name="t", admission=policies.CountAdmission(2))
    bloom = policies.Bloom(1000, error=0.05)
    filtered = ops.HashTable(
        2, optimizers.SGD(0.1), name="u", admission=policies.CountAdmission(2, filter=bloom)
    )
    exact.lookup(np.arange(1500))
    filtered.lookup(np.arange(1500))
    CheckpointStore(tmp_path).save({"exact": exact, "filtered": filtered}, 1)
    text = inspect(tmp_path)
    assert "  full: 0 rows\n  1,500 keys waiting for admission\n" in text
    assert "  admission: CountAdmission(threshold=2, filter=None)\n" in text
    counters = filtered.export_admission().filter.numpy()
    used = f"{np.count_nonzero(counters) / len(counters):.1%}"
    assert f"  admission filter: {len(counters):,} counters, 4 a key, {used} of them above zero\n" in text
    assert f"  admission filter: {len(counters):,} counters, 4 a key\n" in inspect(tmp_path, "--top", 0)
    tables = json.loads(inspect(tmp_path, "--json"))["tables"]
    assert tables["exact"]["waiting"] == 1500
    assert tables["filtered"]["filter"] == {"shards": 64, "counters": len(counters) // 64, "hashes": 4}


def test_damage_is_one_line_that_names_the_file(store):
    (path,) = store.checkpoints()[0].glob("item/rows-*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "998 rows" in inspect(store.root, "--top", 0)  # reads no row
    done = CliRunner().invoke(main, ["inspect", str(store.root)])
    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert done.output.startswith(f"gmeta: error: {path} at byte ")
    assert "is damaged: its CRC-32 is" in done.output
    assert "bring the file back from a copy, or load the checkpoint before" in done.output


def test_no_checkpoint(tmp_path):
    done = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert done.exit_code == 2
    assert done.output == (
        f"gmeta: error: {tmp_path}: no checkpoint here; name a checkpoint or a folder of checkpoints\n"
    )


def test_it_needs_no_tensorflow():
    code = "import sys, gmeta.cli.inspect; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
