"""Manifests that no program should write: JSON with the right structure and wrong values.

The rule that they test: a damaged manifest is read as it was written, or rejected with a gmeta error of one
line, and no file outside of its folder is opened either way.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.checkpoint.chain import CheckpointReader
from gmeta.checkpoint.manifest import FILE_NAME, FULL, INCREMENT, Manifest, Part, SegmentFile, TableEntry
from gmeta.checkpoint.record_file import RecordFileWriter, removed_schema, rows_schema, waiting_schema
from gmeta.core.data_manifest import Manifest as DataManifest
from gmeta.core.data_manifest import Shard, Split
from gmeta.core.errors import GmetaError
from gmeta.core.group_index import index_path
from gmeta.core.schema import Column, Schema
from gmeta.core.shares import LOGICAL_SHARDS

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**70, -(2**63), 1e308, 0.5),
    *(
        float("nan"),
        float("inf"),
        "",
        "1",
        "NaN",
        ".",
        "..",
        "../outside",
        "/etc/passwd",
        "a/../../b",
        "a//b",
    ),
    *("~", "%2e%2e", "..\\..", "x\0y", "\ud800", "x\ny", "item/", "./item", "x" * 5000, [], {}, [[]]),
    *([0], ["x"], {"name": "x"}, [None] * 1024, [-1] * 1024, [2**40] * 1024),
)


def damage(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one to three random changes that fit its structure."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        holder, key = rng.choice(places)
        others = [holder_[key_] for holder_, key_ in places]
        _change(holder, key, others, rng)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside, as its container and its key there; only a few of long lists."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value))) if len(value) < 8 else [0, 1, len(value) // 2, len(value) - 1]
    else:
        return
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _change(holder: Any, key: Any, others: list[Any], rng: random.Random) -> None:
    value = holder[key]
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("..", "/abs", "a/../../b", "x\0y", "surplus", ""))] = holder.pop(key)
        case 2:
            holder[key] = copy.deepcopy(rng.choice(others))
        case 3 if type(value) is int:
            holder[key] = value + rng.choice((-1, 1, 2**32, -(2**40)))
        case 4 if type(value) in (int, float):
            holder[key] = rng.choice((str(value), float(value) if abs(value) < 2**60 else 0.5, [value]))
        case 5 if isinstance(value, str):
            holder[key] = rng.choice(("../" + value, "/" + value, value + "\0", value + "/..", value.upper()))
        case 6 if isinstance(value, list):
            holder[key] = rng.choice((value * 2, value[:-1], value[::-1], [*value, None], [value]))
        case 7:
            for _ in range(rng.choice((1, 200))):
                value = [value]
            holder[key] = value
        case _:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))


def with_digest(value: Any) -> bytes:
    """The manifest's bytes with an updated digest, so that all of it is read."""
    if isinstance(value, dict):
        body = {name: each for name, each in value.items() if name != "digest"}
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        value = {**body, "digest": digest}
    return json.dumps(value).encode()


def outcome(read: Callable[[], Any]) -> Any:
    """The result of reading, or None if it is rejected properly.

    Raises:
      AssertionError: It is rejected with an error of another class, or of several lines.
    """
    try:
        return read()
    except GmetaError as error:
        if len(str(error).splitlines()) != 1:
            raise AssertionError(f"refused in several lines: {error}") from error
        return None
    except Exception as error:
        raise AssertionError(f"refused by {type(error).__name__}: {error}") from error


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Check which files are opened.

    Raises:
      AssertionError: A file outside of this folder is opened.
    """
    opened: list[str] = []
    _watching.append(opened)
    try:
        yield
    finally:
        _watching.remove(opened)
    root = folder.resolve()
    outside = [path for path in opened if not Path(path).resolve().is_relative_to(root)]
    if outside:
        raise AssertionError(f"opened {outside[0]}, outside of {root}")


_watching: list[list[str]] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        _watching
        and event in ("open", "os.listdir", "os.scandir")
        and isinstance(arguments[0], str | os.PathLike)
    ):
        for opened in _watching:
            opened.append(os.fspath(arguments[0]))


sys.addaudithook(_hear)


# The manifests to damage: of a checkpoint that continues another, and of a data set.

_DIM, _SLOTS = 2, 1


@dataclass(frozen=True)
class Case:
    """A manifest in its folder.

    Attributes:
      name: The kind of manifest.
      root: The folder in which all files must be.
      file: The manifest.
      manifest: Its content.
      read: Reads what it describes: tables' records, or names and sizes of shards.
      written: The result of reading the undamaged manifest.
    """

    name: str
    root: Path
    file: Path
    manifest: Any
    read: Callable[[], tuple[Any, ...]]
    written: tuple[Any, ...]

    def holds(self, content: bytes) -> bool:
        """Whether a manifest of this content is read, not rejected; it may name less than the whole one.

        Raises:
          AssertionError: It breaks the rule.
        """
        self.file.write_bytes(content)
        with inside(self.root):
            found = outcome(self.read)
        if found is not None and not all(each in self.written for each in found):
            raise AssertionError(f"read something else than was written: {str(found)[:200]}")
        return found is not None


def checkpoint_case(root: Path) -> Case:
    """An increment on a full checkpoint of one table, saved by two ranks."""
    rng = np.random.default_rng(1)
    shards = {0: [7, 9], 3: [1], 600: [2, 5, 8], 1023: [4]}
    base = _save(root / "step-000000000001", None, FULL, shards, {}, shards, rng)
    now = {0: [9], 3: [1, 6], 600: [2, 5, 8], 1023: [4]}
    _save(root / "step-000000000002", base, INCREMENT, {3: [6], 600: [5]}, {0: [7]}, now, rng)
    file = root / "step-000000000002" / FILE_NAME
    return _case("checkpoint", root, file, lambda: _rows(file.parent))


def _save(
    folder: Path,
    base: Manifest | None,
    kind: str,
    rows: dict[int, list[int]],
    removed: dict[int, list[int]],
    live: dict[int, list[int]],
    rng: np.random.Generator,
) -> Manifest:
    (folder / "item").mkdir(parents=True)
    (folder / "dense").mkdir()
    (folder / "dense" / "weights").write_bytes(b"")
    half = LOGICAL_SHARDS // 2
    parts = []
    for rank, own in enumerate((range(half), range(half, LOGICAL_SHARDS))):
        files = {}
        for name, schema, keys in (
            ("rows", rows_schema(_DIM, _SLOTS), rows),
            ("removed", removed_schema(), removed),
            ("waiting", waiting_schema(), {5: [3], 700: [11]}),
        ):
            path = folder / "item" / f"{name}-{rank:05d}-of-00002.arrow"
            with RecordFileWriter(path, schema, {"table": "item"}) as file:
                for shard in sorted(keys.keys() & set(own)):
                    file.write(shard, _columns(np.array(keys[shard], np.int64), rng))
            files[name] = SegmentFile(f"item/{path.name}", file.bytes, tuple(file.segments))
        counts = tuple(len(live.get(shard, ())) for shard in own)
        since = int(kind == INCREMENT)
        parts.append(
            Part(
                *(rank, own.start, own.stop, kind, since, since + 1, counts, files["rows"]),
                removed=files["removed"] if kind == INCREMENT else None,
                waiting=files["waiting"],
            )
        )
    entry = TableEntry(_DIM, "sgd", ("m",), _SLOTS, {"seed": 1}, None, tuple(parts))
    manifest = Manifest(
        id=folder.name,
        base=None if base is None else base.id,
        base_id=None if base is None else base.id,
        world_size=2,
        metadata={"epochs": 1},
        tables={"item": entry},
    )
    manifest.save(folder)
    return manifest


def _columns(keys: Any, rng: np.random.Generator) -> dict[str, Any]:
    return {
        "key": keys,
        "weights": rng.normal(size=(len(keys), _DIM)).astype(np.float32),
        "slots": rng.normal(size=(len(keys), _SLOTS)).astype(np.float32),
        "frequency": np.ones(len(keys), np.uint32),
        "last_step": np.ones(len(keys), np.uint32),
        "count": np.ones(len(keys), np.uint32),
    }


def _rows(folder: Path) -> tuple[Any, ...]:
    """A checkpoint's records by table and key."""
    with CheckpointReader(folder) as reader:
        reader.verify()
        tables = []
        for name in reader.manifest.tables:
            found = [reader.read_shard(name, shard) for shard in range(LOGICAL_SHARDS)]
            joined = {column: np.concatenate([each[column] for each in found]) for column in found[0]}
            order = np.argsort(joined["key"])
            tables.append({column: values[order].tolist() for column, values in joined.items()})
        return tuple(tables)


def data_set_case(root: Path) -> Case:
    """A data set of two splits; its shards' content isn't read."""
    root.mkdir(parents=True)
    splits = {}
    for split in ("warm", "cold"):
        shards = []
        for number in range(2):
            path = root / f"{split}-{number}.tfrecord"
            path.write_bytes(b"\1" * (30 + number))
            index_path(path).write_bytes(b"")
            shards.append(Shard(path.name, 1, 2, 30 + number, 7))
        splits[split] = Split(tuple(shards))
    schema = Schema(
        (Column("task"), Column("batch_id"), Column("item", is_list=True), Column("price", "float32"))
    )
    saved = DataManifest(schema, splits, {"table": {"label": "y"}}, {"no time": 3}, versions={"plan": 1})
    saved.save(root)
    file = root / "manifest.json"
    return _case("data-set", root, file, lambda: _shards(root))


def _shards(root: Path) -> tuple[Any, ...]:
    splits = DataManifest.load(root).splits.values()
    return tuple((shard.name, shard.bytes) for split in splits for shard in split.shards)


def _case(name: str, root: Path, file: Path, read: Callable[[], tuple[Any, ...]]) -> Case:
    return Case(name, root, file, json.loads(file.read_bytes()), read, read())
