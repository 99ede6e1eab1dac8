"""Manifests with a right digest that nobody should have written: refused by name, nothing else is read."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gmeta import initializers, ops, optimizers
from gmeta.checkpoint.callback import ShardedCheckpoint
from gmeta.checkpoint.chain import CheckpointReader, read_links
from gmeta.checkpoint.manifest import Manifest
from gmeta.checkpoint.sharded import load, save
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.settings import from_mapping
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.runs.run_folder import RunFolder
from support.manifest_damage import Case, checkpoint_case, damage, data_set_case, inside, with_digest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Case:
    return checkpoint_case(tmp_path / "checkpoints")


@pytest.fixture
def data_set(tmp_path: Path) -> Case:
    return data_set_case(tmp_path / "data")


def written(case: Case, place: str, value: Any) -> None:
    """Write the case's manifest with another value at a place such as ``tables.item.dim``."""
    manifest = copy.deepcopy(case.manifest)
    holder = manifest
    *path, last = [int(key) if key.isdecimal() else key for key in place.split(".")]
    for key in path:
        holder = holder[key]
    holder[last] = value
    case.file.write_bytes(with_digest(manifest))


ROWS = "tables.item.parts.0.rows"


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "item/../../x", "a\0b", "a\nb", "", ".", "x" * 300]
)
@pytest.mark.parametrize("place", [f"{ROWS}.name", "base"])
def test_a_name_that_leaves_the_checkpoint_is_refused(checkpoint: Case, place: str, name: str) -> None:
    written(checkpoint, place, name)
    with inside(checkpoint.root), pytest.raises(DataError, match="must be a path inside the folder, got"):
        CheckpointReader(checkpoint.file.parent)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("base", "a/b", "base must be a name without slashes, got 'a/b'"),
        ("files", {"../weights": {"bytes": 1, "crc32": 1}}, "a file must be a path inside the folder"),
        (
            "files",
            {"dense/weights": {"bytes": "1", "crc32": 1}},
            "'dense/weights': bytes must be a whole number",
        ),
        ("world_size", "2", "world_size must be a whole number from 1 to .*, got '2'"),
        ("world_size", float("nan"), "world_size must be a whole number from 1 to .*, got nan"),
        ("metadata", [], r"metadata must be an object, got \[\]"),
        ("tables.item.dim", -1, "table 'item': dim must be a whole number from 1 to"),
        ("tables.item.dim", 2**40, "table 'item': dim must be a whole number from 1 to"),
        ("tables.item.dim", 3, "other columns than the manifest says"),
        ("tables.item.slots", "m", "table 'item': slots must be a list, got 'm'"),
        ("tables.item.parts.0.step", 1.5, "step must be a whole number"),
        ("tables.item.parts.0.last_shard", 600, "parts don't have all 1024|counts of some"),
        ("tables.item.parts.0.live", [2**62] * 512, r"\d+ rows, the manifest says"),
        ("tables.item.parts.0.kind", "half", "a part must be 'full' or 'increment', got 'half'"),
        ("tables.item.parts.0.kind", "full", "counts other rows than it has"),
        (f"{ROWS}.bytes", True, "bytes must be a whole number"),
        (f"{ROWS}.segments.offset", [2**62], "isn't in a file of"),
        (f"{ROWS}.segments.shard", [700], "has logical shard 700, which another part has"),
        ("tables.item.parts.0", [[]], "table 'item': list indices"),
        ("tables.item.parts.1.rows.name", "item/waiting-00000-of-00002.arrow", "is named 2 times; no two"),
        ("files", {"item/rows-00000-of-00002.arrow": {"bytes": 1, "crc32": 1}}, "is named 2 times; no two"),
    ],
)
def test_values_that_gmeta_does_not_write_are_refused_by_name(
    checkpoint: Case, place: str, value: Any, said: str
) -> None:
    written(checkpoint, place, value)
    with (
        inside(checkpoint.root),
        pytest.raises(DataError, match=said),
        CheckpointReader(checkpoint.file.parent) as r,
    ):
        r.verify()


def test_a_checkpoint_that_continues_itself_is_refused(checkpoint: Case) -> None:
    first, second = sorted(checkpoint.root.iterdir())
    written(checkpoint, "base", second.name)
    written_id = Manifest.load(second).id
    manifest = {**checkpoint.manifest, "base": second.name, "base_id": written_id}
    checkpoint.file.write_bytes(with_digest(manifest))
    with pytest.raises(DataError, match=f"an increment on {second.name}, which is an increment on it"):
        read_links(second)
    # A ring of two.
    checkpoint.file.write_bytes(with_digest(checkpoint.manifest))
    other = json.loads((first / "manifest.json").read_bytes())
    (first / "manifest.json").write_bytes(with_digest({**other, "base": second.name, "base_id": written_id}))
    with pytest.raises(DataError, match="which is an increment on it"):
        read_links(second)


@pytest.mark.parametrize(
    "name", ["..", ".", "../out", "/abs", "dense", "manifest.json", "part-00000.json", "a/b"]
)
def test_a_table_of_any_name_is_saved_inside_the_checkpoint(tmp_path: Path, name: str) -> None:
    table, again = (ops.HashTable(2, optimizers.SGD(0.1), initializers.Normal()) for _ in range(2))
    table.lookup_keys(np.arange(5))
    folder = tmp_path / "in" / "a"
    save(folder, {name: table}, dense=lambda dense: (dense / "weights").write_bytes(b"1") and None)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["a"]
    assert load(folder, {name: again}).rows == {name: 5}


@pytest.mark.parametrize(
    "metadata", [{}, {"epochs": "1", "batches_of_epoch": 0}, {"epochs": 1, "stages": [1]}]
)
def test_metadata_of_another_kind_is_refused(tmp_path: Path, metadata: dict[str, Any]) -> None:
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.build([None, 1])
    checkpoints = ShardedCheckpoint(tmp_path)
    table = ops.HashTable(2, optimizers.SGD(0.1))

    def dense(folder: Path) -> None:
        tf.train.Checkpoint(model=model).write(str(folder / "dense"))

    checkpoints.store.save({"t": table}, 1, dense=dense, metadata=metadata)
    with pytest.raises(DataError, match="its metadata isn't what this callback writes"):
        checkpoints.restore(model)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (
            "splits.warm.shards.0.name",
            "../warm-0.tfrecord",
            "a shard's name must be a path inside the folder",
        ),
        ("splits.warm.shards.0.name", "a/b", "a shard's name must be a name without slashes"),
        ("splits.warm.shards.0.name", 7, "a shard's name must be a text, got 7"),
        ("splits.warm.shards.0.rows", "2", "shard 'warm-0.tfrecord': rows must be a whole number"),
        ("splits.warm.shards.0.groups", -1, "shard 'warm-0.tfrecord': groups must be a whole number"),
        ("splits.warm.shards.0.bytes", 2**80, "shard 'warm-0.tfrecord': bytes must be a whole number"),
        ("splits.warm.shards", {"name": "x"}, "shards must be a list"),
        ("seed", float("nan"), "seed must be a whole number"),
        ("config", [], "config must be an object"),
        ("dropped", {"no time": "3"}, "no time must be a whole number"),
        ("schema.columns.0.is_list", 1, "is_list of column 'task' must be true or false"),
        ("schema.columns.2.name", ["item"], "a column's name must be a text"),
    ],
)
def test_a_crafted_data_set_is_refused_by_name(data_set: Case, place: str, value: Any, said: str) -> None:
    written(data_set, place, value)
    with inside(data_set.root), pytest.raises(DataError, match=f"incomplete: .*{said}"):
        data_set.read()


@pytest.mark.parametrize("make", [checkpoint_case, data_set_case])
def test_a_damaged_manifest_reads_as_it_was_or_is_refused_in_a_line(
    tmp_path: Path, make: Callable[[Path], Case]
) -> None:
    case = make(tmp_path / "case")
    assert case.holds(with_digest(case.manifest))
    read = sum(case.holds(with_digest(damage(case.manifest, random.Random(seed)))) for seed in range(300))
    assert 0 < read < 200  # some changes are none, and most are refused


@pytest.mark.parametrize("name", ["../maml", "a/b", "/maml", "", ".", "..", ".hidden", "data", "a\0"])
def test_a_method_that_would_leave_the_run_is_refused_by_name(name: str) -> None:
    methods = {name: {"label": "x", "description": "y"}}
    with pytest.raises(ConfigError, match="a method's name is its folder's in the run"):
        from_mapping(ExperimentConfig, {"methods": methods}, where="config.toml")


@pytest.mark.parametrize(
    "held",
    [{"data": 3, "experiment": {}}, {"data": "x", "experiment": []}, "[" * 100_000, "[" * 3000 + "]" * 3000],
)
def test_a_crafted_run_is_refused(tmp_path: Path, held: Any) -> None:
    (tmp_path / "config.json").write_text(held if isinstance(held, str) else json.dumps(held))
    with pytest.raises(DataError, match=r"config\.json: not"):
        RunFolder(tmp_path).load()
