"""Reads prepared records independently of gmeta's readers: with TensorFlow's own, or the plain reference."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from gmeta.core.data.manifest import Manifest

Row = dict[str, list[int] | list[float]]


def read_shard(path: Path) -> list[Row]:
    """The rows of one TFRecord file of examples: column -> its values, a list even where there is one."""
    import tensorflow as tf

    records = []
    for record in tf.data.TFRecordDataset([str(path)]).as_numpy_iterator():
        features = tf.train.Example.FromString(record).features.feature
        records.append({name: list(getattr(f, f.WhichOneof("kind")).value) for name, f in features.items()})
    return records


def read_groups(path: Path) -> list[Row]:
    """The rows of one file of groups, in the same form."""
    from gmeta.testing.reference.io.columnar import decode, records

    found = []
    for _, payload in records(path):
        group = decode(payload)
        columns: dict[str, Any] = dict(
            zip(group.key_names, ([key] * group.rows for key in group.key), strict=True)
        )
        for name, values in group.columns.items():
            if isinstance(values, tuple):
                flat, ends = values[0].tolist(), values[1].tolist()
                columns[name] = [flat[a:b] for a, b in itertools.pairwise(ends)]
            else:
                columns[name] = values.tolist()
        for row in zip(*columns.values(), strict=True):
            pairs = zip(columns, row, strict=True)
            found.append({name: value if isinstance(value, list) else [value] for name, value in pairs})
    return found


def read_split(folder: Path, split: str) -> list[Row]:
    """The rows of all shards of a split, in order, in either layout."""
    manifest = Manifest.load(folder)
    read = read_shard if manifest.layout == "example" else read_groups
    return [row for shard in manifest.splits[split].shards for row in read(folder / shard.name)]
