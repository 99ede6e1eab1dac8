"""`gmeta tables`: what it writes of checkpoints and says of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gmeta import checkpoint, optimizers
from gmeta.checkpoint.callback import tables_by_name
from gmeta.checkpoint.store import CheckpointStore
from gmeta.cli import main
from gmeta.layers import EmbeddingCollection, FeatureConfig


@pytest.fixture
def tables() -> EmbeddingCollection:
    features = [FeatureConfig(name, dim=2) for name in ("user", "item")]
    made = EmbeddingCollection(features, optimizer=optimizers.SGD(0.1), name="tables")
    made.lookup({"user": np.arange(5), "item": np.arange(1200)})
    return made


@pytest.fixture
def store(tables: EmbeddingCollection, tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "ck")
    store.save(tables_by_name(tables), 1)
    return store


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["tables", "export", *map(str, arguments)])


@pytest.mark.parametrize("form", ["arrow", "npy"])
def test_the_latest_checkpoint_is_exported_as_the_model_would_be(tables, store, tmp_path, form):
    done = run(store.root, tmp_path / "out", "--table", "item", "--format", form)
    assert done.exit_code == 0, done.output
    checkpoint.export_table(tables, "item", tmp_path / "same", format=form)
    for path in (tmp_path / "same").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    first, second = done.output.splitlines()
    assert first.startswith(f"table item: 1,200 rows of 2, {size:,} bytes, in ")
    assert second == "columns: keys, values, frequency"


def test_state_is_written_and_a_table_replaced_if_asked(store, tmp_path):
    assert run(store.latest(), tmp_path / "out", "--table", "item").exit_code == 0
    refused = run(store.latest(), tmp_path / "out", "--table", "user")
    assert refused.exit_code == 2
    said = "exists already: name a folder that is to be made, or overwrite it"
    assert refused.output == f"gmeta: error: {tmp_path / 'out'} {said}\n"
    done = run(store.latest(), tmp_path / "out", "--table", "user", "--state", "--overwrite")
    assert "table user: 5 rows of 2, " in done.output
    assert "columns: keys, values, frequency, last_step" in done.output


def test_an_unknown_table_and_no_table_are_answered_by_those_that_there_are(store, tmp_path):
    where = f"gmeta: error: checkpoint {store.latest()} has"
    done = run(store.root, tmp_path / "out", "--table", "shop")
    assert done.output == f"{where} no table 'shop': it has 'item', 'user'\n"
    done = run(store.root, tmp_path / "out")
    assert done.output == f"{where} the tables 'item', 'user': name one of them\n"
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_leaves_no_folder(store, tmp_path):
    (path,) = store.latest().glob("*/rows-*.arrow")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = run(store.root, tmp_path / "out", "--table", "item")
    assert done.exit_code == 2
    assert "is damaged: its CRC-32 is" in done.output
    assert [each.name for each in tmp_path.iterdir()] == ["ck"]


def test_it_needs_no_tensorflow(store, tmp_path):
    arguments = ["tables", "export", str(store.root), str(tmp_path / "out"), "--table", "item"]
    code = f"import sys; from gmeta.cli import main; main({arguments}, standalone_mode=False)\n"
    code += "sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert (tmp_path / "out" / "table.arrow").exists()
