"""Reads prepared records with TensorFlow's own reader and parser, independently of gmeta's."""

from __future__ import annotations

from pathlib import Path

from gmeta.core.manifest import Manifest


def read_shard(path: Path) -> list[dict[str, list[int] | list[float]]]:
    """The records of one TFRecord file: column -> its values, a list even where there is one."""
    import tensorflow as tf

    records = []
    for record in tf.data.TFRecordDataset([str(path)]).as_numpy_iterator():
        features = tf.train.Example.FromString(record).features.feature
        records.append({name: list(getattr(f, f.WhichOneof("kind")).value) for name, f in features.items()})
    return records


def read_split(folder: Path, split: str) -> list[dict[str, list[int] | list[float]]]:
    """The records of all shards of a split, in order."""
    shards = Manifest.load(folder).splits[split].shards
    return [record for shard in shards for record in read_shard(folder / shard.name)]
