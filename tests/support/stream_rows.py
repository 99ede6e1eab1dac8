"""Rows of a stream, the files that they come in, and a model that trains on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import gmeta
from gmeta.io import StreamPosition
from gmeta.layers import EmbeddingCollection, FeatureConfig

COLUMNS = {"user": "int64", "item": "int64", "click": "float32", "ts": "int64"}


def events(rows: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows that are a function of their number."""
    random = np.random.default_rng(7)
    users, items, clicks = (random.integers(0, n, first + rows) for n in (30, 20, 2))
    return [
        {"user": int(users[i]), "item": int(items[i]), "click": float(clicks[i]), "ts": i}
        for i in range(first, first + rows)
    ]


def put(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write a file of JSON lines, whole."""
    folder.mkdir(exist_ok=True)
    (folder / f".{name}").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f".{name}").rename(folder / name)


def times(data: tf.data.Dataset) -> list[list[int]]:
    return [(batch[0] if isinstance(batch, tuple) else batch)["ts"].numpy().tolist() for batch in data]


def make_model() -> gmeta.models.Model:
    """Return a compiled model whose position is in a stream."""
    tf.random.set_seed(3)
    inputs = {name: tf.keras.Input([], name=name, dtype=tf.int64) for name in ("user", "item")}
    vectors = EmbeddingCollection([FeatureConfig(name, dim=4) for name in inputs])(inputs)
    kernel = tf.keras.initializers.GlorotUniform(5)
    score = tf.keras.layers.Dense(1, kernel_initializer=kernel)(tf.concat([*vectors.values()], axis=-1))
    model = gmeta.models.Model(inputs, score)
    model.reading = StreamPosition()
    return model
