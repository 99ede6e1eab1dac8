"""Schema and manifest: what they accept, that they come back whole, and what a damaged one gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.data_manifest import Manifest, Shard, Split
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.json_values import FILE_NAME
from gmeta.core.schema import Column, Schema

KEYS = (Column("task"), Column("batch_id"))
names = st.text(min_size=1, max_size=8).filter(lambda name: name not in ("task", "batch_id"))
columns = st.builds(Column, names, st.sampled_from(("int64", "float32")), st.booleans())
schemas = st.lists(columns, max_size=6, unique_by=lambda column: column.name).map(
    lambda own: Schema((*KEYS, *own))
)


@given(schemas)
def test_a_schema_comes_back_from_json(schema: Schema) -> None:
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    assert [schema[column.name] for column in schema] == list(schema.columns)


def test_a_schema_knows_its_columns() -> None:
    schema = Schema((*KEYS, Column("genre", is_list=True)))
    assert "genre" in schema
    assert "year" not in schema
    with pytest.raises(ConfigError, match="no column 'year'; it has task, batch_id, genre"):
        schema["year"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ((Column("task"),), "no column 'batch_id'"),
        ((*KEYS, Column("item"), Column("item")), "names a column twice: item"),
        ((Column("task", "float32"), Column("batch_id")), "'task' must be a single int64"),
        ((Column("task"), Column("batch_id", is_list=True)), "'batch_id' must be a single int64"),
    ],
)
def test_an_impossible_schema_is_refused(wrong: tuple[Column, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Schema(wrong)


def test_a_column_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="'item': dtype must be int64 or float32, got 'string'"):
        Column("item", "string")  # type: ignore[arg-type]


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A manifest whose two shards exist in tmp_path."""
    for name, size in (("warm-0.tfrecord", 30), ("cold-0.tfrecord", 10)):
        (tmp_path / name).write_bytes(b"\0" * size)
    return Manifest(
        schema=Schema((*KEYS, Column("item"), Column("rating", "float32"))),
        splits={
            "warm": Split((Shard("warm-0.tfrecord", groups=2, rows=3, bytes=30, index=7),)),
            "cold": Split((Shard("cold-0.tfrecord", groups=1, rows=1, bytes=10, index=8),)),
        },
        config={"seed": 0},
        versions={"plan": 2, "layout": 1},
        dropped={"too few ratings": 4},
    )


def test_a_manifest_comes_back_from_its_folder(manifest: Manifest, tmp_path: Path) -> None:
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    assert (manifest.splits["warm"].groups, manifest.splits["warm"].rows) == (2, 3)


def test_the_digest_tells_two_plans_apart(manifest: Manifest) -> None:
    other = Manifest(manifest.schema, manifest.splits, {"seed": 1}, manifest.dropped)
    assert len({manifest.digest, other.digest}) == 2


def test_a_folder_without_manifest_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest.json: no manifest: .*; run `gmeta prepare`"):
        Manifest.load(tmp_path)


def damage(manifest: Manifest, folder: Path, **changes: Any) -> None:
    """Save a manifest with some of its members replaced."""
    path = manifest.save(folder)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "other"}, "not a gmeta-records manifest"),
        ({"version": 1}, "a manifest of version 1, this gmeta reads version 2; prepare the data again"),
        ({"version": 3}, "a manifest of version 3, this gmeta reads version 2"),
        ({"layout": "rows"}, "incomplete: layout 'rows' isn't one of example, columnar"),
        ({"seed": 1}, "its digest doesn't match its content"),
        ({"splits": {"warm": {}}}, "incomplete: 'shards'"),
        ({"splits": []}, "incomplete"),
        ({"splits": {"warm": {"shards": [{"name": "warm-0.tfrecord"}]}}}, "incomplete"),
        (
            {"splits": {"warm": {"shards": [{"name": "x", "groups": "1", "rows": 1, "bytes": 1}]}}},
            "incomplete",
        ),
        ({"schema": None}, "incomplete"),
        ({"config": {"seed": 7}}, "its digest doesn't match its content"),
        ({"digest": None}, "its digest doesn't match its content"),
    ],
)
def test_a_damaged_manifest_is_refused(
    manifest: Manifest, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    damage(manifest, tmp_path, **changes)
    with pytest.raises(DataError, match=said):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"manifest"'])
def test_what_is_no_manifest_at_all_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json: not"):
        Manifest.load(tmp_path)


def test_a_missing_shard_is_named(manifest: Manifest, tmp_path: Path) -> None:
    manifest.save(tmp_path)
    (tmp_path / "cold-0.tfrecord").unlink()
    with pytest.raises(DataError, match=r"cold-0.tfrecord: the manifest names this shard, but it is missing"):
        Manifest.load(tmp_path)


def test_a_shard_of_another_size_is_named(manifest: Manifest, tmp_path: Path) -> None:
    manifest.save(tmp_path)
    (tmp_path / "warm-0.tfrecord").write_bytes(b"\0" * 29)
    with pytest.raises(DataError, match=r"warm-0.tfrecord: 29 bytes, the manifest says 30"):
        Manifest.load(tmp_path)
