"""The command that makes semantic ids: its inputs, what it writes, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from gmeta.cli import main
from gmeta.core.semantic_ids import SemanticIds
from gmeta.preprocess import semantic_ids
from gmeta.preprocess.plan.column_values import hash_text

VECTORS = np.random.default_rng(0).normal(size=(300, 6)).astype(np.float32)


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["semantic-ids", *map(str, words)])


def test_rows_of_an_array_are_items_from_zero_on(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", VECTORS)
    done = call(tmp_path / "v.npy", tmp_path / "ids", "--levels", 2, "--codes", 8, "--seed", 3)
    assert done.exit_code == 0, done.output
    ids = SemanticIds.read(tmp_path / "ids")
    assert ids.digest == semantic_ids(VECTORS, 2, 8, seed=3).digest
    assert json.loads((tmp_path / "ids" / "report.json").read_text()) == ids.report()
    assert (tmp_path / "ids" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "level 2: 100.0% of 8 codes in use" in done.output
    assert f"digest {ids.digest[:12]}" in done.output
    again = call(tmp_path / "v.npy", tmp_path / "ids")
    assert again.exit_code == 2
    assert "exists already: add --overwrite" in again.output
    assert call(tmp_path / "v.npy", tmp_path / "ids", "--overwrite", "--balanced").exit_code == 0
    counts = np.bincount(SemanticIds.read(tmp_path / "ids").digits[:, 0])
    assert counts.max() - counts.min() <= 1


def test_an_rq_vae_is_trained(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", VECTORS)
    done = call(tmp_path / "v.npy", tmp_path / "ids", "--method", "rq-vae", "--epochs", 1, "--codes", 8)
    assert done.exit_code == 0, done.output
    ids = SemanticIds.read(tmp_path / "ids")
    assert ids.method == "rq-vae"
    np.testing.assert_array_equal(ids.codebooks.encode(VECTORS), ids.digits[:, :-1])


def test_columns_of_files_give_ids_and_vectors(tmp_path: Path) -> None:
    table = pa.table({"asin": np.arange(300) * 7, "text": list(VECTORS)})
    pq.write_table(table, tmp_path / "v.parquet")
    with pa.OSFile(str(tmp_path / "v.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    named = ("--keys", "asin", "--values", "text", "--codes", 8)
    for kind in ("parquet", "arrow"):
        done = call(tmp_path / f"v.{kind}", tmp_path / kind, *named)
        assert done.exit_code == 0, done.output
    one, other = SemanticIds.read(tmp_path / "parquet"), SemanticIds.read(tmp_path / "arrow")
    assert one.digest == other.digest
    np.testing.assert_array_equal(one.items, np.arange(300) * 7)
    names = [f"item-{number}" for number in range(300)]
    pq.write_table(pa.table({"asin": names, "text": list(VECTORS)}), tmp_path / "names.parquet")
    done = call(tmp_path / "names.parquet", tmp_path / "names", *named)
    assert done.exit_code == 0, done.output
    assert set(SemanticIds.read(tmp_path / "names").items) == {hash_text(name) for name in names}


def test_new_items_are_added(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", VECTORS)
    assert call(tmp_path / "v.npy", tmp_path / "ids", "--codes", 8).exit_code == 0
    pq.write_table(pa.table({"keys": [1000, 1001], "values": list(VECTORS[:2])}), tmp_path / "new.parquet")
    done = call(tmp_path / "new.parquet", tmp_path / "more", "--add-to", tmp_path / "ids")
    assert done.exit_code == 0, done.output
    ids, more = SemanticIds.read(tmp_path / "ids"), SemanticIds.read(tmp_path / "more")
    np.testing.assert_array_equal(more.digits[:300], ids.digits)
    np.testing.assert_array_equal(more.digits[300:, :-1], ids.digits[:2, :-1])
    late = call(tmp_path / "new.parquet", tmp_path / "no", "--epochs", 3)
    assert late.exit_code == 2
    assert "--epochs 3 is for --method rq-vae" in late.output
    mixed = call(tmp_path / "new.parquet", tmp_path / "no", "--add-to", tmp_path / "ids", "--codes", 9)
    assert mixed.exit_code == 2
    assert "--codes is for new codebooks" in mixed.output


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("v.npy", lambda path: path.write_bytes(b"no"), "not a whole .npy file"),
        ("v.npy", lambda path: path.touch(), "not a whole .npy file"),
        ("v.npy", lambda path: np.save(path, np.zeros(3)), "its shape is (3,)"),
        ("v.parquet", lambda path: path.write_bytes(b"no"), "can't read columns 'keys' and 'values'"),
        (
            "v.parquet",
            lambda path: pq.write_table(pa.table({"keys": [1, 2], "values": [[1.0], [1.0, 2.0]]}), path),
            "must have one length",
        ),
        (
            "v.parquet",
            lambda path: pq.write_table(pa.table({"keys": [1], "values": [1.0]}), path),
            "must hold lists of numbers, but holds double",
        ),
        (
            "v.parquet",
            lambda path: pq.write_table(pa.table({"keys": ["a", None], "values": [[1.0], [2.0]]}), path),
            "row 2: keys must be given, got None",
        ),
        (
            "v.arrow",
            lambda path: pa.feather.write_feather(
                pa.table({"keys": ["a", "b", "a"], "values": [[1.0], [2.0], [3.0]]}), path
            ),
            "rows 1 and 3 are both of keys 'a'",
        ),
        (
            "v.parquet",
            lambda path: pq.write_table(pa.table({"keys": [1, 2], "values": [["x"], ["y"]]}), path),
            "its vectors aren't lists of numbers",
        ),
        (
            "v.parquet",
            lambda path: pq.write_table(pa.table({"keys": [1.5, 2.0], "values": [[1.0], [2.0]]}), path),
            "row 1: keys must be a whole number, got 1.5",
        ),
        ("v.npz", lambda path: np.savez(path, np.eye(3)), "a .npz archive"),
        ("absent", lambda path: None, "no such file or folder"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, name: str, write, said: str) -> None:
    write(tmp_path / name)
    done = call(tmp_path / name, tmp_path / "ids")
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert done.output.count("\n") == 1
    assert not (tmp_path / "ids").exists()
