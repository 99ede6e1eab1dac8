"""A model whose tables are external, and what a store of its rows should have."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gmeta import initializers, optimizers, policies
from gmeta.export.delta_signatures import named_tables, tables_of
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from support.row_stores import row_client

CLIENT = row_client()
NORMAL = initializers.Normal(0, 1)
FEATURES = (
    FeatureConfig("user", TableConfig("user", 4, initializer=NORMAL)),
    FeatureConfig("item", TableConfig("item", 4, initializer=NORMAL)),  # merged with users
    FeatureConfig("tags", TableConfig("tag", 3), combiner="sum", hash=True),
    FeatureConfig("place", TableConfig("place", 3, initializer=NORMAL, eviction=policies.LRU(max_rows=60))),
)
EXTERNAL = ["user", "item", "place"]


class Scores(Model):
    def __init__(self, width: int = 1) -> None:
        super().__init__(name="scores")
        self.collection = EmbeddingCollection(FEATURES, optimizer=optimizers.Adam(0.1), seed=3)
        self.dense = tf.keras.layers.Dense(width)

    def call(self, inputs: Any, training: bool = False) -> Any:
        vectors = self.collection(inputs, training=training)
        return self.dense(tf.concat([*vectors.values()], axis=-1))[:, 0]


def ids_of(values: Any) -> dict[str, Any]:
    return {
        each.name: tf.ragged.constant([[f"t{value % 7}", "t"] for value in values])
        if each.hash
        else tf.constant(values, tf.int64)
        for each in FEATURES
    }


def make() -> Scores:
    """A model that has its weights."""
    model = Scores()
    model(ids_of([0, 1]))
    return model


def train(model: Scores, seed: int) -> None:
    """A step by gradients that a seed draws; half of its ids are new."""
    random = np.random.default_rng(seed)
    ids = {
        name: value if name == "tags" else value + 40 * seed
        for name, value in ids_of(random.integers(0, 80, 70)).items()
    }
    lookup = model.collection.lookup(ids, insert=True)
    model.collection.apply_gradients(
        lookup, [tf.constant(random.normal(size=rows.shape), tf.float32) for rows in lookup.rows]
    )
    for weight in model.dense.weights:
        weight.assign_add(tf.constant(random.normal(size=weight.shape), tf.float32))


def rows_of(model: Scores) -> dict[tuple[str, int], bytes]:
    """What a store should have."""
    found: dict[tuple[str, int], bytes] = {}
    records = {table.name: table.export(with_slots=False) for table in tables_of(model)}
    for named in named_tables(model).values():
        record = records[named.physical]
        own = named.own({"keys": record.keys.numpy(), "rows": record.rows.numpy()})
        if named.name in EXTERNAL:
            pairs = zip(own["keys"].tolist(), own["rows"], strict=True)
            found |= {(named.name, key): row.tobytes() for key, row in pairs}
    return found


def client_of(url: str) -> Any:
    return CLIENT.Rows(url.replace("127.0.0.1:9,", ""))
